"""Parts of Lark grammars in the dialect of llguidance (its docs/syntax.md), as text. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.text.output_parser import Tool
from gateway.text.tool_parsers.base import MAX_CALLS
from gateway.text.tool_parsers.schemas import required_names, without_look_around

#: Keys that say what kind of value a schema describes; without one, arguments are an object.
_KINDS = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
#: Keys with which a schema says itself which properties an object has beside its own.
_OPENING = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf", "if"}
)
#: Chat templates render arguments with these separators. No other whitespace is allowed, which keeps models from
#: writing it without end.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

#: Terminals that grammars of several formats use.
LEAD = r"LEAD: /\n{1,2}/"
TEXT = r"TEXT: /(.|\n)*/"


def literal(text: str) -> str:
    """A string of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, token_ids: Mapping[str, int]) -> str:
    """A marker as a token, if it is one, or as a string."""
    token = token_ids.get(text)
    return literal(text) if token is None else f"<[{token}]>"


def json_value(schema: Any, *, is_strict: bool) -> str:
    """A JSON value that follows a schema; unsupported keywords and patterns are an error only if ``is_strict``."""
    options = {**_LAYOUT, "lenient": not is_strict}
    schema = schema if is_strict else without_look_around(schema)
    if isinstance(schema, dict):
        return "%json " + json.dumps({**schema, "x-guidance": options})
    return "%json " + json.dumps({"allOf": [schema], "x-guidance": options})


def with_layout(rule: str) -> str:
    """The rule of a JSON value, with the separators of arguments unless its schema says otherwise.

    Where an answer in JSON and a call may both begin, they must consist of the same lexemes: llguidance reads the
    longest one that may come, and does not take it back.
    """
    schema = json.loads(rule.removeprefix("%json "))
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if "whitespace_pattern" not in options:
        return rule
    others = {name: value for name, value in options.items() if name != "whitespace_pattern"}
    return "%json " + json.dumps({**schema, "x-guidance": {**others, **_LAYOUT}})


def bare_calls(tools: Sequence[Tool], arguments_key: str, *, parallel: bool, separator: str) -> list[str]:
    """The rule ``start`` for calls that are JSON objects without a marker, made of the lexemes of any JSON."""
    more = f" ({literal(separator)} object){{0,{MAX_CALLS - 1}}}" if parallel else ""
    rules = [f"start: LEAD? object{more}", LEAD, f"object: {alternatives('object', len(tools))}"]
    for i, tool in enumerate(tools):
        name = json.dumps(tool.name, ensure_ascii=False)
        lexemes = ("{", '"name"', ": ", name, ", ", f'"{arguments_key}"', ": ")
        rules.append(f"object_{i}: {' '.join(map(literal, lexemes))} arguments_{i} {literal('}')}")
        rules.append(f"arguments_{i}: {arguments(tool, required=True)}")
    return rules


def arguments(tool: Tool, *, required: bool) -> str:
    """The JSON object of a tool's arguments: any object for a tool that is neither strict nor required."""
    if not (tool.is_strict or required):
        return json_value({"type": "object"}, is_strict=False)
    schema = tool.parameters
    if not _KINDS & schema.keys():
        schema = {**schema, "type": "object"}
    properties = schema.get("properties")
    has_all = isinstance(properties, dict) and bool(properties) and required_names(schema) <= properties.keys()
    if has_all and not _OPENING & schema.keys():
        schema = {**schema, "additionalProperties": False}  # a function has no other parameters
    return json_value(schema, is_strict=tool.is_strict)


def alternatives(prefix: str, count: int) -> str:
    """One of the rules ``prefix_0``, ``prefix_1`` and so on."""
    return " | ".join(f"{prefix}_{i}" for i in range(count))


def object_heads(tools: Sequence[Tool], arguments_key: str) -> list[str]:
    """The text of a call of each tool, as a JSON object, up to its arguments."""
    names = [json.dumps(tool.name, ensure_ascii=False) for tool in tools]
    return [f'{{"name": {name}, "{arguments_key}": ' for name in names]


def object_rules(tools: Sequence[Tool], *, required: bool) -> list[str]:
    """The rule ``object``: a call of one of the tools as a JSON object with its name and its arguments."""
    rules = [f"object: {alternatives('object', len(tools))}"]
    heads = object_heads(tools, "arguments")
    for i, (tool, head) in enumerate(zip(tools, heads, strict=True)):
        rules.append(f"object_{i}: {literal(head)} arguments_{i} {literal('}')}")
        rules.append(f"arguments_{i}: {arguments(tool, required=required)}")
    return rules


def calls_or_text(
    begin: str, *, separator: str, parallel: bool, required: bool, token_ids: Mapping[str, int]
) -> list[str]:
    """The rules ``start`` and ``call`` for calls that each consist of the marker ``begin`` and the rule ``body``.

    Args:
        separator: between two calls if ``required``.
    """
    call = f"call: {marker(begin, token_ids)} body"
    more = f" ({literal(separator)} call){{0,{MAX_CALLS - 1}}}" if separator else f" call{{0,{MAX_CALLS - 1}}}"
    if required:
        return [f"start: LEAD? call{more if parallel else ''}", LEAD, call]
    if begin in token_ids:
        return [f"start: TEXT {'(call TEXT)*' if parallel else 'call?'}", TEXT, call]
    # The text ends at the first place where the marker is complete, so the marker cannot be a part of the text.
    start = "call* TEXT" if parallel else "call | TEXT"
    return [f"start: {start}", TEXT, f"head[lazy]: TEXT {literal(begin)}", "call: head body"]


def pattern(text: str) -> str:
    """A regular expression for this text."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/\-])", r"\\\1", text)


def calls_at_start(heads: Sequence[str], *, opening: str, separator: str, closing: str, parallel: bool) -> list[str]:
    """The rule ``calls`` for calls without a marker; each is its head and the rule ``tail_0``, ``tail_1`` and so on.

    The first head is one terminal with what precedes it, so that it competes as a whole with that of ``other_text``.
    """
    more = f"({literal(separator)} next){{0,{MAX_CALLS - 1}}}" if parallel else ""
    rules = [f"calls: first {more} {literal(closing) if closing else ''}"]
    rules.append("first: " + " | ".join(f"FIRST_{i} tail_{i}" for i in range(len(heads))))
    rules.append("next: " + " | ".join(f"{literal(head)} tail_{i}" for i, head in enumerate(heads)))
    rules += [f"FIRST_{i}: /\\n{{0,2}}/ {literal(opening + head)}" for i, head in enumerate(heads)]
    return rules


def other_text(beginning: str, tags: Sequence[str], token_ids: Mapping[str, int]) -> list[str]:
    """The rule ``start`` for ``calls`` at the beginning or behind a tag, or any text.

    Args:
        beginning: matches the beginning of a call; the text does not begin so, nor does it contain a tag.
    """
    spelled = [rf" & ~/(?s:.*){pattern(tag)}(?s:.*)/" for tag in tags if tag not in token_ids]
    tokens = [marker(tag, token_ids) for tag in tags if tag in token_ids]
    tagged = f" (({' | '.join(tokens)}) calls)?" if tokens else ""
    return [
        f"start: calls | OTHER{tagged}",
        f"OTHER: /(?s:.*)/ & ~/{beginning}(?s:.*)/{''.join(spelled)}",
    ]
