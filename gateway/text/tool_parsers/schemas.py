"""What formats other than JSON need to know of a JSON schema. Pure."""

import re
from collections.abc import Callable, Mapping
from typing import Any

_TYPES = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}
#: References that are followed one after the other; schemas may refer to themselves.
MAX_REFERENCES = 16
#: Steps of the place that a reference names: schemas are not nested more deeply.
MAX_STEPS = 64
#: Keywords that hold schemas by name, in a list, and alone. Definitions come first, so that an error in one is found
#: there and not at a reference to it.
MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
#: Look-ahead, look-behind and back-references, which llguidance does not have, in a pattern without other escapes.
_LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9k]")
_OTHER_ESCAPES = re.compile(r"\\[^1-9k]")
#: The place of an item in a list, as references name it.
_INDEX = re.compile(r"[0-9]{1,7}", re.ASCII)
ALL_TYPES = frozenset({"string", *_TYPES.values()})


def type_of(value: Any) -> str:
    """The JSON type of a decoded value."""
    return _TYPES.get(type(value), "string")


def with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The schema with every schema directly in it changed; other values, such as those of ``enum``, stay."""
    parts: dict[str, Any] = {}
    for name, part in schema.items():
        if name in MAPS and isinstance(part, Mapping):
            parts[name] = {key: change(child) for key, child in part.items()}
        elif name in LISTS and isinstance(part, list):
            parts[name] = [change(child) for child in part]
        else:
            parts[name] = change(part) if name in SCHEMAS else part
    return parts


def without_look_around(schema: Any) -> Any:
    """A JSON schema without patterns that have look-around or back-references.

    Zod writes such patterns for e-mail addresses, and pydantic for decimals. llguidance refuses them even where it
    ignores unsupported keywords.
    """
    if not isinstance(schema, Mapping):
        return schema
    kept = {name: part for name, part in schema.items() if name != "pattern" or not _has_look_around(part)}
    if isinstance(named := schema.get("patternProperties"), Mapping):
        kept["patternProperties"] = {name: part for name, part in named.items() if not _has_look_around(name)}
    return with_parts(kept, without_look_around)


def _has_look_around(pattern: Any) -> bool:
    return isinstance(pattern, str) and bool(_LOOK_AROUND.search(_OTHER_ESCAPES.sub("", pattern)))


def required_names(schema: Mapping[str, Any]) -> frozenset[str]:
    """The properties that an object must have; none if ``required`` is no list, which clients send at times."""
    names = schema.get("required")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema to which a schema refers by ``$ref``, perhaps through others; itself if it refers to none.

    Args:
        root: the schema of which references such as ``#/$defs/name`` and ``#/properties/name`` mean a part, and
            ``#`` the whole.
    """
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not re.match("#(/|$)", reference):
            return schema
        part: Any = root
        for step in reference.split("/", MAX_STEPS)[1:]:
            if isinstance(part, list) and _INDEX.fullmatch(step) and int(step) < len(part):
                part = part[int(step)]
            elif isinstance(part, Mapping) and step in part:
                part = part[step]
            else:
                return schema
        schema = part
    return schema


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it says so at its top or in what it refers to.

    Each schema is looked at once, since alternatives may refer to themselves and to each other.

    Args:
        root: as in ``resolved``.
    """
    types: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        one = resolved(waiting.pop(), root)
        if id(one) in seen:
            continue
        seen.add(id(one))
        alternatives = _alternatives(one)
        if alternatives is None:
            types |= _own_types(one)
        else:
            waiting += alternatives
    return frozenset(types)


def _alternatives(schema: Any) -> list[Any] | None:
    """The schemas of which one must hold; None if the schema has types or constants, or no alternatives."""
    if not isinstance(schema, dict) or isinstance(schema.get("type"), str | list) or constants(schema):
        return None
    return next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)


def _own_types(schema: Any) -> frozenset[str]:
    """The types that the schema itself names."""
    types = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(types, str):
        types = [types]
    if isinstance(types, list):
        return frozenset(name for name in types if isinstance(name, str))
    return frozenset(type_of(choice) for choice in constants(schema)) or ALL_TYPES


def constants(schema: Any) -> list[Any]:
    """The values to which ``enum`` or ``const`` limit a schema; empty if neither does."""
    if not isinstance(schema, dict):
        return []
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) else []
