"""Estimates how far a node's monotonic clock is ahead of the gateway's, from the instants in heartbeats. Pure.

A message that left the gateway at its instant a and arrived at the node's instant b shows that the node's clock is
ahead by at most b - a, since no message arrives before it is sent. A message in the other direction gives a lower bound
in the same way. The offset lies between the tightest bounds of either direction, which are those of the quickest
messages, however unequal the two delays are. A bound loosens with its age, as fast as two clocks may drift apart.
"""

import math

#: Two clocks drift apart by at most this many seconds in one second. Quartz clocks do by 0.0001.
MAX_DRIFT = 200e-6


class ClockOffset:
    """The offset of one node's clock. All instants of the gateway that are given to it must never fall."""

    def __init__(self) -> None:
        self._lowest = -math.inf
        self._highest = math.inf
        self._at = 0.0

    def sent_by_gateway(self, sent_at: float, received_at: float, now: float) -> None:
        """Take a message of the gateway, sent by its clock and received by the node's; ``now`` is by the gateway's."""
        age_s = max(now - sent_at, 0.0)
        self._take(-math.inf, received_at - sent_at + age_s * MAX_DRIFT, now)

    def sent_by_node(self, sent_at: float, now: float) -> None:
        """Take a message of the node, sent by its clock and received at ``now``."""
        self._take(sent_at - now, math.inf, now)

    def _take(self, lowest: float, highest: float, now: float) -> None:
        self._lowest, self._highest = self._bounds(now)
        self._at = now
        self._lowest, self._highest = max(self._lowest, lowest), min(self._highest, highest)
        if self._lowest > self._highest:  # the clock has jumped, as when its machine was suspended: begin again
            self._lowest, self._highest = lowest, highest

    def _bounds(self, now: float) -> tuple[float, float]:
        drift_s = (now - self._at) * MAX_DRIFT
        return self._lowest - drift_s, self._highest + drift_s

    def estimate(self, now: float) -> tuple[float, float]:
        """The seconds by which the node's clock is ahead, and the largest error of that; infinite without messages in
        both directions."""
        lowest, highest = self._bounds(now)
        if math.isinf(lowest):
            return (0.0 if math.isinf(highest) else highest), math.inf
        if math.isinf(highest):
            return lowest, math.inf
        return (lowest + highest) / 2, (highest - lowest) / 2
