"""Random histories of a decode scheduler: no grant is overlooked, every request ends, and every page comes back."""

from random import Random

import pytest
from support.scheduling import single_nodes
from support.scheduling.single_nodes import DecodeNode, result_of

from common.cache.page_allocator import Owner
from common.config.scheduling import PriorityRules
from common.request import RequestKey
from common.scheduling.chunked_prefill import ChunkAlignment
from common.scheduling.in_batch_prefix_caching import InBatchPrefixLimits
from common.scheduling.prefill_adder import LongPromptLimits
from common.step_plan import StepPlan
from decode_node.scheduler import Effect, Outgrown, PageGrant, Stopped

CLASSES = {"high": 4.0, "low": 1.0}


class History:
    """One random history of a node whose engine may have two steps at once."""

    def __init__(self, seed: int, page_size: int) -> None:
        self.random = random = Random(seed)
        self.page_size = page_size
        classes = random.choice([{}, CLASSES])
        self.node = DecodeNode(
            num_pages=random.randint(60, 120) // page_size,
            slots=random.randint(1, 3),
            rules=PriorityRules(
                is_enabled=random.random() < 0.8,
                preemption_threshold=random.choice([0, 2]),
                aging_per_s=random.choice([0.0, 1.0]),
                class_weights=classes,
                default_class="low" if classes else "",
            ),
            policy=random.choice(["fcfs", "lof", "lpm", "short-first"]),
            chunk=random.choice([page_size, 8]),
            is_mixed=random.random() < 0.5,
            max_skip_ahead=random.choice([0, 1, 8]),
            resume_tokens=random.choice([None, 0, 6]),
            long_prompts=random.choice([LongPromptLimits(), LongPromptLimits(8, 0.5, 1), LongPromptLimits(share=1.0)]),
            sharing=random.choice([InBatchPrefixLimits(), InBatchPrefixLimits(4, 4)]),
            alignment=random.choice([ChunkAlignment(), ChunkAlignment(align_tokens=6)]),
        )
        self.node.connected.add("prefill")
        self.scheduler = self.node.scheduler
        self.num_outstanding = random.choice([1, 2])
        self.plans: list[StepPlan] = []

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            self.random.choice([self.submit, self.submit, self.change, self.receive, self.step, self.step])()
            self.settle()
        for key in list(self.node.table.held):
            self.scheduler.set_paused(key, is_paused=False)
        for _ in range(2_000):
            self.receive()
            self.settle()
            self.step()
            self.settle()
            if not self.scheduler.requests and not self.plans:
                break
        assert not self.scheduler.requests, self.node.table.states
        allocator = self.node.allocator
        assert allocator.num_free + self.node.cache.num_pages == allocator.num_pages, "a page leaked"

    # ---- events -----------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        random, node = self.random, self.node
        is_local, first = random.random() < 0.5, random.choice([None, 0, 0])
        length, new, priority = random.randint(1, 50), random.choice([1, 1, 9]), random.choice([0, 0, 3, 9])
        node.submit(f"r{node.num_submitted}", length, priority, new=new, is_local=is_local, first=first)

    def change(self) -> None:
        """Something happens to a request from outside."""
        if not (keys := list(self.scheduler.requests)):
            return
        key, kind = self.random.choice(keys), self.random.choice(["end", "hold", "let go", "move", "urgency", "class"])
        if kind == "end":
            self.end(key)
        elif kind == "move" and key not in self.scheduler.moving:
            self.scheduler.stop_decoding(key)
        elif kind in ("hold", "let go"):
            self.scheduler.set_paused(key, is_paused=kind == "hold")
        elif kind in ("urgency", "class"):
            name = self.random.choice(sorted(CLASSES)) if kind == "class" else None
            self.scheduler.reprioritize(key, self.random.randint(-9, 20), self.node.now, priority_class=name)

    def receive(self) -> None:
        """A prompt has arrived, or its transfer has failed."""
        if not (keys := list(self.node.table.receiving)):
            return
        key = self.random.choice(keys)
        if self.random.random() < 0.8:
            self.scheduler.received(key, token=7)
        elif self.scheduler.requests[key].output:  # it is computed again
            pages, arrived = self.pages_of(key)
            self.scheduler.not_received(key, self.node.now, arrived)
            self.free(pages, arrived)
        else:
            self.end(key)

    def step(self) -> None:
        self.node.now += self.random.choice([0.1, 1.0])
        while len(self.plans) < self.num_outstanding and (plan := self.scheduler.plan(self.node.now)) is not None:
            self.plans.append(plan)
            self.settle()
        if self.plans:
            self.perform(self.scheduler.commit(result_of(self.plans.pop(0))))

    # ---- what follows -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        effects = [None]
        while effects:
            self.perform(self.scheduler.take_effects())
            self.scheduler.grant(self.node.now)
            self.perform(effects := self.scheduler.take_effects())
        self.scheduler._queue.changed()
        self.scheduler.grant(self.node.now)
        assert not self.scheduler.take_effects(), "a grant was overlooked"
        self.node.check()

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Outgrown | Stopped) and effect.request.key in self.scheduler.requests:
                self.end(effect.request.key)
            assert not isinstance(effect, PageGrant) or effect.reservation.num_pages

    def end(self, key: RequestKey) -> None:
        pages, arrived = self.pages_of(key) if self.scheduler.is_receiving(key) else ([], [])
        self.scheduler.abort(key, arrived)
        self.free(pages, arrived)

    def pages_of(self, key: RequestKey) -> tuple[list[int], list[int]]:
        """The pages of a transfer that does not complete, and the first of them, which have arrived."""
        reservation = self.scheduler._reservations.by_key[key]
        num_full = self.scheduler.requests[key].num_decodable // self.page_size - reservation.first
        return reservation.pages, reservation.pages[: self.random.randint(0, max(num_full, 0))]

    def free(self, pages: list[int], arrived: list[int]) -> None:
        self.node.allocator.free(pages[len(arrived) :], Owner.GRANT)


@pytest.mark.parametrize("page_size", [1, 3, 4, 7])
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_grant_is_overlooked_and_every_page_comes_back(
    page_size: int, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_nodes, "PAGE", page_size)
    for seed in seeds:
        History(seed, page_size).run(120)
