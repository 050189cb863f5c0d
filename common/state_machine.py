"""State machines as tables from (state, event) to state. A pair outside the table is a bug and ends the process."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from common.errors import InvariantError

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


def advance(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """Return the state after ``event``. Raises InvariantError: the table has no such entry."""
    try:
        return table[state, event]
    except KeyError:
        raise InvariantError(f"{event} cannot happen in state {state}") from None
