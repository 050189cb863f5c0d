"""A row without a valid token ends its request on either node, and no other."""

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.config.scheduling import SchedulingOptions
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.policies.factory import make_ordering
from common.scheduling.prefill_adder import SamplingFailed
from common.step_plan import StepPlan, StepResult
from decode_node.scheduler import DecodeLimits, DecodeScheduler, Sampled


def make_scheduler() -> tuple[DecodeScheduler, PageAllocator]:
    allocator = PageAllocator(50)
    cache = RadixCache(allocator, 4)
    scheduler = DecodeScheduler(
        cache,
        allocator,
        limits=DecodeLimits(8, chunk_tokens=64, is_mixed=True),
        ordering=make_ordering(SchedulingOptions(), cache),
        eos_token_ids=(),
        is_connected=lambda source: False,
    )
    return scheduler, allocator


def request(rid: str) -> Request:
    return Request(rid, 0, (len(rid),) * 6, SamplingParams(max_new_tokens=9))


def commit(scheduler: DecodeScheduler, plan: StepPlan, errors: tuple[str, ...]) -> list[object]:
    return list(scheduler.commit(StepResult(plan.step, (7,) * len(errors), errors=errors)))


def test_an_error_ends_a_chunk_or_a_decode_row_and_gives_its_pages_back() -> None:
    scheduler, allocator = make_scheduler()
    for rid in ("a", "bb", "ccc"):
        scheduler.submit(request(rid), source=None)
    plan = scheduler.plan(0.0)
    assert plan is not None
    first, second, failed = commit(scheduler, plan, ("", "", "no grammar"))
    assert isinstance(first, SamplingFailed) and (first.request.rid, first.message) == ("ccc", "no grammar")
    assert isinstance(second, Sampled) and isinstance(failed, Sampled)
    scheduler.abort(first.request.key)
    plan = scheduler.plan(0.0)
    assert plan is not None
    effects = commit(scheduler, plan, ("stuck", ""))
    assert [(type(effect), effect.request.rid) for effect in effects] == [(SamplingFailed, "a"), (Sampled, "bb")]  # type: ignore[attr-defined]
    assert len(scheduler.requests["a", 0].output) == 1
    scheduler.abort(("a", 0))
    scheduler.abort(("bb", 0))
    scheduler.check()
    allocator.check()
    assert scheduler.plan(0.0) is None
