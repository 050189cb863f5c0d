"""Cost of ordering long queues: ``plan`` of a prefill node under every policy, and ``lpm`` compared with SGLang's.

The node has the cache of ``bench scheduler``, with a million tokens. Prompts have 1,024 tokens and start with one of
its 50 shared prefixes. Each step admits a chunk budget of 8,192 tokens, as many new requests arrive, and the pool is
full, so that every plan evicts pages. *Plan* is one step with all watches current. *Cold* is the cost of building the
watches: all requests arrive, their tokens are packed, and the first step is planned.
"""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from common.cache.request_kv import packed_tokens
from common.config.scheduling import POLICIES, SchedulingOptions
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.factory import make_ordering, make_policy
from common.scheduling.waiting_queue import WaitingQueue
from common.step_plan import StepPlan, StepResult
from prefill_node.scheduler import PrefillLimits, PrefillScheduler
from scripts.benchmarks.tree import PREFIX_TOKENS, Figure, Sample, Tree, figure, timed

PROMPT_TOKENS = 1_024
CHUNK_TOKENS = 8_192
PLAN_MARK_US = 5.0  # target for a plan, per waiting request
#: SGLang 0.5.23's ``lpm``, by number of waiting requests of 1,024 tokens, with the limit of 128 lifted for the second.
SGLANG_LPM_US = {128: 1_900.0, 1_000: 16_000.0}
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


class Node:
    """A prefill node with a full cache and a queue of constant length.

    Args:
        options: of the order; the limit on ``lpm`` is lifted.
        num_waiting: length of the queue.
    """

    def __init__(self, tree: Tree, options: SchedulingOptions, num_waiting: int) -> None:
        self._tree = tree
        self._random = np.random.default_rng(1)
        self._base = tuple(self._random.integers(0, 151_936, 200_000).tolist())
        self._prefixes = [np.frombuffer(key, "<i4").tolist() for key in tree.prefixes]
        self._arrivals = itertools.count()
        self._num_waiting = num_waiting
        self._planned: StepPlan | None = None
        options = replace(options, lpm_degrade_threshold=10**9) if options.schedule_policy == "lpm" else options
        self.scheduler = PrefillScheduler(
            tree.cache,
            tree.books,
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

    def steps(self, num_steps: int) -> Iterator[tuple[Sample, Sample]]:
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
        self._tree.books.check()


def bench_plan(name: str, options: SchedulingOptions, num_waiting: int, num_steps: int) -> PlanFigure:
    node = Node(Tree(), options, num_waiting)
    arriving = node.requests(num_waiting)
    arrival = timed(partial(node.submit, arriving))
    (first, _), *later = node.steps(num_steps + 1)
    node.close()
    plan = figure(f"plan, {name}", [planned for planned, _ in later], mark=PLAN_MARK_US * num_waiting)
    commit = figure(f"commit, {name}", [committed for _, committed in later])
    return PlanFigure(name, num_waiting, plan, commit, arrival.wall_us + first.wall_us)


def bench_lpm(num_repeats: int) -> list[Figure]:
    """Measure the ordering alone, as SGLang's figures do: with current watches, and with all watches built again."""
    figures = []
    for count, published_us in SGLANG_LPM_US.items():
        tree = Tree()
        requests = Node(tree, SchedulingOptions(), 0).requests(count)
        options = SchedulingOptions(schedule_policy="lpm", lpm_degrade_threshold=count)
        order = RequestOrdering(make_policy("lpm", tree.cache, options=options))
        queue = WaitingQueue(order, tree.cache)
        for request in requests:
            packed_tokens(request, request.num_tokens)  # once per request, measured in a row of its own

        def arrive(queue: WaitingQueue = queue, requests: list[Request] = requests) -> None:
            for request in requests:
                queue[request.key] = request
            queue.sorted(0.0)

        cold, warm = [], []
        for _ in range(max(3, num_repeats // 20)):
            cold.append(timed(arrive))
            warm += [timed(partial(queue.sorted, 0.0)) for _ in range(5)]
            queue.clear()
        figures.append(figure(f"lpm over {count:,} of 1,024 tokens", warm, python=published_us))
        figures.append(figure(f"lpm over {count:,}, cold", cold, python=published_us))
    return figures


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


def measured_steps(num_repeats: int) -> dict[str, float]:
    """Milliseconds of steps of the small model on this machine, to compare scheduling with."""
    from common.config.shared import SMALL_MODEL
    from common.engine.executor import load_executor
    from common.engine.model_config import ModelConfig
    from common.step_plan import Admit, PageDelta, Row

    num_rows, length = 256, 512
    executor = load_executor(
        ModelConfig.load(SMALL_MODEL), num_slots=num_rows, num_pages=num_rows * 4 + length // 16 + 1, page_size=16
    )
    sampling = SamplingParams(temperature=0.0, max_new_tokens=10_000)
    tokens = tuple(range(300, 300 + length))
    numbers = itertools.count(1)
    pages = tuple(range(num_rows * 4, num_rows * 4 + length // 16))

    def prefill() -> None:
        rows = (Row(0, 0, tokens, True),)
        admits = (Admit(0, sampling, length, None),)
        executor.run(StepPlan(next(numbers), admits, (PageDelta(0, 0, pages),), rows))

    prefills = [timed(prefill).wall_us for _ in range(num_repeats)]
    admits = tuple(Admit(slot, sampling, 40, 5) for slot in range(num_rows))
    deltas = tuple(PageDelta(slot, 0, tuple(range(4 * slot, 4 * slot + 4))) for slot in range(num_rows))
    rows = tuple(Row(slot, 40, None, True) for slot in range(num_rows))
    executor.run(StepPlan(next(numbers), admits, deltas, rows))

    def decode() -> None:
        executor.run(StepPlan(next(numbers), (), (), rows))

    decodes = [timed(decode).wall_us for _ in range(num_repeats)]
    return {
        "prefill of 512 tokens": statistics.median(prefills) / 1e3,
        "decode of 256 rows": statistics.median(decodes) / 1e3,
    }


def print_steps(measured: dict[str, float], given: list[str]) -> None:
    """Print measured steps, and given ones (``NAME:MILLISECONDS``)."""
    print("\nEngine steps for comparison, in milliseconds:")
    for name, step_ms in measured.items():
        print(f"  {name}, small model, measured: {step_ms:.1f}")
    for text in given:
        name, _, milliseconds = text.rpartition(":")
        print(f"  {name}, given: {milliseconds}")
