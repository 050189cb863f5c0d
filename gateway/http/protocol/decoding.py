"""Decodes bodies strictly. All errors of decoding become a ``RequestError`` that names the field.

A body is decoded once, straight into its struct. Only one with an unknown field or a wrong number is decoded again, to
plain values: ``_Cleaner`` drops what has no effect, makes integers such as ``8.0`` plain, and refuses the rest.
"""

import difflib
import functools
import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from common.errors import ErrorCode, RequestError
from gateway.http.protocol.extras import INSTEAD, OTHER_NAMES, UNSUPPORTED, WITHOUT_EFFECT


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An object that refuses unknown fields, except for those of ``extras.WITHOUT_EFFECT``."""

    def values_without_effect(self) -> list[str]:
        """Names of values that have no effect although their fields have; ``decode_with_extras`` names them."""
        return []


class Extensible(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An object within a body to which clients add keys of their own; ``decode_with_extras`` ignores and names them."""


Body = TypeVar("Body", bound=Strict)

#: Fields without effect of one body that are named, each once, and those of which the names are read: a body may have
#: tens of thousands.
MAX_NAMED_EXTRAS, MAX_READ_EXTRAS = 16, 1_024
#: Characters that count of the name of an unknown field, and of the path to it: a name may be as long as the body.
MAX_NAME, MAX_PATH = 64, 256
#: Characters of msgspec's complaint, which quotes a wrong text as a whole.
MAX_SENTENCE = 400
_STRANGE = re.compile(r"[^A-Za-z0-9_.-]")


def refuse(message: str, param: str | None, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> RequestError:
    """An error about one field of the body."""
    return RequestError(code, f"{param}: {message}" if param else message, param=param)


def value_of_either(fields: msgspec.Struct, name: str, other: str, prefix: str = "") -> Any:
    """The value of a field that has two names. Raises RequestError: both are given, with different values.

    Args:
        prefix: of the names in errors.
    """
    value, value_of_other = getattr(fields, name), getattr(fields, other)
    if value is not None and value_of_other is not None and value != value_of_other:
        raise refuse(f"differs from {other}; give one of the two", prefix + name)
    return value_of_other if value is None else value


def decode(kind: type[Body], body: bytes) -> Body:
    """Decode a body. Raises RequestError naming the field."""
    return decode_with_extras(kind, body)[0]


def decode_with_extras(kind: type[Body], body: bytes, *, are_refused: bool = False) -> tuple[Body, tuple[str, ...]]:
    """Decode a body, and name its fields without effect, such as ``user`` and ``messages.cache_control``.

    Args:
        are_refused: refuse fields without effect, instead of naming them.

    Raises:
        RequestError: with the name of the field.
    """
    cleaner = _Cleaner(are_refused=are_refused)
    try:
        try:
            decoded = msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error) and "got `float`" not in str(error):
                raise
            plain = cleaner.cleaned(msgspec.json.decode(body), _described(kind), "")
            decoded = msgspec.convert(plain, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _named(str(error), kind) from error
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from error
    except UnicodeDecodeError as error:
        raise refuse("the body is not valid UTF-8", None) from error
    for name in decoded.values_without_effect():
        cleaner.ignore(name)
    return decoded, tuple(cleaner.ignored)


class _Cleaner:
    """Drops unknown fields that have no effect, and refuses the others.

    Attributes:
        ignored: names of the dropped fields, without indices, each once; their characters are safe in an HTTP header.
    """

    def __init__(self, *, are_refused: bool) -> None:
        self._are_refused = are_refused
        self._num_read = 0
        self.ignored: dict[str, None] = {}

    def cleaned(self, value: Any, kind: inspect.Type, path: str) -> Any:
        """A plain value without the fields that the structs within ``kind`` do not declare.

        A number such as 256.0 outside lists is an integer where only integers are expected: JSON does not tell them
        apart, and clients in languages without integers write them so.
        """
        if isinstance(value, float):
            kinds = [type(option) for option in _options(kind)]
            is_integer = value.is_integer() and inspect.IntType in kinds and inspect.FloatType not in kinds
            return int(value) if is_integer else value
        if isinstance(value, list):
            items = next((option for option in _options(kind) if isinstance(option, inspect.ListType)), None)
            if items is None or not _has_structs(items.item_type):  # such as hundreds of thousands of token ids
                return value
            return [
                self.cleaned(item, items.item_type, f"{path}[{i}]") if isinstance(item, (list, dict)) else item
                for i, item in enumerate(value)
            ]
        struct = _struct(kind, value) if isinstance(value, dict) else None
        return value if struct is None else self._cleaned_struct(value, struct, path)

    def _cleaned_struct(self, value: dict[str, Any], struct: inspect.StructType, path: str) -> dict[str, Any]:
        kinds = {field.encode_name: field.type for field in struct.fields}
        cleaned: dict[str, Any] = {}
        for name, item in value.items():
            where = f"{path}.{name}" if path else name
            if name in kinds:
                cleaned[name] = self.cleaned(item, kinds[name], where)
            elif name == struct.tag_field:
                cleaned[name] = item
            elif name in WITHOUT_EFFECT or issubclass(struct.cls, Extensible):
                if item is not None:
                    self.ignore(where)
            else:
                _refuse_unknown(name, item, where, kinds)
        return cleaned

    def ignore(self, where: str) -> None:
        """Names a field, or a value, without effect. Raises RequestError if these are refused."""
        if self._are_refused:
            raise refuse("has no effect here; leave it out (the gateway runs with --strict-fields)", where[:MAX_PATH])
        if len(self.ignored) < MAX_NAMED_EXTRAS and self._num_read < MAX_READ_EXTRAS:
            self._num_read += 1
            self.ignored[_STRANGE.sub("_", re.sub(r"\[\d+\]", "", where[:MAX_PATH])[:MAX_NAME])] = None


def _refuse_unknown(name: str, value: object, where: str, known: Mapping[str, inspect.Type]) -> None:
    """Refuse an unknown field, unless its value asks for nothing."""
    if name not in UNSUPPORTED:
        hint = _other_place(name, known) or INSTEAD.get(name)
        if hint is None and (close := difflib.get_close_matches(name[:MAX_NAME], known, 1)):
            hint = f"did you mean {close[0]}?"
        raise refuse("unknown field" + (f"; {hint}" if hint else ""), where[:200])
    if value is not None and not any(value == other and type(value) is type(other) for other in UNSUPPORTED[name]):
        hint = INSTEAD.get(name, "leave it out")
        raise refuse(f"not supported by this server; {hint}", where, ErrorCode.NOT_SUPPORTED)


def _other_place(name: str, known: Mapping[str, inspect.Type]) -> str | None:
    """Where a body takes an unknown field: inside one of its own, or by the name that another API has for it."""
    for outer, kind in known.items():
        for struct in _options(kind):
            if isinstance(struct, inspect.StructType) and any(field.encode_name == name for field in struct.fields):
                return f"put it into {outer}"
    other = next((other for other in OTHER_NAMES.get(name, ()) if other.partition(".")[0] in known), None)
    return other and f"use {other}"


@functools.cache
def _described(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _options(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    """The members of a union; otherwise the type itself. Metadata is stripped."""
    if isinstance(kind, inspect.Metadata):
        return _options(kind.type)
    if isinstance(kind, inspect.UnionType):
        return tuple(option for member in kind.types for option in _options(member))
    return (kind,)


def _has_structs(kind: inspect.Type) -> bool:
    """Whether a value of this type may be a struct, or a list with structs in it."""
    return any(
        isinstance(option, inspect.StructType)
        or (isinstance(option, inspect.ListType) and _has_structs(option.item_type))
        for option in _options(kind)
    )


def _struct(kind: inspect.Type, value: dict[str, Any]) -> inspect.StructType | None:
    """The struct of a union that this object is; its tag decides between several."""
    structs = [option for option in _options(kind) if isinstance(option, inspect.StructType)]
    if len(structs) > 1:
        return next((struct for struct in structs if value.get(str(struct.tag_field)) == struct.tag), None)
    return structs[0] if structs else None


_AT = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_QUOTED_FIELD = re.compile(r"required field `([^`]*)`")
_LAST_KEY = re.compile(rb'"([A-Za-z_][A-Za-z0-9_]{0,63})"\s*:\s*[-+]?$')
_STEP = re.compile(r"[^.\[\]]+")
#: The beginning of a pair of surrogates, which has 12 bytes.
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB]")


def _named(message: str, kind: type[Strict]) -> RequestError:
    """msgspec's complaint, its ``$.a.b[0]`` turned into a parameter's name."""
    at = _AT.search(message)
    path = at.group(1) if at else ""
    sentence = (message[: at.start()] if at else message)[:MAX_SENTENCE].replace("`", "")
    if sentence.startswith("Invalid enum value"):
        sentence += f"; it may be {', '.join(_choices(kind, path))}"
    path = path.replace("[...]", "")
    field = _QUOTED_FIELD.search(message)
    if field:
        path, sentence = f"{path}.{field.group(1)}" if path else field.group(1), "is missing"
    return refuse(sentence if path else f"the body is wrong: {sentence}", path or None)


def _choices(kind: type[Strict], path: str) -> list[str]:
    """The texts that a field may have. The path to it is msgspec's, such as ``messages[0].role``."""
    kinds = _options(_described(kind))
    for step in _STEP.findall(path):
        kinds = tuple(inner for outer in kinds for inner in _inside(outer, step))
    return [str(value) for one in kinds if isinstance(one, inspect.LiteralType) for value in one.values]


def _inside(kind: inspect.Type, step: str) -> tuple[inspect.Type, ...]:
    """The types of the field of a struct with this name, or of the items of a list."""
    if isinstance(kind, inspect.ListType):
        return _options(kind.item_type)
    fields = kind.fields if isinstance(kind, inspect.StructType) else ()
    return tuple(option for field in fields if field.encode_name == step for option in _options(field.type))


def _malformed(body: bytes, message: str) -> RequestError:
    """The error for broken JSON. It names a field if the fault, such as ``NaN``, directly follows its key."""
    if body.startswith(BOM_UTF8):
        return refuse("the body begins with a byte order mark; send UTF-8 without it", None)
    if "surrogate" in message or ("truncated" in message and _HALF_PAIR.search(body[-12:])):
        return refuse(r"a text has half of a character, as \ud83d is of an emoji; send both \u escapes or none", None)
    at = re.search(r"\(byte (\d+)\)", message)
    key = _LAST_KEY.search(body[max(0, int(at.group(1)) - 80) : int(at.group(1))]) if at else None
    return refuse(f"the body is not valid JSON: {message}", key.group(1).decode() if key else None)
