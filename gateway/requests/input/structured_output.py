"""What a request wants its output to follow, as the fields of all endpoints say it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from common.errors import RequestError
from gateway.http.protocol.decoding import refuse

MAX_BYTES = 256 << 10
MAX_DEPTH = 64

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag", "lark"]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What a request wants its output to follow.

    Attributes:
        param: field of the body that asks for it.
        kind: ``grammar`` is EBNF (GBNF) or Lark as clients write it; ``lark`` is our own, as tool formats give it.
        value: as in the body; a JSON value may be JSON text. Unused with ``json_object``.
        is_lenient: ignore keywords, formats and patterns of a JSON schema that are not supported, instead of refusing
            them.
    """

    param: str
    kind: Kind
    value: Any = None
    is_lenient: bool = False

    def encoded(self) -> bytes:
        """Return this as JSON in one line, from which ``grammars.compiler`` decodes it.

        Raises RequestError for values that are too large or nested too deeply. The size comes first: on the event loop,
        nothing but the encoder may see a value as large as a body.
        """
        try:
            value = self.value.encode() if isinstance(self.value, str) else msgspec.json.encode(self.value)
        except RecursionError as error:
            raise too_deep(self.param) from error
        check_num_bytes(len(value), MAX_BYTES, self.param)
        check_depth(self.value, self.param)
        return msgspec.json.encode(self)


class GrammarAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """What ``grammars.compiler`` makes of a ``StructuredOutput``.

    Attributes:
        lark: the text for ``SamplingParams.grammar``; empty if there is a problem.
        problem: why it is refused; begins with ``param``.
        param: the field, with the place in a schema.
    """

    lark: str = ""
    problem: str = ""
    param: str | None = None


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
#: Fields that ask for structured output, of all endpoints.
STRUCTURE_FIELDS = ("response_format", "structured_outputs", *_FIELDS)


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
    names = ("schema", "value") if given.get("json_schema") is None else ("json_schema",)
    schemas = {name: given[name] for name in names if given.get(name) is not None}
    for name in schemas:
        if kind != ("json_schema" if name == "json_schema" else "json_object"):
            message = 'has no effect here; write {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
            raise refuse(message, f"{param}.{name}")
    if kind == "json_object":
        wanted = [
            StructuredOutput(f"{param}.{name}", "json_schema", schema, is_lenient=True)
            for name, schema in schemas.items()
        ]
        return only_one(wanted) or StructuredOutput(param, "json_object")
    if kind == "structural_tag":
        return StructuredOutput(param, "structural_tag", {key: part for key, part in given.items() if part is not None})
    if kind != "json_schema":
        return None
    content = given.get("json_schema")
    if not isinstance(content, Mapping) or content.get("schema") is None:
        raise refuse("is missing", f"{param}.json_schema" + (".schema" if isinstance(content, Mapping) else ""))
    is_lenient = not content.get("strict")
    return StructuredOutput(f"{param}.json_schema.schema", "json_schema", content["schema"], is_lenient=is_lenient)


def only_one(wanted: Sequence[StructuredOutput]) -> StructuredOutput | None:
    """Return the first entry, or None for an empty list. Raises RequestError naming one that asks for something else.

    The same grammar may come twice: guidance sends it by vLLM's older and newer name.
    """
    for other in wanted[1:]:
        if replace(other, param=wanted[0].param).encoded() != wanted[0].encoded():
            raise refuse(f"cannot be combined with {wanted[0].param}; give one of the two", other.param)
    return wanted[0] if wanted else None


def check_num_bytes(num_bytes: int, max_bytes: int, param: str) -> None:
    if num_bytes > max_bytes:
        raise refuse(f"has {num_bytes} bytes, at most {max_bytes} are allowed", param)


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
    raise too_deep(param)


def too_deep(param: str) -> RequestError:
    return refuse(f"is nested more than {MAX_DEPTH} levels deep", param)
