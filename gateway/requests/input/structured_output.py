"""Turns every way of asking for structured output into one Lark grammar, and checks it before a node sees it.

A JSON schema, a regular expression, choices, an EBNF grammar, a structural tag and a tool format each become one Lark
text, as llguidance reads it. A text that does not compile is refused with the field and, in a schema, with the place.
Sizes and nesting are bounded here; llguidance bounds the work of compiling. Conversion and check run on threads, and
their results are kept.
"""

import asyncio
import hashlib
import json
import math
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.errors import ErrorCode, RequestError
from common.system.deep_threads import MAX_GRAMMAR_BYTES, deep_threads
from gateway.http.protocol.decoding import refuse
from gateway.requests.input.schema_numbers import problem_with_numbers
from gateway.requests.input.structural_tags import (
    check_num_bytes,
    check_size,
    json_rule,
    regex_rule,
    structural_tag_to_lark,
)

MAX_BYTES = 256 << 10
MAX_DEPTH = 64
MAX_EBNF_RULES, MAX_EBNF_COMMENTS = 512, 4_096
COMPILE_TIMEOUT_S = 10.0
NUM_THREADS = 2
#: Grammars that are kept with the results of their checks, those that still wait included: 128 MiB at most.
MAX_CHECKED = 256
#: Grammars that wait for a thread or are on one; for further ones the client gets 429.
MAX_PENDING = 64
#: Processor time for which the parts of a refused schema are compiled to find the place of the error.
PLACE_S = 1.0

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag", "lark"]

_LIMITS = LLParserLimits(verbose_errors=False)
#: What a grammar in Lark has, and one in EBNF has not, in which rules are written with ``::=``. If the whitespace could
#: reach across lines, the time of the search would grow with the square of the number of blank lines.
_LARK = re.compile(r"(?m)^[ \t]*(?:%llguidance\b|\??start[ \t]*:(?!:))")
#: Where llguidance found an error in a Lark text, and the lines that it quotes.
_LOCATION = re.compile(r"^at \d+\(\d+\): ")
_QUOTED_LINES = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
#: A schema of any string; LangChain adds titles.
_STRING = {"type": "string", "title": ""}
#: The reference through which it came to an error in a schema.
_REFERENCE = re.compile(r" while processing json-schema:\S*")


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What a request wants its output to follow.

    Attributes:
        param: field of the body that asks for it.
        kind: ``grammar`` is EBNF (GBNF) or Lark as clients write it; ``lark`` is our own, as tool formats give it.
        value: as in the body; a JSON value may be JSON text. Unused with ``json_object``.
        is_lenient: ignore keywords and formats of a JSON schema that are not supported, instead of refusing them.
    """

    param: str
    kind: Kind
    value: Any = None
    is_lenient: bool = False


#: Fields of all endpoints, and their kinds: SGLang's and vLLM's older ones, then those inside ``structured_outputs``.
_FIELDS: dict[str, Kind] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_INNER_FIELDS: dict[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}


def structured_output_of(body: msgspec.Struct, prefix: str = "") -> StructuredOutput | None:
    """Return what the fields of a body, or of its sampling parameters, ask for; None if they ask for nothing.

    Args:
        prefix: of the fields' names in errors.
    Raises:
        RequestError: two fields ask for something, or a part of one is missing.
    """
    wanted = _wanted(body, _FIELDS, prefix)
    inner = getattr(body, "structured_outputs", None)
    if inner is not None:
        wanted += _wanted(inner, _INNER_FIELDS, f"{prefix}structured_outputs.")
    response_format = getattr(body, "response_format", None)
    if response_format is not None:
        found = _response_format(msgspec.to_builtins(response_format), f"{prefix}response_format")
        wanted += [] if found is None else [found]
    return only_one(wanted)


def _wanted(struct: msgspec.Struct, fields: Mapping[str, Kind], prefix: str) -> list[StructuredOutput]:
    values = [(name, kind, getattr(struct, name, None)) for name, kind in fields.items()]
    return [
        StructuredOutput(prefix + name, kind, value)
        for name, kind, value in values
        if value is not None and not (kind == "json_object" and value is False)
    ]


def _response_format(given: Mapping[str, Any], param: str) -> StructuredOutput | None:
    kind = given.get("type")
    name = "schema" if given.get("json_schema") is None else "json_schema"
    if given.get(name) is not None and (kind, name) != ("json_schema", "json_schema"):
        message = 'has no effect here; write {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
        raise refuse(message, f"{param}.{name}")
    if kind == "json_object":
        return StructuredOutput(param, "json_object")
    if kind == "structural_tag":
        return StructuredOutput(param, "structural_tag", {key: part for key, part in given.items() if part is not None})
    if kind != "json_schema":
        return None
    content = given.get("json_schema")
    if not isinstance(content, Mapping) or content.get("schema") is None:
        raise refuse("is missing", f"{param}.json_schema" + (".schema" if isinstance(content, Mapping) else ""))
    is_lenient = content.get("strict") is False
    return StructuredOutput(f"{param}.json_schema.schema", "json_schema", content["schema"], is_lenient=is_lenient)


def only_one(wanted: Sequence[StructuredOutput]) -> StructuredOutput | None:
    """Return the first entry, or None for an empty list. Raises RequestError naming one that asks for something else.

    The same grammar may come twice: guidance sends it by vLLM's older and newer name.
    """
    for other in wanted[1:]:
        if _key(replace(other, param=wanted[0].param)) != _key(wanted[0]):
            raise refuse(f"cannot be combined with {wanted[0].param}; give one of the two", other.param)
    return wanted[0] if wanted else None


class _Check:
    """The check of one grammar.

    Attributes:
        begun_at: when a thread took it up; infinite while it waits for one.
    """

    def __init__(self, wanted: StructuredOutput, threads: Executor) -> None:
        self.begun_at = math.inf
        self.work = asyncio.get_running_loop().run_in_executor(threads, self._run, wanted)

    def _run(self, wanted: StructuredOutput) -> str | RequestError:
        self.begun_at = time.monotonic()
        return _checked(wanted)


class GrammarChecker:
    """Converts and checks grammars on threads, each once at a time, and keeps the results used last."""

    def __init__(self) -> None:
        self._threads = deep_threads(NUM_THREADS, "grammar-checker")
        self._checks: OrderedDict[bytes, _Check] = OrderedDict()
        self._num_pending = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, wanted: StructuredOutput) -> str:
        """Return the Lark text for ``SamplingParams.grammar``.

        Raises:
            RequestError: naming the field, and the place in a schema, that is wrong or too large; or too many others
                are being compiled.
        """
        key = _key(wanted)
        check = self._checks.get(key) or self._begin(key, wanted)
        self._checks.move_to_end(key)
        try:
            found = await asyncio.wait_for(asyncio.shield(check.work), COMPILE_TIMEOUT_S)
        except TimeoutError:
            if time.monotonic() - check.begun_at < COMPILE_TIMEOUT_S / 2:  # it has waited for others most of the time
                raise self._crowded(wanted) from None
            raise refuse(f"takes more than {COMPILE_TIMEOUT_S:g} s to compile; simplify it", wanted.param) from None
        if isinstance(found, RequestError):
            raise RequestError(found.code, found.message, param=found.param)
        return found

    def _begin(self, key: bytes, wanted: StructuredOutput) -> _Check:
        if self._num_pending >= MAX_PENDING:
            raise self._crowded(wanted)
        check = self._checks[key] = _Check(wanted, self._threads)
        self._num_pending += 1
        check.work.add_done_callback(self._end)
        if len(self._checks) > MAX_CHECKED:
            self._checks.popitem(last=False)
        return check

    def _crowded(self, wanted: StructuredOutput) -> RequestError:
        message = f"{wanted.param}: {self._num_pending} grammars are being compiled; try again"
        return RequestError(ErrorCode.QUEUE_FULL, message, param=wanted.param, retry_after_s=1.0)

    def _end(self, work: "asyncio.Future[str | RequestError]") -> None:
        self._num_pending -= 1


def _key(wanted: StructuredOutput) -> bytes:
    """Return a digest of everything that the result depends on.

    Raises RequestError for values that are too large or nested too deeply. The size comes first: on the event loop,
    nothing but the encoder may see a value as large as a body.
    """
    value, param = wanted.value, wanted.param
    try:
        data = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    except RecursionError as error:
        raise _too_deep(param) from error
    check_num_bytes(len(data), MAX_BYTES, param)
    check_depth(value, param)
    return hashlib.sha256(f"{param}\0{wanted.kind}\0{wanted.is_lenient}\0".encode() + data).digest()


def _checked(wanted: StructuredOutput) -> str | RequestError:
    try:
        return to_lark(wanted)
    except RequestError as error:
        return error
    except RecursionError:  # of JSON in a text within a structural tag
        return _too_deep(wanted.param)


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
        return _compiled("start: " + " | ".join(map(json.dumps, value)), param)
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
        schema = {**schema, "x-guidance": {**(options if isinstance(options, Mapping) else {}), "lenient": True}}
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
    parts: dict[str, Any] = {}
    for name, part in schema.items():
        if name == "propertyNames" and isinstance(part, Mapping) and {**part, "title": ""} == _STRING:
            continue
        if name in _MAPS and isinstance(part, Mapping):
            parts[name] = {key: _without_string_names(child) for key, child in part.items()}
        elif name in _LISTS and isinstance(part, list):
            parts[name] = [_without_string_names(child) for child in part]
        else:
            parts[name] = _without_string_names(part) if name in _SCHEMAS else part
    return parts


def _ebnf(text: str, param: str) -> str:
    """Return Lark for a grammar in EBNF, as llama.cpp and xgrammar read it."""
    if text.count("#") > MAX_EBNF_COMMENTS:  # the library's time grows with the square of their number
        raise refuse(f"has more than {MAX_EBNF_COMMENTS:,} comments", param)
    if text.count("::=") > MAX_EBNF_RULES:
        raise refuse(f"has {text.count('::=')} rules, at most {MAX_EBNF_RULES} are allowed", param)
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


def check_depth(value: Any, param: str) -> None:
    """Raise RequestError if a JSON value is nested too deeply."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))  # the values of JSON that have others
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise _too_deep(param)


def _too_deep(param: str) -> RequestError:
    return refuse(f"is nested more than {MAX_DEPTH} levels deep", param)


# ---- the place of an error in a schema -------------------------------------------------------------------------------

#: Definitions come first, so that an error in one is found there and not at a reference to it.
_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


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
    for name in _MAPS:
        for key, child in schema[name].items() if isinstance(schema.get(name), Mapping) else ():
            if isinstance(child, Mapping):
                yield f".{name}.{key}", child
    for name in _SCHEMAS:
        if isinstance(schema.get(name), Mapping):
            yield f".{name}", schema[name]
    for name in _LISTS:
        for i, child in enumerate(schema[name]) if isinstance(schema.get(name), list) else ():
            if isinstance(child, Mapping):
                yield f".{name}[{i}]", child
