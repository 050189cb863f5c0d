"""Overlap scheduling: with a second step in the engine, every request gets what it gets without."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cluster.fake_engine import FakeExecutor
from support.cluster.local_cluster import Answer, LocalCluster, assert_all_pages_are_released
from support.cluster.overlapped_cluster import ClusterOfExecutors, OverlappedCluster
from support.cluster.watched_allocator import WatchedAllocator
from support.engine.asynchronous_device import AsynchronousDevice
from support.engine.recorded_graphs import GraphRecorder, load_with_torch
from support.examples import examples
from torch import Tensor

from common.cache.page_allocator import Owner
from common.config.scheduling import PriorityRules
from common.config.shared import SMALL_MODEL
from common.engine import executor as executor_module
from common.engine.device_copies import HostCopies
from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig
from common.errors import ErrorCode
from common.sampling_params import SamplingParams, TokenLogprobs
from common.step_plan import Admit, PageDelta, Row, StepPlan
from common.wire.messages import SetPaused

PAGE_SIZE, NUM_SLOTS, MAX_PAGES = 4, 3, 40
MAX_NEW = 14
#: One token in sixteen ends an output.
STOP_IDS = tuple(range(5, 1024, 16))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stopped": {"stop_token_ids": STOP_IDS, "min_tokens": 2},
    "random": {"temperature": 1.2, "seed": 11, "top_k": 40, "top_p": 0.9, "stop_token_ids": STOP_IDS},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bad words": {"bad_words": ((7,), (12, 13)), "allowed_token_ids": tuple(range(200))},
    "logprobs": {"logprobs": 2, "prompt_logprobs_from": 1},
    "grammar": {"grammar": "start: /[a-z]{2,6} [a-z]{2,6}/", "logprobs": 0},
}


@dataclass(frozen=True)
class Wanted:
    """A request of a history.

    Attributes:
        first, length: of the prompt; prompts with the same first token share a prefix.
        at: tick at which it comes.
        pair: prefill and decode node.
        event: what happens to it after ``event_after`` output tokens.
    """

    first: int
    length: int
    kind: str
    max_new: int
    at: int
    pair: tuple[int | None, int]
    priority: int
    event: str
    event_after: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple((self.first + 7 * i) % 900 for i in range(self.length))


def wanted(kinds: list[str]) -> st.SearchStrategy[Wanted]:
    return st.builds(
        Wanted,
        first=st.integers(0, 2),
        length=st.integers(1, 30),
        kind=st.sampled_from(kinds),
        max_new=st.integers(1, MAX_NEW),
        at=st.integers(0, 20),
        pair=st.sampled_from([(0, 0), (0, 1), (None, 0), (None, 1)]),
        priority=st.sampled_from([0, 0, 5]),
        event=st.sampled_from(["", "", "abort", "pause", "move"]),
        event_after=st.integers(1, 8),
    )


CLUSTERS = st.fixed_dictionaries(
    {
        "prefill_pages": st.integers(12, MAX_PAGES),
        "decode_pages": st.integers(12, MAX_PAGES),
        "chunk_tokens": st.sampled_from([8, 16, None]),
        "rules": st.sampled_from([None, PriorityRules(is_enabled=True, preemption_threshold=0)]),
        "latency": st.sampled_from([0, 3]),
        "is_cached": st.booleans(),
        "stream_interval": st.sampled_from([1, 3]),
        "wants_checksums": st.booleans(),
        "limits": st.fixed_dictionaries({"is_mixed": st.booleans()}),
    }
)


class Play:
    """Plays a history on a cluster."""

    def __init__(self, cluster: LocalCluster, history: list[Wanted]) -> None:
        self._cluster = cluster
        self._history = history
        self._resume_at: dict[str, int] = {}

    def run(self) -> dict[str, Answer]:
        cluster, answers = self._cluster, self._cluster.answers
        for tick in range(3_000):
            for number, one in enumerate(self._history):
                if one.at == tick:
                    sampling = SamplingParams(**{"temperature": 0.0, "max_new_tokens": one.max_new, **KINDS[one.kind]})
                    cluster.submit(f"r{number}", one.prompt, sampling, pair=one.pair, priority=one.priority)
                elif one.at < tick:
                    self._happen(f"r{number}", one, tick)
            if len(answers) == len(self._history) and all(answer.is_over for answer in answers.values()):
                break
            cluster.step()
        cluster.run(1)
        cluster.settle(30)
        assert_all_pages_are_released(cluster)
        return answers

    def _happen(self, rid: str, one: Wanted, tick: int) -> None:
        answer = self._cluster.answers[rid]
        if answer.is_over:
            return
        if self._resume_at.get(rid) == tick:
            self._cluster.tell(answer.nodes[-1], SetPaused(rid, answer.attempt, is_paused=False))
        if not one.event or rid in self._resume_at or len(answer.tokens) < one.event_after:
            return
        self._resume_at[rid] = tick + 6
        if one.event == "abort":
            answer.finish = "aborted"
            self._cluster.abort(rid)
        elif one.event == "pause":
            self._cluster.tell(answer.nodes[-1], SetPaused(rid, answer.attempt, is_paused=True))
        elif answer.target is None:
            self._cluster.move(rid, 1 - one.pair[1])


def assert_same(ours: Answer, expected: Answer, rid: str) -> None:
    errors = [answer.error for answer in (ours, expected) if answer.error is not None]
    # It had no pages when it was to move, or both nodes waited for moves to the other.
    cannot_move = any(error.code in (ErrorCode.SHUTTING_DOWN, ErrorCode.QUEUE_FULL) for error in errors)
    is_aborted = "aborted" in (ours.finish, expected.finish)  # perhaps only one, as the other had ended
    got, wanted_output = ours.output, expected.output
    if not cannot_move:
        assert ours.error == expected.error, rid
        assert is_aborted or ours.finish == expected.finish, rid
    if cannot_move or is_aborted:  # the client may have read more tokens
        num_common = min(len(got), len(wanted_output))
        got, wanted_output = got[:num_common], wanted_output[:num_common]
    assert got == wanted_output, rid
    for index in range(len(got)):
        assert_close(ours.logprobs[index], expected.logprobs[index], rid)
    if 0 in ours.tokens and 0 in expected.tokens:
        for mine, other in zip(ours.prompt_logprobs, expected.prompt_logprobs, strict=True):
            assert_close(mine, other, rid)


def assert_close(ours: TokenLogprobs | None, expected: TokenLogprobs | None, rid: str) -> None:
    assert (ours is None) == (expected is None), rid
    if ours is not None and expected is not None:
        assert math.isclose(ours.token, expected.token, abs_tol=1e-3), rid
        assert [token for token, _ in ours.top] == [token for token, _ in expected.top], rid


@contextmanager
def stopping(cluster: OverlappedCluster) -> Iterator[OverlappedCluster]:
    try:
        yield cluster
    finally:
        cluster.stop()


SHAPE: dict[str, Any] = {"num_prefill": 1, "num_decode": 2, "page_size": PAGE_SIZE, "max_running": NUM_SLOTS}
SHAPE["reserved_tokens"] = 0  # so that requests are retracted


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(wanted(["greedy", "stopped"]), min_size=1, max_size=7), CLUSTERS)
def test_a_device_that_runs_its_steps_late_yields_the_same_tokens(history: list[Wanted], shape: dict[str, Any]) -> None:
    executors = [FakeExecutor(MAX_PAGES, PAGE_SIZE, NUM_SLOTS) for _ in range(3)]
    expected = Play(ClusterOfExecutors(executors, **SHAPE, **shape), history).run()
    late = [AsynchronousDevice(FakeExecutor(MAX_PAGES, PAGE_SIZE, NUM_SLOTS)) for _ in range(3)]
    with stopping(OverlappedCluster(late, **SHAPE, **shape)) as cluster:
        answers = Play(cluster, history).run()
    for rid, answer in answers.items():
        assert_same(answer, expected[rid], rid)


def test_the_watch_notices_a_page_that_is_allocated_too_soon() -> None:
    allocator = WatchedAllocator(4, PAGE_SIZE)
    pages = allocator.alloc(2, Owner.REQUEST)
    assert pages is not None
    admit = Admit(0, SamplingParams(), 5, None)
    allocator.planned(StepPlan(1, (admit,), (PageDelta(0, 0, tuple(pages)),), (Row(0, 0, (1,) * 5, True),)))
    allocator.free(pages, Owner.REQUEST)  # and no step has begun, for which they would linger
    with pytest.raises(AssertionError, match="while step 1 still uses it"):
        allocator.alloc(4, Owner.GRANT)
    allocator.committed()


class LateCopies(HostCopies):
    """Copies to the host that contain nothing before ``wait``, and are not over before it is called."""

    is_done = False  # type: ignore[assignment]  # as a GPU that is always behind

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, tensor: Tensor) -> Tensor:
        host = torch.zeros_like(tensor)
        self._parts.append((host, tensor.clone()))
        return host

    def wait(self) -> None:
        with torch.inference_mode():
            for host, tensor in self._parts:
                host.copy_(tensor)


@pytest.fixture(scope="module")
def executors() -> Iterator[list[TorchExecutor]]:
    config = ModelConfig.load(SMALL_MODEL)
    made = [
        load_executor(
            config, dtype="float32", num_slots=NUM_SLOTS, num_pages=MAX_PAGES, page_size=PAGE_SIZE, num_threads=1
        )
        for _ in range(3)
    ]
    yield made
    for executor in made:
        executor.close()


@pytest.fixture(scope="module")
def with_graphs() -> Iterator[list[TorchExecutor]]:
    """Steps of one row are padded to two; those of prompts run eagerly, and so do those that compute prompts beside."""
    config = replace(ModelConfig.load(SMALL_MODEL), context_length=128)  # the stand-in reads whole contexts
    made = [
        load_with_torch(config, num_slots=NUM_SLOTS, num_pages=MAX_PAGES + 1, page_size=PAGE_SIZE) for _ in range(3)
    ]
    for executor in made:
        executor.capture_graphs(GraphRecorder(), (2, NUM_SLOTS))
    yield made
    for executor in made:
        executor.close()


@pytest.mark.slow(sample=0.34)
@pytest.mark.parametrize("device", ["CPU", "late device", "late device with graphs"])
def test_the_engine_in_its_thread_yields_the_same_outputs(
    executors: list[TorchExecutor], device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With grammars, penalties, bad words and log-probabilities, of which the host must know every token in time."""
    ours = request.getfixturevalue("with_graphs") if "graphs" in device else executors

    @settings(max_examples=4 if "graphs" in device else 8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(wanted([*KINDS]), min_size=3, max_size=7), CLUSTERS)
    def check(history: list[Wanted], shape: dict[str, Any]) -> None:
        expected = Play(ClusterOfExecutors(executors, folder=SMALL_MODEL, **SHAPE, **shape), history).run()
        with monkeypatch.context() as patch:
            if device != "CPU":
                patch.setattr(TorchExecutor, "is_asynchronous", True)
                patch.setattr(executor_module, "HostCopies", LateCopies)
            with stopping(OverlappedCluster(ours, folder=SMALL_MODEL, **SHAPE, **shape)) as cluster:
                answers = Play(cluster, history).run()
        for rid, answer in answers.items():
            assert_same(answer, expected[rid], rid)

    check()
