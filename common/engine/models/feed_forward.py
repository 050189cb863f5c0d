"""The feed-forward half of a layer: one gated network, or several experts of which each token takes a few."""

from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from common.config.shared import WeightDtype
from common.engine.cpu.huge_pages import HugePages
from common.engine.models.expert_config import ExpertConfig
from common.engine.models.layers import Operations
from common.engine.models.linear import Linear


class FeedForward(Protocol):
    def pack(self, dtype: WeightDtype, memory: HugePages) -> None:
        """Round the matrices to ``dtype`` and repack them for this machine."""
        ...

    def __call__(self, x: Tensor, operations: Operations) -> Tensor:
        """Map contiguous ``[rows, hidden]`` to the same shape and dtype."""
        ...


class Mlp:
    """One gated network (SwiGLU, arXiv 2002.05202). The rows of ``gate_up`` are gate, up."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def pack(self, dtype: WeightDtype, memory: HugePages) -> None:
        self.gate_up.pack(dtype, memory=memory)
        self.down.pack(dtype, memory=memory)

    def __call__(self, x: Tensor, operations: Operations) -> Tensor:
        return self.down(operations.silu_and_multiply(self.gate_up(x)))


class Routing(NamedTuple):
    """Which experts each token takes.

    Attributes:
        experts: ``[rows, num_per_token]`` int64, the best first.
        weights: ``[rows, num_per_token]`` float32, factors of what the experts return.
    """

    experts: Tensor
    weights: Tensor


def route(scores: Tensor, config: ExpertConfig) -> Routing:
    """Choose the experts with the highest ``scores`` ``[rows, experts]`` float32 (Mixtral, arXiv 2401.04088).

    The weights are the softmax over all experts, divided by the sum of the chosen ones if the model says so.
    """
    weights, experts = scores.softmax(dim=-1).topk(config.num_per_token, dim=-1)
    if config.is_normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(experts, weights)


class ExpertProduct(Protocol):
    def __call__(self, x: Tensor, routing: Routing, operations: Operations) -> Tensor:
        """Return for each row of ``x`` ``[rows, hidden]`` the weighted sum of its experts, in the dtype of ``x``."""
        ...


class Experts:
    """A router and the experts among which it chooses. On CPUs only experts that got tokens are read.

    The router keeps the model's dtype whatever the experts are rounded to: a rounded score may choose other experts.

    Args:
        router: its outputs are the scores of the experts.
        gate_up: ``[experts, 2 * width, hidden]``; the rows of an expert are gate, up.
        down: ``[experts, hidden, width]``.
    """

    __slots__ = ("_config", "_product", "router")

    def __init__(self, config: ExpertConfig, router: Linear, gate_up: Tensor, down: Tensor) -> None:
        self._config = config
        self.router = router
        self._product: ExpertProduct = _make_product(gate_up, down)

    def pack(self, dtype: WeightDtype, memory: HugePages) -> None:
        self.router.pack("auto", memory=memory)
        if isinstance(self._product, ExpertLoop):
            for expert in self._product.experts:
                expert.pack(dtype, memory)

    def __call__(self, x: Tensor, operations: Operations) -> Tensor:
        return self._product(x, route(self.router(x, torch.float32), self._config), operations)


def _make_product(gate_up: Tensor, down: Tensor) -> ExpertProduct:
    """Return Triton's kernel on CUDA if the package is there. The loop waits for the device in every layer."""
    if gate_up.device.type == "cuda" and find_spec("triton"):
        from common.engine.triton_kernels.grouped_linear import GroupedExperts  # imports triton

        return GroupedExperts(gate_up, down)
    return ExpertLoop([Mlp(Linear(first), Linear(second)) for first, second in zip(gate_up, down, strict=True)])


class ExpertLoop:
    """One product after the other, each with the rows of one expert, which are gathered before.

    A row's result does not depend on the rows beside it where that of the products does not.
    """

    def __init__(self, experts: list[Mlp]) -> None:
        self.experts = experts

    def __call__(self, x: Tensor, routing: Routing, operations: Operations) -> Tensor:
        rows, num_per_token = routing.experts.shape
        taken = routing.experts.flatten()
        order = taken.argsort(stable=True)  # places of the pairs of token and expert, sorted by expert
        counts = torch.bincount(taken, minlength=len(self.experts)).tolist()
        gathered = x[order // num_per_token]
        chosen = [(expert, count) for expert, count in zip(self.experts, counts, strict=True) if count]
        sizes = [count for _, count in chosen]
        gate_up = [expert.gate_up(part) for (expert, _), part in zip(chosen, gathered.split(sizes), strict=True)]
        inner = operations.silu_and_multiply(torch.cat(gate_up))
        down = [expert.down(part, torch.float32) for (expert, _), part in zip(chosen, inner.split(sizes), strict=True)]
        pairs = torch.empty(len(taken), x.shape[1])
        pairs[order] = torch.cat(down)
        weighted = pairs.view(rows, num_per_token, -1) * routing.weights[..., None]
        return weighted.sum(dim=1).to(x.dtype)
