"""One request of a plan: its instant, its lengths, and the prompt as segments.

A segment is ``(key, number of tokens)``; equal keys stand for equal tokens. Shared prefixes, turns of a session and the
``hash_ids`` of traces are all expressed this way, and the best possible cache hits follow from the keys alone. Tokens
are made from the seed and the key when a body is needed (``prompts``).
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Segment = tuple[int, int]

#: What a segment stands for: the upper bits of its key.
UNIQUE, GROUP, TURN, ANSWER, HASH = range(1, 6)
MASK = (1 << 56) - 1
MAX_GROUPS = 1 << 24  # of a class; a group's number is the class's number times this, plus its own


def segment_key(source: int, number: int) -> int:
    """Key of a segment: its source, and the lower 56 bits of ``number``."""
    return source << 56 | number & MASK


@dataclass(slots=True)
class PlannedRequest:
    """One request of a plan.

    Attributes:
        at: seconds after the start; no meaning for later turns and in a closed loop.
        session: number of a session of several turns; -1 for a single request.
        turns_left: turns of the session after this one.
        think_s: pause after the previous turn; -1 for a first turn.
        group: number of the group with a shared prefix; -1 for none.
        slos: limits of its own, in seconds, as a class has them.
        extra: fields of the body from the user's own trace, perhaps the prompt; they override all others.
    """

    index: int
    at: float
    segments: tuple[Segment, ...]
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
    slos: tuple[tuple[str, float], ...] = ()
    extra: dict[str, Any] | None = None

    def digest(self, drawn: str) -> str:
        """Identify the prompt and the other fields of ``extra``, the same in every run.

        Args:
            drawn: what the tokens depend on beside the segments; ignored if ``extra`` has the prompt.
        """
        given = self.extra or {}
        is_given = "prompt" in given or "messages" in given
        content = repr((sorted(given.items()), () if is_given else (drawn, self.segments)))
        return hashlib.sha256(content.encode()).hexdigest()[:24]

    @property
    def num_input(self) -> int:
        return sum(length for _, length in self.segments)


def ideal_cached_tokens(plan: Iterable[PlannedRequest]) -> list[int]:
    """Prompt tokens of each request that a perfect, unlimited prefix cache would hold, in the order of the plan.

    Every request leaves its prompt in the cache; at least one token is always computed. If a segment came with another
    length before, the common part counts.
    """
    seen: dict[tuple[int, int], tuple[int, int]] = {}  # (node, key) -> (node below, most tokens seen)
    found = []
    for planned in plan:
        node, num_cached, is_cached = 0, 0, True
        for key, length in planned.segments:
            below, longest = seen.get((node, key), (0, 0))
            if is_cached:
                num_cached += min(longest, length)
                is_cached = longest == length
            below = below or len(seen) + 1
            seen[node, key] = (below, max(longest, length))
            node = below
        found.append(max(0, min(num_cached, planned.num_input - 1)))
    return found
