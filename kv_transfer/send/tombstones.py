"""How transfers have ended, remembered for a while, so that a late message gets the same answer. Pure.

A tombstone keeps pages from being written for a grant that comes after the end, and a request that comes after it from
waiting for grants. Tombstones are bounded in number and in time, since peers cause them.
"""

from dataclasses import dataclass

from common.errors import ErrorCode
from common.request import RequestKey
from common.wire.messages import CloseReason

LEASE_S = 300.0
MAX_TOMBSTONES = 65_536


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """Why a transfer ended. ``message`` is a sentence or empty; ``code`` is the client's error after a failure."""

    reason: CloseReason
    message: str
    code: ErrorCode = ErrorCode.TRANSFER_FAILED


class Tombstones:
    """Ends of transfers, by peer and key; the oldest are dropped first."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, RequestKey], tuple[TransferEnd, float]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def get(self, peer: str, key: RequestKey) -> TransferEnd | None:
        return self._ends.get((peer, key), (None, 0.0))[0]

    def add(self, peer: str, key: RequestKey, end: TransferEnd, *, now: float) -> None:
        self._ends.pop((peer, key), None)
        self._ends[peer, key] = (end, now + LEASE_S)
        if len(self._ends) > MAX_TOMBSTONES:
            del self._ends[next(iter(self._ends))]

    def expire(self, now: float) -> None:
        while self._ends:
            owner, (_, until) = next(iter(self._ends.items()))
            if until > now:
                return
            del self._ends[owner]
