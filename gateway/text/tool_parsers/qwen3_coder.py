"""Calls as tags for the function and each parameter: Qwen3-Coder and later models of Qwen.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Documented in the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct. ``<tool_call>`` and its end are single tokens, the
other tags are text. The models leave out ``<tool_call>`` at times, so ``<function=`` with a known name begins a call,
too.

Values are not quoted: they are strings, or JSON, as the tool's schema says. A value whose schema allows strings and
other types is JSON if it reads as a value of one of these types, and a string otherwise; so is one without a schema.
The template writes Python's ``True``, ``False`` and ``None``, which are read as well. A value ends at the first
``</parameter>``, which models leave out at times, or before a line that begins with the next tag.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gateway.http.protocol.decoding import refuse
from gateway.text.incremental_parser import SPACE, Sink, Steps, drop
from gateway.text.output_parser import Tool
from gateway.text.tool_parsers import grammar
from gateway.text.tool_parsers.base import NotACall, ToolFormat, ToolParser
from gateway.text.tool_parsers.schemas import (
    ALL_TYPES,
    constants,
    required_names,
    resolved,
    schema_types,
    type_of,
)

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"

#: What parameters of one tool refer to, with all its copies in the grammar.
MAX_DEFINITIONS_BYTES = 256 << 10
_VALUE_END = grammar.literal("\n" + _PARAMETER_END)

_NAME = re.compile(r"[^>\n]*")
#: A reference in a schema's JSON, with the first step of its place; ``#`` alone has none.
_REFERENCE = re.compile(r'"\$ref": "#(/[^/"]*)?(?=[/"])')
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class Qwen3CoderParser(ToolParser):
    def _parse(self) -> Steps[None]:
        return self._text_and_calls((BEGIN, _FUNCTION), self._call)

    def _call(self, marker: str) -> Steps[str]:
        """Read a call behind a begin tag; return the begin tag of the next if this call's end is missing."""
        self._hold(marker)
        if marker == BEGIN:
            yield from self._run(SPACE, self._hold)
            if not (yield from self._literal(_FUNCTION, self._hold)):
                raise NotACall
        num_before = len(self._held)
        yield from self._run(_NAME, self._hold)
        name = "".join(self._held[num_before:]).strip()
        if not (yield from self._literal(">", self._hold)):
            raise NotACall
        self._begin(name)
        self._arguments("{")
        return (yield from self._parameters(self._tools[name]))

    def _parameters(self, tool: Tool) -> Steps[str]:
        """Read parameters up to the end of the call; text between them becomes text behind the call."""
        separator = ""
        between: list[str] = []
        marker = ""
        while True:
            if marker != _PARAMETER:
                marker = yield from self._text_until((_PARAMETER, _FUNCTION_END, BEGIN, END), between.append)
            if marker == _PARAMETER:
                self._arguments(separator)
                separator = ", "
                marker = yield from self._parameter(tool)
                if marker in (_PARAMETER, _PARAMETER_END):
                    continue
            if marker:
                self._arguments("}")
            self._text("".join(between).strip())
            if marker == _FUNCTION_END:
                yield from self._after_call((END,))
            return BEGIN if marker == BEGIN else ""

    def _parameter(self, tool: Tool) -> Steps[str]:
        """Read a parameter behind its begin tag; return the marker that ends it."""
        names: list[str] = []
        yield from self._run(_NAME, names.append)
        yield from self._literal(">", drop)
        name = "".join(names).strip()
        self._arguments(_quoted(name) + ": ")
        yield from self._literal("\n", drop)
        types = _types(tool, name)
        if types == {"string"}:
            return (yield from self._string())
        texts: list[str] = []
        marker = yield from self._value(texts.append)
        value = "".join(texts)
        self._arguments(_json_value(value, types) if marker else value)
        return marker

    def _string(self) -> Steps[str]:
        """Pass a string on as it comes."""
        self._arguments('"')
        marker = yield from self._value(lambda text: self._arguments(_quoted(text)[1:-1]))
        if marker:
            self._arguments('"')
        return marker

    def _value(self, sink: Sink) -> Steps[str]:
        """Read a value with the marker that ends it, without one line break before this marker."""
        breaks: list[str] = []

        def hold_break(text: str) -> None:
            sink("".join(breaks))
            breaks.clear()
            if text.endswith("\n"):
                breaks.append("\n")
            sink(text.removesuffix("\n"))

        ends = (_PARAMETER_END, "\n" + _PARAMETER, "\n" + _FUNCTION_END)
        marker = yield from self._text_until((*ends, END) if END in self._token_markers else ends, hold_break)
        if not marker or marker.startswith("\n"):  # it has a line break of its own
            sink("".join(breaks))
        return marker.lstrip("\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types(tool: Tool, name: str) -> frozenset[str]:
    """The JSON types that the schema of a parameter allows."""
    properties = tool.parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return schema_types(schema, tool.parameters)


def _json_value(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that is written as this text."""
    raw = text.strip()
    raw = _PYTHON.get(raw, raw)
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _quoted(text)
    kind = type_of(value)
    if kind == "string":  # in quotes of its own only if nothing says that the value is a bare string
        return _quoted(text) if "string" in types and types != ALL_TYPES else raw
    is_allowed = kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return raw if is_allowed else _quoted(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")  # though the library reads it


class Qwen3CoderFormat(ToolFormat):
    def __init__(self) -> None:
        super().__init__("qwen3-coder", (BEGIN, END))

    def parser(self, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> Qwen3CoderParser:
        return Qwen3CoderParser(tools, token_ids)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, required: bool, token_ids: Mapping[str, int]) -> str:
        """Calls whose parameters stand in the order of the schema.

        The schema of a parameter that may be a string only decides between its constants (``enum``, ``const``).
        """
        rules = grammar.calls_or_text(BEGIN, separator="\n", parallel=parallel, required=required, token_ids=token_ids)
        end = grammar.marker(END, token_ids)
        rules.append(f'body: "\\n<function=" ({grammar.alternatives("function", len(tools))}) "</function>\\n" {end}')
        rules.append("value[lazy]: VALUE")
        rules.append(r"VALUE: /(.|\n)*<\/parameter>/ & ~/(.|\n)*\n<(\/function>|parameter=)(.|\n)*/")  # see `_value`
        for i, tool in enumerate(tools):
            rules += _function_rules(i, tool, required=required)
        return "\n".join(rules)


def _function_rules(i: int, tool: Tool, *, required: bool) -> list[str]:
    """The rule of a function, from its name, and those of its parameters.

    Raises RequestError: the parser could not read the name of a property.
    """
    properties = tool.parameters.get("properties")
    head = grammar.literal(f"{tool.name}>\n")
    if not isinstance(properties, dict) or not (tool.is_strict or required):
        return [f"function_{i}: {head} any_{i}*", f'any_{i}: /<parameter=[^>\\n]+>\\n/ value "\\n"']
    needed = required_names(tool.parameters)
    shared = _shared_by_property(tool, properties)
    parts: list[str] = []
    rules: list[str] = []
    for j, (name, schema) in enumerate(properties.items()):
        if not name or name != name.strip() or not _NAME.fullmatch(name):
            message = f"{tool.name} cannot be called with its property {name[:100]!r}"
            raise refuse(f"{message}: this model needs names without '>', line breaks and outer whitespace", "tools")
        parts.append(f"parameter_{i}_{j}{'' if name in needed else '?'}")
        begin = grammar.literal(f"<parameter={name}>\n")
        rules.append(f'parameter_{i}_{j}: {begin} value_{i}_{j} "\\n"')
        choices = constants(resolved(schema, tool.parameters))
        if choices or "string" in schema_types(schema, tool.parameters):
            rules.append(f"value_{i}_{j}: {_text_rule(choices)}")
            continue
        if name in shared:
            schema = {**_moved(schema), "$defs": {"tool": shared[name]}}
        rules.append(f"value_{i}_{j}: json_{i}_{j} {_VALUE_END}")
        rules.append(f"json_{i}_{j}: {grammar.json_value(schema, is_strict=tool.is_strict)}")
    return [f"function_{i}: {head} {' '.join(parts)}", *rules]


def _shared_by_property(tool: Tool, properties: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The parts of the tool's schema to which each property may refer, as each value has its own grammar: ``$defs``, or
    ``properties``, which zod refers to for a schema that it has seen before, or all of it, where ``#`` means the tool's
    schema. References in them are ``_moved``.

    Raises RequestError: they are too large together.
    """
    text = json.dumps(tool.parameters)
    named = set(_REFERENCE.findall(text))
    shared = {key: part for key, part in tool.parameters.items() if f"/{key}" in named or "" in named}
    names = [name for name, schema in properties.items() if shared and '"$ref"' in json.dumps(schema)]
    num_bytes = len(names) * len(json.dumps(shared))
    if num_bytes > MAX_DEFINITIONS_BYTES:
        message = f"the {' and '.join(shared)} of {tool.name}, once for each parameter that refers to them,"
        raise refuse(f"{message} have {num_bytes} bytes, at most {MAX_DEFINITIONS_BYTES} are allowed", "tools")
    return dict.fromkeys(names, _moved(shared))


def _moved(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a tool's schema, with references that find the tool's schema as the definition ``tool``."""
    moved: dict[str, Any] = json.loads(_REFERENCE.sub(r'"$ref": "#/$defs/tool\1', json.dumps(part)))
    return moved


def _text_rule(choices: Sequence[Any]) -> str:
    """The body of the rule of a value that may be a string, with its end tag: one of the constants, or any text."""
    if not choices:
        return "value"
    texts = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
    return f"({' | '.join(map(grammar.literal, texts))}) {_VALUE_END}"
