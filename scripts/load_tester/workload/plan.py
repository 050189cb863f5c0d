"""The plan of a run: every request, with its instant, lengths and whose prefix it shares, before the clock starts.

A prompt is a row of *pieces* ``(key, tokens)``: equal keys stand for equal tokens, so shared prefixes, sessions and the
``hash_ids`` of traces are all the same thing, and what a perfect cache could have kept follows from the keys alone. The
tokens themselves are made from the seed and the key when they are needed (``scripts/load_tester/workload/prompts.py``).
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Piece = tuple[int, int]

#: Kinds of pieces: the upper bits of a key.
UNIQUE, GROUP, TURN, ANSWER, HASH = range(1, 6)
MASK = (1 << 56) - 1
MAX_PRIORITY = 2**31 - 1  # and no less than its negative: files hold 32 bits
MAX_GROUPS = 1 << 24  # of a class: a group's number is its class's times this, plus its own


def key(kind: int, number: int) -> int:
    """A piece's key: of ``number`` the lower 56 bits."""
    return kind << 56 | number & MASK


@dataclass(slots=True)
class Planned:
    """One request to come.

    Attributes:
        at: seconds after the start; of later turns and in a closed loop it says nothing.
        think_s: of later turns, the pause after the turn before; -1 of first turns.
        turns_left: turns of the session after this one.
        extra: fields of the body that a user's own file gives, the prompt among them; they win over everything.
    """

    index: int
    at: float
    pieces: tuple[Piece, ...]
    num_output: int
    class_name: str = ""
    tenant: str = ""
    session: int = -1
    turn: int = 0
    turns_left: int = 0
    think_s: float = -1.0
    group: int = -1
    priority: int | None = None
    deadline_ms: float | None = None
    priority_class: str = ""
    extra: dict[str, Any] | None = None

    def digest(self, drawn: str) -> str:
        """Names the prompt and what a user's own file says beside it, the same in every run.

        Args:
            drawn: what tokens follow from beside the pieces; of a prompt that was given it is no part.
        """
        given = self.extra or {}
        is_given = "prompt" in given or "messages" in given
        content = repr((sorted(given.items()), () if is_given else (drawn, self.pieces)))
        return hashlib.sha256(content.encode()).hexdigest()[:24]

    @property
    def num_input(self) -> int:
        return sum(length for _, length in self.pieces)


def ideal_cached(plan: Iterable[Planned]) -> list[int]:
    """Prompt tokens of each request that a perfect, endless prefix cache would have held, by order of the plan.

    A request leaves its prompt behind; at least one token of the next is always computed. Whole pieces count, and of a
    piece that was longer or shorter before, what both have.
    """
    seen: dict[tuple[int, int], tuple[int, int]] = {}  # (node, key) -> (node below, most tokens seen)
    found = []
    for planned in plan:
        node, num_cached, is_cached = 0, 0, True
        for piece, length in planned.pieces:
            below, longest = seen.get((node, piece), (0, 0))
            if is_cached:
                num_cached += min(longest, length)
                is_cached = longest == length
            below = below or len(seen) + 1
            seen[node, piece] = (below, max(longest, length))
            node = below
        found.append(max(0, min(num_cached, planned.num_input - 1)))
    return found
