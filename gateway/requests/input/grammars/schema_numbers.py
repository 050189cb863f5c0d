"""Finds the numbers in JSON schemas that llguidance would not follow. Pure.

It reads every number as a double and holds bounds of integers in 64 bits. So integers beyond 2**53 may be rounded. A
range of integers that ends at -2**63 overflows the stack, which ends the process.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from gateway.text.tool_parsers.schemas import MAPS

_LIMIT, _LAST = float(2**63), 2**63 - 1
#: What may stand between ``%json`` and a schema in a Lark text.
_SPACE = re.compile(r"(?:\s|//[^\n]*)*")
_NUMBER = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


class _Object(NamedTuple):
    """A JSON object with all of its members: which of two with one name counts is up to the reader."""

    members: list[tuple[str, Any]]


def problem_with_numbers(lark: str) -> str:
    """Why the numbers of the schemas in a Lark text cannot be followed, as a sentence; empty if they can."""
    decoder = json.JSONDecoder(object_pairs_hook=_Object)
    for found in re.finditer("%json", lark):
        space = _SPACE.match(lark, found.end())
        assert space is not None
        try:
            schema, _ = decoder.raw_decode(lark, space.end())
        except ValueError:  # no JSON here, or JSON that only llguidance can read: take every number that follows
            texts = _NUMBER.findall(lark, found.end())
            return next(_problems(_Object([("enum", list(map(float, texts)))])), "")
        for problem in _problems(schema):
            return problem
    return ""


def _problems(schema: Any, *, is_map: bool = False) -> Iterator[str]:
    if isinstance(schema, list):
        for child in schema:
            yield from _problems(child)
    if not isinstance(schema, _Object):
        return
    kinds = [value for name, value in schema.members if name == "type" and isinstance(value, (str, list))]
    may_be_integer = not kinds or any("integer" in kind for kind in kinds)
    for name, value in schema.members:
        if is_map and isinstance(value, _Object):
            yield from _problems(value)
        elif name in ("const", "enum"):
            for number in _numbers(value):
                if not _is_written_exactly(number):
                    yield _sentence(name, number)
        elif name in (*_LOWER, *_UPPER) and isinstance(value, (int, float)):
            overflows = name in _UPPER and _double(value) <= -_LIMIT
            if overflows or (may_be_integer and _allows_others(name, value)):
                yield _sentence(name, value)
        else:
            yield from _problems(value, is_map=name in MAPS)


def _is_written_exactly(number: int | float) -> bool:
    rounded = _double(number)
    if rounded <= -_LIMIT or (isinstance(number, int) and rounded >= _LIMIT):
        return number == _LAST
    return rounded == number


def _allows_others(name: str, bound: int | float) -> bool:
    """Whether a range allows integers that its bound forbids."""
    end = _double(bound)  # the first or the last integer of the range, as llguidance has it
    if name.startswith("exclusive") and end.is_integer():
        step = 1 if name in _LOWER else -1
        end, bound = end + step, int(bound) + step
    end = min(max(end, -_LIMIT), _LAST)
    return end < bound if name in _LOWER else end > bound


def _double(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, _Object):
        value = [child for _, child in value.members]
    if isinstance(value, list):
        for child in value:
            yield from _numbers(child)
    elif isinstance(value, (int, float)):
        yield value


def _sentence(name: str, number: int | float) -> str:
    shown = str(number) if isinstance(number, float) or abs(number) < 10**30 else "of more than 30 digits"
    return f"{name} {shown} cannot be held exactly: use integers up to 2**53, or text"
