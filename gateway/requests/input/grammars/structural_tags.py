"""Turns structural tags into Lark grammars, both those of SGLang and xgrammar's older form.

A format is an object with a ``type``; the older form is a list of ``structures`` with their ``triggers``. Tags are
matched as text: a tokenizer's special tokens are not text, and need a Lark grammar that names them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from llguidance import regex_to_lark

from gateway.http.protocol.decoding import refuse
from gateway.requests.input.structured_output import check_num_bytes

MAX_FORMATS = 512
#: A regular expression takes a node a time that grows with the square of its length.
MAX_REGEX_BYTES = 16 << 10
ANY_TEXT = "/(?s:.*)/"
#: Whitespace between the parts of JSON: a line break and an indentation. A weak model would write it without end.
WHITESPACE = r"\n? {0,16}"


def json_rule(schema: Any) -> str:
    """The body of a Lark rule for a value that follows a JSON schema, with bounded whitespace.

    The schema's own ``x-guidance``, llguidance's options, may say otherwise.
    """
    if not isinstance(schema, Mapping):
        return f"%json {json.dumps(schema)}"
    given = schema.get("x-guidance")
    options = dict(given) if isinstance(given, Mapping) else {}
    if "whitespace_flexible" not in options:
        options.setdefault("whitespace_pattern", WHITESPACE)
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def regex_rule(pattern: str, param: str) -> str:
    """The body of a Lark rule for a text that matches a regular expression as a whole. Raises RequestError."""
    check_size(pattern, MAX_REGEX_BYTES, param)
    return f"/{regex_to_lark(pattern)}/"


def check_size(text: str, max_bytes: int, param: str) -> None:
    check_num_bytes(len(text.encode("utf-8", "surrogatepass")), max_bytes, param)


def structural_tag_to_lark(tag: Mapping[str, Any], param: str) -> str:
    """Return the Lark text of a structural tag. Raises RequestError naming the place."""
    if "format" in tag:
        return _Rules().grammar(tag["format"], f"{param}.format")
    if "structures" not in tag or "triggers" not in tag:
        raise refuse("needs a format, or structures and triggers", param)
    structures = _list(tag, "structures", param)
    tags = [_older_tag(item, f"{param}.structures[{i}]") for i, item in enumerate(structures)]
    newer = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    return _Rules().grammar(newer, param, tags="structures")


def _older_tag(item: Any, param: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise refuse("must be an object", param)
    schema = item.get("schema")
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except ValueError as error:
            raise refuse(f"is not valid JSON: {error}", f"{param}.schema") from error
    content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
    return {"begin": item.get("begin"), "content": content, "end": item.get("end", "")}


class _Rules:
    """The rules of one grammar, numbered in the order in which they are added."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._num_formats = 0

    def grammar(self, given: Any, param: str, *, tags: str = "tags") -> str:
        start = self._format(given, param, is_last=True, tags=tags)
        return "\n".join([f"start: {start}", *self._lines]) + "\n"

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def _format(self, given: Any, param: str, *, is_last: bool, tags: str = "tags") -> str:
        """Add the rules of a format; return the name of its rule.

        Args:
            is_last: whether nothing follows it in the output; a text of any kind cannot end otherwise.
            tags: name of the field with a triggered format's tags.
        """
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            raise refuse(f"has more than {MAX_FORMATS} formats", param)
        if not isinstance(given, Mapping):
            raise refuse("must be an object with a type", param)
        kind = given.get("type")
        if kind == "const_string":
            return self._rule(json.dumps(_text(given, "value", param)))
        if kind == "json_schema":
            return self._rule(json_rule(given.get("json_schema", {})))
        if kind == "regex":
            return self._rule(regex_rule(_text(given, "pattern", param), f"{param}.pattern"))
        if kind == "any_text":
            if not is_last or given.get("excludes") or given.get("excluded_str"):
                raise refuse("any_text is only supported at the end of the output or alone in a tag", param)
            return self._rule(ANY_TEXT)
        if kind == "sequence":
            elements = list(enumerate(_list(given, "elements", param)))
            names = [
                self._format(element, f"{param}.elements[{i}]", is_last=is_last and i == len(elements) - 1)
                for i, element in elements
            ]
            return self._rule(" ".join(names))
        if kind == "or":
            names = [
                self._format(element, f"{param}.elements[{i}]", is_last=is_last)
                for i, element in enumerate(_list(given, "elements", param))
            ]
            return self._rule(" | ".join(names))
        if kind == "tag":
            return self._tag(given, param, begin=_text(given, "begin", param))
        if kind == "triggered_tags":
            return self._triggered_tags(given, param, is_last=is_last, tags=tags)
        if kind == "tags_with_separator":
            return self._tags_with_separator(given, param)
        raise refuse(f"the type {str(kind)[:100]!r} is not supported", f"{param}.type")

    def _tag(self, given: Any, param: str, *, begin: str) -> str:
        """Add the rule of a tag, of whose begin only ``begin`` is left to match."""
        if not isinstance(given, Mapping):
            raise refuse("must be an object", param)
        end, content = _text(given, "end", param, may_be_empty=True), given.get("content")
        parts = [json.dumps(begin)] if begin else []
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            parts.append(self._rule(ANY_TEXT, f"[suffix={json.dumps(end)}]"))
        else:
            parts.append(self._format(content, f"{param}.content", is_last=False))
            parts += [json.dumps(end)] if end else []
        return self._rule(" ".join(parts))

    def _triggered_tags(self, given: Mapping[str, Any], param: str, *, is_last: bool, tags: str) -> str:
        """Text of any kind in which each trigger begins one of its tags."""
        triggers = _list(given, "triggers", param)
        is_once = bool(given.get("stop_after_first"))
        if not is_last and not is_once:
            raise refuse("triggered_tags need stop_after_first, unless they are at the end of the output", param)
        by_trigger: dict[str, list[str]] = {}
        whole: list[str] = []
        for i, tag in enumerate(_list(given, "tags", param, shown=tags)):
            where = f"{param}.{tags}[{i}]"
            begin = _text(tag, "begin", where)
            trigger = next((text for text in triggers if isinstance(text, str) and text and begin.startswith(text)), "")
            if not trigger:
                raise refuse("none of the triggers is the beginning of it", f"{where}.begin")
            by_trigger.setdefault(trigger, []).append(self._tag(tag, where, begin=begin[len(trigger) :]))
            whole.append(f"{json.dumps(trigger)} {by_trigger[trigger][-1]}")
        calls = []
        for trigger, names in by_trigger.items():
            head = self._rule(f"{ANY_TEXT} {json.dumps(trigger)}", "[lazy]")
            calls.append(f"{head} ({' | '.join(names)})")
        after = "" if is_once else f" ({' | '.join(calls)})* {self._rule(ANY_TEXT)}"
        if given.get("at_least_one"):
            return self._rule(f"({' | '.join(whole)}){after}")
        if is_once:
            return self._rule(" | ".join([*calls, *([self._rule(ANY_TEXT)] if is_last else [])]))
        return self._rule(after.strip())

    def _tags_with_separator(self, given: Mapping[str, Any], param: str) -> str:
        separator = _text(given, "separator", param, may_be_empty=True)
        names = [
            self._tag(tag, f"{param}.tags[{i}]", begin=_text(tag, "begin", f"{param}.tags[{i}]"))
            for i, tag in enumerate(_list(given, "tags", param))
        ]
        tag = self._rule(" | ".join(names))
        several = tag if given.get("stop_after_first") else f"{tag} ({json.dumps(separator)} {tag})*"
        return self._rule(several if given.get("at_least_one") else f"({several})?")


def _text(given: Any, field: str, param: str, *, may_be_empty: bool = False) -> str:
    value = given.get(field, "" if may_be_empty else None) if isinstance(given, Mapping) else None
    if not isinstance(value, str) or not (value or may_be_empty):
        raise refuse("must be a text" + ("" if may_be_empty else " that is not empty"), f"{param}.{field}")
    return value


def _list(given: Mapping[str, Any], field: str, param: str, *, shown: str = "") -> Sequence[Any]:
    value = given.get(field)
    if not isinstance(value, list) or not value:
        raise refuse("must be a list that is not empty", f"{param}.{shown or field}")
    return value
