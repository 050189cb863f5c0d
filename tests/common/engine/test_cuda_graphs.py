"""Decode steps that are captured and replayed sample what they sample without graphs.

No GPU is needed for most of this: a ``GraphRecorder`` stands in for CUDA graphs, and replays each operation with the
arguments that it had.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.engine_driver import DrivenRequest, Driver
from support.engine.recorded_graphs import GraphRecorder, load_with_torch
from support.engine.reference_models import make_model

from common.engine.attention import BACKENDS, GRAPH_SAFE
from common.engine.attention.protocol import AttentionParams, GraphSafeAttention
from common.engine.attention.torch_sdpa import TorchAttention
from common.engine.cuda_graphs import CudaGraphRunner, batch_sizes_to_capture
from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.kv_pool import KVPool
from common.engine.models.config import ModelConfig
from common.engine.triton_kernels import has_interpreter
from common.sampling_params import SamplingParams
from common.step_plan import Admit, PageDelta, Row, StepPlan

NUM_SLOTS, PAGE_SIZE, NUM_PAGES = 7, 4, 90
#: Steps of three rows are padded to four; those of six and seven run eagerly.
BATCH_SIZES = (1, 2, 4, 5)
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.2, seed=5, top_k=40, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(temperature=0.0, logprobs=2, bad_words=((7,), (12, 13))),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_model(tmp_path_factory.mktemp("model"), seed=3, max_position_embeddings=64)
    return ModelConfig.load(str(folder))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def recorder() -> GraphRecorder:
    """Of the graphs of ``executors``."""
    return GraphRecorder()


@pytest.fixture(scope="module")
def executors(config: ModelConfig, recorder: GraphRecorder) -> Iterator[list[TorchExecutor]]:
    """One executor without graphs, and one with them."""
    made = [load(config) for _ in range(2)]
    made[1].capture_graphs(recorder, BATCH_SIZES)
    yield made
    for executor in made:
        executor.close()


def load(config: ModelConfig, **others: Any) -> TorchExecutor:
    return load_with_torch(config, num_slots=NUM_SLOTS, num_pages=NUM_PAGES, page_size=PAGE_SIZE, **others)


def test_batch_sizes_are_close_where_batches_are_small() -> None:
    assert batch_sizes_to_capture(1) == (1,)
    assert batch_sizes_to_capture(3) == (1, 2, 3)
    assert batch_sizes_to_capture(32) == (1, 2, 4, 8, 16, 24, 32)
    assert batch_sizes_to_capture(100)[-5:] == (56, 64, 80, 96, 100)
    assert batch_sizes_to_capture(330)[-6:] == (160, 192, 224, 256, 320, 330)


class Play:
    """Plays a history of requests that come, go on, lose their pages and end; every event is a number."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._driver = Driver(executor)
        self._running: dict[int, DrivenRequest] = {}
        self.outputs: list[list[int]] = []

    def run(self, events: list[int]) -> list[list[int]]:
        for number, event in enumerate(events):
            slot = event % NUM_SLOTS
            if slot not in self._running:
                self._start(slot, number)
            elif event // NUM_SLOTS % 4 == 0:
                self._retract(slot)
            elif event // NUM_SLOTS % 4 == 1:
                self._release(slot)  # it was aborted
            for slot in [slot for slot, text in self._running.items() if len(text.prompt) + len(text.output) > 50]:
                self._release(slot)
            if self._running:
                self._step()
        return self.outputs

    def _start(self, slot: int, number: int) -> None:
        prompt = [(3 * number + 7 * i) % 200 for i in range(1 + number % 9)]
        self._running[slot] = self._driver.start(slot, prompt, KINDS[number % len(KINDS)])
        self.outputs.append(self._running[slot].output)

    def _step(self) -> None:
        """Prompts are computed alone, as on a decode node, so that the other steps are decode steps."""
        fresh = [text for text in self._running.values() if text.num_computed == 0]
        for texts in (fresh, list(self._running.values())):
            if texts:
                self._driver.step(*((text, 0) for text in texts))

    def _retract(self, slot: int) -> None:
        """The request loses its pages, and goes on in the same slot with other pages and the same tokens."""
        old = self._release(slot)
        again = self._driver.start(slot, old.prompt, old.params)
        again.output = old.output
        self._running[slot] = again

    def _release(self, slot: int) -> DrivenRequest:
        text = self._running.pop(slot)
        self._driver.free = [*text.pages, *self._driver.free]
        return text


def test_random_histories_sample_the_same_tokens(executors: list[TorchExecutor], recorder: GraphRecorder) -> None:
    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.integers(0, 4 * NUM_SLOTS - 1), min_size=5, max_size=25))
    def check(events: list[int]) -> None:
        expected, outputs = (Play(executor).run(events) for executor in executors)
        assert outputs == expected

    check()
    assert all(graph.num_replays for graph in recorder.graphs), "a batch size did not occur"


def test_the_stand_in_brings_back_what_the_host_has_computed() -> None:
    """As a real graph would, so that a step which depends on the host gives wrong tokens above."""
    step, on_host, out = torch.tensor([1]), [1], torch.zeros(2, dtype=torch.int64)

    def launch() -> None:
        out[0] = step[0] * 10
        out[1] = on_host[0] * 10

    with torch.inference_mode():
        graph = GraphRecorder().capture(launch)
        step[0], on_host[0] = 2, 2
        graph.replay()
    assert out.tolist() == [20, 10]


def test_a_step_that_the_host_takes_part_in_cannot_be_captured() -> None:
    tensor = torch.tensor([1])
    with pytest.raises(AssertionError, match="the host reads"):
        GraphRecorder().capture(lambda: print(tensor.item()))


def start(executor: TorchExecutor, num_rows: int) -> None:
    """Admit requests of one page each, whose prompts are computed."""
    admits = tuple(Admit(slot, KINDS[0], 2, None) for slot in range(num_rows))
    pages = tuple(PageDelta(slot, 0, (10 + slot,)) for slot in range(num_rows))
    executor.run(StepPlan(0, admits, pages, tuple(Row(slot, 0, (5, slot), True) for slot in range(num_rows))))


def content(executor: TorchExecutor) -> torch.Tensor:
    """A copy of all keys and values, ``[layers, 2, pages, kv_heads, page_size, head_dim]``."""
    layers = [executor.pool.layer(index)[:2] for index in range(executor.pool.layout.num_layers)]
    return torch.stack([torch.stack((keys, values)) for keys, values in layers])


def test_padding_rows_write_to_the_padding_page_alone(executors: list[TorchExecutor]) -> None:
    executor = executors[1]
    for layer in range(executor.pool.layout.num_layers):
        for part in executor.pool.layer(layer)[:2]:
            part[:-1] = 7.0
    start(executor, 3)
    before = content(executor)
    executor.run(StepPlan(1, (), (), tuple(Row(slot, 2, None, True) for slot in range(3))))
    after = content(executor)
    is_changed = (after != before).any(dim=-1).any(dim=3).any(dim=1).any(dim=0)  # [pages, page_size]
    assert is_changed[[10, 11, 12]].tolist() == [[False, False, True, False]] * 3, "only the third token was written"
    is_changed[[10, 11, 12, NUM_PAGES - 1]] = False
    assert not is_changed.any()
    assert not after.isnan().any()


def test_no_request_can_have_the_padding_page(executors: list[TorchExecutor]) -> None:
    assert [executor.num_pages for executor in executors] == [NUM_PAGES, NUM_PAGES - 1]
    plan = StepPlan(0, (Admit(0, KINDS[0], 2, None),), (PageDelta(0, 0, (NUM_PAGES - 1,)),), ())
    executors[0].run(plan)
    with pytest.raises(AssertionError, match="a page outside the pool"):
        executors[1].run(plan)


@pytest.mark.parametrize(
    "rows",
    [
        [Row(slot, 2, None, True) for slot in range(6)],
        [Row(0, 2, None, True), Row(1, 2, (4,), True)],
        [Row(0, 2, None, True), Row(1, 2, None, False)],
        [Row(0, 2, None, True), Row(1, 1, (4, 5), True, targets=(5,), first_target=0)],
    ],
    ids=["more rows than the largest graph", "named tokens", "nothing to sample", "log-probabilities of prompts"],
)
def test_steps_of_other_kinds_run_eagerly(
    executors: list[TorchExecutor], recorder: GraphRecorder, rows: list[Row]
) -> None:
    num_before = [graph.num_replays for graph in recorder.graphs]
    for executor in executors:
        start(executor, 6)
    expected, found = (executor.run(StepPlan(1, (), (), tuple(rows))) for executor in executors)
    assert found == expected
    assert [graph.num_replays for graph in recorder.graphs] == num_before


def test_progress_counts_the_graphs(config: ModelConfig) -> None:
    executor = load(config)
    counts: list[int] = []
    executor.capture_graphs(GraphRecorder(), (1, 2, 4), progress=counts.append)
    assert counts == [1, 2, 3]
    executor.close()


def test_the_backends_that_are_named_graph_safe_are() -> None:
    from common.engine.attention.flash_attn_backend import FlashAttention
    from common.engine.attention.triton_backend import TritonAttention

    classes = {"triton": TritonAttention, "flash-attn": FlashAttention, "torch": TorchAttention}
    safe = {name for name, backend in classes.items() if hasattr(backend, "prepare_decode")}
    assert safe == set(GRAPH_SAFE) <= set(BACKENDS)


@pytest.mark.slow
@pytest.mark.skipif(not (has_interpreter() and find_spec("triton")), reason="needs Triton's interpreter")
def test_the_steps_of_tritons_kernels_can_be_replayed(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of Triton's kernels take part, as on a GPU; every launch is replayed with the arguments that it had."""
    from common.engine.attention import triton_backend
    from common.engine.triton_kernels import elementwise

    recorder = GraphRecorder()
    recorder.watch_kernels(triton_backend, ("write_kv", "paged_attention", "merge_splits"), monkeypatch)
    recorder.watch_kernels(elementwise, ("add_rms_norm", "norm_and_rotate", "silu_and_multiply"), monkeypatch)

    def attention(pool: KVPool) -> triton_backend.TritonAttention:
        return triton_backend.TritonAttention(pool, config.num_heads, (AttentionParams(),) * config.num_layers)

    executors = [load(config, attention=attention, operations=elementwise.TritonOperations) for _ in range(2)]
    assert isinstance(executors[1]._attention, GraphSafeAttention)
    executors[1].capture_graphs(recorder, (1, 3))
    outputs = []
    for executor in executors:
        driver = Driver(executor)
        texts = [driver.start(slot, [slot + 1] * (3 + slot)) for slot in range(2)]
        for count in (2, 2, 1):  # the prompts, then a step of two rows and one of one
            driver.step(*((text, 0) for text in texts[:count]))
        outputs.append([text.output for text in texts])
        executor.close()
    assert outputs[1] == outputs[0]
    assert [graph.num_replays for graph in recorder.graphs] == [1, 1]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["triton", "flash-attn"])
@pytest.mark.filterwarnings("ignore")  # of flash-attn-4 and its compiler
def test_replayed_graphs_of_a_gpu_equal_eager_steps(config: ModelConfig, attention: str, dtype: str) -> None:
    """In bfloat16 only the log-probabilities are close, since rounding may choose another of two close tokens."""
    if attention == "flash-attn":
        pytest.importorskip("flash_attn.cute")  # earlier versions share its folder
        if dtype == "float32":
            pytest.skip("flash-attn does not compute in float32")
    found: list[Any] = []
    for has_graphs in (False, True):
        executor = load_executor(
            config, device="cuda", dtype=dtype, num_slots=12, num_pages=80, page_size=16, attention=attention
        )
        if has_graphs:
            executor.capture_graphs(CudaGraphRunner(executor.pool.device), batch_sizes_to_capture(9))
        driver = Driver(executor)
        texts = [
            driver.start(slot, [slot + 3] * (2 + slot), SamplingParams(temperature=0.0, logprobs=0))
            for slot in range(11)
        ]
        driver.step(*((text, 0) for text in texts))
        for num_rows in (*range(1, 12), *range(11, 0, -1)):
            driver.step(*((text, 0) for text in texts[:num_rows]))
        found.append(texts)
        executor.close()
    for eager, replayed in zip(*found, strict=True):
        if dtype == "float32":
            assert replayed.output == eager.output
        assert replayed.logprobs[1] is not None and eager.logprobs[1] is not None
        if replayed.output[:2] == eager.output[:2]:
            assert replayed.logprobs[1].token == pytest.approx(eager.logprobs[1].token, abs=0.1)
