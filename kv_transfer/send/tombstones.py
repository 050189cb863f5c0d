"""How transfers have ended, remembered for a while, so that what comes late finds the same answer.

A tombstone keeps a grant that comes after the end from being written to, and a request that comes after it from
waiting for grants. Bounded in number and in time, since those who make them are not ours.
"""

from dataclasses import dataclass
from typing import Literal

from common.errors import ErrorCode
from common.request import RequestKey

Reason = Literal["finished", "cancelled", "aborted", "failed", "unknown"]

LEASE_S = 300.0
MAX_TOMBS = 65_536


@dataclass(frozen=True, slots=True)
class End:
    """Why a transfer ended; ``message`` is a sentence or empty, ``code`` is what the client hears of a failure."""

    reason: Reason
    message: str
    code: ErrorCode = ErrorCode.TRANSFER_FAILED


class Tombs:
    """Ends of transfers, by peer and key; the oldest make room."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, RequestKey], tuple[End, float]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def get(self, peer: str, key: RequestKey) -> End | None:
        tomb = self._ends.get((peer, key))
        return None if tomb is None else tomb[0]

    def bury(self, peer: str, key: RequestKey, end: End, *, now: float) -> None:
        self._ends.pop((peer, key), None)
        self._ends[peer, key] = (end, now + LEASE_S)
        if len(self._ends) > MAX_TOMBS:
            del self._ends[next(iter(self._ends))]

    def expire(self, now: float) -> None:
        """Forget those whose lease is over."""
        while self._ends:
            owner, (_, until) = next(iter(self._ends.items()))
            if until > now:
                return
            del self._ends[owner]
