"""Turns a request of Anthropic's Messages API into a chat completion request. Pure.

A message of Anthropic's is a list of blocks. Results of tools are blocks of the user there and messages of their own in
a chat; neighbouring messages of one role become one message, as Anthropic's API has it.
"""

from typing import Literal

import msgspec

from common.errors import ErrorCode
from gateway.http.protocol.anthropic import (
    AnthropicMessage,
    AnthropicOutputFormat,
    AnthropicTool,
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
    ThinkingConfig,
)
from gateway.http.protocol.decoding import refuse
from gateway.http.protocol.openai import (
    ChatCompletionRequest,
    ChatMessage,
    ChosenFunction,
    FunctionField,
    JsonSchemaField,
    Part,
    ResponseFormat,
    ToolChoice,
    ToolChoiceField,
    ToolField,
)
from gateway.http.translation.common import AssistantTurn, missing, only_text

Role = Literal["user", "assistant", "system"]

#: Names of the Messages API for fields of chat completions, for errors.
FIELD_NAMES = {
    "messages": "messages",
    "stop": "stop_sequences",
    "parameters": "input_schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
}
#: Begins the first block of Claude Code's system prompt. It differs in each request, so no prefix would be found in the
#: cache.
BILLING_HEADER = "x-anthropic-billing-header:"


def field_names(body: CountTokensRequest) -> dict[str, str]:
    """``FIELD_NAMES`` for a body that may give the format under its older name."""
    return FIELD_NAMES if _config_format(body) else {**FIELD_NAMES, "response_format": "output_format"}


def to_chat(body: CountTokensRequest) -> ChatCompletionRequest:
    """The chat of a request, or of one whose tokens are counted. Raises RequestError with the name of the field.

    ``max_tokens`` is left out: it is an upper bound here, which may exceed what fits behind the prompt.
    """
    choice, is_parallel = _tool_choice(body)
    system = _system(body.system)
    messages = [ChatMessage(role="system", content=system)] if system else []
    messages += to_messages(body.messages)
    is_continued = bool(messages) and messages[-1].role == "assistant"
    if is_continued and not messages[-1].content:
        raise refuse("the last message is the assistant's and has no text to continue; add one of the user", "messages")
    chat = ChatCompletionRequest(
        messages=messages,
        model=body.model,
        tools=None if body.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)],
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        response_format=_response_format(body),
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
        thinking_budget=None if body.thinking is None else body.thinking.budget_tokens,
        chat_template_kwargs=_template_kwargs(body),
        add_generation_prompt=False if is_continued else None,
        continue_final_message=True if is_continued else None,
    )
    if isinstance(body, MessagesRequest):
        chat = msgspec.structs.replace(
            chat,
            stream=body.stream,
            stop=body.stop_sequences,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            ignore_eos=body.ignore_eos,
            priority=body.priority,
            priority_class=body.priority_class,
            deadline_ms=body.deadline_ms,
            slo_ttft_ms=body.slo_ttft_ms,
            slo_itl_ms=body.slo_itl_ms,
            cache_salt=body.cache_salt,
        )
    return chat


# ---- messages --------------------------------------------------------------------------------------------------------


def to_messages(messages: list[AnthropicMessage]) -> list[ChatMessage]:
    """Chat messages. Raises RequestError: a block is incomplete, or of a type that is not supported."""
    chat: list[ChatMessage] = []
    turn: AssistantTurn | None = None
    for i, message in enumerate(messages):
        if turn is not None and message.role != "assistant":
            chat.append(turn.message())
            turn = None
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [ContentBlock(type="text", text=blocks)]
        for k, block in enumerate(blocks):
            where = f"messages[{i}].content[{k}]"
            if message.role == "assistant":
                turn = turn or AssistantTurn()
                _add_to_turn(turn, block, where)
            elif message.role == "user" and block.type == "tool_result":
                chat.append(_result(block, where))
            else:
                _add_text(chat, message.role, block, where)
    return chat if turn is None else [*chat, turn.message()]


def _add_to_turn(turn: AssistantTurn, block: ContentBlock, where: str) -> None:
    """Add a block of an assistant message."""
    if block.type == "thinking":
        turn.reasoning.append(block.thinking or "")
    elif block.type == "redacted_thinking":
        message = "redacted thinking is readable only by Anthropic's models; leave the block out"
        raise refuse(message, f"{where}.type", ErrorCode.NOT_SUPPORTED)
    elif block.type == "tool_use":
        arguments = msgspec.json.encode(block.input or {}).decode()
        turn.call(block.id, block.name, arguments, where, id_field="id")
    else:
        turn.texts.append(_text(block, where))


def _result(block: ContentBlock, where: str) -> ChatMessage:
    """The message of a tool's result."""
    if block.tool_use_id is None:
        raise missing(f"{where}.tool_use_id")
    content: str | list[Part]
    if isinstance(block.content, list):
        content = [_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(block.content)]
    elif isinstance(block.content, dict):
        raise refuse("must be a string or a list of blocks", f"{where}.content")
    else:
        content = block.content or ""
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=content)


def _add_text(chat: list[ChatMessage], role: Role, block: ContentBlock, where: str) -> None:
    """Add a block of a user or system message to the last message, if that has the same role."""
    part = _text_part(block, where)
    last = chat[-1] if chat else None
    if last is not None and last.role == role and isinstance(last.content, list):
        last.content.append(part)
    else:
        chat.append(ChatMessage(role=role, content=[part]))


def _text(block: ContentBlock, where: str) -> str:
    if block.type != "text":
        raise only_text(block.type, where)
    if block.text is None:
        raise missing(f"{where}.text")
    return block.text


def _text_part(block: ContentBlock, where: str) -> Part:
    return Part(type="text", text=_text(block, where))


def _system(system: str | list[ContentBlock] | None) -> str | list[Part] | None:
    if not isinstance(system, list):
        return system
    blocks = [(i, block) for i, block in enumerate(system) if not (block.text or "").startswith(BILLING_HEADER)]
    return [_text_part(block, f"system[{i}]") for i, block in blocks]


# ---- tools, thinking, formats ----------------------------------------------------------------------------------------


def _tool(tool: AnthropicTool, where: str) -> ToolField:
    if tool.type not in (None, "custom"):
        message = f"{tool.type[:100]!r} is not supported; only tools with an input_schema are, which the client runs"
        raise refuse(message, f"{where}.type", ErrorCode.NOT_SUPPORTED)
    if tool.name is None:
        raise missing(f"{where}.name")
    if tool.input_schema is None:
        raise missing(f"{where}.input_schema")
    return ToolField(
        function=FunctionField(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
    )


def _tool_choice(body: CountTokensRequest) -> tuple[ToolChoice | None, bool | None]:
    """``tool_choice`` and ``parallel_tool_calls`` of a chat."""
    given = body.tool_choice
    if given is None:
        return None, None
    is_parallel = None if given.disable_parallel_tool_use is None else not given.disable_parallel_tool_use
    if given.type == "tool":
        if given.name is None:
            raise missing("tool_choice.name")
        return ToolChoiceField(function=ChosenFunction(name=given.name)), is_parallel
    if given.type == "any":
        return "required", is_parallel
    return given.type, is_parallel


def _config_format(body: CountTokensRequest) -> AnthropicOutputFormat | None:
    return None if body.output_config is None else body.output_config.format


def _response_format(body: CountTokensRequest) -> ResponseFormat | None:
    given = _config_format(body) or body.output_format
    if body.output_format not in (None, given):
        raise refuse("differs from output_config.format; give one of the two", "output_format")
    if given is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaField(schema=given.schema, strict=True))


def _template_kwargs(body: CountTokensRequest) -> dict[str, object] | None:
    """The variables of the chat template, with the switch that turns thinking on or off."""
    thinking = body.thinking
    if thinking is None:
        return body.chat_template_kwargs
    _check_thinking(thinking)
    is_thinking = thinking.type != "disabled"
    switches = {"enable_thinking": is_thinking, "thinking": is_thinking}  # of Qwen's and of DeepSeek's templates
    return {**switches, **(body.chat_template_kwargs or {})}


def _check_thinking(thinking: ThinkingConfig) -> None:
    if thinking.type == "between_tools":
        message = "'between_tools' is not supported; use enabled, adaptive or disabled"
        raise refuse(message, "thinking.type", ErrorCode.NOT_SUPPORTED)
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise missing("thinking.budget_tokens")
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        raise refuse("only together with the type 'enabled'", "thinking.budget_tokens")
