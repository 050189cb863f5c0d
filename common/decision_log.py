"""The last decisions of a scheduler, a node or the gateway, each with its reason, for whoever asks why. Pure.

Noting one is cheap enough for every request: a template and its arguments are kept as they are, and made into a
sentence only when somebody asks.
"""

from collections import OrderedDict, deque
from itertools import islice
from typing import Any, NamedTuple

MAX_REASON = 4_000
#: Requests of which it is remembered why they wait.
MAX_WAITS = 10_000


class Decided(NamedTuple):
    """One decision, as it is told; the fields are those of ``messages.Decision``.

    Attributes:
        ago_s: seconds before the question.
        rid: the request it was about; empty for the whole node.
        action: what was done, in a word: admit, pause, retract, refuse ...
        reason: a sentence.
    """

    ago_s: float
    rid: str
    action: str
    reason: str


class Decisions:
    """A ring of the last ``maxlen`` decisions.

    Attributes:
        num_noted: how many there have been since the start.
    """

    def __init__(self, maxlen: int = 1_024) -> None:
        self._ring: deque[tuple[float, str, str, str, tuple[Any, ...]]] = deque(maxlen=maxlen)
        self._waits: OrderedDict[str, tuple[Any, ...]] = OrderedDict()  # why each waits of whom that was told last
        self.num_noted = 0

    def note(self, now: float, rid: str, action: str, reason: str, *args: Any) -> None:
        """Remembers one decision, and forgets the oldest if there are too many.

        Args:
            now: seconds of the caller's clock.
            reason: for ``str.format`` with ``args``, which are numbers and texts: what could change until somebody
                asks must not be handed in.
        """
        self.num_noted += 1
        if rid in self._waits:
            del self._waits[rid]
        self._ring.append((now, rid, action, reason, args))

    def note_wait(self, now: float, rid: str, reason: str, *args: Any) -> None:
        """Remembers that a request is passed over, and why; once, as long as that is what there is to tell of it."""
        why = (reason, *args)
        if self._waits.get(rid) != why:
            self.note(now, rid, "wait", reason, *args)
            self._waits[rid] = why
            if len(self._waits) > MAX_WAITS:
                self._waits.popitem(last=False)

    def note_change(self, now: float, rid: str, before: tuple[int, str], after: tuple[int, str | None]) -> None:
        """Remembers that a request counts otherwise from now on: its priority and class, before and after.

        Args:
            after: with a class of None the class stays.
        """
        (priority, name), (priority_now, name_now) = before, after
        if name_now is None or name_now == name:
            self.note(now, rid, "reprioritize", "from {} to {}", priority, priority_now)
        else:
            reason = "from {} to {}, from the class {} to {}"
            self.note(now, rid, "reprioritize", reason, priority, priority_now, name, name_now)

    def last(self, limit: int, now: float) -> tuple[Decided, ...]:
        """At most ``limit`` of the latest, newest last."""
        newest = list(islice(reversed(self._ring), limit))
        return tuple(
            Decided(max(now - at, 0.0), rid, action, reason.format(*args)[:MAX_REASON])
            for at, rid, action, reason, args in reversed(newest)
        )
