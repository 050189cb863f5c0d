"""Takes pairs of nodes whose transfers fail out of rotation, and lets them prove themselves again. Pure.

Each pair has a circuit breaker. After ``NUM_FAILURES`` failed transfers in a row it opens, and the pair gets no
requests for 1 s. Then it is half open: one request probes the pair. If that succeeds the breaker closes; if it fails
it opens for twice as long, up to ``MAX_BACKOFF_S``.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

NUM_FAILURES = 3
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0

BreakerState = Literal["closed", "open", "half_open", "probing"]


class PairKey(NamedTuple):
    """Incarnations of the two nodes."""

    prefill: str
    decode: str


@dataclass(slots=True)
class Breaker:
    """State of one pair that has failed lately.

    Attributes:
        num_failures: in a row.
        backoff_s: how long it stays open the next time.
        until: when it becomes half open.
    """

    state: BreakerState = "closed"
    num_failures: int = 0
    backoff_s: float = MIN_BACKOFF_S
    until: float = 0.0


class PairHealth:
    """The breakers of all pairs of one model. A pair without one is healthy.

    Attributes:
        breakers: of pairs that have failed since their last success.
    """

    def __init__(self) -> None:
        self.breakers: dict[PairKey, Breaker] = {}

    def resting(self) -> list[PairKey]:
        """The pairs that get no requests now."""
        return [pair for pair, breaker in self.breakers.items() if breaker.state in ("open", "probing")]

    def failed(self, pair: PairKey, now: float, *, is_probe: bool) -> bool:
        """Count a failed transfer. Return whether the pair gets no requests from now on.

        While the breaker is not closed only the probe counts: the others, often very many, were sent before it opened.
        """
        breaker = self.breakers.setdefault(pair, Breaker())
        breaker.num_failures += 1
        if not is_probe and (breaker.state != "closed" or breaker.num_failures < NUM_FAILURES):
            return False
        breaker.state, breaker.until = "open", now + breaker.backoff_s
        breaker.backoff_s = min(2 * breaker.backoff_s, MAX_BACKOFF_S)
        return True

    def succeeded(self, pair: PairKey, *, is_probe: bool) -> bool:
        """A request was handed over. Return whether the pair gets requests again.

        While the breaker is not closed only the probe counts: the others were handed over before it opened.
        """
        breaker = self.breakers.get(pair)
        if breaker is None or not (is_probe or breaker.state == "closed"):
            return False
        del self.breakers[pair]
        return is_probe

    def sent(self, pair: PairKey) -> bool:
        """A request was sent to the pair. Return whether it is the one that probes it."""
        breaker = self.breakers.get(pair)
        if breaker is None or breaker.state != "half_open":
            return False
        breaker.state = "probing"
        return True

    def gave_no_answer(self, pair: PairKey) -> None:
        """The request that probed the pair ended before it could tell; the next one probes it again."""
        breaker = self.breakers.get(pair)
        if breaker is not None and breaker.state == "probing":
            breaker.state = "half_open"

    def tick(self, now: float) -> bool:
        """Let pairs whose back-off is over be probed. Return whether there are such."""
        due = [breaker for breaker in self.breakers.values() if breaker.state == "open" and breaker.until <= now]
        for breaker in due:
            breaker.state = "half_open"
        return bool(due)

    def forget(self, incarnation: str) -> None:
        """Drop the breakers of a node that is gone."""
        self.breakers = {pair: breaker for pair, breaker in self.breakers.items() if incarnation not in pair}
