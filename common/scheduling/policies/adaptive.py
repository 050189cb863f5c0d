"""``adaptive``: follows another policy, chosen by measurement. Pure.

Three values are measured: the length of the queue, the cached share of the prompts that leave it, and the share of the
requests that miss their deadlines. The first rule that holds decides. The current rule is kept down to a lower bound,
and a choice stands for a minimum time, so that the policy does not oscillate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.request import Request
from common.scheduling.policies.base import Policy

#: Weight of the latest request in a moving average.
ALPHA = 1 / 64
#: Minimum time between two choices.
MIN_STAY_S = 2.0


@dataclass(frozen=True, slots=True)
class Rule:
    """A policy is chosen when a measure reaches ``enters``, and kept until it falls below ``leaves``.

    Attributes:
        measure: ``misses`` and ``hits`` are shares, ``waiting`` is a number of requests.
    """

    policy: str
    measure: str
    enters: float
    leaves: float


RULES = (
    Rule("edf", "misses", 0.05, 0.01),
    Rule("hrrn", "waiting", 64, 16),
    Rule("lpm", "hits", 0.2, 0.1),
)
OTHERWISE = "fcfs"
#: The policies to choose from.
CHOICES = (*(rule.policy for rule in RULES), OTHERWISE)

_SENTENCES = {
    "misses": "{:.1%} of the requests missed their deadlines",
    "waiting": "{:.0f} requests wait",
    "hits": "{:.1%} of the prompts' tokens were cached",
}


class Adaptive(Policy):
    """``adaptive``. ``why`` is the measure of the current rule, or ``nothing``."""

    name = "adaptive"

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.choice = OTHERWISE
        self.reason = "nothing has been measured yet"
        self.why = "nothing"
        self.num_switches = 0
        self._num_orders = dict.fromkeys(CHOICES, 0)
        self._policies = policies
        self.measured = dict.fromkeys(_SENTENCES, 0.0)
        self._chosen_at = float("-inf")

    @property
    def chosen(self) -> Policy:
        """The policy that it follows."""
        return self._policies[self.choice]

    @property
    def overtakes(self) -> bool:  # type: ignore[override]  # a constant in the base class
        return self.chosen.overtakes

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        self.measured["waiting"] = len(waiting)
        if now - self._chosen_at >= MIN_STAY_S:
            self._choose(now)
        self._num_orders[self.choice] += 1
        return self.chosen.order(waiting, now)

    def left(self, request: Request) -> None:
        self._average("misses", 0.0)
        self._average("hits", 1 - request.num_uncached / max(request.num_tokens, 1))

    def missed(self, request: Request) -> None:
        self.measured["misses"] = min(1.0, self.measured["misses"] + ALPHA)  # ``left`` has counted it as 0

    def totals(self) -> dict[str, float]:
        """The number of switches, and the number of orders made by each policy."""
        orders = {f"adaptive_orders_{name}": float(count) for name, count in self._num_orders.items()}
        return {"adaptive_switches": float(self.num_switches), **orders}

    def _average(self, measure: str, latest: float) -> None:
        self.measured[measure] += ALPHA * (latest - self.measured[measure])

    def _choose(self, now: float) -> None:
        choice, self.why, self.reason = self._wanted()
        if choice != self.choice:
            self.choice = choice
            self.num_switches += 1
            self._chosen_at = now

    def _wanted(self) -> tuple[str, str, str]:
        for rule in RULES:
            bound = rule.leaves if rule.policy == self.choice else rule.enters
            if self.measured[rule.measure] >= bound:
                return rule.policy, rule.measure, _SENTENCES[rule.measure].format(self.measured[rule.measure])
        return OTHERWISE, "nothing", "few requests wait, little of them is cached, and deadlines are met"
