"""Keeps the last decisions of a scheduler or of the gateway with their reasons. Pure.

``/v1/workers/NAME/decisions`` shows them.

Noting a decision stores a template and its arguments, which is cheap enough for every request. The sentence is
formatted when it is read.
"""

from collections import OrderedDict, deque
from itertools import islice
from typing import Any

from common.wire.messages import Decision

MAX_DECISIONS = 1_024
MAX_REASON = 4_000
#: Number of requests whose last reason for waiting is remembered.
MAX_WAITS = 10_000


class DecisionLog:
    """A ring of the last ``maxlen`` decisions."""

    def __init__(self, maxlen: int = MAX_DECISIONS) -> None:
        self._ring: deque[tuple[float, str, str, str, tuple[Any, ...]]] = deque(maxlen=maxlen)
        self._waits: OrderedDict[str, tuple[Any, ...]] = OrderedDict()  # last noted reason of each waiting request

    def note(self, now: float, rid: str, action: str, reason: str, *args: Any) -> None:
        """Note a decision, and drop the oldest if there are too many.

        Args:
            rid: request id; empty if the decision is about the whole node.
            action: one word: admit, pause, retract, refuse ...
            reason: template for ``str.format``.
            args: numbers and strings for the template; mutable objects could change before they are formatted.
        """
        self._waits.pop(rid, None)
        self._ring.append((now, rid, action, reason, args))

    def note_wait(self, now: float, rid: str, reason: str, *args: Any) -> None:
        """Note why a request waits, unless the last decision noted for it says the same."""
        why = (reason, *args)
        if self._waits.get(rid) != why:
            self.note(now, rid, "wait", reason, *args)
            self._waits[rid] = why
            if len(self._waits) > MAX_WAITS:
                self._waits.popitem(last=False)

    def note_change(self, now: float, rid: str, before: tuple[int, str], after: tuple[int, str | None]) -> None:
        """Note a change of a request's priority and class.

        Args:
            before, after: priority and class; a class of None in ``after`` means that the class stays.
        """
        (priority, name), (priority_now, name_now) = before, after
        reason = "from {} to {}" if name_now in (None, name) else "from {} to {}, from the class {} to {}"
        self.note(now, rid, "reprioritize", reason, priority, priority_now, name, name_now)

    def last(self, limit: int, now: float) -> tuple[Decision, ...]:
        """Return at most ``limit`` of the latest decisions, newest last."""
        newest = list(islice(reversed(self._ring), limit))
        return tuple(
            Decision(max(now - at, 0.0), rid, action, reason.format(*args)[:MAX_REASON])
            for at, rid, action, reason, args in reversed(newest)
        )
