"""The Triton kernel for experts equals one product after the other, reads only chosen experts, and never waits."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.devices import DEVICES
from torch import Tensor

from common.engine.models.feed_forward import ExpertLoop, make_expert_product
from common.engine.models.layers import TorchOperations
from common.engine.models.routing import Routing
from scripts.benchmarks.engines.launches import META, counting_kernels

if not find_spec("triton"):
    pytest.skip("needs triton", allow_module_level=True)

from common.engine.triton_kernels.elementwise import TritonOperations
from common.engine.triton_kernels.grouped_linear import GroupedExperts, make_blocks

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2}


def loop(gate_up: Tensor, down: Tensor) -> ExpertLoop:
    product = make_expert_product(gate_up, down)
    assert isinstance(product, ExpertLoop)
    return product


def routing_of(num_rows: int, num_experts: int, num_per_token: int, device: str = "cpu") -> Routing:
    experts = torch.rand(num_rows, num_experts, device=device).topk(num_per_token).indices
    return Routing(experts, torch.rand(num_rows, num_per_token, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_per_token", "hidden", "width"),
    [(1, 5, 2, 48, 32), (7, 4, 1, 80, 16), (150, 3, 2, 70, 40), (30, 60, 8, 32, 24)],
)
def test_it_equals_one_product_after_the_other(
    device: str, dtype: torch.dtype, num_rows: int, num_experts: int, num_per_token: int, hidden: int, width: int
) -> None:
    """Blocks of 16 and of 64 rows, widths that no tile divides, more experts than pairs, one expert for a token."""
    torch.manual_seed(num_rows)
    gate_up = (torch.randn(num_experts, 2 * width, hidden) * hidden**-0.5).to(device, dtype)
    down = (torch.randn(num_experts, hidden, width) * width**-0.5).to(device, dtype)
    x, routing = (
        torch.randn(num_rows, hidden).to(device, dtype),
        routing_of(num_rows, num_experts, num_per_token, device),
    )
    found = GroupedExperts(gate_up, down)(x, routing, TorchOperations())
    cpu = Routing(routing.experts.cpu(), routing.weights.cpu())
    expected = loop(gate_up.cpu(), down.cpu())(x.cpu(), cpu, TorchOperations())
    torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_experts_without_tokens_are_not_read(device: str) -> None:
    torch.manual_seed(0)
    gate_up, down = torch.randn(6, 32, 32, device=device), torch.randn(6, 32, 16, device=device)
    gate_up[[0, 3, 5]] = down[[0, 3, 5]] = float("nan")
    routing = Routing(torch.tensor([[1, 4], [2, 1], [4, 2]], device=device), torch.ones(3, 2, device=device))
    found = GroupedExperts(gate_up, down)(torch.randn(3, 32, device=device), routing, TorchOperations())
    assert found.isfinite().all()


@settings(max_examples=60, deadline=None)
@given(
    taken=st.lists(st.integers(0, 6), min_size=1, max_size=90),
    rows=st.sampled_from([1, 4, 16]),
)
def test_every_pair_is_in_one_block_of_its_expert(taken: list[int], rows: int) -> None:
    blocks = make_blocks(torch.tensor(taken), 7, rows)
    in_order = sorted(taken)
    found: list[int] = []
    for expert, first, end in zip(*(part.tolist() for part in blocks), strict=True):
        pairs = range(first, min(first + rows, end))
        found += pairs
        assert all(in_order[pair] == expert for pair in pairs)
    assert sorted(found) == list(range(len(taken)))


def test_the_host_waits_for_nothing_and_launches_the_same_for_every_distribution() -> None:
    """As a CUDA graph needs it; the tensors have shapes and no data, so that nothing can depend on the data."""
    experts = GroupedExperts(torch.empty(8, 64, 32, device=META), torch.empty(8, 32, 32, device=META))
    routing = Routing(
        torch.empty(5, 2, dtype=torch.int64, device=META), torch.empty(5, 2, dtype=torch.float32, device=META)
    )
    with counting_kernels() as counter:
        counter.pool = type("NoPool", (), {"pages": torch.empty(0)})()
        with counter:
            out = experts(torch.empty(5, 32, device=META), routing, TritonOperations())
    assert out.shape == (5, 32)
    assert counter.counts.num_syncs == 0
    assert counter.counts.launches["grouped_linear"] == 2
