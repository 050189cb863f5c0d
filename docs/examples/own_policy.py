"""A custom scheduling policy and a custom priority function.

    PYTHONPATH=docs/examples ./scripts/serve --schedule-policy own_policy:ShortPromptsFirst
    PYTHONPATH=docs/examples ./scripts/serve --enable-priority-scheduling --default-priority-value 0 \
        --priority-function own_policy:short_answers_first

The gateway and every node create the policy once, without arguments. If it raises an exception, or does not return
each waiting request exactly once, the order of arrival applies and the log says so once.
"""

from collections.abc import Sequence

from common.plugins import RequestFacts
from common.request import Request
from common.scheduling.policies.base import Policy

MAX_WAIT_S = 10.0


class ShortPromptsFirst(Policy):
    """Fewest uncached prompt tokens first; a request that has waited ``MAX_WAIT_S`` comes before all that have not.

    Without that bound, a long prompt would wait for as long as shorter ones keep arriving.
    """

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """The waiting requests, next one first. ``sorted`` keeps the order of arrival among equals."""

        def rank(request: Request) -> tuple[int, float]:
            if now - request.arrived_at >= MAX_WAIT_S:
                return 0, request.arrived_at
            return 1, request.num_uncached

        return sorted(waiting, key=rank)


def short_answers_first(facts: RequestFacts) -> int | None:
    """Priority 10 for requests of at most 32 output tokens; other requests keep the priority that the client named."""
    return 10 if facts.max_new_tokens <= 32 else None
