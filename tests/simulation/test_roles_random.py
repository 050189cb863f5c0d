"""Both roles under random events, on an engine whose tokens depend on the content of every page."""

from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.cluster.fake_engine import expected_of_both, expected_output
from support.cluster.local_cluster import Answer, LocalCluster, assert_all_pages_are_released, prompt_of, sampling
from support.examples import examples

from common.config.scheduling import PriorityRules
from common.errors import ErrorCode
from common.scheduling.output_reserve import RESERVED_TOKENS
from common.wire.messages import Reprioritize, SetPaused


class Cluster(RuleBasedStateMachine):
    """Random requests, aborts, node deaths and replacements with very small pools."""

    priorities: PriorityRules | None = None
    resume_tokens: int | None = None
    reserved_tokens = RESERVED_TOKENS
    window: int | None = None
    window_pages: tuple[int, int] | None = None
    decode_page_size = 4
    pages: ClassVar[dict[str, int]] = {"prefill": 20, "decode": 14}

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0
        self.wanted: dict[str, tuple[tuple[int, ...], int]] = {}
        self.aborted: set[str] = set()
        self.cluster = LocalCluster(
            num_prefill=2,
            num_decode=2,
            page_size=4,
            chunk_tokens=8,
            prefill_pages=self.pages["prefill"],
            decode_pages=self.pages["decode"],
            max_running=3,
            latency=2,
            rules=self.priorities,
            resume_tokens=self.resume_tokens,
            reserved_tokens=self.reserved_tokens,
            window=self.window,
            window_pages=self.window_pages,
            decode_page_size=self.decode_page_size,
            wants_checksums=self.decode_page_size != 4,
        )

    @rule(
        head=st.integers(0, 2),
        length=st.integers(1, 40),
        max_new=st.integers(1, 14),
        pair=st.tuples(st.sampled_from([0, 1, None]), st.integers(0, 1)),
        priority=st.sampled_from([0, 3, 9]),
    )
    def submit(self, head: int, length: int, max_new: int, pair: tuple[int | None, int], priority: int) -> None:
        rid = f"r{self.num_requests}"
        self.num_requests += 1
        prompt = prompt_of(length, head)
        self.wanted[rid] = (prompt, max_new)
        self.cluster.submit(rid, prompt, sampling(max_new), pair=pair, priority=priority)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.cluster.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [rid for rid, answer in self.cluster.answers.items() if not answer.is_over]
        if alive:
            rid = data.draw(st.sampled_from(alive))
            self.aborted.add(rid)
            self.cluster.answers[rid].finish = "aborted"
            self.cluster.abort(rid)

    @rule(data=st.data(), pair=st.tuples(st.sampled_from([0, 1, None]), st.integers(0, 1)))
    def continue_elsewhere(self, data: st.DataObject, pair: tuple[int | None, int]) -> None:
        alive = [rid for rid, answer in self.cluster.answers.items() if not answer.is_over]
        if alive:
            self.cluster.continue_request(data.draw(st.sampled_from(alive)), pair=pair)

    @rule(data=st.data(), priority=st.integers(-9, 9), name=st.sampled_from([None, "high", "low"]))
    def reprioritize(self, data: st.DataObject, priority: int, name: str | None) -> None:
        if self.cluster.answers:
            rid = data.draw(st.sampled_from(sorted(self.cluster.answers)))
            for member in self.cluster.members:
                attempt = self.cluster.answers[rid].attempt
                member.role.on_gateway(Reprioritize(rid, attempt, priority, name), self.cluster.clock.now())

    @rule(data=st.data(), is_paused=st.booleans())
    def pause(self, data: st.DataObject, is_paused: bool) -> None:
        alive = [rid for rid, answer in self.cluster.answers.items() if not answer.is_over]
        if alive:
            self.set_paused(data.draw(st.sampled_from(alive)), is_paused=is_paused)

    def set_paused(self, rid: str, *, is_paused: bool) -> None:
        for member in self.cluster.decode:
            message = SetPaused(rid, self.cluster.answers[rid].attempt, is_paused)
            member.role.on_gateway(message, self.cluster.clock.now())

    @rule(role=st.sampled_from(["prefill", "decode"]), index=st.integers(0, 1))
    def die(self, role: str, index: int) -> None:
        nodes = self.cluster.prefill if role == "prefill" else self.cluster.decode
        member = nodes[index]
        self.cluster.kill(member)
        self.cluster.replace(member, self.pages[role])

    @invariant()
    def books_balance(self) -> None:
        self.cluster.check()

    def teardown(self) -> None:
        for rid in self.cluster.answers:
            self.set_paused(rid, is_paused=False)
        self.cluster.run()
        self.cluster.settle(30)
        assert_all_pages_are_released(self.cluster)
        for rid, answer in self.cluster.answers.items():
            self.judge(rid, answer)

    def judge(self, rid: str, answer: Answer) -> None:
        prompt, max_new = self.wanted[rid]
        if rid in self.aborted:
            return
        if self.window is not None and self.window_pages is not None:
            expected = expected_of_both(prompt, max_new, self.window)
        else:
            expected = expected_output(prompt, max_new, self.window)
        if answer.error is None:
            assert answer.output == expected
            return
        got = tuple(answer.tokens[i] for i in range(len(answer.tokens)) if i in answer.tokens)
        assert got == expected[: len(got)], "wrong tokens before the error"
        is_lost = answer.error.code is ErrorCode.NODE_LOST
        is_bounded = self.window is not None and self.window_pages is None
        assert is_lost or (answer.error.code is ErrorCode.OUT_OF_PAGES and not is_bounded)


class UrgentCluster(Cluster):
    """The same with priorities and classes, and with retracted requests that a prefill node computes again."""

    priorities = PriorityRules(
        is_enabled=True,
        preemption_threshold=2,
        aging_per_s=100.0,
        class_weights={"high": 3.0, "low": 1.0},
        default_class="low",
    )
    resume_tokens = 3
    reserved_tokens = 0  # admits so many requests that some are retracted


class WindowCluster(Cluster):
    """A model whose layers all attend within a window, and pools that are smaller than many requests."""

    window = 11
    pages: ClassVar[dict[str, int]] = {"prefill": 8, "decode": 7}


class WideWindowCluster(Cluster):
    """Decode nodes have larger pages, and no room for cached pages beside a ring."""

    window = 30
    decode_page_size = 8
    pages: ClassVar[dict[str, int]] = {"prefill": 14, "decode": 7}


class UrgentWindowCluster(UrgentCluster):
    window = 6
    pages: ClassVar[dict[str, int]] = {"prefill": 7, "decode": 10}


class HybridCluster(Cluster):
    """A model with window layers that have pages of their own, hardly more than one request needs."""

    window = 11
    window_pages = (7, 6)


class UrgentHybridCluster(UrgentCluster):
    window = 6
    window_pages = (12, 9)


SETTINGS = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCluster = Cluster.TestCase
TestCluster.settings = SETTINGS
TestUrgentCluster = UrgentCluster.TestCase
TestUrgentCluster.settings = SETTINGS
TestWindowCluster = WindowCluster.TestCase
TestWindowCluster.settings = SETTINGS
TestWideWindowCluster = WideWindowCluster.TestCase
TestWideWindowCluster.settings = SETTINGS
TestUrgentWindowCluster = UrgentWindowCluster.TestCase
TestUrgentWindowCluster.settings = SETTINGS
TestHybridCluster = HybridCluster.TestCase
TestHybridCluster.settings = SETTINGS
TestUrgentHybridCluster = UrgentHybridCluster.TestCase
TestUrgentHybridCluster.settings = SETTINGS
