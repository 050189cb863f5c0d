"""Numbers and durations in words, for every kind of report."""

from collections.abc import Sequence
from typing import Any

NO_VALUE = "-"


def milliseconds(value: Any) -> str:
    """A duration in seconds as milliseconds with three or four significant digits."""
    if not isinstance(value, int | float):
        return NO_VALUE
    scaled = value * 1e3
    return f"{scaled:,.0f}" if scaled >= 1000 else f"{scaled:.1f}" if scaled >= 10 else f"{scaled:.2f}"


def limit(value: float) -> str:
    """A limit that a user gave in seconds, with its unit and without zeros at the end."""
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"


def percent(value: Any) -> str:
    """A share as a percentage; only all is 100.0 %, and only nothing 0.0 %."""
    if not isinstance(value, int | float):
        return NO_VALUE
    text = f"{value:.1%}"
    return ">99.9%" if text == "100.0%" and value < 1 else "<0.1%" if text == "0.0%" and value > 0 else text


def per_second(value: float) -> str:
    """A rate with three or four significant digits, without powers of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def counted(count: int, thing: str) -> str:
    """A number of things, such as "1 node" and "2 nodes"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def interval(ends: Sequence[float | None] | None) -> str:
    """A 95 % interval of a duration in milliseconds, in words; empty if neither end is known."""
    low, high = ends or (None, None)
    if low is not None and high is not None:
        return f"{milliseconds(low)} to {milliseconds(high)}"
    if low is not None:
        return f"at least {milliseconds(low)}"
    return f"at most {milliseconds(high)}" if high is not None else ""
