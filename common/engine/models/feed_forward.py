"""The feed-forward half of a layer: one gated network, or several experts of which each token takes a few."""

from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from common.config.shared import WeightDtype
from common.engine.cpu.huge_pages import HugePages
from common.engine.cpu.kernels import Groups
from common.engine.models.expert_config import ExpertConfig
from common.engine.models.layers import Operations
from common.engine.models.linear import GroupedLinear, Linear, group_linears
from common.engine.models.routing import Routing, route


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


class ExpertProduct(Protocol):
    def __call__(self, x: Tensor, routing: Routing, operations: Operations) -> Tensor:
        """Return for each row of ``x`` ``[rows, hidden]`` the weighted sum of its experts, in the dtype of ``x``."""
        ...


class Experts:
    """A router and the experts among which it chooses. Only experts that got tokens are read.

    The router keeps the model's dtype whatever the experts are rounded to: a rounded score may choose other experts.

    Args:
        router: its outputs are the scores of the experts.
        product: multiplies tokens with their experts.
    """

    __slots__ = ("config", "product", "router")

    def __init__(self, config: ExpertConfig, router: Linear, product: ExpertProduct) -> None:
        self.config = config
        self.router = router
        self.product = product

    def pack(self, dtype: WeightDtype, memory: HugePages) -> None:
        self.router.pack("auto", memory=memory)
        if isinstance(self.product, ExpertLoop):
            self.product.pack(dtype, memory)

    def __call__(self, x: Tensor, operations: Operations) -> Tensor:
        return self.product(x, route(self.router(x, torch.float32), self.config), operations)


def make_expert_product(gate_up: Tensor, down: Tensor) -> ExpertProduct:
    """Return Triton's kernel on CUDA if the package is there. The loop waits for the device in every layer.

    Args:
        gate_up: ``[experts, 2 * width, hidden]``; the rows of an expert are gate, up.
        down: ``[experts, hidden, width]``.
    """
    if gate_up.device.type == "cuda" and find_spec("triton"):
        from common.engine.triton_kernels.grouped_linear import GroupedExperts  # imports triton

        return GroupedExperts(gate_up, down)
    return ExpertLoop([Mlp(Linear(first), Linear(second)) for first, second in zip(gate_up, down, strict=True)])


class ExpertLoop:
    """One product after the other, each with the rows of one expert, which are gathered before.

    A row's result does not depend on the rows beside it where that of the products does not. Our kernels multiply all
    groups of rows in one call: for small experts, calls from here took a tenth of a decode step.
    """

    def __init__(self, experts: list[Mlp]) -> None:
        self.experts = experts
        self._gate_up: GroupedLinear | None = None
        self._down: GroupedLinear | None = None

    def pack(self, dtype: WeightDtype, memory: HugePages) -> None:
        for expert in self.experts:
            expert.pack(dtype, memory)
        self._gate_up = group_linears([expert.gate_up for expert in self.experts])
        self._down = group_linears([expert.down for expert in self.experts])

    def __call__(self, x: Tensor, routing: Routing, operations: Operations) -> Tensor:
        rows, num_per_token = routing.experts.shape
        taken = routing.experts.flatten()
        order = taken.argsort(stable=True)  # places of the pairs of token and expert, sorted by expert
        counts = torch.bincount(taken, minlength=len(self.experts))
        chosen = counts.nonzero()[:, 0]
        groups = Groups(chosen, counts[chosen].cumsum(0))
        tokens = order // num_per_token
        gate_up = self._multiply(x[tokens], groups, tokens, x.dtype, is_down=False)
        down = self._multiply(operations.silu_and_multiply(gate_up), groups, tokens, torch.float32, is_down=True)
        pairs = torch.empty_like(down)
        pairs[order] = down
        weighted = pairs.view(rows, num_per_token, -1) * routing.weights[..., None]
        return weighted.sum(dim=1).to(x.dtype)

    def _multiply(self, x: Tensor, groups: Groups, tokens: Tensor, dtype: torch.dtype, *, is_down: bool) -> Tensor:
        """Multiply each group of ``x`` ``[pairs, in]`` with its expert's matrix.

        Args:
            tokens: ``[pairs]``, the token of each pair, on which no product depends here.
        """
        grouped = self._down if is_down else self._gate_up
        if grouped is not None:
            return grouped(x, groups, dtype)
        parts = x.tensor_split(groups.ends[:-1].tolist())  # torch takes no tensor on a GPU here
        experts = [self.experts[number] for number in groups.weights.tolist()]
        linears = [expert.down if is_down else expert.gate_up for expert in experts]
        return torch.cat([linear(part, dtype) for linear, part in zip(linears, parts, strict=True)])
