"""How long streams paused at faults: pure functions of instants."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

#: Seconds after its end in which a fault may still pause streams.
AFTERMATH_S = 2.0


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was injected.

    Attributes:
        began_at, ended_at: instants by the clock of the answers.
        mark_s: the longest pause, p99, that the kind may cause; 0 for kinds without a mark.
    """

    name: str
    began_at: float
    ended_at: float
    mark_s: float

    @property
    def felt_until(self) -> float:
        return max(self.ended_at, self.began_at + self.mark_s) + AFTERMATH_S


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of several tokens that has ended: their instants, in order."""

    stamps: Sequence[float]
    ended_at: float


def pauses_by_kind(faults: Sequence[Injected], streams: Iterable[Stream]) -> dict[str, list[float]]:
    """The longest gap between two tokens of each stream that was in flight at a fault, by the name of the fault.

    A gap that several faults overlap counts for the one with the highest mark, and for the earliest of these.
    """
    ordered = sorted(faults, key=lambda fault: (-fault.mark_s, fault.began_at))
    found: dict[str, list[float]] = {}
    for stream in streams:
        overlapping = [f for f in ordered if stream.stamps[0] <= f.began_at < stream.ended_at]
        longest: dict[Injected, float] = {}
        for begin, end in zip(stream.stamps, [*stream.stamps[1:], stream.ended_at], strict=True):
            for fault in overlapping:
                if end > fault.began_at and begin < fault.felt_until:
                    longest[fault] = max(longest.get(fault, 0.0), end - begin)
                    break
        for fault, gap_s in longest.items():
            found.setdefault(fault.name, []).append(gap_s)
    return found


def quantiles(gaps_s: Sequence[float]) -> tuple[float, float, float]:
    """p50, p99 and the longest."""
    p50, p99 = np.quantile(np.asarray(gaps_s), [0.5, 0.99]).tolist()
    return p50, p99, max(gaps_s)
