"""First guesses at the nodes that a load needs, from its tokens and the costs of steps, without simulating.

They are where the search begins; what holds is decided by simulation. The formulas are those of ``common.capacity``,
which the gateway's advice follows too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common import capacity
from scripts.load_tester.analysis.metrics import slo_limits
from scripts.load_tester.workload.plan import Plan
from scripts.load_tester.workload.planned_request import ideal_cached_tokens
from scripts.simulator.costs import Costs, StepWork
from scripts.simulator.hardware.node_model import NodeModel

CHUNKS = (8_192, 4_096, 2_048, 1_024, 512, 256, 128)
#: Decoding requests beside a chunk in a step of a colocated node, for the choice of its chunk.
ROWS_BESIDE = 32


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Tokens of one request, and its objectives.

    Attributes:
        num_cached: tokens of the prompt that are in a perfect prefix cache.
        ttft_s: until its prompt must be computed.
        itl_s: for a decode step.
    """

    num_input: int
    num_cached: int
    num_output: int
    ttft_s: float = math.inf
    itl_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits in seconds; infinite without one."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class LoadSize:
    """The requests of several windows, and the time over which they arrive."""

    requests: tuple[RequestSize, ...]
    span_s: float

    @classmethod
    def of(cls, plans: Sequence[Plan], span_s: float, slos: dict[str, float]) -> "LoadSize":
        """Args: slos: limits of requests that have none, nor has their class."""
        found: list[RequestSize] = []
        for plan in plans:
            planned = [request for session in plan.sessions for request in session]
            for one, hit in zip(planned, ideal_cached_tokens(planned), strict=True):
                limits = slo_limits(one, slos, plan.classes)
                ttft_s = min(limits.get(name, math.inf) for name in ("ttft", "e2e"))
                itl_s = limits.get("itl", limits.get("tpot", math.inf))
                found.append(RequestSize(one.num_input, hit, one.num_output, ttft_s, itl_s))
        return cls(tuple(found), span_s)

    def objective(self, share: float) -> Objective:
        """The strictest objectives that must be held so that ``share`` of the requests are within their own."""
        place = min(int(round((1 - share) * len(self.requests), 6)), len(self.requests) - 1)
        return Objective(
            sorted(one.ttft_s for one in self.requests)[place], sorted(one.itl_s for one in self.requests)[place]
        )

    @property
    def requests_per_s(self) -> float:
        return len(self.requests) / self.span_s if self.span_s else math.inf

    @property
    def input_tokens_per_s(self) -> float:
        return sum(one.num_input for one in self.requests) / self.span_s if self.span_s else math.inf

    @property
    def output_tokens_per_s(self) -> float:
        return sum(one.num_output for one in self.requests) / self.span_s if self.span_s else math.inf


def prefill_s(size: RequestSize, costs: Costs, chunk: int) -> float:
    """Time to compute a prompt alone on a node, in chunks of this size; -1: in one step."""
    seconds, start = 0.0, size.num_cached
    while start < size.num_input:
        left = size.num_input - start
        length = left if chunk < 0 else min(chunk, left)
        seconds += costs.seconds(StepWork(length, 0, 0, length * start + length * (length + 1) // 2))
        start += length
    return seconds


def share_within_ttft(load: LoadSize, costs: Costs, chunk: int) -> float:
    """Share of requests whose prompt, alone on a node, is computed within their objective."""
    good = sum(prefill_s(one, costs, chunk) + 2 * costs.message_s <= one.ttft_s for one in load.requests)
    return good / len(load.requests)


def prefill_nodes(load: LoadSize, node: NodeModel, chunk: int, ttft_s: float = math.inf) -> int:
    """Nodes that are busy for a part of their time, and at which few prompts wait for too long."""
    if not load.span_s:
        return 1
    seconds = [prefill_s(one, node.costs, chunk) for one in load.requests]
    mean_s = sum(seconds) / len(seconds)
    variance = sum((value - mean_s) ** 2 for value in seconds) / len(seconds)
    work = capacity.PromptWork(sum(seconds) / load.span_s, mean_s, variance / mean_s**2 if mean_s else 0.0)
    return capacity.prefill_nodes(work, ttft_s - mean_s - 2 * node.costs.message_s, utilization=capacity.UTILIZATION)


def _context(load: LoadSize) -> float:
    """Mean tokens of a request that is decoded."""
    return sum(one.num_input + one.num_output / 2 for one in load.requests) / len(load.requests)


def _decode_step_s(node: NodeModel, context: float) -> capacity.StepSeconds:
    return lambda batch: node.costs.seconds(StepWork(0, batch, int(batch * context)))


def largest_batch(load: LoadSize, node: NodeModel, itl_s: float, limit: int) -> int:
    """Requests that a decode node can run at once within the objective and its KV pool; 0: not even one."""
    context = _context(load)
    room = min(limit, int(node.pool_tokens / max(1.0, context)))
    return capacity.largest_batch(_decode_step_s(node, context), itl_s, room)


def decode_nodes(load: LoadSize, node: NodeModel, itl_s: float, limit: int) -> int:
    """Nodes so that each runs a part of its largest batch."""
    if not load.span_s:
        return 1
    batch = capacity.planned_batch(largest_batch(load, node, itl_s, limit), capacity.UTILIZATION)
    num_tokens = sum(one.num_output for one in load.requests)
    work = capacity.decode_work(num_tokens / load.span_s, _decode_step_s(node, _context(load)), batch)
    return max(1, math.ceil(work))


def colocated_chunk(load: LoadSize, node: NodeModel, itl_s: float, page_size: int = 1) -> int:
    """The largest chunk beside which decoding requests keep their objective; the smallest of at least a page if none
    does.
    """
    chunks = [chunk for chunk in CHUNKS if chunk >= page_size] or [page_size]
    context = sum(one.num_input for one in load.requests) / len(load.requests)
    for chunk in chunks:
        work = StepWork(chunk, ROWS_BESIDE, int(ROWS_BESIDE * context), int(chunk * (context + chunk) / 2))
        if node.costs.seconds(work) <= capacity.OBJECTIVE_SHARE * itl_s:
            return chunk
    return chunks[-1]


def colocated_nodes(load: LoadSize, node: NodeModel, chunk: int, itl_s: float, limit: int) -> int:
    """Nodes for the work of both kinds."""
    return max(1, prefill_nodes(load, node, chunk) + decode_nodes(load, node, itl_s, limit) - 1)
