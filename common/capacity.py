"""How many nodes a load needs, by its tokens and by what steps take, without simulating. Pure.

The planner begins its search with these numbers (``scripts.simulator.planning.estimate``), and the gateway's advice
follows them (``gateway.advice``).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

#: Share of its time, and of its largest batch, for which a node is planned. Random arrivals queue at busier nodes.
UTILIZATION = 0.7
#: Share of an objective that a step may take, so that something is left for waiting.
OBJECTIVE_SHARE = 0.8
#: Share of requests that should be within their objectives.
ATTAINMENT = 0.9
#: Rounding errors up to this share of a node do not ask for another one.
TOLERANCE = 1e-9
#: No more nodes are ever named: a load that seems to need more is an error of measurement.
MAX_NODES = 2_000

#: From a number of outputs, or of prompt tokens, to the seconds of a step that computes them.
StepSeconds = Callable[[int], float]


class PromptWork(NamedTuple):
    """The work of the prompts that arrive.

    Attributes:
        nodes: seconds of work per second, which is the number of nodes that it keeps busy.
        mean_s: mean work of one prompt.
        variation: variance of the work of a prompt, divided by the square of its mean.
    """

    nodes: float
    mean_s: float
    variation: float


def nodes_for(work: float, utilization: float) -> int:
    """The fewest nodes, at least one, that are busy for at most this share of their time."""
    return whole_nodes(work / utilization)


def whole_nodes(work: float) -> int:
    """The fewest nodes, at least one, that have the time for ``work`` seconds of work per second."""
    return max(1, math.ceil(work - TOLERANCE)) if work < MAX_NODES else MAX_NODES


def share_waiting(num_nodes: int, work: PromptWork, seconds: float) -> float:
    """Share of prompts that wait longer than this until a node begins with them.

    Arrivals are random (Poisson), and a prompt goes to the node that is free first. Erlang's formula gives the share
    that waits at all; the wait falls off exponentially, at the rate that Allen and Cunneen give for service times of
    any variation (A. O. Allen, Probability, Statistics, and Queueing Theory, 1990, section 5.3).
    """
    if work.nodes >= num_nodes:
        return 1.0
    blocked = 1.0  # Erlang's B, by its recurrence
    for count in range(1, num_nodes + 1):
        blocked = work.nodes * blocked / (count + work.nodes * blocked)
    waits = blocked / (1 - (1 - blocked) * work.nodes / num_nodes)
    if seconds <= 0 or not work.mean_s:
        return waits
    mean_s = work.mean_s * (1 + work.variation) / 2
    return waits * math.exp(-(num_nodes - work.nodes) * seconds / mean_s)


def prefill_nodes(work: PromptWork, slack_s: float, *, utilization: float) -> int:
    """The fewest nodes whose utilization, and whose share of prompts that wait too long, are low enough.

    Args:
        slack_s: how long a prompt may wait for a node; infinite without an objective, and without effect if it is not
            positive, since no number of nodes makes a prompt faster that is late without waiting.
    """
    count = nodes_for(work.nodes, utilization)
    while 0 < slack_s < math.inf and count < MAX_NODES and share_waiting(count, work, slack_s) > 1 - ATTAINMENT:
        count += 1
    return count


def largest_batch(step_s: StepSeconds, itl_s: float, limit: int) -> int:
    """Outputs that a node can compute at once within the objective; 0: not even one.

    Args:
        limit: by slots and pages.
    """
    low, high = 0, max(1, limit)
    while low < high:
        middle = (low + high + 1) // 2
        is_fast = step_s(middle) <= OBJECTIVE_SHARE * itl_s
        low, high = (middle, high) if is_fast else (low, middle - 1)
    return low


def planned_batch(largest: int, utilization: float) -> int:
    """The batch for which a node is planned that could run a larger one."""
    return max(1, int(largest * utilization + TOLERANCE))


def decode_work(tokens_per_s: float, step_s: StepSeconds, batch: int) -> float:
    """Nodes that ``tokens_per_s`` output tokens per second keep busy in batches of ``batch`` outputs."""
    return tokens_per_s * step_s(batch) / batch
