"""Decode steps with and without overlap scheduling, by the production scheduler and engine thread.

The difference is the time in which the engine waits for the host between two steps: taking in a result, planning the
next step, and waking up for both.
"""

import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.engine.executor import TorchExecutor
from common.engine.pending_step import PendingStep
from common.node.engine_thread import EngineThread
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.factory import make_policy
from common.step_plan import StepPlan, StepResult
from decode_node.scheduler import DecodeLimits, DecodeScheduler

#: The longest time for one step.
STEP_S = 600.0


@dataclass(frozen=True)
class StepTimes:
    """Medians over the steps of a run, in seconds.

    Attributes:
        step_s: from the launch of a step to its result.
        idle_s: from the result of a step to the launch of the next one; on a GPU, which has the next step by then, 0.
    """

    step_s: float
    idle_s: float


class TimedExecutor:
    """Notes the instants at which steps are launched and have ended."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.is_asynchronous = executor.is_asynchronous
        self.launched_at: list[float] = []
        self.ended_at: list[float] = []
        self.compile_grammar, self.drop_grammar = executor.compile_grammar, executor.drop_grammar
        self._executor = executor

    def launch(self, plan: StepPlan) -> "TimedStep":
        self.launched_at.append(time.perf_counter())
        return TimedStep(self._executor.launch(plan), self.ended_at)


@dataclass(frozen=True)
class TimedStep:
    step: PendingStep
    ended_at: list[float]

    def result(self) -> StepResult:
        result = self.step.result()
        self.ended_at.append(time.perf_counter())
        return result


@dataclass(frozen=True)
class Overlap:
    """The same steps without and with overlap scheduling."""

    batch: int
    without: StepTimes
    with_overlap: StepTimes


def measure_overlap(executor: TorchExecutor, batches: Sequence[int], *, context: int, num_steps: int) -> list[Overlap]:
    """Measure every batch size, and print each as soon as it is known."""
    columns = ("step", "host, no overlap", "host, overlap", "ratio")
    print(f"{'microseconds':<18}" + "".join(f"{name:>18}" for name in columns), flush=True)
    found = []
    for batch in batches:
        both = [
            decode(executor, batch, context=context, num_steps=num_steps, max_outstanding=count) for count in (1, 2)
        ]
        found.append(Overlap(batch, *both))
        ratio = (both[0].step_s + both[0].idle_s) / (both[1].step_s + both[1].idle_s)
        figures = "".join(f"{seconds * 1e6:>18.0f}" for seconds in (both[0].step_s, both[0].idle_s, both[1].idle_s))
        print(f"decode batch {batch:<5}{figures}{ratio:>18.2f}", flush=True)
    return found


def decode(executor: TorchExecutor, batch: int, *, context: int, num_steps: int, max_outstanding: int) -> StepTimes:
    """Time ``num_steps`` decode steps of ``batch`` rows with ``context`` cached tokens each."""
    scheduler = _scheduler(executor, batch, context, num_steps)
    timed = TimedExecutor(executor)
    with _engine(timed, max_outstanding) as engine:
        num_committed = 0
        while num_committed < num_steps:
            while engine.has_room and (plan := scheduler.plan(0.0)) is not None:
                engine.submit(plan)
            select.select([engine], [], [], STEP_S)
            while (result := engine.take()) is not None:
                scheduler.commit(result)
                num_committed += 1
    assert not scheduler.requests
    launched_at, ended_at = timed.launched_at, timed.ended_at
    began_at = [max(pair) for pair in zip(launched_at[1:], ended_at, strict=False)]
    step_s = median(end - begin for begin, end in zip(began_at, ended_at[1:], strict=True))
    idle_s = median(begin - end for begin, end in zip(began_at, ended_at, strict=False))
    return StepTimes(step_s, idle_s)


@contextmanager
def _engine(executor: TimedExecutor, max_outstanding: int) -> Iterator[EngineThread]:
    engine = EngineThread(executor, max_outstanding=max_outstanding)
    try:
        yield engine
    finally:
        engine.close()


def _scheduler(executor: TorchExecutor, batch: int, context: int, num_steps: int) -> DecodeScheduler:
    """A decode scheduler whose requests have all arrived; their KV is what the pool contains."""
    allocator = PageAllocator(executor.num_pages)
    cache = RadixCache(allocator, executor.pool.layout.page_size)
    scheduler = DecodeScheduler(
        cache,
        allocator,
        limits=DecodeLimits(max_running=batch),
        ordering=RequestOrdering(make_policy("fcfs", cache)),
        eos_token_ids=(),
        is_connected=lambda source: False,
    )
    sampling = SamplingParams(max_new_tokens=num_steps + 1, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = tuple(range(number * context, (number + 1) * context))  # no two share a prefix
        scheduler.submit(Request(f"r{number}", 0, prompt, sampling), source="prefill")
    scheduler.grant(0.0)
    scheduler.take_effects()
    for key in list(scheduler.requests):
        scheduler.received(key, token=1)
    return scheduler
