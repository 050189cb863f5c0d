"""Turns a request of OpenAI's Responses API into a chat completion request. Pure.

The items of an input are smaller than chat messages: the reasoning, the text and the calls of one turn of the model are
separate items, which become one assistant message.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from common.errors import ErrorCode
from gateway.http.protocol.decoding import refuse
from gateway.http.protocol.fields import OpenAIFields
from gateway.http.protocol.openai import (
    MAX_FUNCTION_NAME,
    MAX_TOOLS,
    AllowedTools,
    ChatCompletionRequest,
    ChatMessage,
    ChosenFunction,
    FunctionField,
    JsonSchemaField,
    NamedTool,
    Part,
    ResponseFormat,
    ToolChoice,
    ToolChoiceField,
    ToolField,
)
from gateway.http.protocol.responses import (
    LOGPROBS,
    InputItem,
    InputPart,
    ResponseFunction,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    TextFormat,
)
from gateway.http.translation.common import AssistantTurn, missing, only_text

#: Names of the Responses API for fields of chat completions, for errors.
FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def input_items(body: ResponsesRequest) -> list[InputItem]:
    """The input as items; a string is one message of the user."""
    if isinstance(body.input, str):
        return [InputItem(type="message", role="user", content=body.input)]
    return body.input


def is_reference(item: InputItem) -> bool:
    """Whether an item of an input only refers to one of a stored answer, by its id."""
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


def shown_items(items: Sequence[InputItem], response_id: str) -> list[dict[str, Any]]:
    """Items as clients see them: each has an id, and the content of a message is a list of parts."""
    shown = []
    for i, item in enumerate(items):
        plain = msgspec.to_builtins(item)
        plain.setdefault("id", f"in_{response_id.removeprefix('resp_')}{i:02d}")
        plain.setdefault("status", "completed")
        if plain.setdefault("type", "message") == "message" and isinstance(item.content, str):
            text = {"type": "input_text", "text": item.content}
            is_answer = item.role == "assistant"
            plain["content"] = [{**text, "type": "output_text", "annotations": []} if is_answer else text]
        shown.append(plain)
    return shown


def to_chat(body: ResponsesRequest, history: Sequence[InputItem]) -> ChatCompletionRequest:
    """The chat of a request.

    Args:
        history: the items of the responses that it continues.

    Raises:
        RequestError: with the name of the field.
    """
    _check(body)
    messages = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    messages += to_messages(history, "previous_response_id")
    messages += to_messages(input_items(body), "input")
    reasoning = body.reasoning
    shared = {name: getattr(body, name) for name in OpenAIFields.__struct_fields__}
    has_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or [])
    return ChatCompletionRequest(
        **shared,
        messages=messages,
        logprobs=has_logprobs,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else _tools(body),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if body.text is None else _response_format(body.text.format),
        reasoning_effort=None if reasoning is None else reasoning.effort,
        thinking_budget=body.thinking_budget,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _check(body: ResponsesRequest) -> None:
    """Refuse what this server cannot do."""
    if body.n not in (None, 1):
        raise refuse("a response has one output; use /v1/chat/completions for several", "n")
    for name, instead in (("prompt", "send instructions and input"), ("conversation", "use previous_response_id")):
        if getattr(body, name) is not None:
            raise refuse(f"not supported by this server; {instead}", name, ErrorCode.NOT_SUPPORTED)
    if body.stream_options is not None and not body.stream:
        raise refuse("only together with stream: true", "stream_options")


# ---- messages --------------------------------------------------------------------------------------------------------


def to_messages(items: Sequence[InputItem], param: str) -> list[ChatMessage]:
    """Chat messages of items. Raises RequestError: an item is incomplete, or of a type that is not supported."""
    messages: list[ChatMessage] = []
    turn: AssistantTurn | None = None
    for i, item in enumerate(items):
        where = f"{param}[{i}]"
        kind = item.type or "message"
        is_of_turn = kind in ("reasoning", "function_call") or (kind == "message" and item.role == "assistant")
        if turn is not None and (not is_of_turn or _begins_next(kind, turn)):
            messages.append(turn.message())
            turn = None
        if is_of_turn:
            turn = turn or AssistantTurn()
            _add_to_turn(turn, kind, item, where)
        else:
            messages.append(_message(kind, item, where))
    return messages if turn is None else [*messages, turn.message()]


def turn_starts(messages: Sequence[ChatMessage]) -> list[int]:
    """Where the turns of a conversation begin, behind its instructions: at its beginning and with each user message."""
    num_instructions = 0
    while num_instructions < len(messages) and messages[num_instructions].role in ("system", "developer"):
        num_instructions += 1
    return [i for i in range(num_instructions, len(messages)) if i == num_instructions or messages[i].role == "user"]


def without_turns(chat: ChatCompletionRequest, count: int) -> ChatCompletionRequest:
    """The chat without its oldest turns; the instructions before them stay."""
    starts = turn_starts(chat.messages)
    return msgspec.structs.replace(chat, messages=chat.messages[: starts[0]] + chat.messages[starts[count] :])


def _begins_next(kind: str, turn: AssistantTurn) -> bool:
    """Whether an item begins the next turn. Text behind calls does not, since the results of these calls follow it."""
    if kind == "reasoning":
        return bool(turn.texts or turn.calls)
    return kind == "message" and bool(turn.texts) and not turn.calls


def _add_to_turn(turn: AssistantTurn, kind: str, item: InputItem, where: str) -> None:
    if kind == "function_call":
        if isinstance(item.arguments, dict):
            raise refuse("must be a string of JSON", f"{where}.arguments")
        name = item.name and model_name(item.name, item.namespace)
        turn.call(item.call_id, name, item.arguments or "{}", where, id_field="call_id")
    elif kind == "message":
        turn.texts += _texts(item.content, f"{where}.content")
    else:  # a client may send reasoning back in encrypted form only: then there is nothing to add
        turn.reasoning += _texts(item.content or item.summary or [], f"{where}.content")


def _message(kind: str, item: InputItem, where: str) -> ChatMessage:
    if kind == "message":
        if item.role is None:
            raise missing(f"{where}.role")
        return ChatMessage(role=item.role, content=_parts(item.content, f"{where}.content"))
    if kind == "function_call_output":
        if item.call_id is None:
            raise missing(f"{where}.call_id")
        return ChatMessage(role="tool", tool_call_id=item.call_id, content=_parts(item.output, f"{where}.output"))
    message = f"{kind[:100]!r} is not supported; use message, reasoning, function_call or function_call_output"
    raise refuse(message, f"{where}.type", ErrorCode.NOT_SUPPORTED)


def _parts(content: str | list[InputPart] | dict[str, Any] | None, param: str) -> list[Part]:
    return [Part(type="text", text=text) for text in _texts(content, param)]


def _texts(content: str | list[InputPart] | dict[str, Any] | None, param: str) -> list[str]:
    if content is None:
        raise missing(param)
    if isinstance(content, dict):
        raise refuse("must be a string or a list of parts", param)
    return [content] if isinstance(content, str) else [_text(part, f"{param}[{i}]") for i, part in enumerate(content)]


def _text(part: InputPart, param: str) -> str:
    if part.type is None:
        raise missing(f"{param}.type")
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in TEXT_PARTS:
        raise only_text(part.type, param)
    if part.text is None:
        raise missing(f"{param}.text")
    return part.text


# ---- tools and formats -----------------------------------------------------------------------------------------------


def _tool_choice(body: ResponsesRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if not isinstance(choice, ResponseToolChoice):
        return choice
    if choice.type == "function":
        return ToolChoiceField(function=_chosen(choice.name, "tool_choice.name"))
    if choice.type == "allowed_tools":
        named = [
            NamedTool(function=_chosen(tool.name, f"tool_choice.tools[{i}].name"))
            for i, tool in enumerate(choice.tools or [])
        ]
        return ToolChoiceField(
            type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=named)
        )
    message = f"{choice.type[:100]!r} is not supported; use function or allowed_tools"
    raise refuse(message, "tool_choice.type", ErrorCode.NOT_SUPPORTED)


class Function(NamedTuple):
    """A function that the model may call, and its place in the request."""

    where: str
    namespace: ResponseTool | None
    tool: ResponseFunction


def functions(body: ResponsesRequest) -> list[Function]:
    """The functions of a request, with those of its namespaces."""
    found = []
    for i, tool in enumerate(body.tools or []):
        where = f"tools[{i}]"
        if tool.type == "namespace":
            found += [Function(f"{where}.tools[{j}]", tool, one) for j, one in enumerate(tool.tools or [])]
        elif not tool.is_ignored:
            found.append(Function(where, None, tool))
    return found


def model_name(name: str, namespace: str | None) -> str:
    """The name by which the model calls a function, in the form that Codex gives the tools of MCP servers."""
    if namespace is None:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def called_functions(body: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """Namespace and name of the functions in namespaces, by the names of the model."""
    return {
        model_name(tool.name, namespace.name): (namespace.name, tool.name)
        for _, namespace, tool in functions(body)
        if namespace is not None and namespace.name is not None and tool.name is not None
    }


def _tools(body: ResponsesRequest) -> list[ToolField]:
    for i, tool in enumerate(body.tools or []):
        if tool.name is None and tool.type == "namespace":
            raise missing(f"tools[{i}].name")
    found = functions(body)
    if len(found) > MAX_TOOLS:
        raise refuse(f"has {len(found)} functions together with those of namespaces, at most {MAX_TOOLS}", "tools")
    return [_tool(tool, where, namespace) for where, namespace, tool in found]


def _tool(tool: ResponseFunction, where: str, namespace: ResponseTool | None) -> ToolField:
    if tool.type != "function":
        message = f"{tool.type[:100]!r} is not supported; only functions are, which the client runs itself"
        raise refuse(message, f"{where}.type", ErrorCode.NOT_SUPPORTED)
    if tool.name is None:
        raise missing(f"{where}.name")
    name, description = tool.name, tool.description
    if namespace is not None:
        name = model_name(tool.name, namespace.name)
        description = description or namespace.description
    if len(name) > MAX_FUNCTION_NAME:
        message = f"has {len(name)} characters together with its namespace, at most {MAX_FUNCTION_NAME}"
        raise refuse(message, f"{where}.name")
    return ToolField(
        function=FunctionField(name=name, description=description, parameters=tool.parameters, strict=tool.strict)
    )


def _chosen(name: str | None, param: str) -> ChosenFunction:
    if name is None:
        raise missing(param)
    return ChosenFunction(name=name)


def _response_format(given: TextFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    if given.type != "json_schema":
        if given.schema is not None:
            raise refuse("needs the type json_schema", "text.format.schema")
        return ResponseFormat(type=given.type)
    if given.schema is None:
        raise missing("text.format.schema")
    schema = JsonSchemaField(name=given.name, description=given.description, schema=given.schema, strict=given.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)
