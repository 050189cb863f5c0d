"""Decides how the answer of a chat is written and read: reasoning, tool calls, and the grammar that binds it. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from common.errors import ErrorCode
from common.sampling_params import Thinking
from gateway.http.protocol.decoding import refuse, value_of_either
from gateway.http.protocol.openai import ChatCompletionRequest, ToolChoiceField, ToolField
from gateway.requests.input.structured_output import check_depth
from gateway.text.output_formats import ModelFormats
from gateway.text.output_parser import (
    NO_PARAMETERS,
    FirstCallParser,
    OutputFormat,
    OutputParser,
    RequiredCallsParser,
    TextParser,
    Tool,
)
from gateway.text.reasoning_parsers import ReasoningFormat
from gateway.text.tokenizer import Tokenizer
from gateway.text.tool_parsers.base import ToolFormat
from gateway.text.tool_parsers.grammar import with_layout

_START = re.compile(r"^start:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """How one answer is written.

    Attributes:
        output_format: None if the answer is text alone.
        grammar: of the output; empty if nothing binds it.
        param: the field that asks for the grammar; empty without one.
        thinking: how reasoning begins and ends, if a grammar or a budget depends on it.
    """

    output_format: OutputFormat | None = None
    grammar: str = ""
    param: str = ""
    thinking: Thinking | None = None


#: White space that models write before their reasoning.
BLANKS = ("\n", "\n\n", " ")
#: Of an answer that is text alone, bound by nothing.
PLAIN_TEXT = ChatOutput()


def chat_output(
    body: ChatCompletionRequest, formats: ModelFormats, tokenizer: Tokenizer, prompt: str, structure: ChatOutput
) -> ChatOutput:
    """How the answer to a chat is written.

    Args:
        prompt: the rendered text, which may end inside the reasoning.
        structure: the grammar of the structured output that the fields ask for, if they do.

    Raises:
        RequestError: the model has no format for what the fields ask for.
    """
    tools = _callable_tools(body)
    if tools and formats.tools is None:
        message = "the gateway does not know how this model writes tool calls; start it with --tool-call-parser"
        raise refuse(message, "tools", ErrorCode.NOT_SUPPORTED)
    budget_param, budget = _thinking_budget(body, formats)
    reasoning = formats.reasoning
    if not tools and reasoning is None:
        return structure
    is_open = reasoning is not None and _is_open(reasoning, body, prompt)
    markers = _tokens(tokenizer, formats)
    shown = reasoning if body.separate_reasoning is not False else None
    new_parser: Callable[[], OutputParser] = partial(
        _new_parser, formats.tools if tools else None, tools, markers, shown, is_open
    )
    if tools and body.parallel_tool_calls is False:  # without a grammar the model may still write several
        new_parser = partial(_wrapped, FirstCallParser, new_parser)
    if _chosen_tools(body, tools):
        new_parser = partial(_wrapped, RequiredCallsParser, new_parser)
    grammar = structure.grammar
    if formats.tools is not None:
        grammar = _grammar(body, formats.tools, tools, markers, structure)
    param = (structure.param or "tools") if grammar else ""
    thinking = None
    if reasoning is not None and (grammar or budget is not None) and not formats.covers_reasoning:
        thinking = _thinking(reasoning, tokenizer, is_open, budget, param if budget is None else budget_param)
    return ChatOutput(OutputFormat(new_parser, {id: text for text, id in markers.items()}), grammar, param, thinking)


def _thinking_budget(body: ChatCompletionRequest, formats: ModelFormats) -> tuple[str, int | None]:
    """The field that bounds the reasoning, and the tokens that it allows; None without a bound."""
    name = "thinking_budget" if body.thinking_budget is not None else "thinking_token_budget"
    budget: int | None = value_of_either(body, "thinking_budget", "thinking_token_budget")
    if budget is not None and formats.reasoning is None:
        message = "the gateway does not know how this model writes its reasoning; start it with --reasoning-parser"
        raise refuse(message, name, ErrorCode.NOT_SUPPORTED)
    if budget is not None and formats.covers_reasoning:
        message = "this model may reason in several messages, so that no sequence of tokens ends its reasoning for good"
        raise refuse(f"{message}; use reasoning_effort", name, ErrorCode.NOT_SUPPORTED)
    return name, budget


def _is_open(reasoning: ReasoningFormat, body: ChatCompletionRequest, prompt: str) -> bool:
    """Whether the answer begins inside the reasoning."""
    if not body.continue_final_message:
        return reasoning.is_open_after(prompt)
    content = body.messages[-1].content or ""  # which ends the prompt, and may contain the beginning of its reasoning
    length = len(content) if isinstance(content, str) else sum(len(part.text or "") + 1 for part in content)
    final = prompt[-length:]
    return final.rfind(reasoning.start) > final.rfind(reasoning.end)


def _tokens(tokenizer: Tokenizer, formats: ModelFormats) -> dict[str, int]:
    """Ids of the markers that are tokens, by text."""
    texts = formats.tools.markers if formats.tools is not None else ()
    if formats.reasoning is not None:
        texts = (*texts, *formats.reasoning.markers)
    ids = {text: tokenizer.token_id(text) for text in texts}
    return {text: token for text, token in ids.items() if token is not None}


def _new_parser(
    tool_format: ToolFormat | None, tools: Sequence[Tool], markers: Mapping[str, int],
    reasoning: ReasoningFormat | None, is_open: bool,
) -> OutputParser:  # fmt: skip
    inner = TextParser() if tool_format is None else tool_format.parser(tools, token_ids=markers)
    return inner if reasoning is None else reasoning.parser(inner, is_open=is_open, token_ids=markers)


def _wrapped(wrapper: Callable[[OutputParser], OutputParser], new_parser: Callable[[], OutputParser]) -> OutputParser:
    return wrapper(new_parser())


def _grammar(
    body: ChatCompletionRequest, tool_format: ToolFormat, tools: Sequence[Tool], markers: Mapping[str, int],
    structure: ChatOutput,
) -> str:  # fmt: skip
    """Bind calls that the answer must make, or its text and the calls that it may make, or those of strict tools."""
    # A named function is called once, as in SGLang and vLLM: with the same tool again, a weak model would not end.
    is_parallel = body.parallel_tool_calls is not False and _named_tool(body) is None
    calls = partial(tool_format.grammar, parallel=is_parallel, token_ids=markers)
    chosen = _chosen_tools(body, tools)
    if chosen:
        return calls(chosen, required=True)
    if structure.grammar:
        if tool_format.covers_reasoning:
            return tool_format.answer_grammar(answer_rule(structure.grammar), tools, token_ids=markers)
        return calls_or_answer(calls(tools, required=True), structure.grammar) if tools else structure.grammar
    if any(tool.is_strict for tool in tools):
        return calls(tools, required=False)
    return ""


def calls_or_answer(calls: str, answer: str) -> str:
    """A grammar of outputs that follow one of two grammars, in Lark."""
    rules, rule = _START.sub("either_calls:", calls), answer_rule(answer)
    rule = with_layout(rule) if rule.startswith("%json ") else rule
    return f"start: either_calls | either_answer\neither_answer: {rule}\n{rules}"


def answer_rule(grammar: str) -> str:
    """The body of a rule for what follows a grammar, which is nested, so that its names are its own."""
    rule = grammar.removeprefix("start: ")
    return rule if rule.startswith("%json ") and "\n" not in rule else f"%lark {{\n{grammar}\n}}"


def _thinking(
    reasoning: ReasoningFormat, tokenizer: Tokenizer, is_open: bool, budget: int | None, param: str
) -> Thinking | None:
    """None if the answer cannot begin with reasoning: nodes follow it by the token that begins it and the one that ends
    it. A marker of several is written with others where it merges with the text beside it.

    Args:
        param: the field that depends on the reasoning.

    Raises:
        RequestError: the prompt has begun reasoning that no one token ends, or a budget is set for an answer without
            reasoning.
    """
    start, end = (_marker_ids(tokenizer, marker) for marker in (reasoning.start, reasoning.end))
    if len(end) == 1 and (is_open or len(start) == 1):
        if is_open:
            return Thinking(None, end[0], budget)
        blanks = (_marker_ids(tokenizer, blank) for blank in BLANKS)
        return Thinking(start[0], end[0], budget, tuple(ids[0] for ids in blanks if len(ids) == 1))
    if is_open or budget is not None:
        missing = reasoning.start if len(end) == 1 else reasoning.end
        message = f"not supported for this model, whose vocabulary has no token for {missing}"
        raise refuse(message, param, ErrorCode.NOT_SUPPORTED)
    return None


def _marker_ids(tokenizer: Tokenizer, marker: str) -> tuple[int, ...]:
    """The tokens of a marker; empty if no tokens have its text."""
    ids = tokenizer.encode(marker, add_special_tokens=False)
    text = tokenizer.decode(ids, skip_special=False)
    is_whole = marker in (text, text.strip())  # else characters are missing, or unknown
    return tuple(ids) if is_whole else ()


# ---- tools -----------------------------------------------------------------------------------------------------------


def narrow_tools(body: ChatCompletionRequest, choice: ToolChoiceField) -> None:
    """Leave only the tools that the choice allows, if it names some, so that the model sees no others.

    Raises RequestError: one of them is not among the tools, or a tool is wrong.
    """
    if choice.type != "allowed_tools":
        return
    allowed = choice.allowed_tools
    if allowed is None:
        raise refuse("is missing", "tool_choice.allowed_tools")
    _check_tools(body.tools or [])  # now, while their numbers are those of the client
    tools = {field.function.name: field for field in body.tools or []}
    names = dict.fromkeys(tool.function.name for tool in allowed.tools)
    for name in names:
        if name not in tools:
            raise refuse(f"{name!r} is not one of the tools", "tool_choice.allowed_tools.tools")
    body.tools = [field for field in body.tools or [] if field.function.name in names]
    body.tool_choice = allowed.mode


def _named_tool(body: ChatCompletionRequest) -> str | None:
    """The function that ``tool_choice`` names."""
    if not isinstance(body.tool_choice, ToolChoiceField):
        return None
    if body.tool_choice.function is None:
        raise refuse("is missing", "tool_choice.function")
    return body.tool_choice.function.name


def _callable_tools(body: ChatCompletionRequest) -> tuple[Tool, ...]:
    """The tools that the answer may call; none with the tool choice "none". Raises RequestError."""
    fields = body.tools or []
    _check_tools(fields)
    choice = body.tool_choice
    if choice == "none":
        return ()
    if not fields and choice not in (None, "auto"):
        raise refuse("needs tools", "tool_choice")
    named = _named_tool(body)
    if named is not None and all(named != field.function.name for field in fields):
        raise refuse(f"{named} is not one of the tools", "tool_choice.function.name")
    return tuple(
        Tool(
            field.function.name,
            field.function.description or "",
            field.function.parameters or NO_PARAMETERS,
            bool(field.function.strict),
        )
        for field in fields
    )


def _chosen_tools(body: ChatCompletionRequest, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools of which the answer must call one; none if it need not call any."""
    named = _named_tool(body)
    if named is not None:
        return tuple(tool for tool in tools if tool.name == named)
    return tuple(tools) if body.tool_choice == "required" else ()


def _check_tools(fields: Sequence[ToolField]) -> None:
    names: set[str] = set()
    for i, field in enumerate(fields):
        if field.function.name in names:
            raise refuse("another tool has this name", f"tools[{i}].function.name")
        names.add(field.function.name)
        check_depth(field.function.parameters, f"tools[{i}].function.parameters")
