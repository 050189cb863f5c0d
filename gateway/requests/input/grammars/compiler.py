"""Turns every way of asking for structured output into one Lark grammar, and checks that it compiles.

    python -m gateway.requests.input.grammars.compiler SECONDS

A JSON schema, a regular expression, choices, an EBNF grammar, a structural tag and a tool format each become one Lark
text, as llguidance reads it. A text that does not compile is refused with the field and, in a schema, with the place.

As a process of its own, it reads one ``StructuredOutput`` a line and writes one ``GrammarAnswer`` a line, both JSON.
llguidance cannot be interrupted, and a grammar of a few hundred bytes can take it hours, or all memory. So the process
limits its memory, and the time for each grammar to SECONDS; the kernel ends it when a grammar exceeds one.
"""

import contextlib
import json
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.errors import RequestError
from common.system.deep_threads import LEXER_FUEL, MAX_GRAMMAR_BYTES, deep_threads
from gateway.http.protocol.decoding import refuse
from gateway.requests.input.grammars.schema_numbers import problem_with_numbers
from gateway.requests.input.grammars.structural_tags import (
    check_size,
    json_rule,
    regex_rule,
    structural_tag_to_lark,
)
from gateway.requests.input.structured_output import GrammarAnswer, StructuredOutput, check_depth, too_deep
from gateway.text.tool_parsers.schemas import LISTS, MAPS, SCHEMAS, with_parts, without_look_around

#: A node follows all readings of a text at once, and nothing in llguidance bounds them: the time of a token can grow
#: with the cube of the size of a client's grammar, to two seconds for one of this size.
MAX_RULES_BYTES = 24 << 10
#: Address space of the process. Without a grammar it takes 0.6 GiB, mostly for one large stack.
MAX_MEMORY_BYTES = 2 << 30
#: Processor time for which the parts of a refused schema are compiled to find the place of the error.
PLACE_S = 1.0

_LIMITS = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
#: What a grammar in Lark has, and one in EBNF has not, in which rules are written with ``::=``.
_LARK = re.compile(r"(?m)^[ \t]*(?:%llguidance\b|\??start[ \t]*:(?!:))")
#: Where llguidance found an error in a Lark text, and the lines that it quotes.
_LOCATION = re.compile(r"^at \d+\(\d+\): ")
_QUOTED_LINES = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
#: A schema of any string; LangChain adds titles.
_STRING = {"type": "string", "title": ""}
#: The reference through which it came to an error in a schema.
_REFERENCE = re.compile(r" while processing json-schema:\S*")


def main(timeout_s: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with deep_threads(1) as threads, contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            signal.setitimer(signal.ITIMER_REAL, timeout_s)  # SIGALRM ends the process
            answer = threads.submit(_answer, line).result()
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()


def _answer(line: bytes) -> GrammarAnswer:
    wanted = msgspec.json.decode(line, type=StructuredOutput)
    try:
        return GrammarAnswer(lark=to_lark(wanted))
    except RequestError as error:
        return GrammarAnswer(problem=error.message, param=error.param)
    except RecursionError:  # of JSON in a text within a structural tag
        return GrammarAnswer(problem=too_deep(wanted.param).message, param=wanted.param)


# ---- conversion; pure ------------------------------------------------------------------------------------------------


def to_lark(wanted: StructuredOutput) -> str:
    """Return the Lark text, converted and checked. Slow. Raises RequestError."""
    param, value = wanted.param, wanted.value
    if wanted.kind == "json_object":
        return _compiled(_lark_of({"type": "object"}), param)
    if wanted.kind == "json_schema":
        return _json_schema(_json_value(value, param), param, is_lenient=wanted.is_lenient)
    if wanted.kind == "choice":
        if not value or not all(isinstance(choice, str) for choice in value):
            raise refuse("must be a list of texts that is not empty", param)
        # A terminal becomes one regular expression. Nodes cannot follow a rule of 2,000 alternatives.
        return _compiled("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value)), param)
    if wanted.kind == "structural_tag":
        tag = _json_value(value, param)
        if not isinstance(tag, Mapping):
            raise refuse("must be an object", param)
        return _compiled(structural_tag_to_lark(tag, param), param)
    if not isinstance(value, str) or not value:
        raise refuse("must be a text that is not empty", param)
    if wanted.kind == "regex":
        return _compiled(f"start: {regex_rule(value, param)}", param)
    if wanted.kind == "grammar":
        check_size(value, MAX_RULES_BYTES, param)
        is_lark = _LARK.search(value) is not None
        return _compiled(value if is_lark else _ebnf(value, param), param, has_location=is_lark)
    return _compiled(value, param)


def _json_schema(schema: Any, param: str, *, is_lenient: bool) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise refuse("must be a JSON schema, which is an object", param)
    if is_lenient:
        options = schema.get("x-guidance")
        options = options if isinstance(options, Mapping) else {}
        schema = {**without_look_around(schema), "x-guidance": {**options, "lenient": True}}
    schema = _without_string_names(schema)
    lark = _lark_of(schema)
    check_size(lark, MAX_GRAMMAR_BYTES, param)
    if problem := _problem(lark):
        raise refuse(_reason(problem), param + _place(schema, problem))
    return lark


def _lark_of(schema: Mapping[str, Any]) -> str:
    return f"start: {json_rule(schema)}"


def _without_string_names(schema: Any) -> Any:
    """Drop each ``propertyNames`` that asks for strings, as all names are: zod writes it for every record."""
    if not isinstance(schema, Mapping):
        return schema
    names = schema.get("propertyNames")
    if isinstance(names, Mapping) and {**names, "title": ""} == _STRING:
        schema = {name: part for name, part in schema.items() if name != "propertyNames"}
    return with_parts(schema, _without_string_names)


def _ebnf(text: str, param: str) -> str:
    """Return Lark for a grammar in EBNF, as llama.cpp and xgrammar read it."""
    try:
        return gbnf_to_lark(text)
    except RecursionError as error:
        raise refuse("is nested too deeply", param) from error
    except Exception as error:  # the library raises bare Exception
        raise refuse(f"is no EBNF grammar with a rule named root: {str(error)[:300]}", param) from error


def _compiled(lark: str, param: str, *, has_location: bool = False) -> str:
    """Return a Lark text that compiles. Raises RequestError.

    Args:
        has_location: the client has written this text, so line and column in an error tell it the place.
    """
    check_size(lark, MAX_GRAMMAR_BYTES, param)
    if problem := _problem(lark):
        raise refuse(_reason(problem, has_location=has_location), param)
    return lark


def _problem(lark: str) -> str:
    """Return why a text cannot be followed; empty if it can. Special tokens are checked by nodes."""
    if problem := problem_with_numbers(lark):
        return problem
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(lark, None, limits=_LIMITS)
    except BaseException as error:  # a panic of the library, such as at a long text in an error, is no Exception
        if type(error).__name__ != "PanicException":
            raise
        return str(error)
    return messages[0] if is_error else ""


def _reason(problem: str, *, has_location: bool = False) -> str:
    """Return llguidance's error as one line."""
    text = _REFERENCE.sub("", _QUOTED_LINES.sub("", problem))
    text = text if has_location else _LOCATION.sub("", text)
    text = " ".join(text.removeprefix("failed to compile JSON schema: ").split())
    return f"cannot be compiled: {text[:400]}"


# ---- JSON values -----------------------------------------------------------------------------------------------------


def _json_value(value: Any, param: str) -> Any:
    """Return a JSON value, which a client may also send as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        parsed = msgspec.json.decode(value)  # as strict as bodies are: the library takes halves of characters
    except (ValueError, RecursionError) as error:
        raise refuse(f"is not valid JSON: {error}", param) from error
    check_depth(parsed, param)
    return parsed


# ---- the place of an error in a schema -------------------------------------------------------------------------------


def _place(schema: Mapping[str, Any], problem: str) -> str:
    """Return the path of the innermost part of a schema that has the same problem, such as ``.properties.age``."""
    shared = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
    reason, path, until = _reason(problem), "", time.thread_time() + PLACE_S
    part: Mapping[str, Any] = schema
    while True:
        for step, child in _parts(part):
            if time.thread_time() >= until:
                return path
            if _reason(_problem(_lark_of({**shared, **child}))) == reason:
                path, part = path + step, child
                break
        else:
            return path


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the schemas directly inside a schema, each with its step of the path."""
    for name in MAPS:
        for key, child in schema[name].items() if isinstance(schema.get(name), Mapping) else ():
            if isinstance(child, Mapping):
                yield f".{name}.{key}", child
    for name in SCHEMAS:
        if isinstance(schema.get(name), Mapping):
            yield f".{name}", schema[name]
    for name in LISTS:
        for i, child in enumerate(schema[name]) if isinstance(schema.get(name), list) else ():
            if isinstance(child, Mapping):
                yield f".{name}[{i}]", child


if __name__ == "__main__":
    main(float(sys.argv[1]))
