"""Cost of ordering long queues: ``plan`` of a prefill node under every policy.

The node has the cache of ``bench scheduler``, with a million tokens. Prompts have 1,024 tokens and start with one of
its 50 shared prefixes. Each step admits a chunk budget of 8,192 tokens, as many new requests arrive, and the pool is
full, so that every plan evicts pages. *Plan* is one step with all watches current. *Cold* is the cost of building the
watches: all requests arrive, their tokens are packed, and the first step is planned.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from common.config.scheduling import POLICIES, SchedulingOptions
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.policies.factory import make_ordering
from common.scheduling.prefill_adder import PrefillLimits
from common.step_plan import StepPlan, StepResult
from prefill_node.scheduler import PrefillScheduler
from scripts.benchmarks.virtual_time.radix_tree import PREFIX_TOKENS, Figure, Tree, figure, timed

PROMPT_TOKENS = 1_024
CHUNK_TOKENS = 8_192
PLAN_MARK_US = 5.0  # target for a plan, per waiting request
#: Every policy, and priorities, ageing and classes on top of fcfs.
ROWS: dict[str, SchedulingOptions] = {name: SchedulingOptions(schedule_policy=name) for name in POLICIES} | {
    "fcfs+priorities": SchedulingOptions(enable_priority_scheduling=True),
    "fcfs+ageing": SchedulingOptions(
        enable_priority_scheduling=True, default_priority_value=0, priority_aging_per_second=1.0
    ),
    "fcfs+classes": SchedulingOptions(priority_classes=("high:8", "normal:3", "low:1")),
}


@dataclass(frozen=True, slots=True)
class PlanFigure:
    """One row of the table of plans; times in microseconds."""

    name: str
    num_waiting: int
    plan: Figure
    commit: Figure
    cold_us: float


class BusyNode:
    """A prefill node with a full cache and a queue of constant length.

    Args:
        options: of the order.
    """

    def __init__(self, tree: Tree, options: SchedulingOptions, num_waiting: int) -> None:
        self._tree = tree
        self._random = np.random.default_rng(1)
        self._base = tuple(self._random.integers(0, 151_936, 200_000).tolist())
        self._prefixes = [np.frombuffer(key, "<i4").tolist() for key in tree.prefixes]
        self._arrivals = itertools.count()
        self._num_waiting = num_waiting
        self._planned: StepPlan | None = None
        self.scheduler = PrefillScheduler(
            tree.cache,
            tree.allocator,
            limits=PrefillLimits(max_running=256, chunk_tokens=CHUNK_TOKENS),
            ordering=make_ordering(options, tree.cache),
            eos_token_ids=(),
            is_granted=lambda key: False,
        )

    def requests(self, count: int) -> list[Request]:
        """New requests, a millisecond apart."""
        made = []
        for number in itertools.islice(self._arrivals, count):
            start = int(self._random.integers(0, len(self._base) - PROMPT_TOKENS))
            prefix = self._prefixes[number % len(self._prefixes)]
            prompt = (*prefix, *self._base[start : start + PROMPT_TOKENS - PREFIX_TOKENS])
            made.append(self._request(number, prompt))
        return made

    def _request(self, number: int, prompt: tuple[int, ...]) -> Request:
        most = int(self._random.integers(1, 1_000))
        return Request(
            f"r{number}",
            0,
            prompt,
            SamplingParams(max_new_tokens=most),
            priority=number % 7,
            priority_class=("high", "normal", "low")[number % 3],
            tenant=f"tenant {number % 20}",
            arrived_at=number * 1e-3,
            deadline_at=number * 1e-3 + most,
        )

    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            self.scheduler.submit(request)

    def steps(self, num_steps: int) -> Iterator[tuple[float, float]]:
        """Plan and commit; computed requests leave at once, and as many new ones arrive."""
        for _ in range(num_steps):
            now = next(self._arrivals) * 1e-3
            planned = timed(partial(self._plan, now))
            plan = self._planned
            assert plan is not None
            result = StepResult(plan.step, (7,) * sum(row.sample for row in plan.rows))
            committed = timed(partial(self.scheduler.commit, result))
            for key, request in list(self.scheduler.requests.items()):
                if request.output:
                    self.scheduler.abort(key)
                    self.scheduler.release(key)
            self.submit(self.requests(self._num_waiting - self.scheduler.num_waiting))
            yield planned, committed

    def _plan(self, now: float) -> None:
        self._planned = self.scheduler.plan(now)

    def close(self) -> None:
        """Release all requests and check the books."""
        for key in list(self.scheduler.requests):
            self.scheduler.abort(key)
            self.scheduler.release(key)
        self.scheduler.check()
        self._tree.cache.check()
        self._tree.allocator.check()


def bench_plan(name: str, options: SchedulingOptions, num_waiting: int, num_steps: int) -> PlanFigure:
    node = BusyNode(Tree(), options, num_waiting)
    arriving = node.requests(num_waiting)
    arrival = timed(partial(node.submit, arriving))
    (first, _), *later = node.steps(num_steps + 1)
    node.close()
    plan = figure(f"plan, {name}", [planned for planned, _ in later], mark=PLAN_MARK_US * num_waiting)
    commit = figure(f"commit, {name}", [committed for _, committed in later])
    return PlanFigure(name, num_waiting, plan, commit, arrival + first)


def print_plans(rows: list[PlanFigure]) -> None:
    print(f"\n{'milliseconds':22} {'waiting':>8} {'plan':>8} {'p99':>8} {'mark':>6} {'commit':>8} {'cold':>9}")
    for row in rows:
        assert row.plan.mark_us is not None
        numbers = [row.plan.median_us, row.plan.p99_us, row.plan.mark_us, row.commit.median_us, row.cold_us]
        plan, p99, mark, commit, cold = (value / 1e3 for value in numbers)
        verdict = "" if plan <= mark else "  over the mark"
        print(
            f"{row.name:22} {row.num_waiting:>8,} {plan:8.2f} {p99:8.2f} {mark:6.0f} {commit:8.2f} {cold:9.1f}{verdict}"
        )
    print("Plan and commit: one step that admits 8,192 tokens of prompts of 1,024, with watches current.")
    print("Cold: all requests arrive, are packed and watched, and the first step is planned.")
