"""Turns a frozen dataclass into a set of options, and merges their values from flags, environment and file.

``option`` defines a field of a configuration class: type, default, bounds and help. The flag (``--page-size``), the
environment variable (``BATON_PAGE_SIZE``) and the key in the TOML file (``page-size`` or ``page_size``) follow from its
name. ``merge`` takes flags over variables over file over defaults, checks every value, and names its source in errors.
The ``__post_init__`` of a class checks combinations of fields.
"""

import dataclasses
import difflib
import functools
import math
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from common.errors import ConfigError, reason_of

ENV_PREFIX = "BATON_"


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    metavar: str | None = None,
    is_secret: bool = False,
) -> Any:
    """Return a dataclass field with the metadata of an option.

    Args:
        default: value if neither flag, variable nor file sets the option; None requires a type that allows it.
        help: one or more sentences for ``--help``, which appends the default.
        minimum, maximum: inclusive bounds of a number.
        is_secret: never shown; child processes get it in the environment and not on the command line.
    """
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "metavar": metavar, "is_secret": is_secret}
    return dataclasses.field(default=default, metadata=metadata, repr=not is_secret)


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    name: str
    default: Any
    help: str
    kind: type  # bool, int, float, str, or tuple for several strings
    choices: tuple[str, ...]  # values of a Literal type; else empty
    allows_none: bool
    minimum: float | None
    maximum: float | None
    metavar: str
    is_secret: bool
    env_prefix: str = ENV_PREFIX

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def env(self) -> str:
        return self.env_prefix + self.name.upper()


def flag_of(name: str) -> str:
    """The flag of the field of this name."""
    return "--" + name.replace("_", "-")


def check_unset(config: Any, names: Iterable[str], why: str) -> None:
    """Raise ConfigError if one of these options of a configuration has another value than its default.

    Args:
        why: what follows its flag in the sentence.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in names:
        if getattr(config, name) != defaults[name]:
            raise ConfigError(f"{flag_of(name)} {why}")


@functools.cache
def options_of(cls: type) -> Mapping[str, Option]:
    """Return the options of a configuration class by field name, in order; fields without help are not options.

    A class whose environment variables would collide with those of others defines its own ``ENV_PREFIX``.
    """
    hints = get_type_hints(cls)
    prefix = getattr(cls, "ENV_PREFIX", ENV_PREFIX)
    fields = [field for field in dataclasses.fields(cls) if field.metadata.get("help")]
    return {field.name: _option(field, hints[field.name], prefix) for field in fields}


def _option(field: "dataclasses.Field[Any]", hint: Any, prefix: str) -> Option:
    is_union = get_origin(hint) in (types.UnionType, Union)
    kinds = [arg for arg in (get_args(hint) if is_union else (hint,)) if arg is not type(None)]
    assert len(kinds) == 1, f"{field.name}: needs one type, optionally or None"
    choices = get_args(kinds[0]) if get_origin(kinds[0]) is Literal else ()
    kind = str if choices else tuple if kinds[0] == tuple[str, ...] else kinds[0]
    assert kind in (bool, int, float, str, tuple), f"{field.name}: {kind} is not an option type"
    metadata = dict(field.metadata)
    metadata["metavar"] = metadata["metavar"] or ("|".join(choices) if choices else kind.__name__.upper())
    return Option(
        name=field.name,
        default=field.default,
        kind=kind,
        choices=choices,
        allows_none=is_union,
        env_prefix=prefix,
        **metadata,
    )


def merge(
    cls: type,
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Any],
    file_name: str = "",
    spellings: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, Any]:
    """Return the values of all options that are set: ``flags`` over ``environ`` over ``file``.

    Args:
        flags: values by field name: strings as typed, or bool for switches.
        environ: environment variables; see ``unknown_variables`` for unknown BATON_* variables.
        file: keys of the file for this class (see ``read_file``); all must be known.
        spellings: flags as typed, by field name, where an alias was used.
    Raises:
        ConfigError: a key is unknown, or a value has a wrong type or is out of bounds; the message names the source.
    """
    options = options_of(cls)
    values: dict[str, Any] = {}
    for key, given in file.items():
        name = key.replace("-", "_")
        if name not in options:
            raise ConfigError(f"{key} in {file_name} is not a known option{_did_you_mean(name, options)}")
        values[name] = _checked(options[name], given, f"{key} in {file_name}")
    for found in options.values():
        if environ.get(found.env):
            values[found.name] = _checked(found, environ[found.env], found.env)
    for name, given in flags.items():
        values[name] = _checked(options[name], given, spellings.get(name, options[name].flag))
    return values


def unknown_variables(environ: Mapping[str, str], known: Iterable[str], other_prefixes: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for an unknown BATON_* variable, unless it has the prefix of another command."""
    known = list(known)
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in known and not name.startswith(other_prefixes):
            hint = _did_you_mean(name, known, prefix=ENV_PREFIX)
            raise ConfigError(f"the environment variable {name} is not a known option{hint}")


def read_file(path: str, command: str, commands: Iterable[str]) -> dict[str, Any]:
    """Return the options of one command from a TOML file: the command's table over the keys outside tables.

    Raises:
        ConfigError: the file cannot be read, is not TOML, has a table that is not a command, or sets an option twice.
    """
    commands = list(commands)
    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = tomllib.loads(text)
        if _has_long_integers(content):
            raise ConfigError(f"--config {path} has an integer of more than 64 bits, which TOML forbids")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {reason_of(error)}") from error
    except tomllib.TOMLDecodeError as error:
        _check_names(text, commands, path)
        raise ConfigError(f"--config {path} is not valid TOML: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} has a number that is too long, or is nested too deeply") from error
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    for name in tables:
        if name not in commands:
            raise ConfigError(f"[{name}] in {path} is not a command; use one of {', '.join(commands)}")
    own = tables.get(command, {})
    for keys in (content, own):
        _check_spellings(keys, path)
    return {key: value for key, value in content.items() if key not in tables} | own


def _has_long_integers(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_long_integers, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _check_names(text: str, commands: Iterable[str], path: str) -> None:
    """Raises ConfigError: a key above all tables has the name of a table, which TOML forbids."""
    above, *_ = re.split(r"^\s*\[", text, maxsplit=1, flags=re.MULTILINE)
    for name in commands:
        is_key = re.search(rf"^\s*{name}\s*=", above, re.MULTILINE)
        if is_key and re.search(rf"^\s*\[\s*{name}\s*\]", text, re.MULTILINE):
            raise ConfigError(
                f"{name} in {path} is a key above all tables and the table [{name}]: put the key into the table of its "
                "command, such as [serve]"
            )


def _check_spellings(keys: Iterable[str], path: str) -> None:
    """Raises ConfigError: two keys of one table name the same option."""
    spellings: dict[str, str] = {}
    for key in keys:
        other = spellings.setdefault(key.replace("-", "_"), key)
        if other != key:
            raise ConfigError(f"{other} and {key} in {path} are the same option; leave one out")


def _checked(found: Option, given: Any, source: str) -> Any:
    if given is None or (found.allows_none and given == "none"):
        return None
    value = _converted(found, given, source)
    if value == "" and not found.choices:
        raise ConfigError(f"{source} is empty; give a value, or leave it out")
    if found.choices and value not in found.choices:
        raise ConfigError(f"{source} must be one of {', '.join(found.choices)}, not {value!r}")
    is_number = found.kind in (int, float)
    if found.kind is float and not math.isfinite(value):
        raise ConfigError(f"{source} must be a finite number, not {value}")
    if is_number and found.minimum is not None and value < found.minimum:
        raise ConfigError(f"{source} must be at least {_bound(found.minimum)}, not {value}")
    if is_number and found.maximum is not None and value > found.maximum:
        raise ConfigError(f"{source} must be at most {_bound(found.maximum)}, not {value}")
    return value


def _bound(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _converted(found: Option, given: Any, source: str) -> Any:
    if found.kind is tuple:
        return _texts(given, source)
    if type(given) is found.kind:
        return given
    if found.kind is float and type(given) is int:
        return float(given)
    if found.kind is str and type(given) in (int, float):  # in a file, rate = 4 means rate = "4"
        return str(given)
    if not isinstance(given, str):
        raise ConfigError(f"{source} must be {_a_kind(found)}, not {given!r}")
    if found.kind is bool:
        if given.lower() in ("1", "true", "yes", "on"):
            return True
        if given.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{source} must be true or false, not {given!r}")
    try:
        return found.kind(given)
    except ValueError:
        raise ConfigError(f"{source} must be {_a_kind(found)}, not {given!r}") from None


def _texts(given: Any, source: str) -> tuple[str, ...]:
    """Split into strings: a list (the flag more than once), or one string with commas."""
    texts = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{source} must be a string or a list of strings, not {given!r}")
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


def _a_kind(found: Option) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[found.kind]


def _did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Name the option that a name resembles most, behind the prefix that all of them share."""
    near = difflib.get_close_matches(name.removeprefix(prefix), [other.removeprefix(prefix) for other in known], n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def to_flags(cls: type, values: Mapping[str, Any]) -> list[str]:
    """Return flags that pass ``values`` to a process with configuration ``cls``, without defaults and secrets."""
    words: list[str] = []
    for found in options_of(cls).values():
        value = values.get(found.name, found.default)
        if value == found.default or found.is_secret:
            continue
        if found.kind is bool:
            words.append(found.flag if value else "--no-" + found.flag[2:])
        elif found.kind is tuple:
            words += [f"{found.flag}={text}" for text in value]
        else:
            words.append(f"{found.flag}={'none' if value is None else value}")
    return words
