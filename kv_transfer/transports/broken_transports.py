"""Which transports have broken for which peers, so that others carry their pages for a while. Pure.

A transport rests for a peer once it has broken, or could not be attached again after it had carried pages. Each rest is
twice as long as the one before, unless the transport has worked for longer than that in between. When a pair must be
mended, a transport that could not be attached is tried last, since waiting for it again would hold up transfers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MIN_REST_S, MAX_REST_S = 30.0, 960.0
#: Peers and rests that are remembered; those of peers that have gone are never asked for.
MAX_REMEMBERED = 4_096


@dataclass(slots=True)
class Rest:
    """The rest of a transport.

    Attributes:
        seconds: its length.
        until: before this instant, other transports are tried first.
    """

    seconds: float
    until: float


class BrokenTransports:
    def __init__(self) -> None:
        self._rests: dict[tuple[str, str], Rest] = {}  # by peer and transport, the latest last
        self._carrying: dict[str, tuple[str, float]] = {}  # by peer: the transport that was attached last, and when
        self._failed: dict[tuple[str, str], float] = {}  # when a transport that never broke could not be attached

    def attached(self, peer: str, transport: str, now: float) -> None:
        self._carrying.pop(peer, None)
        self._carrying[peer] = (transport, now)
        self._failed.pop((peer, transport), None)
        if len(self._carrying) > MAX_REMEMBERED:
            del self._carrying[next(iter(self._carrying))]

    def left(self, peer: str) -> None:
        """The attachment has ended, and not because it broke."""
        self._carrying.pop(peer, None)

    def broke(self, peer: str, now: float) -> None:
        """The attachment has ended by a break, unless it was left before."""
        transport, attached_at = self._carrying.pop(peer, ("", now))
        if transport:
            self._rest(peer, transport, now, worked_s=now - attached_at)

    def could_not_attach(self, peer: str, transport: str, now: float) -> None:
        """A transport rests once more if it has broken before, and for the first time if it was attached last."""
        if (peer, transport) in self._rests or self._carrying.get(peer, ("", now))[0] == transport:
            self._rest(peer, transport, now, worked_s=0.0)
            return
        self._failed.pop((peer, transport), None)
        self._failed[peer, transport] = now
        if len(self._failed) > MAX_REMEMBERED:
            del self._failed[next(iter(self._failed))]

    def _rest(self, peer: str, transport: str, now: float, *, worked_s: float) -> None:
        before = self._rests.pop((peer, transport), None)
        seconds = MIN_REST_S
        if before is not None and worked_s <= before.seconds:
            seconds = min(2 * before.seconds, MAX_REST_S)
        self._rests[peer, transport] = Rest(seconds, now + seconds)
        if len(self._rests) > MAX_REMEMBERED:
            del self._rests[next(iter(self._rests))]

    def is_resting(self, peer: str, transport: str, now: float) -> bool:
        rest = self._rests.get((peer, transport))
        return rest is not None and now < rest.until

    def has_failed_lately(self, peer: str, transport: str, now: float) -> bool:
        """Whether a transport could not be attached lately, though it has never broken."""
        failed_at = self._failed.get((peer, transport))
        return failed_at is not None and now < failed_at + MAX_REST_S

    def due(self, peer: str, transports: Sequence[str], now: float) -> str:
        """The first of these transports that has broken and whose rest is over; empty for none."""
        if not self._rests or peer not in self._carrying:
            return ""
        rests = ((name, self._rests.get((peer, name))) for name in transports)
        return next((name for name, rest in rests if rest is not None and rest.until <= now), "")
