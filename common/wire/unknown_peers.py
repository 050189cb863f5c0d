"""How much is decoded of peers that have not registered, so that their floods delay no other peer. Pure.

A registration with many adapters is larger than the bursts. So while anything is left, a frame is decoded however large
it is; those that come next are dropped until the rate has made up for it.
"""

from collections import OrderedDict

#: Units that one peer may send at once, and in each second after that. A frame counts one, and another one per KiB.
#: Registering takes about three without adapters.
PEER_BURST, PEER_RATE = 256, 32.0
#: The same for all such peers together, since a stranger can take any number of names.
TOTAL_BURST, TOTAL_RATE = 4_096, 1_024.0
UNIT_BYTES = 1_024
MAX_PEERS = 4_096


class _Bucket:
    """Units that may be decoded now; negative after a frame that took more."""

    def __init__(self, burst: int, rate: float, now: float) -> None:
        self._burst = self._left = float(burst)
        self._rate = rate
        self._counted_at = now

    def left(self, now: float) -> float:
        self._left = min(self._left + self._rate * (now - self._counted_at), self._burst)
        self._counted_at = now
        return self._left

    def take(self, count: int) -> None:
        self._left -= count


class UnknownPeers:
    """Limits each peer, and all of them together. The peers heard least recently are forgotten."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Bucket] = OrderedDict()
        self._total = _Bucket(TOTAL_BURST, TOTAL_RATE, 0.0)

    def may_send(self, peer: str, num_bytes: int, now: float) -> bool:
        """Whether a frame of this peer is decoded; it is counted if so."""
        bucket = self._peers.get(peer)
        if bucket is None:
            bucket = self._peers[peer] = _Bucket(PEER_BURST, PEER_RATE, now)
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer)
        if min(bucket.left(now), self._total.left(now)) < 1:
            return False
        units = 1 + num_bytes // UNIT_BYTES
        bucket.take(min(units, PEER_BURST))  # the peer may have to register after this frame, and soon
        self._total.take(units)
        return True
