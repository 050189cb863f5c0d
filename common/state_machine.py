"""Lifecycles as tables: (state, event) -> state. What a table does not name is our own bug and stops the process."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from common.errors import InvariantError

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class IllegalTransitionError(InvariantError):
    """An event reached a state in which it cannot happen."""


def advance(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state after ``event``; raises ``IllegalTransitionError`` outside the table."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransitionError(f"{event} cannot happen in state {state}") from None
