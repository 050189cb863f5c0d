"""Experts: which are chosen, which are read, and that no token changes the answer of another."""

import pytest
import torch
from torch import Tensor

from common.config.shared import WeightDtype
from common.engine.cpu.huge_pages import HugePages
from common.engine.models.expert_config import QWEN_EXPERTS, ExpertConfig
from common.engine.models.feed_forward import ExpertLoop, Experts, Mlp, make_expert_product
from common.engine.models.layers import TorchOperations
from common.engine.models.linear import Linear, group_linears
from common.engine.models.routing import Routing, route

HIDDEN, WIDTH = 64, 32


def expert_config(num_experts: int = 16, num_per_token: int = 3, *, is_normalised: bool = True) -> ExpertConfig:
    return ExpertConfig(num_experts, num_per_token, WIDTH, is_normalised, (0,), QWEN_EXPERTS)


def experts_of(config: ExpertConfig, router: Tensor, gate_up: Tensor, down: Tensor) -> Experts:
    return Experts(config, Linear(router), make_expert_product(gate_up, down))


def make_experts(config: ExpertConfig, dtype: torch.dtype = torch.float32) -> tuple[Experts, Tensor, Tensor, Tensor]:
    """Return experts, and the weights of their router, of gate and up, and of down."""
    torch.manual_seed(1)
    router = torch.randn(config.num_experts, HIDDEN) / 8
    gate_up, down = (
        torch.randn(config.num_experts, 2 * WIDTH, HIDDEN) / 8,
        torch.randn(config.num_experts, HIDDEN, WIDTH),
    )
    tensors = router.to(dtype), gate_up.to(dtype), down.to(dtype)
    return experts_of(config, *tensors), *tensors


def expected_row(x: Tensor, config: ExpertConfig, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The sum over the experts of one token, by the definition, in float64."""
    weights = (router.double() @ x.double()).softmax(0)
    chosen = weights.argsort(descending=True)[: config.num_per_token].tolist()
    total = sum(float(weights[expert]) for expert in chosen) if config.is_normalised else 1.0
    out = torch.zeros(HIDDEN, dtype=torch.float64)
    for expert in chosen:
        gate, up = (gate_up[expert].double() @ x.double()).chunk(2)
        out += weights[expert] / total * (down[expert].double() @ (torch.nn.functional.silu(gate) * up))
    return out


def test_the_best_experts_are_chosen_with_the_softmax_over_all() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    found = route(scores, expert_config(4, 2, is_normalised=False))
    assert found.experts.tolist() == [[1, 2]]
    assert torch.allclose(found.weights, scores.softmax(1)[:, 1:3])
    normalised = route(scores, expert_config(4, 2))
    assert torch.allclose(normalised.weights, torch.tensor([[2.0, 1.0]]).softmax(1))  # the rest cancels


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_each_row_is_the_weighted_sum_of_its_experts(num_rows: int, is_normalised: bool) -> None:
    config = expert_config(is_normalised=is_normalised)
    experts, *tensors = make_experts(config)
    x = torch.randn(num_rows, HIDDEN)
    expected = torch.stack([expected_row(row, config, *tensors) for row in x])
    torch.testing.assert_close(experts(x, TorchOperations()).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.cuda
def test_a_gpu_without_triton_multiplies_one_expert_after_the_other() -> None:
    config = expert_config()
    experts, _, gate_up, down = make_experts(config)
    x, routing = torch.randn(5, HIDDEN), route(torch.randn(5, config.num_experts), config)
    expected = experts.product(x, routing, TorchOperations())
    loop = ExpertLoop([Mlp(Linear(one.cuda()), Linear(two.cuda())) for one, two in zip(gate_up, down, strict=True)])
    found = loop(x.cuda(), Routing(*(part.cuda() for part in routing)), TorchOperations())
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_experts_without_tokens_are_not_read() -> None:
    """An expert that is not a number would show in the sum, even with a weight of zero."""
    config = expert_config(8, 2)
    _, router, gate_up, down = make_experts(config)
    x = torch.randn(3, HIDDEN)
    taken = set(route(x @ router.T, config).experts.flatten().tolist())
    expected = experts_of(config, router, gate_up, down)(x, TorchOperations())
    for expert in set(range(8)) - taken:
        gate_up[expert] = down[expert] = float("nan")
    assert len(taken) < 8
    assert torch.equal(experts_of(config, router, gate_up, down)(x, TorchOperations()), expected)


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
def test_packed_experts_give_nearly_the_same_and_no_row_depends_on_the_others(dtype: WeightDtype) -> None:
    config = expert_config()
    plain, *_ = make_experts(config, torch.bfloat16)
    packed, *_ = make_experts(config, torch.bfloat16)
    packed.pack(dtype, HugePages(0))
    x = torch.randn(23, HIDDEN).bfloat16()
    found = packed(x, TorchOperations())
    expected = plain(x, TorchOperations())
    distance = (found.float() - expected.float()).norm() / expected.float().norm()
    assert distance < {"auto": 0.02, "int8": 0.03, "int4": 0.2}[dtype]
    if dtype != "auto":  # with oneDNN, a plain product may depend on the number of rows
        alone = torch.cat([packed(row, TorchOperations()) for row in x.split(1)])
        assert torch.equal(found, alone)


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
def test_one_call_for_all_experts_has_the_bits_of_a_call_for_each(
    dtype: WeightDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = expert_config()
    x = torch.randn(37, HIDDEN).bfloat16()
    found = []
    for group in (group_linears, lambda _: None):
        monkeypatch.setattr("common.engine.models.feed_forward.group_linears", group)
        experts, *_ = make_experts(config, torch.bfloat16)
        experts.pack(dtype, HugePages(0))
        found.append(experts(x, TorchOperations()))
    assert torch.equal(*found)


def test_the_router_is_not_rounded() -> None:
    experts, router, *_ = make_experts(expert_config())
    experts.pack("int4", HugePages(0))
    x = torch.randn(9, HIDDEN)
    torch.testing.assert_close(experts.router(x), x @ router.T)


def test_packed_experts_do_not_keep_their_plain_weights() -> None:
    experts, *_ = make_experts(expert_config(), torch.bfloat16)
    experts.pack("int8", HugePages(0))
    assert isinstance(experts.product, ExpertLoop)
    for expert in experts.product.experts:
        assert isinstance(expert, Mlp)
        assert (expert.gate_up.weight, expert.down.weight) == (None, None)
