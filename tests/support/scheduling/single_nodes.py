"""A prefill or a decode scheduler alone: the test ends transfers, and every step is checked."""

from typing import Any

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.config.scheduling import PriorityRules
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.factory import make_policy
from common.scheduling.prefill_adder import PrefillLimits
from common.step_plan import StepPlan, StepResult
from decode_node.request_state import State
from decode_node.scheduler import DecodeLimits, DecodeScheduler, PageGrant, Sampled
from prefill_node.scheduler import Computed, PrefillScheduler

PAGE = 4
ON = PriorityRules(is_enabled=True, preemption_threshold=2)


class PrefillNode:
    """A prefill scheduler whose steps complete immediately; pages of computed prompts are released."""

    def __init__(
        self,
        *,
        num_pages: int = 100,
        slots: int = 8,
        chunk: int | None = 8,
        rules: Any = None,
        skip_ahead: int = 2,
        policy: str = "fcfs",
        **limits: Any,
    ) -> None:
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.allocator, PAGE)
        self.granted: set[tuple[str, int]] = set()
        self.now = 0.0
        self.done: list[str] = []
        self.computed: list[list[tuple[str, int]]] = []
        self.scheduler = PrefillScheduler(
            self.cache,
            self.allocator,
            limits=PrefillLimits(slots, chunk_tokens=chunk, max_skip_ahead=skip_ahead, **limits),
            ordering=RequestOrdering(make_policy(policy, self.cache), rules or PriorityRules(is_enabled=True)),
            eos_token_ids=(),
            is_granted=self.granted.__contains__,
        )

    def submit(self, rid: str, length: int, priority: int = 0, *, first: int | None = None, new: int = 9) -> Request:
        start = 1000 * (len(self.scheduler.requests) + len(self.done) + 1) if first is None else first
        prompt = tuple(range(start, start + length))
        request = Request(rid, 0, prompt, SamplingParams(max_new_tokens=new), priority=priority, arrived_at=self.now)
        self.scheduler.submit(request)
        return request

    def step(self, *, is_sent: bool = True) -> list[tuple[str, int]]:
        """Run a step; return each request of the step with the number of computed tokens."""
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        self.scheduler.check()
        if plan is None:
            return []
        chunks = [(chunk.request.rid, chunk.num_tokens) for chunk in self.scheduler.chunks(plan)]
        for effect in self.scheduler.commit(result_of(plan)):
            if isinstance(effect, Computed) and effect.first is not None:
                self.done.append(effect.request.rid)
                if is_sent:
                    self.scheduler.release(effect.request.key)
        self.allocator.check()
        self.cache.check()
        return chunks

    def run(self) -> list[str]:
        while self.step():
            pass
        return self.done


class DecodeNode:
    """A decode scheduler whose transfers the test ends and whose engine always samples token 7."""

    def __init__(
        self,
        *,
        num_pages: int = 100,
        slots: int = 8,
        rules: PriorityRules = ON,
        policy: str = "fcfs",
        reserved_tokens: int = 0,
        chunk: int = 8,
        **limits: Any,
    ) -> None:
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.allocator, PAGE)
        self.now = 0.0
        self.done: list[str] = []
        self.chunks: list[tuple[str, int]] = []  # of the last step: requests, and how many of their tokens it computed
        self.granted: list[str] = []
        self.num_submitted = 0
        self.connected: set[str] = set()  # prefill nodes that can compute a request again
        self.scheduler = DecodeScheduler(
            self.cache,
            self.allocator,
            limits=DecodeLimits(
                slots,
                chunk_tokens=chunk,
                is_retracted_by_priority=rules.is_enabled,
                reserved_tokens=reserved_tokens,
                **limits,
            ),
            ordering=RequestOrdering(make_policy(policy, self.cache), rules),
            eos_token_ids=(),
            is_connected=self.connected.__contains__,
        )
        self.table = self.scheduler._table

    def submit(
        self,
        rid: str,
        length: int,
        priority: int = 0,
        *,
        new: int = 4,
        is_local: bool = False,
        ignore_eos: bool = False,
        first: int | None = None,
    ) -> Request:
        self.num_submitted += 1
        start = 1000 * self.num_submitted if first is None else first
        sampling = SamplingParams(max_new_tokens=new, ignore_eos=ignore_eos)
        prompt = tuple(range(start, start + length))
        request = Request(rid, 0, prompt, sampling, priority=priority, arrived_at=self.now)
        self.scheduler.submit(request, source=None if is_local else "prefill")
        return request

    def run_in(self, rid: str, length: int, priority: int = 0, **others: Any) -> Request:
        """Submit a request and step until it runs."""
        request = self.submit(rid, length, priority, **others)
        self.grant()
        self.receive(rid)
        self.step()
        return request

    def grant(self) -> list[str]:
        """Reserve pages; return the requests that got theirs."""
        self.scheduler.grant(self.now)
        return self.take_grants()

    def take_grants(self) -> list[str]:
        effects = self.scheduler.take_effects()
        rids = [effect.request.rid for effect in effects if isinstance(effect, PageGrant)]
        self.granted += rids
        return rids

    def receive(self, *rids: str) -> None:
        for rid in rids:
            self.scheduler.received((rid, 0), token=7)

    def step(self) -> list[str]:
        """Run a step; return the requests that got a token, in order."""
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        self.take_grants()
        self.check()
        self.chunks = []
        if plan is None:
            return []
        self.chunks = [(chunk.request.rid, chunk.num_tokens) for chunk in self.scheduler.chunks(plan)]
        sampled = [one for one in self.scheduler.commit(result_of(plan)) if isinstance(one, Sampled)]
        self.done += [one.request.rid for one in sampled if one.finish]
        self.check()
        return [one.request.rid for one in sampled]

    def run(self) -> list[str]:
        """Step until every request has ended; transfers take no time."""
        for _ in range(1_000):
            self.grant()
            self.receive(*[rid for rid, _ in self.table.receiving])
            if not self.step() and not self.table.requests:
                return self.done
        raise AssertionError(f"not finished after 1000 steps: {self.table.states}")

    def run_until_idle(self) -> None:
        """Step until no request goes on; transfers take no time."""
        is_idle = False
        while not is_idle:
            self.grant()
            self.receive(*[rid for rid, _ in self.table.receiving])
            is_idle = not self.step() and not self.table.receiving

    def check(self) -> None:
        self.scheduler.check()
        self.allocator.check()
        self.cache.check()

    def state(self, rid: str) -> State:
        return self.table.states[rid, 0]


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, tuple(7 for row in plan.rows if row.sample))
