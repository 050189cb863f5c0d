"""LoRA adapters on the linear layers of a model, several in one step (Hu et al., arXiv 2106.09685).

An adapter adds ``(x @ A.T) @ B.T`` to the result of a matrix, for the rows of the requests that have it. Rows without
an adapter, and those of other adapters, are left as they are.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
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
from common.engine.models.lora.checkpoint import AdapterCheckpoint, LowRankPair

#: The matrices of ``LayerWeights``, and the matrices of a checkpoint that each is merged of.
MERGED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True)
class Addition:
    """What one adapter adds to one matrix.

    Attributes:
        down: ``[ranks, in]``, the A of all matrices below each other that are merged into this one.
        up: ``[out, ranks]``, their B as blocks, the adapter's scale included.
    """

    down: Linear
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``[rows, in]`` to ``[rows, out]``."""
        return self.up(self.down(x))

    def add_to(self, y: Tensor, x: Tensor, tokens: Tensor | None) -> None:
        """Add to ``y`` ``[rows, out]`` what ``x`` ``[rows, in]`` gives for these tokens; None: for all."""
        if tokens is None:
            y += self(x)
        else:
            y.index_add_(0, tokens, self(x[tokens]).to(y.dtype))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoraWeights:
    """An adapter on a device.

    Attributes:
        digest: as in ``AdapterCheckpoint``.
        additions: what is added to matrices: of the native decoder by layer and name in ``MERGED``, of others by name.
    """

    digest: str
    additions: Mapping[Hashable, Addition]


def native_matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the matrices of a native model that adapters may change, by their names.

    There are none if it has experts.
    """
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, wide = model.hidden_size, model.intermediate_size
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    num_layers = model.num_layers if model.experts is None else 0
    return {f"model.layers.{layer}.{name}": shape for layer in range(num_layers) for name, shape in shapes.items()}


def make_lora(adapter: AdapterCheckpoint, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoraWeights:
    """Merge the parts of an adapter as those of the model's matrices are, and pack them for this machine."""
    shapes = native_matrices(model)
    found: dict[Hashable, Addition] = {}
    for layer in range(model.num_layers):
        for matrix, modules in MERGED.items():
            names = [f"model.layers.{layer}.{module}" for module in modules]
            parts = [adapter.pairs.get(name) for name in names]
            if any(parts):
                found[layer, matrix] = _merged(parts, [shapes[name][0] for name in names], dtype, device)
    return LoraWeights(adapter.digest, found)


def make_unmerged_lora(adapter: AdapterCheckpoint, dtype: torch.dtype, device: torch.device) -> LoraWeights:
    """Pack an adapter for a model whose matrices are those of its checkpoint."""
    found: dict[Hashable, Addition] = {}
    for name, pair in adapter.pairs.items():
        found[name] = _merged([pair], [len(pair.b)], dtype, device)
    return LoraWeights(adapter.digest, found)


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
            addition.add_to(y, x, tokens)
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

    def matrices(self) -> dict[Hashable, list[tuple[Addition, Tensor | None]]]:
        """Return what is added to each matrix of a model whose layers all compute every token."""
        found: dict[Hashable, list[tuple[Addition, Tensor | None]]] = {}
        for share in self._all:
            for matrix, addition in share.adapter.additions.items():
                found.setdefault(matrix, []).append((addition, share.tokens))
        return found


def _shares(distinct: Sequence[LoraWeights], of_token: NDArray[np.int64], device: torch.device) -> list[Share]:
    shares: list[Share] = []
    for number, adapter in enumerate(distinct):
        tokens = np.flatnonzero(of_token == number)
        if len(tokens):
            is_all = len(tokens) == len(of_token)
            shares.append(Share(adapter, None if is_all else to_device(tokens, device)))
    return shares


def _adapted(base: Linear, matrix: str, index: int, shares: Sequence[Share]) -> Linear:
    found = [(addition, share.tokens) for share in shares if (addition := share.adapter.additions.get((index, matrix)))]
    return AdaptedLinear(base, found) if found else base
