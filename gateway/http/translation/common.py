"""What both translations share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import ErrorCode, RequestError
from gateway.http.protocol.decoding import refuse
from gateway.http.protocol.openai import ChatMessage, FunctionCall, ToolCall


def only_text(kind: str, param: str) -> RequestError:
    """The error for content that is not text."""
    return refuse(f"{kind[:100]!r} is not supported; only text is", f"{param}.type", ErrorCode.NOT_SUPPORTED)


def missing(param: str) -> RequestError:
    return refuse("is missing", param)


def with_own_names(error: RequestError, names: Mapping[str, str], tools: Sequence[str] = ()) -> RequestError:
    """The same error with a field of the chat completion request under its name in the client's body.

    Args:
        names: the client's names by those of chat completions.
        tools: the places of the tools of the chat completion request in the client's body, if they differ.
    """
    if error.param is None:
        return error
    name = own_name(error.param, names, tools)
    message = error.message.removeprefix(f"{error.param}: ")
    return RequestError(error.code, f"{name}: {message}", param=name, retry_after_s=error.retry_after_s)


def own_name(param: str, names: Mapping[str, str], tools: Sequence[str] = ()) -> str:
    """The name in the client's body of a field of the chat completion request; see ``with_own_names``."""
    root = param.partition("[")[0].partition(".")[0]
    if tools and param.startswith("tools["):
        number, _, rest = param.removeprefix("tools[").partition("]")
        param = tools[int(number)] + rest
    if root in ("tools", "tool_choice"):
        parameters = names.get("parameters", "parameters")
        param = param.replace(".function", "").replace(".allowed_tools", "")
        return param.replace(".parameters", f".{parameters}")
    if root == "response_format":  # which may have the place in a schema behind it
        return names[root] + param.removeprefix(root).removeprefix(".json_schema")
    return names.get(root, param)  # without indices, since the lists of messages differ in length


@dataclass(slots=True)
class AssistantTurn:
    """Collects the parts of one assistant message."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def call(self, call_id: str | None, name: str | None, arguments: str, where: str, *, id_field: str) -> None:
        """Add a tool call. Raises RequestError: its id or its name is missing."""
        if call_id is None:
            raise missing(f"{where}.{id_field}")
        if name is None:
            raise missing(f"{where}.name")
        self.calls.append(ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments)))

    def message(self) -> ChatMessage:
        return ChatMessage(
            role="assistant",
            content="".join(self.texts) if self.texts or not self.calls else None,
            reasoning_content="".join(self.reasoning) if self.reasoning else None,
            tool_calls=self.calls or None,
        )
