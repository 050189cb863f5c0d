"""LoRA adapters on the linear layers of a decoder, several in one step (Hu et al., arXiv 2106.09685).

An adapter adds ``(x @ A.T) @ B.T`` to the result of a matrix, for the rows of the requests that have it. Rows without
an adapter, and those of other adapters, are left as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.cpu.kernels import LANES
from common.engine.device_copies import to_device
from common.engine.models.config import ModelConfig
from common.engine.models.feed_forward import Mlp
from common.engine.models.layer_weights import LayerWeights
from common.engine.models.linear import Linear
from common.engine.models.lora_checkpoint import AdapterCheckpoint, LowRankPair, shape_of

#: The matrices of ``LayerWeights``, and the matrices of a checkpoint that each is merged of.
MERGED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True)
class Addition:
    """What one adapter adds to one matrix of ``LayerWeights``.

    Attributes:
        down: ``[ranks, in]``, the A of all merged matrices below each other.
        up: ``[out, ranks]``, their B as blocks, the adapter's scale included.
    """

    down: Linear
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``[rows, in]`` to ``[rows, out]``."""
        return self.up(self.down(x))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoraWeights:
    """An adapter on a device.

    Attributes:
        digest: as in ``AdapterCheckpoint``.
        layers: of each layer, what is added to its matrices, by their names in ``MERGED``.
    """

    digest: str
    layers: Sequence[Mapping[str, Addition]]


def make_lora(adapter: AdapterCheckpoint, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoraWeights:
    """Merge the parts of an adapter as those of the model's matrices are, and pack them for this machine."""

    def layer(index: int) -> dict[str, Addition]:
        found: dict[str, Addition] = {}
        for matrix, modules in MERGED.items():
            parts = [adapter.pairs.get((index, module)) for module in modules]
            if any(parts):
                sizes = [shape_of(module, model)[0] for module in modules]
                found[matrix] = _merged(parts, sizes, dtype, device)
        return found

    return LoraWeights(adapter.digest, [layer(index) for index in range(model.num_layers)])


def _merged(
    parts: Sequence[LowRankPair | None], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Addition:
    """Put the pairs of merged matrices, with ``sizes`` outputs each, into one pair.

    Their ranks are filled up with zeros to a multiple that the kernels multiply fastest; zeros change no sum.
    """
    present = [part for part in parts if part is not None]
    num_ranks = sum(len(part.a) for part in present)
    down = torch.zeros(-(-num_ranks // LANES) * LANES, present[0].a.shape[1])
    up = torch.zeros(sum(sizes), len(down))
    rank = output = 0
    for part, size in zip(parts, sizes, strict=True):
        if part is not None:
            ranks = slice(rank, rank + len(part.a))
            down[ranks] = part.a.float()
            up[output : output + size, ranks] = part.b
            rank = ranks.stop
        output += size
    pair = Addition(*(Linear(weight.to(device=device, dtype=dtype)) for weight in (down, up)))
    pair.down.pack()
    pair.up.pack()
    return pair


@dataclass(frozen=True, slots=True)
class Share:
    """The tokens of a step that have one adapter.

    Attributes:
        tokens: ``[T]`` int64 on the device, their places in the step; None: all tokens.
    """

    adapter: LoraWeights
    tokens: Tensor | None


class AdaptedLinear(Linear):
    """A linear layer, and what adapters add to its result for the tokens that have them."""

    __slots__ = ("_additions",)

    def __init__(self, base: Linear, additions: Sequence[tuple[Addition, Tensor | None]]) -> None:
        self.weight, self.bias, self._product = base.weight, base.bias, base._product
        self._additions = additions

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        y = super().__call__(x, dtype, out)
        for addition, tokens in self._additions:
            if tokens is None:
                y += addition(x)
            else:
                y.index_add_(0, tokens, addition(x[tokens]).to(y.dtype))
        return y


class StepAdapters:
    """The adapters of one step.

    Args:
        of_row: the adapter of each row, or None.
        num_new: ``[R]`` new tokens of each row.
        kept: indices of the tokens that the last layer goes on with, as for ``Decoder.hidden_states``.
    """

    def __init__(
        self,
        of_row: Sequence[LoraWeights | None],
        num_new: NDArray[np.int64],
        kept: NDArray[np.int64],
        device: torch.device,
    ) -> None:
        distinct = list({id(adapter): adapter for adapter in of_row if adapter is not None}.values())
        numbers = {id(adapter): number for number, adapter in enumerate(distinct)}
        of_token = np.repeat([-1 if adapter is None else numbers[id(adapter)] for adapter in of_row], num_new)
        self._all = _shares(distinct, of_token, device)
        self._kept = _shares(distinct, of_token[kept], device)

    def layers(self, layers: Sequence[LayerWeights]) -> Iterator[LayerWeights]:
        """Return the layers of a model with the adapters of this step."""
        for index, layer in enumerate(layers):
            later = self._kept if index + 1 == len(layers) else self._all
            assert isinstance(layer.mlp, Mlp), "adapters of models with experts are refused"
            mlp = Mlp(
                _adapted(layer.mlp.gate_up, "gate_up", index, later), _adapted(layer.mlp.down, "down", index, later)
            )
            qkv = _adapted(layer.qkv, "qkv", index, self._all)
            yield replace(layer, qkv=qkv, o=_adapted(layer.o, "o", index, later), mlp=mlp)


def _shares(distinct: Sequence[LoraWeights], of_token: NDArray[np.int64], device: torch.device) -> list[Share]:
    shares: list[Share] = []
    for number, adapter in enumerate(distinct):
        tokens = np.flatnonzero(of_token == number)
        if len(tokens):
            is_all = len(tokens) == len(of_token)
            shares.append(Share(adapter, None if is_all else to_device(tokens, device)))
    return shares


def _adapted(base: Linear, matrix: str, index: int, shares: Sequence[Share]) -> Linear:
    found = [(addition, share.tokens) for share in shares if (addition := share.adapter.layers[index].get(matrix))]
    return AdaptedLinear(base, found) if found else base
