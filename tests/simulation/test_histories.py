"""Random histories of whole clusters with faults: exact tokens or a typed error, and all pages returned.

A history follows from a seed: the nodes (pools that are too small, pages of unequal size, every policy, every limit),
the requests (equal and partly equal prompts, tenants, classes, deadlines, several samples of one prompt) and the
events (clients that leave or are slow to read, changed priorities and classes, moves between decode nodes, faults).
"""

from random import Random
from typing import Any

import pytest
from support.cluster.fake_engine import VOCAB_SIZE, expected_of_both, expected_output
from support.cluster.faulty_cluster import FaultyCluster, end_by_client
from support.cluster.local_cluster import LocalCluster, assert_all_pages_are_released, prompt_of, sampling

from common.cache.kv_window import UNBOUNDED, KVWindow
from common.config.scheduling import POLICIES, PriorityRules, SchedulingOptions
from common.errors import ErrorCode
from common.scheduling.chunked_prefill import ChunkAlignment
from common.scheduling.in_batch_prefix_caching import InBatchPrefixLimits
from common.scheduling.output_reserve import RESERVED_TOKENS
from common.scheduling.prefill_adder import LongPromptLimits
from common.wire.messages import Closed, Flush, GetDecisions, Grant, Reprioritize, Resume, SetPaused
from scripts.simulator.service.inprocess_transport import Fault, Wire

ROOTS = (prompt_of(40, 0), prompt_of(40, 1), (*prompt_of(12, 0), *prompt_of(28, 5)))


class History:
    """One random history. ``run`` plays it to its end, and ``judge`` checks the result.

    Args:
        has_windows: the model has window layers with pages of their own, few more than one request needs.
    """

    def __init__(self, seed: int, num_outstanding: int = 1, *, has_windows: bool = False) -> None:
        self.random = random = Random(seed)
        self.num_outstanding = num_outstanding
        self.wanted: dict[str, tuple[tuple[int, ...], int, int | None]] = {}  # prompt, max_new_tokens, stop token
        self.given_up: dict[str, None] = {}
        self.in_haste: dict[str, None] = {}
        self.hopeless: dict[str, None] = {}  # their grammars cannot be compiled
        self.may_fail = {ErrorCode.OUT_OF_PAGES, ErrorCode.POOL_TOO_SMALL}
        small, large = random.choice([(4, 4), (4, 4), (4, 8), (2, 6), (1, 4), (3, 3), (5, 15), (7, 7)])
        self.page_sizes = (small, large) if random.random() < 0.5 else (large, small)
        self.window = random.choice([2, 5, 11, 20]) if has_windows else None
        if has_windows:
            self.page_sizes = (small, small)
        self.num_tokens = (random.randint(12, 24) * 4, random.randint(12, 24) * 4)  # tokens of each pool
        self.num_tokens = tuple(n - n % size for n, size in zip(self.num_tokens, self.page_sizes, strict=True))
        self.cluster = self._make()
        self.held: dict[str, None] = {}
        self.is_faulty = self.has_moved = False
        self.can_break = random.random() < 0.6

    def _make(self) -> FaultyCluster:
        random = self.random
        policy = random.choice(POLICIES)
        max_queued = random.choice([None, None, None, 3])
        if max_queued:
            self.may_fail.add(ErrorCode.QUEUE_FULL)
        wire = Wire(latency=random.choice([0, 2, 6]), bytes_per_tick=random.choice([None, 64]), faults=self._faults())
        wire.can_recall = random.random() < 0.7
        chunk_tokens, limits = random.choice([8, 8, 16, None]), self._limits()
        return FaultyCluster(
            random,
            slowness=random.choice([0, 0, 2, 5]),
            num_prefill=2,
            num_decode=2,
            page_size=self.page_sizes[0],
            decode_page_size=self.page_sizes[1],
            prefill_pages=self.num_tokens[0] // self.page_sizes[0],
            decode_pages=self.num_tokens[1] // self.page_sizes[1],
            chunk_tokens=chunk_tokens,
            window=self.window,
            window_pages=self._window_pages(chunk_tokens, limits["alignment"]),
            max_running=random.choice([1, 2, 2, 4]),
            max_queued=max_queued,
            policy=policy,
            options=SchedulingOptions(schedule_policy=policy, tenant_shares=("a:3",) if policy == "fair" else ()),
            rules=self._rules(),
            is_cached=random.random() < 0.85,
            stream_interval=random.choice([1, 1, 3]),
            resume_tokens=random.choice([None, 0, 3, 12]),
            reserved_tokens=random.choice([0, 0, 2, 8, RESERVED_TOKENS]),
            wants_checksums=self.wants_checksums,
            limits=limits,
            wire=wire,
            grammar_ticks=random.choice([0, 3, 20]),
            num_outstanding=self.num_outstanding,
        )

    def _window_pages(self, chunk_tokens: int | None, alignment: ChunkAlignment) -> tuple[int, int] | None:
        if self.window is None:
            return None
        page_size = self.page_sizes[0]
        most = alignment.most_at_once(chunk_tokens, page_size) or UNBOUNDED
        of_one, extra = KVWindow(page_size, self.window, most).max_span(most), self.random.randint(0, 6)
        prefill, decode = (min(of_one + extra, num_tokens // page_size) for num_tokens in self.num_tokens)
        return prefill, decode

    def _expected(self, prompt: tuple[int, ...], max_new: int) -> tuple[int, ...]:
        if self.window is not None:
            return expected_of_both(prompt, max_new, self.window)
        return expected_output(prompt, max_new)

    def _faults(self) -> dict[int, Fault]:
        random = self.random
        self.wants_checksums = random.random() < 0.3
        if random.random() < 0.6:
            return {}
        self.may_fail.add(ErrorCode.TRANSFER_FAILED)
        kinds: Any = ["drop", "duplicate", "reorder", "delay", "partition"] + ["corrupt"] * self.wants_checksums
        return {random.randint(0, 120): Fault(random.choice(kinds), random.randint(1, 6)) for _ in range(8)}

    def _rules(self) -> PriorityRules | None:
        random = self.random
        if random.random() < 0.3:
            return None
        classes = {"high": 4.0, "low": 1.0} if random.random() < 0.3 else {}
        return PriorityRules(
            is_enabled=random.random() < 0.8,
            preemption_threshold=random.choice([0, 0, 2, 10]),
            preemption_cooldown_s=random.choice([0.0, 0.05]),
            max_preemptions=random.choice([None, 0, 2]),
            aging_per_s=random.choice([0.0, 100.0]),
            class_weights=classes,
            default_class="low" if classes else "",
        )

    def _limits(self) -> dict[str, Any]:
        random = self.random
        return {
            "max_prefill_tokens": random.choice([16_384, 16_384, 12, 1]),
            "alignment": random.choice(
                [
                    ChunkAlignment(),
                    ChunkAlignment(),
                    ChunkAlignment(align_tokens=6),
                    ChunkAlignment(crossover_tokens=10.0),
                ]
            ),
            "long_prompts": random.choice(
                [
                    LongPromptLimits(),
                    LongPromptLimits(8, 0.5, 1),
                    LongPromptLimits(4, 0.3, 3),
                    LongPromptLimits(share=1.0),
                ]
            ),
            "sharing": random.choice([InBatchPrefixLimits(), InBatchPrefixLimits(4, 4), InBatchPrefixLimits(0, 1)]),
            "max_skip_ahead": random.choice([8, 8, 0, 1]),
            "is_mixed": random.random() < 0.7,
        }

    # ---- events -----------------------------------------------------------------------------------------------------

    def run(self, num_events: int = 45) -> None:
        actions = (
            ["submit"] * 8
            + ["step"] * 8
            + ["continue_elsewhere"] * 2
            + ["leave", "urgency", "odd", "stop", "fault", "hold", "hold", "let_go", "move"]
        )
        for _ in range(num_events):
            getattr(self, self.random.choice(actions))()
        while self.held:
            self.let_go()
        self.cluster.finish(may_wait=self.is_faulty or self.has_moved or bool(self.cluster.wire.faults))

    def submit(self) -> None:
        random = self.random
        prompt = self._prompt()
        pair = (random.choice([0, 1, 0, 1, None]), random.randint(0, 1))
        max_new = random.randint(1, 16)
        output = self._expected(prompt, max_new)
        stop = random.choice(output) if random.random() < 0.2 else None
        where: dict[str, Any] = {
            "salt": random.choice(["", "", "", "red"]),
            "priority": random.choice([0, 0, 3, 9, -5]),
            "timeout_s": random.choice([1e6, 1e6, 0.5, 0.05]),  # not enforced by the gateway; affects only the order
            "tenant": random.choice(["", "a", "b"]),
            "priority_class": random.choice(["", "high"]) if self._has_classes() else "",
            "expected_output": random.choice([0, 0, 2, 30]),
            "waited_s": random.choice([0.0, 0.0, 0.2]),
        }
        grammar = random.choice(["", "", "", "", "one", "two", "bad"])
        for _ in range(random.choice([1, 1, 1, 3])):
            rid = f"r{len(self.wanted)}"
            self.wanted[rid] = (prompt, max_new, stop)
            if where["timeout_s"] < 1.0:
                self.in_haste[rid] = None
            if grammar == "bad":
                self.hopeless[rid] = None
            sampled = sampling(max_new, stop_token_ids=() if stop is None else (stop,), grammar=grammar)
            self.cluster.submit(rid, prompt, sampled, pair=pair, **where)

    def _has_classes(self) -> bool:
        rules = self.cluster._rules
        return rules is not None and bool(rules.class_weights)

    def _prompt(self) -> tuple[int, ...]:
        random = self.random
        root = random.choice(ROOTS)[: random.choice([40, 40, 24, random.randint(1, 40)])]
        own = prompt_of(random.randint(1, 12), random.randint(50, 60)) if random.random() < 0.4 else ()
        return (*root, *own)

    def step(self) -> None:
        for _ in range(self.random.randint(1, 8)):
            self.cluster.step()

    def _open_rids(self) -> list[str]:
        return [rid for rid, answer in self.cluster.answers.items() if not answer.is_over]

    def leave(self) -> None:
        if open_rids := self._open_rids():
            rid = self.random.choice(open_rids)
            self.given_up[rid] = None
            end_by_client(self.cluster, rid, "left")

    def continue_elsewhere(self) -> None:
        if open_rids := self._open_rids():
            pair = (self.random.choice([0, 1, None]), self.random.randint(0, 1))
            self.cluster.continue_request(self.random.choice(open_rids), pair=pair)

    def move(self) -> None:
        cluster = self.cluster
        rids = [rid for rid in self._open_rids() if cluster.answers[rid].target is None]
        if rids:
            rid = self.random.choice(rids)
            if (node := cluster.answers[rid].nodes[-1]) in cluster.decode:
                cluster.move(rid, 1 - cluster.decode.index(node))
                self.has_moved = True
                # A request without pages does not move, and one may move to a node that has no room for it.
                self.may_fail |= {ErrorCode.SHUTTING_DOWN, ErrorCode.QUEUE_FULL, ErrorCode.TRANSFER_FAILED}

    def hold(self) -> None:
        if open_rids := self._open_rids():
            rid = self.random.choice(open_rids)
            self.held[rid] = None
            self._set_paused(rid, is_paused=True)

    def let_go(self) -> None:
        if self.held:
            rid = self.random.choice(list(self.held))
            del self.held[rid]
            self._set_paused(rid, is_paused=False)

    def _set_paused(self, rid: str, *, is_paused: bool) -> None:
        answer = self.cluster.answers[rid]
        for node in answer.nodes:
            if node in self.cluster.decode:
                self.cluster.tell(node, SetPaused(rid, answer.attempt, is_paused=is_paused))

    def urgency(self) -> None:
        if self.cluster.answers:
            rid, priority = self.random.choice(sorted(self.cluster.answers)), self.random.randint(-9, 20)
            answer = self.cluster.answers[rid]
            name = self.random.choice([None, "high", "low"]) if self._has_classes() else None
            for node in answer.nodes:
                self.cluster.tell(node, Reprioritize(rid, answer.attempt, priority, priority_class=name))

    def odd(self) -> None:
        message = self.random.choice([Flush(), GetDecisions(100)])
        for member in self.cluster.members:
            self.cluster.tell(member, message)

    def stop(self) -> None:
        self.cluster.stop_for(self.random.choice(self.cluster.members), self.random.randint(1, 30))

    def fault(self) -> None:
        cluster, random = self.cluster, self.random
        if not self.can_break:
            return
        kind = random.choice(["kill", "kill", "cut", "cut off"])
        if kind == "cut":
            cluster.cut(random.choice(cluster.prefill), random.choice(cluster.decode))
        elif kind == "cut off":
            cluster.cut_off(random.choice(cluster.members))
        else:
            member = random.choice(cluster.members)
            cluster.kill(member)
            cluster.replace(member, member.allocator.num_pages)
        self.is_faulty = True
        # A node hears of the end of an attempt from its peer before it hears it from the gateway.
        self.may_fail |= {ErrorCode.NODE_LOST, ErrorCode.TRANSFER_FAILED, ErrorCode.ABORTED}

    # ---- results ----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        assert_all_pages_are_released(self.cluster)
        for rid, (prompt, max_new, stop) in self.wanted.items():
            answer = self.cluster.answers[rid]
            expected = self._expected(prompt, max_new)
            if stop is not None:
                expected = expected[: expected.index(stop) + 1]
            got = answer.output
            assert got == expected[: len(got)], f"{rid}: wrong tokens"
            if rid in self.given_up:
                continue
            if answer.error is None:
                assert got == expected and rid not in self.hopeless, rid
                assert answer.finish == ("length" if stop is None else "stop") or stop == expected[-1], rid
                continue
            if answer.error.code is ErrorCode.DEADLINE_EXCEEDED:  # the clock leaps while leases run out
                assert rid in self.in_haste, rid
                continue
            if answer.error.code is ErrorCode.INVALID_REQUEST:
                assert rid in self.hopeless, (rid, answer.error)
                continue
            assert answer.error.code in self.may_fail, (rid, answer.error)
            longest = len(prompt) + max_new
            if answer.error.code is ErrorCode.OUT_OF_PAGES:
                assert longest > self.num_tokens[1], (rid, answer.error)
            elif answer.error.code is ErrorCode.POOL_TOO_SMALL:
                needed = len(prompt) + max(1, len(answer.message.output))
                assert needed > min(self.num_tokens), (rid, answer.error)


class WindowHistory(History):
    """One whose model has a window in every layer, so that long requests hold the pages of the window only."""

    def _window_pages(self, chunk_tokens: int | None, alignment: ChunkAlignment) -> None:
        return None

    def _expected(self, prompt: tuple[int, ...], max_new: int) -> tuple[int, ...]:
        return expected_output(prompt, max_new, self.window)


def live(seed: int, num_outstanding: int = 1, *, kind: type[History] = History, has_windows: bool = False) -> History:
    history = kind(seed, num_outstanding, has_windows=has_windows)
    history.run()
    history.judge()
    return history


def test_a_request_that_outgrows_the_pool_fails_at_once_without_affecting_others() -> None:
    """A regression: once retracted, the request stayed first in the queue, and other requests failed instead."""
    cluster = LocalCluster(
        page_size=4, decode_pages=4, reserved_tokens=0, resume_tokens=0, limits={"max_skip_ahead": 0},
        rules=PriorityRules(is_enabled=True, preemption_threshold=0),
    )  # fmt: skip
    outgrown = cluster.submit("outgrown", prompt_of(12), sampling(30))
    cluster.run_until("outgrown", 5)  # 17 tokens, and room for 16
    cluster.submit("urgent", prompt_of(10, 1), sampling(3), priority=9)
    cluster.submit("local", prompt_of(8, 2), sampling(3), pair=(None, 0))
    cluster.run(200)
    assert outgrown.error is not None
    assert outgrown.error.message == (
        "the pool of 4 pages cannot hold 17 tokens and one more (--max-total-tokens of the decode node)"
    )
    assert cluster.answers["urgent"].output == expected_output(prompt_of(10, 1), 3)
    assert cluster.answers["local"].output == expected_output(prompt_of(8, 2), 3)
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_a_request_retracted_for_a_local_prompt_waits_for_it() -> None:
    """A regression: the request was granted its pages again at once and retracted again, endlessly."""
    cluster = LocalCluster(
        page_size=4, decode_pages=8, reserved_tokens=0, resume_tokens=0,
        rules=PriorityRules(is_enabled=True, preemption_threshold=0),
    )  # fmt: skip
    weak = cluster.submit("weak", prompt_of(14), sampling(4))
    cluster.run_until("weak", 2)
    # The request needs 17 tokens including its output and one to spare: 5 of the 8 pages. The other request holds 4.
    cluster.submit("urgent", prompt_of(16, 1), sampling(1), pair=(None, 0), priority=9)
    cluster.run(200)
    assert weak.output == expected_output(prompt_of(14), 4)
    assert cluster.answers["urgent"].output == expected_output(prompt_of(16, 1), 1)
    assert cluster.counters(cluster.decode[0])["retractions"] == 1
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_the_grant_of_a_refused_resume_is_free_for_the_next_request() -> None:
    """A regression: the grant, which arrives after the refusal, was kept for a request that might still arrive. When
    its pages were granted to another request, that one was refused.
    """
    cluster = LocalCluster(page_size=4)
    cluster.submit("first", prompt_of(8), sampling(2))
    cluster.run()
    prefill, decode = cluster.prefill[0].role, cluster.decode[0].name
    prefill.on_peer(decode, Resume("again", 1 << 16, prompt=(VOCAB_SIZE,), timeout_s=9.0), cluster.clock.now())
    for rid, attempt in (("again", 1 << 16), ("next", 0)):
        prefill.on_peer(decode, Grant(rid, attempt, 1, 0, (5, 6)), cluster.clock.now())
    answers = [message for _, message in prefill.outbox.peers]
    assert all(isinstance(message, Closed) and message.rid == "again" for message in answers) and answers


def test_a_request_that_has_aged_is_not_retracted() -> None:
    """If it were retracted, it would come before the request that it made room for, and both would loop."""
    rules = PriorityRules(is_enabled=True, preemption_threshold=0, aging_per_s=1000.0)
    cluster = LocalCluster(page_size=4, decode_pages=5, reserved_tokens=0, resume_tokens=0, rules=rules)
    old = cluster.submit("old", prompt_of(12), sampling(6))
    cluster.run_until("old", 2)
    cluster.clock.advance(0.01)  # worth 10 priorities, and the old request arrived even earlier
    new = cluster.submit("new", prompt_of(12, 1), sampling(4), priority=10)
    cluster.run(200)
    assert old.output == expected_output(prompt_of(12), 6)
    assert new.output == expected_output(prompt_of(12, 1), 4)
    assert cluster.counters(cluster.decode[0])["retractions"] == 0


class Largest(Random):
    """Draws the largest number that is possible."""

    def randint(self, a: int, b: int) -> int:
        return b


@pytest.mark.parametrize("num_ticks", [4, 5, 6])
def test_a_cluster_is_not_idle_when_a_grammar_has_just_been_compiled(num_ticks: int) -> None:
    """A regression of the cluster: it looks every three steps, and 6 is the end of the second look."""
    cluster = FaultyCluster(Largest(), slowness=0, grammar_ticks=num_ticks)
    answer = cluster.submit("r0", prompt_of(6), sampling(3, grammar="one"), pair=(None, 0))
    cluster.finish(may_wait=False)
    assert answer.output == expected_output(prompt_of(6), 3)


@pytest.mark.slow(sample=0.12)
@pytest.mark.parametrize("num_outstanding", [1, 2])
@pytest.mark.parametrize("seed", range(30))
def test_random_histories_end_in_exact_tokens_or_an_error_and_return_all_pages(seed: int, num_outstanding: int) -> None:
    live(seed, num_outstanding)


@pytest.mark.slow(sample=0.12)
@pytest.mark.parametrize("num_outstanding", [1, 2])
@pytest.mark.parametrize("kind", [History, WindowHistory])
@pytest.mark.parametrize("seed", range(12))
def test_random_histories_of_models_with_windows(seed: int, kind: type[History], num_outstanding: int) -> None:
    live(seed, num_outstanding, kind=kind, has_windows=True)


@pytest.mark.slow
@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("hundred", range(2))
def test_many_more_histories(hundred: int, has_windows: bool) -> None:
    for seed in range(1_000 + 100 * hundred, 1_100 + 100 * hundred):
        try:
            live(seed, 1 + seed % 2, has_windows=has_windows)
        except AssertionError as error:
            raise AssertionError(f"history {seed}") from error
