"""The Triton kernel for experts equals one product after the other, reads only chosen experts, and never waits."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.devices import DEVICES
from support.examples import examples
from torch import Tensor

from common.engine.models.feed_forward import ExpertLoop, make_expert_product
from common.engine.models.layers import TorchOperations
from common.engine.models.lora.checkpoint import LowRankPair
from common.engine.models.lora.expert_stack import ExpertAddition, ExpertStack, stack_experts
from common.engine.models.routing import Routing

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


def random_stack(num_experts: int, changed: list[int], out: int, inputs: int) -> ExpertStack:
    """Pairs of rank 16 and, of the last expert, of rank 32."""
    ranks = {expert: 32 if expert == changed[-1] else 16 for expert in changed}
    pairs = {
        expert: LowRankPair(torch.randn(rank, inputs) * inputs**-0.5, torch.randn(out, rank) * rank**-0.5)
        for expert, rank in ranks.items()
    }
    return stack_experts(pairs, num_experts, torch.float32, torch.device("cpu"))


def moved(addition: ExpertAddition, device: str, dtype: torch.dtype) -> ExpertAddition:
    def stack(one: ExpertStack | None) -> ExpertStack | None:
        return one and ExpertStack(one.places.to(device), one.down.to(device, dtype), one.up.to(device, dtype))

    tokens = None if addition.tokens is None else addition.tokens.to(device)
    return ExpertAddition(stack(addition.gate_up), stack(addition.down), tokens)


def merged(weight: Tensor, stack: ExpertStack | None) -> Tensor:
    """Return ``weight`` ``[experts, out, in]`` with the products of the stack added."""
    if stack is None:
        return weight
    changed = stack.places >= 0
    weight = weight.clone()
    weight[changed] += (stack.up @ stack.down)[stack.places[changed]]
    return weight


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_rows", "num_per_token"), [(1, 1), (9, 3), (150, 2)])
def test_tokens_with_adapters_get_what_merged_experts_give(
    device: str, dtype: torch.dtype, num_rows: int, num_per_token: int
) -> None:
    """One adapter changes some experts, another one only one matrix; the tokens behind theirs have none."""
    torch.manual_seed(num_rows)
    num_experts, hidden, width = 5, 48, 32
    gate_up = (torch.randn(num_experts, 2 * width, hidden) * hidden**-0.5).to(dtype).float()
    down = (torch.randn(num_experts, hidden, width) * width**-0.5).to(dtype).float()
    tokens = torch.randperm(num_rows)
    of_adapter = [tokens[: num_rows // 3], tokens[num_rows // 3 : num_rows // 2]] if num_rows > 1 else [None]
    given = [
        ExpertAddition(
            random_stack(num_experts, [3, 0, 4], 2 * width, hidden),
            random_stack(num_experts, [1, 3], hidden, width) if number == 0 else None,
            which,
        )
        for number, which in enumerate(of_adapter)
    ]
    given = [moved(one, "cpu", dtype) for one in given]
    x, routing = torch.randn(num_rows, hidden).to(dtype), routing_of(num_rows, num_experts, num_per_token)
    experts = GroupedExperts(gate_up.to(device, dtype), down.to(device, dtype))
    on_device = Routing(routing.experts.to(device), routing.weights.to(device))
    adapted = experts.with_additions([moved(one, device, dtype) for one in given])
    found = adapted(x.to(device), on_device, TorchOperations()).cpu()
    expected = loop(gate_up, down)(x.float(), routing, TorchOperations())
    for one in (moved(one, "cpu", torch.float32) for one in given):
        changed = loop(merged(gate_up, one.gate_up), merged(down, one.down))(x.float(), routing, TorchOperations())
        which = slice(None) if one.tokens is None else one.tokens
        assert not torch.allclose(changed[which], expected[which], atol=0.1)
        expected[which] = changed[which]
    torch.testing.assert_close(found.float(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(max_examples=examples(60), deadline=None)
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


@pytest.mark.parametrize("num_adapters", [0, 2])
def test_the_host_waits_for_nothing_and_launches_the_same_for_every_distribution(num_adapters: int) -> None:
    """As a CUDA graph needs it; the tensors have shapes and no data, so that nothing can depend on the data."""
    pytest.importorskip("msgspec", reason="needs packages that a bare GPU machine may lack")
    from scripts.benchmarks.engines.launches import META, counting_kernels

    experts = GroupedExperts(torch.empty(8, 64, 32, device=META), torch.empty(8, 32, 32, device=META))
    places, tokens = (torch.empty(length, dtype=torch.int64, device=META) for length in (8, 2))
    stacks = [
        ExpertStack(places, torch.empty(4, 16, 32, device=META), torch.empty(4, out, 16, device=META))
        for out in (64, 32)
    ]
    experts = experts.with_additions([ExpertAddition(*stacks, tokens)] * num_adapters)
    routing = Routing(
        torch.empty(5, 2, dtype=torch.int64, device=META), torch.empty(5, 2, dtype=torch.float32, device=META)
    )
    with counting_kernels() as counter:
        counter.pool = type("NoPool", (), {"pages": torch.empty(0)})()
        with counter:
            out = experts(torch.empty(5, 32, device=META), routing, TritonOperations())
    assert out.shape == (5, 32)
    assert counter.counts.num_syncs == 0
    assert counter.counts.launches["grouped_linear"] == 2 + 4 * num_adapters
