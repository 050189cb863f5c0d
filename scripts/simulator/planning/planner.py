"""The plan: which nodes, how sure it is, what they cost, when a colocated pool is cheaper, what the next node buys.

Everything here follows from ``evaluate``; simulations, processes and printing are elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from common.config.shared import LocalPrefillMode
from scripts.simulator.hardware.node_model import NodeModel
from scripts.simulator.planning import estimate
from scripts.simulator.planning.deployment import Deployment, Settings
from scripts.simulator.planning.estimate import LoadSize
from scripts.simulator.planning.search import MAX_FACTOR, Evaluate, Found, Goal, best_settings, capacity, fewest, tune

#: Loads, as multiples of the given one, at which separate and colocated nodes are compared.
FACTORS = (0.25, 0.5, 1.0, 2.0)
#: How close the two loads come between which a colocated pool begins or ceases to be cheaper.
CROSSING_TOLERANCE = 0.1
#: Starts that need this many times the devices of the smallest are not searched.
MAX_START = 2.0
HOURLY = 3600.0


@dataclass(frozen=True, slots=True)
class Choices:
    """What the planner may choose; one value where the user has chosen.

    Attributes:
        nodes: costs and sizes of a node, by its number of devices.
        page_size: no chunk is smaller.
    """

    nodes: dict[int, NodeModel]
    prefill_tps: tuple[int, ...] = (1,)
    decode_tps: tuple[int, ...] = (1,)
    chunks: tuple[int, ...] = (8_192, 2_048)
    batch_limits: tuple[int, ...] = (256, 64)
    local_prefills: tuple[LocalPrefillMode, ...] = ("never", "auto")
    page_size: int = 1


@dataclass(frozen=True, slots=True)
class LoadRow:
    """What a multiple of the load needs: separate nodes, and a colocated pool; None if none was found."""

    factor: float
    separate: Found | None
    colocated: Found | None

    @property
    def is_colocated_cheaper(self) -> bool:
        """Whether a colocated pool needs fewer devices."""
        if self.colocated is None or self.separate is None:
            return self.colocated is not None
        return self.colocated.deployment.num_devices < self.separate.deployment.num_devices


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The result of a search.

    Attributes:
        best: the fewest devices of prefill and decode nodes; None if nothing holds the objectives.
        colocated: the fewest of a pool whose nodes do both.
        rows: both at several loads, in order.
        capacities: factor of the load that holds, by what is deployed: the plan, and it with one node more. If the plan
            holds ``MAX_FACTOR``, the search ends there.
        why: why nothing was found.
    """

    load: LoadSize
    best: Found | None
    colocated: Found | None
    rows: tuple[LoadRow, ...] = ()
    capacities: tuple[tuple[Deployment, float], ...] = ()
    why: str = ""
    nodes: dict[int, NodeModel] = field(default_factory=dict)

    @property
    def chosen(self) -> Found | None:
        """The cheaper of the two; separate nodes if they cost the same."""
        both = [found for found in (self.best, self.colocated) if found is not None]
        return min(
            both, key=lambda found: self.price_per_hour(found.deployment) or found.deployment.num_devices, default=None
        )

    def num_devices(self, deployment: Deployment) -> int:
        """Devices of all nodes. A node of a calibrated profile may have several, whatever its tensor parallelism."""
        roles = deployment.settings.roles
        return sum(deployment.count(role) * self.nodes[deployment.devices_of(role)].num_devices for role in roles)

    def price_per_hour(self, deployment: Deployment) -> float:
        prices = {role: self.nodes[deployment.devices_of(role)].price_per_hour for role in deployment.settings.roles}
        return sum(deployment.count(role) * price for role, price in prices.items())

    def price_per_million(self, deployment: Deployment, factor: float = 1.0) -> float:
        """US dollars per million tokens of prompts and outputs."""
        tokens = (self.load.input_tokens_per_s + self.load.output_tokens_per_s) * factor * HOURLY
        return self.price_per_hour(deployment) / tokens * 1e6

    def price_per_million_output(self, deployment: Deployment, factor: float = 1.0) -> float:
        return self.price_per_hour(deployment) / (self.load.output_tokens_per_s * factor * HOURLY) * 1e6

    def colocated_cheaper_at(self) -> list[float]:
        """The factors among ``rows`` at which a colocated pool needs fewer devices."""
        return [row.factor for row in self.rows if row.is_colocated_cheaper]


class Planner:
    """Plans for one load.

    Args:
        evaluate: says how a deployment fares under the load times a factor.
    """

    def __init__(self, evaluate: Evaluate, load: LoadSize, choices: Choices, *, goal: Goal) -> None:
        self._evaluate = evaluate
        self._load = load
        self._choices = choices
        self._objective = load.objective(goal.share)
        self._goal = goal

    def plan(self) -> PlanResult:
        separate, colocated = list(self._separate_starts()), list(self._colocated_starts())
        best = self._best(separate)
        if best is not None:
            best = tune(self._evaluate, best, self._variants(best.deployment.settings), self._goal)
        pool = self._best(colocated)
        result = PlanResult(self._load, best, pool, nodes=self._choices.nodes)
        if result.chosen is None:
            return replace(result, why=self._why_not(bool(separate or colocated)))
        rows = self._rows(best, pool)
        return replace(result, rows=rows, capacities=tuple(self._capacities(result.chosen)))

    # ---- where the search begins ------------------------------------------------------------------------------------

    def _separate_starts(self) -> Iterator[Deployment]:
        """One start for each pair of tensor parallelism at which single requests can meet the objectives."""
        own, itl_s = self._choices, self._objective.itl_s
        chunk, limit = own.chunks[0], own.batch_limits[0]
        for prefill_tp in own.prefill_tps:
            costs = own.nodes[prefill_tp].costs
            if estimate.share_within_ttft(self._load, costs, chunk) < self._goal.share:
                continue
            for decode_tp in own.decode_tps:
                if estimate.largest_batch(self._load, own.nodes[decode_tp], itl_s, limit):
                    settings = Settings(prefill_tp, decode_tp, chunk, limit, own.local_prefills[0])
                    yield self._start(settings)

    def _colocated_starts(self) -> Iterator[Deployment]:
        own, itl_s = self._choices, self._objective.itl_s
        limit = own.batch_limits[0]
        for tp in own.decode_tps:
            node = own.nodes[tp]
            chunk = estimate.colocated_chunk(self._load, node, itl_s, own.page_size)
            if estimate.share_within_ttft(self._load, node.costs, chunk) < self._goal.share:
                continue
            if estimate.largest_batch(self._load, node, itl_s, limit):
                yield self._start(Settings(1, tp, chunk, limit, "always"))

    def _start(self, settings: Settings) -> Deployment:
        own, load, itl_s, ttft_s = self._choices, self._load, self._objective.itl_s, self._objective.ttft_s
        chunk, limit = settings.chunk_tokens, settings.batch_limit
        decode = own.nodes[settings.decode_tp]
        if settings.is_colocated:
            return Deployment(0, estimate.colocated_nodes(load, decode, chunk, itl_s, limit), settings)
        return Deployment(
            estimate.prefill_nodes(load, own.nodes[settings.prefill_tp], chunk, ttft_s),
            estimate.decode_nodes(load, decode, itl_s, limit),
            settings,
        )

    def _best(self, starts: Sequence[Deployment]) -> Found | None:
        least = min((start.num_devices for start in starts), default=0)
        near = [start for start in starts if start.num_devices <= MAX_START * least]
        return best_settings(self._evaluate, near, self._goal)

    def _variants(self, settings: Settings) -> Iterator[Settings]:
        own = self._choices
        for chunk in own.chunks[1:]:
            yield replace(settings, chunk_tokens=chunk)
        for limit in own.batch_limits[1:]:
            yield replace(settings, batch_limit=limit)
        for local in own.local_prefills[1:]:
            yield replace(settings, local_prefill=local)

    # ---- around the plan --------------------------------------------------------------------------------------------

    def _rows(self, best: Found | None, pool: Found | None) -> tuple[LoadRow, ...]:
        """All loads, and loads around the point at which a colocated pool begins or ceases to be cheaper.

        Nodes are whole, so there may be several such points. Then none is sought.
        """
        rows = [self._row(factor, best, pool) for factor in FACTORS]
        served = [row for row in rows if row.separate or row.colocated]
        changes = [
            (low, high) for low, high in pairwise(served) if low.is_colocated_cheaper != high.is_colocated_cheaper
        ]
        if len(changes) == 1:
            low, high = changes[0]
            while high.factor / low.factor - 1 > CROSSING_TOLERANCE:
                middle = self._row((low.factor * high.factor) ** 0.5, best, pool)
                rows.append(middle)
                is_like_low = middle.is_colocated_cheaper == low.is_colocated_cheaper
                low, high = (middle, high) if is_like_low else (low, middle)
        return tuple(sorted(rows, key=lambda row: row.factor))

    def _row(self, factor: float, best: Found | None, pool: Found | None) -> LoadRow:
        return LoadRow(factor, self._at(factor, best), self._at(factor, pool))

    def _at(self, factor: float, found: Found | None) -> Found | None:
        """The fewest nodes with the same settings under another load."""
        if found is None or factor == 1.0:
            return found
        known = found.deployment
        start = replace(
            known,
            num_prefill=max(min(1, known.num_prefill), round(known.num_prefill * factor)),
            num_decode=max(1, round(known.num_decode * factor)),
        )
        return fewest(self._evaluate, start, self._goal, factor=factor)

    def _capacities(self, chosen: Found) -> Iterator[tuple[Deployment, float]]:
        deployment = chosen.deployment
        own = capacity(self._evaluate, deployment, self._goal)
        yield deployment, own
        if own >= MAX_FACTOR:  # nor would it be found with one node more
            return
        for role in deployment.settings.roles:
            more = deployment.plus(role)
            yield more, capacity(self._evaluate, more, self._goal, start=max(1.0, own))

    def _why_not(self, has_starts: bool) -> str:
        if has_starts:
            return f"no deployment of up to {self._goal.max_devices:,} devices holds the objectives"
        own = self._choices
        if all(
            estimate.share_within_ttft(self._load, own.nodes[tp].costs, own.chunks[0]) < self._goal.share
            for tp in own.prefill_tps
        ):
            return "prompts take longer than --slo-ttft or --slo-e2e even alone: raise it, or take faster hardware"
        return (
            "a decode step takes longer than --slo-itl or --slo-tpot even with one request: raise it, or take faster "
            "hardware"
        )
