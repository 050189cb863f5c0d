"""Calls as a list of Python calls: Llama 4, Llama 3.2.

    [get_weather(city="Paris", days=2), get_time(zone="UTC")]

Documented as "Zero shot function calling" in models/llama3_2/text_prompt_format.md and models/llama4/prompt_format.md
of meta-llama/llama-models. Arguments are named, and their values are Python literals: strings, numbers, ``True``,
``False``, ``None``, lists, tuples and dictionaries. The list stands at the beginning of an output, or behind
``<|python_start|>`` (then ``<|python_end|>`` follows it) or ``<|python_tag|>``, which are special tokens.

Literals become JSON while they are read. If one is broken, the rest of the output is passed on as a part of the
arguments.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.http.protocol.decoding import refuse
from gateway.text.incremental_parser import SPACE, Steps, drop
from gateway.text.output_parser import Tool
from gateway.text.tool_parsers import grammar
from gateway.text.tool_parsers.base import NotACall, ToolFormat, ToolParser
from gateway.text.tool_parsers.schemas import ALL_TYPES, constants, required_names, schema_types

START, END, TAG = "<|python_start|>", "<|python_end|>", "<|python_tag|>"
#: Depth of lists and dictionaries in a value.
MAX_DEPTH = 64
#: Characters of a number or a constant.
MAX_SCALAR = 400

_NAME = re.compile(r"[\w.\-]*")
_SCALAR = re.compile(r"[\w.+\-]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_CHARACTERS = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\""}
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}


class PythonicParser(ToolParser):
    def _parse(self) -> Steps[None]:
        yield from self._run(SPACE, self._text)
        yield from self._text_and_calls((START, TAG), self._calls, may_begin_at_once=True)

    def _calls(self, marker: str) -> Steps[str]:
        """Read a list of calls; return the marker that ends broken arguments."""
        if marker:
            self._hold(marker)
        else:
            yield from self._accept((START, TAG), self._hold)
        yield from self._run(SPACE, self._hold)
        if not (yield from self._literal("[", self._hold)):
            raise NotACall
        while True:
            yield from self._run(SPACE, self._hold)
            num_before = len(self._held)
            yield from self._run(_NAME, self._hold)
            name = "".join(self._held[num_before:])
            if not (yield from self._literal("(", self._hold)):
                raise NotACall
            self._begin(name)
            if not (yield from self._keywords()):
                return (yield from self._text_until((START, TAG), self._arguments))
            yield from self._run(SPACE, self._text)
            if not (yield from self._literal(",", self._hold)):
                break
        yield from self._literal("]", drop)
        yield from self._after_call((END,))
        return ""

    def _keywords(self) -> Steps[bool]:
        """Read the arguments of a call with the closing parenthesis; False if they are broken."""
        self._arguments("{")
        separator = ""
        while True:
            yield from self._run(SPACE, drop)
            if (yield from self._literal(")", drop)):
                self._arguments("}")
                return True
            names: list[str] = []
            yield from self._run(_NAME, names.append)
            name = "".join(names)
            yield from self._run(SPACE, drop)
            if not name or not (yield from self._literal("=", drop)):
                self._arguments(name)
                return False
            self._arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._python_value(MAX_DEPTH)) or not (yield from self._comma(")")):
                return False

    def _comma(self, closing: str) -> Steps[bool]:
        """Read a comma with the space around it; False if neither it nor the closing bracket comes next."""
        yield from self._run(SPACE, drop)
        if (yield from self._literal(",", drop)):
            yield from self._run(SPACE, drop)
            return True
        return (yield from self._peek()) == closing

    def _python_value(self, depth: int) -> Steps[bool]:
        """Read a literal and pass it on as JSON; False if it is broken or cut off."""
        yield from self._run(SPACE, drop)
        character = yield from self._peek()
        if character in ("'", '"'):
            return (yield from self._python_string(character))
        if character in ("[", "(", "{") and depth:
            return (yield from self._container(character, depth - 1))
        scalar = yield from self._scalar()
        if scalar:
            self._arguments(scalar)
        return bool(scalar)

    def _container(self, opening: str, depth: int) -> Steps[bool]:
        """Read a list, tuple or dictionary."""
        closing = {"[": "]", "(": ")", "{": "}"}[opening]
        yield from self._literal(opening, drop)
        self._arguments("{" if opening == "{" else "[")
        yield from self._run(SPACE, drop)
        separator = ""
        while not (yield from self._literal(closing, drop)):
            self._arguments(separator)
            separator = ", "
            if opening == "{" and not (yield from self._dictionary_key()):
                return False
            if not (yield from self._python_value(depth)) or not (yield from self._comma(closing)):
                return False
        self._arguments("}" if opening == "{" else "]")
        return True

    def _dictionary_key(self) -> Steps[bool]:
        """Read a key with its colon; numbers and constants become strings, as JSON has no other keys."""
        character = yield from self._peek()
        if character in ("'", '"'):
            if not (yield from self._python_string(character)):
                return False
        else:
            scalar = yield from self._scalar()
            if not scalar:
                return False
            self._arguments(json.dumps(scalar))
        yield from self._run(SPACE, drop)
        if not (yield from self._literal(":", drop)):
            return False
        self._arguments(": ")
        return True

    def _scalar(self) -> Steps[str]:
        """Read a number or constant and return it as JSON; pass it on as it is and return "" if it is neither."""
        texts: list[str] = []
        yield from self._run(_SCALAR, texts.append)
        text = "".join(texts)
        value = _scalar_json(text)
        if not value:
            self._arguments(text)
        return value

    def _python_string(self, quote: str) -> Steps[bool]:
        """Read a string; False if it is cut off."""
        end = quote * 3 if (yield from self._literal(quote * 3, drop)) else quote
        if end == quote:
            yield from self._literal(quote, drop)
        self._arguments('"')
        while not (yield from self._literal(end, drop)):
            character = yield from self._peek()
            if character == "\\":
                yield from self._python_escape()
            elif character == quote:  # one of less than three
                yield from self._literal(quote, self._string_part)
            elif character:
                yield from self._run(_CHARACTERS[quote], self._string_part)
            elif self._marker:
                self._string_part(self._take_marker())
            else:
                return False
        self._arguments('"')
        return True

    def _string_part(self, text: str) -> None:
        # An escaped surrogate, which only JSON puts together with the next one to a character, stays escaped.
        is_surrogate = "\ud800" <= text <= "\udfff"
        self._arguments(json.dumps(text, ensure_ascii=is_surrogate)[1:-1])

    def _python_escape(self) -> Steps[None]:
        """Read a backslash with what belongs to it."""
        following = yield from self._ahead(2)
        code = following[1:]
        if code in _CODE_LENGTHS:
            length = _CODE_LENGTHS[code]
            following = yield from self._ahead(2 + length)
            self._take(self._at + len(following))
            self._string_part(_code_point(following[2:], length) or following)
        else:
            self._take(self._at + len(following))
            self._string_part(_ESCAPES.get(code, following))

    def _ahead(self, count: int) -> Steps[str]:
        """The next characters, fewer before a marker or the end."""
        while len(self._buffer) - self._at < count and not self._is_at_boundary:
            yield
        return self._buffer[self._at : self._at + count]


def _code_point(digits: str, length: int) -> str:
    """The character of an escape; "" if it is invalid."""
    try:
        return chr(int(digits, 16)) if len(digits) == length else ""
    except (ValueError, OverflowError):
        return ""


def _scalar_json(text: str) -> str:
    """The JSON text of a Python number or constant; "" if it is neither."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _NUMBER.fullmatch(text):
        return text
    if len(text) > MAX_SCALAR or not text.isascii():
        return ""
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return ""
    return json.dumps(value) if abs(value) < float("inf") else ""


class PythonicFormat(ToolFormat):
    def __init__(self) -> None:
        super().__init__("pythonic", (START, END, TAG))

    def parser(self, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> PythonicParser:
        return PythonicParser(tools, token_ids)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, required: bool, token_ids: Mapping[str, int]) -> str:
        """Calls whose arguments stand in the order of the schema, those that are required first.

        Of a schema, types, constants, ``items``, ``properties`` and ``required`` count.
        """
        names = "|".join(grammar.pattern(tool.name) for tool in tools)
        rules = grammar.calls_at_start(
            [f"{tool.name}(" for tool in tools],
            opening="[",
            separator=", ",
            closing="]",
            parallel=parallel,
        )
        if required:
            rules.append("start: calls")
        else:
            rules += grammar.other_text(rf"\s*\[\s*({names})\(", (START, TAG), token_ids)
        values = _Rules()
        for i, tool in enumerate(tools):
            rules.append(f'tail_{i}: {values.keywords(tool, required=required)} ")"')
        return "\n".join(rules + values.lines + _LITERAL_RULES)


_LITERAL_RULES = [
    r"""STRING: /"([^"\\\n]|\\.)*"/ | /'([^'\\\n]|\\.)*'/""",
    r"INTEGER: /-?(0|[1-9][0-9]*)/",
    r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    r"KEYWORD: /[A-Za-z_][A-Za-z0-9_]*=/",
    'boolean: "True" | "False"',
    'literal: STRING | NUMBER | boolean | "None" | list | dictionary',
    'list: "[" (literal (", " literal)*)? "]"',
    'dictionary: "{" (STRING ": " literal (", " STRING ": " literal)*)? "}"',
    'keywords: (KEYWORD literal (", " KEYWORD literal)*)?',
]
_TYPE_RULES = {
    "string": "STRING",
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": "boolean",
    "null": '"None"',
    "array": "list",
    "object": "dictionary",
}


class _Rules:
    """The rules of the Python literals of values that follow schemas."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def keywords(self, tool: Tool, *, required: bool) -> str:
        """The rule of a tool's arguments: any for a tool that is neither strict nor required.

        Raises RequestError: the parser could not read the name of a property.
        """
        properties = tool.parameters.get("properties")
        if not isinstance(properties, dict) or not (tool.is_strict or required):
            return "keywords"
        for name in properties:
            if not name or not _NAME.fullmatch(name):
                message = f"{tool.name} cannot be called with its property {name[:100]!r}"
                raise refuse(f"{message}: this model needs names of letters, digits, '_', '-' and '.'", "tools")
        return self._members(tool.parameters, {f"{name}=": name for name in properties})

    def _add(self, expression: str) -> str:
        name = f"value_{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _members(self, schema: Mapping[str, Any], keys: Mapping[str, str]) -> str:
        """The rule of properties, by the text before their values, those that are required first."""
        properties, needed = schema["properties"], required_names(schema)
        rest = '""'
        first: list[str] = []
        starts: list[str] = []
        for key, name in reversed(list(keys.items())):
            member = self._add(f"{grammar.literal(key)} {self._value(properties[name])}")
            if name in needed:
                first.append(member)
            else:
                starts.append(f"{member} {rest}")
                rest = self._add(f'(", " {member})? {rest}')
        if first:
            return self._add(' ", " '.join(reversed(first)) + f" {rest}")
        return self._add(f"({' | '.join(starts)})?") if starts else '""'

    def _value(self, schema: Any) -> str:
        choices = constants(schema)
        if choices:
            texts = dict.fromkeys(text for choice in choices for text in _spellings(choice))
            return self._add(" | ".join(map(grammar.literal, texts)))
        types = schema_types(schema, {})
        if not types or types == ALL_TYPES:
            return "literal"
        return self._add(" | ".join(self._typed(name, schema) for name in sorted(types)))

    def _typed(self, name: str, schema: Mapping[str, Any]) -> str:
        """A value of this type."""
        if name == "array" and isinstance(schema.get("items"), dict):
            item = self._value(schema["items"])
            return f'"[" ({item} (", " {item})*)? "]"'
        if name == "object" and isinstance(schema.get("properties"), dict):
            keys = {f"{json.dumps(key, ensure_ascii=False)}: ": key for key in schema["properties"]}
            return f'"{{" {self._members(schema, keys)} "}}"'
        return _TYPE_RULES.get(name, "literal")


def _spellings(value: Any) -> tuple[str, ...]:
    return (repr(value), json.dumps(value, ensure_ascii=False)) if isinstance(value, str) else (repr(value),)
