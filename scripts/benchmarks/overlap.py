"""Decode steps with and without overlap scheduling, by the production scheduler and engine thread.

The difference is the time in which the engine waits for the host between two steps: taking in a result, planning the
next step, and waking up for both.
"""

import select
import time
from collections.abc import Iterator
from contextlib import contextmanager

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.engine.executor import TorchExecutor
from common.node.engine_thread import EngineThread
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.new_token_ratio import NewTokenRatio, RatioConstants
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.factory import make_policy
from decode_node.scheduler import DecodeLimits, DecodeScheduler

#: The longest time for one step.
STEP_S = 600.0


def decode_s(executor: TorchExecutor, batch: int, *, context: int, num_steps: int, max_outstanding: int) -> float:
    """Seconds for ``num_steps`` decode steps of ``batch`` rows with ``context`` cached tokens each."""
    scheduler = _scheduler(executor, batch, context, num_steps)
    with _engine(executor, max_outstanding) as engine:
        begun_at = time.perf_counter()
        num_committed = 0
        while num_committed < num_steps:
            while engine.has_room and (plan := scheduler.plan(0.0)) is not None:
                engine.submit(plan)
            select.select([engine], [], [], STEP_S)
            while (result := engine.take()) is not None:
                scheduler.commit(result)
                num_committed += 1
        seconds = time.perf_counter() - begun_at
    assert not scheduler.requests
    return seconds


@contextmanager
def _engine(executor: TorchExecutor, max_outstanding: int) -> Iterator[EngineThread]:
    engine = EngineThread(executor, max_outstanding=max_outstanding)
    try:
        yield engine
    finally:
        engine.close()


def _scheduler(executor: TorchExecutor, batch: int, context: int, num_steps: int) -> DecodeScheduler:
    """A decode scheduler whose requests have all arrived; their KV is what the pool contains."""
    allocator = PageAllocator(executor.pool.num_pages)
    cache = RadixCache(allocator, executor.pool.layout.page_size)
    scheduler = DecodeScheduler(
        cache,
        allocator,
        limits=DecodeLimits(max_running=batch),
        ordering=RequestOrdering(make_policy("fcfs", cache)),
        ratio=NewTokenRatio(RatioConstants()),
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
