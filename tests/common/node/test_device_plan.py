"""Memory on CUDA: the KV pool gets a share of what weights, CUDA graphs and the largest step leave free."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.cache.page_layout import PageLayout
from common.config.node import NodeConfig
from common.config.shared import SMALL_MODEL
from common.engine import factory
from common.engine.models.config import ModelConfig
from common.errors import ConfigError
from common.node.loading import model_loading
from common.node.loading.device_plan import (
    GRAPH_OVERHEAD_BYTES,
    STEP_OVERHEAD_BYTES,
    DeviceReserve,
    activation_bytes,
    check_left,
    graph_conflict,
    pages_on_device,
    plan_graphs,
    plan_reserve,
)
from common.node.loading.memory_plan import Capacity, plan_capacity

LAYOUT = PageLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_size=16, dtype="float32")
PAGE = 2 * 8 * 16 * 4  # bytes
CAPACITY = Capacity(num_slots=4, num_pages=1000, max_queued=0, chunk_tokens=32)


def model() -> ModelConfig:
    shape = {"hidden_size": 10, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 100}
    return replace(ModelConfig.load(SMALL_MODEL), vocab_size=1000, context_length=160, **shape)


def test_a_token_holds_what_one_layer_holds_at_once() -> None:
    # Residual, its norm, and two sums of 10; queries, keys and values of 8 heads of 8, twice; attention of 4 heads;
    # gate, up and their product.
    assert activation_bytes(model(), 2) == 2 * (4 * 10 + 2 * 64 + 32 + 3 * 100)


def test_graphs_and_the_largest_step_are_reserved() -> None:
    token = 2 * 500  # in bfloat16
    step = STEP_OVERHEAD_BYTES + 32 * token + 4 * 1000 * 16
    assert plan_reserve(NodeConfig(dtype="bfloat16"), model(), LAYOUT, CAPACITY, ()) == DeviceReserve(0, step)
    graphs = (
        3 * GRAPH_OVERHEAD_BYTES + 4 * (1000 * (4 + 2) + token) + 5 * 10 * 4
    )  # a line of ten pages for each slot and one
    assert plan_reserve(NodeConfig(dtype="bfloat16"), model(), LAYOUT, CAPACITY, (1, 2, 4)) == DeviceReserve(
        graphs, step
    )


def test_prompts_that_are_computed_whole_make_the_largest_step() -> None:
    whole = replace(CAPACITY, chunk_tokens=None)
    step = STEP_OVERHEAD_BYTES + 16384 * 1000 + 4 * 1000 * 16
    assert plan_reserve(NodeConfig(dtype="bfloat16", chunked_prefill_size=-1), model(), LAYOUT, whole, ()).step == step


@pytest.mark.parametrize(
    ("fraction", "reserve", "free", "pages"),
    [
        (0.5, DeviceReserve(), 100 * PAGE, 50),
        (0.5, DeviceReserve(graphs=20 * PAGE, step=30 * PAGE), 100 * PAGE, 25),
        (0.95, DeviceReserve(), 100 * PAGE - 1, 94),
        (0.5, DeviceReserve(), 10_000 * PAGE, 1000),  # more than the requests can use
        (0.5, DeviceReserve(graphs=1), 10_000 * PAGE, 1001),  # with the page of padding rows
    ],
)
def test_the_pool_gets_a_share_of_the_rest(fraction: float, reserve: DeviceReserve, free: int, pages: int) -> None:
    assert pages_on_device(NodeConfig(memory_fraction=fraction), LAYOUT, CAPACITY, reserve, free) == pages


def test_a_configured_pool_is_made_whole_or_refused() -> None:
    config, capacity = NodeConfig(max_total_tokens=160), replace(CAPACITY, num_pages=10)
    reserve = DeviceReserve(graphs=5 * PAGE, step=4 * PAGE)
    assert pages_on_device(config, LAYOUT, capacity, reserve, 20 * PAGE) == 11
    with pytest.raises(ConfigError, match=r"^--max-total-tokens 160 needs 0.00 GB .*lower it, --cuda-graph-max-bs or"):
        pages_on_device(config, LAYOUT, capacity, reserve, 20 * PAGE - 1)


@pytest.mark.parametrize("free", [0, 9 * PAGE, 11 * PAGE])
def test_a_device_without_room_for_a_page_is_refused_by_flag(free: int) -> None:
    reserve = DeviceReserve(graphs=5 * PAGE, step=4 * PAGE)
    with pytest.raises(ConfigError, match=r"^--memory-fraction 0.4 leaves no room .*CUDA graphs need about 0.00 GB"):
        pages_on_device(NodeConfig(), LAYOUT, CAPACITY, reserve, free)


def test_too_little_memory_beside_the_graphs_is_refused() -> None:
    check_left(DeviceReserve(step=10), 10)
    with pytest.raises(ConfigError, match=r"1.50 GB of device memory are left .*needs about 2.00 GB: lower --memory-f"):
        check_left(DeviceReserve(step=2 * 10**9), 15 * 10**8)


def test_a_pool_on_a_device_is_planned_for_all_requests() -> None:
    capacity = plan_capacity(NodeConfig(max_running_requests=3), LAYOUT, device="cuda", context_length=160)
    assert capacity.num_pages == 30


def test_graphs_are_captured_up_to_the_batches_that_a_node_runs() -> None:
    assert plan_graphs(NodeConfig(), "", 4) == (1, 2, 4)
    assert plan_graphs(NodeConfig(cuda_graph_max_bs=2), "", 4) == (1, 2)
    assert plan_graphs(NodeConfig(cuda_graph_max_bs=8), "", 4) == (1, 2, 4)
    assert max(plan_graphs(NodeConfig(), "", 1000)) == 256
    assert max(plan_graphs(NodeConfig(cuda_graph_max_bs=512), "", 1000)) == 512
    assert plan_graphs(NodeConfig(disable_cuda_graph=True), "", 4) == ()


def test_nodes_that_cannot_capture_graphs_say_why_and_go_on_without() -> None:
    of_library: Any = SimpleNamespace(implementation="transformers", layers=())
    eager = "--attention-backend torch runs every step eagerly; give triton"
    for config, of_model, device, words in (
        (NodeConfig(), model(), "cpu", "no CUDA graphs on a CPU"),
        (NodeConfig(tp=2), model(), "cuda", "steps of several ranks are not captured"),
        (NodeConfig(), of_library, "cuda", "a model that transformers computes are not captured"),
        (NodeConfig(attention_backend="torch"), model(), "cuda", eager),
    ):
        conflict = graph_conflict(config, of_model, LAYOUT, device)
        assert words in conflict
        assert plan_graphs(config, conflict, 4) == ()
        with pytest.raises(ConfigError, match=r"^--cuda-graph-max-bs 2: "):
            plan_graphs(replace(config, cuda_graph_max_bs=2), conflict, 4)


def test_graphs_that_can_have_no_effect_are_refused_by_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--cuda-graph-max-bs has no effect with --disable-cuda-graph"):
        NodeConfig(cuda_graph_max_bs=2, disable_cuda_graph=True)
    with pytest.raises(ConfigError, match=r"^--cuda-graph-max-bs: there are no CUDA graphs on a CPU"):
        NodeConfig(cuda_graph_max_bs=2, device="cpu")


class Capturing:
    """An executor that captures graphs until the device has no memory left."""

    pool = SimpleNamespace(device=None)

    def __init__(self, num_fitting: int) -> None:
        self._num_fitting = num_fitting

    def capture_graphs(self, runner: object, batch_sizes: Sequence[int], *, progress: Callable[[int], None]) -> None:
        for number in range(1, len(batch_sizes) + 1):
            if number > self._num_fitting:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB\nand more")
            progress(number)


def test_the_log_says_how_many_graphs_are_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("common.engine.cuda_graphs.CudaGraphRunner", lambda device: None)
    executor: Any = Capturing(num_fitting=3)
    with caplog.at_level("INFO"):
        model_loading._capture_graphs(executor, (1, 2, 4))
    assert "captured 3 of 3 CUDA graphs in" in caplog.messages[-1]


def test_a_device_without_memory_for_its_graphs_is_refused_by_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.cuda_graphs.CudaGraphRunner", lambda device: None)
    executor: Any = Capturing(num_fitting=1)
    with pytest.raises(
        ConfigError, match=r"too little memory .* --cuda-graph-max-bs, or give .*Tried to allocate 2 MiB\)"
    ):
        model_loading._capture_graphs(executor, (1, 2, 4))


@pytest.mark.parametrize(
    ("full", "advice"),
    [
        ("load_model", "weights .*serve --prefill 0 --local-prefill always"),
        ("KVPool", "KV pages .* --memory-fraction"),
    ],
)
def test_a_device_without_memory_for_weights_or_pages_is_refused_with_what_helps(
    monkeypatch: pytest.MonkeyPatch, full: str, advice: str
) -> None:
    def exhaust(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    monkeypatch.setattr(factory, full, exhaust)
    with pytest.raises(ConfigError, match=rf"too little memory for .*{advice}.*Tried to allocate 2 MiB\)"):
        factory.load_executor(ModelConfig.load(SMALL_MODEL), num_slots=1, num_pages=1, page_size=16)
