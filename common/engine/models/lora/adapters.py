"""LoRA adapters on the linear layers of a model, several in one step (Hu et al., arXiv 2106.09685).

An adapter adds ``(x @ A.T) @ B.T`` to the result of a matrix, for the rows of the requests that have it. Rows without
an adapter, and those of other adapters, are left as they are.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.cpu.huge_pages import HugePages
from common.engine.cpu.kernels import LANES, Groups
from common.engine.device_copies import to_device
from common.engine.models.config import ModelConfig
from common.engine.models.feed_forward import ExpertLoop, ExpertProduct, Experts, FeedForward, Mlp
from common.engine.models.layer_weights import LayerWeights
from common.engine.models.linear import Linear
from common.engine.models.lora.checkpoint import Adaptable, AdapterCheckpoint, LowRankPair
from common.engine.models.lora.expert_stack import ExpertAddition, ExpertStack, stack_experts
from common.engine.tensor_parallel.shard import WHOLE_MODEL, Shard

#: Outputs and inputs of a matrix.
Shape = tuple[int, int]
_EXPERTS = "experts."


class ExpertMatrix(NamedTuple):
    """A matrix of an expert of a model of the library.

    Attributes:
        parts: the matrices below each other that adapters may change in it.
        order: ``[out]`` int64, which of their outputs each of its outputs is; None: they are in order.
    """

    parts: Mapping[str, Shape]
    order: Tensor | None = None


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
        additions: what is added to matrices: of the native decoder by layer and name in ``_merged_matrices``, of others
            by name, and of their experts by the name of their module and that of the matrix in it.
        stacks: what is added to all experts of a layer where a kernel multiplies them, by layer and name of the matrix.
        expert_layers: the layers of whose experts it changes a matrix: their numbers, or names of modules.
        number: what the other ranks of a node know it by; 0 without ranks.
    """

    digest: str
    additions: Mapping[Hashable, Addition]
    stacks: Mapping[tuple[int, str], ExpertStack] = field(default_factory=dict)
    expert_layers: frozenset[Hashable] = frozenset()
    number: int = 0


def _merged_matrices(model: ModelConfig, layer: int) -> dict[str, dict[str, Shape]]:
    """Return the matrices of a layer, and the matrices of the checkpoint that each is merged of, with their shapes.

    Those of an expert have its number: ``experts.3.gate_up``.
    """
    hidden, queries, keys = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    experts = model.experts if model.experts is not None and layer in model.experts.layers else None

    def named(place: str, **shapes: Shape) -> dict[str, Shape]:
        names = {name: f"model.layers.{layer}.{place}.{name}.weight" for name in shapes}
        stored = names if experts is None else {name: experts.keys.stored_name(one) for name, one in names.items()}
        return {stored[name].removesuffix(".weight"): shape for name, shape in shapes.items()}

    def gated(place: str, prefix: str, wide: int) -> dict[str, dict[str, Shape]]:
        gate_up = named(place, gate_proj=(wide, hidden), up_proj=(wide, hidden))
        return {f"{prefix}gate_up": gate_up, f"{prefix}down": named(place, down_proj=(hidden, wide))}

    found = {
        "qkv": named("self_attn", q_proj=(queries, hidden), k_proj=(keys, hidden), v_proj=(keys, hidden)),
        "o": named("self_attn", o_proj=(hidden, queries)),
    }
    if experts is None:
        return found | gated("mlp", "", model.intermediate_size)
    found["router"] = named("mlp", gate=(experts.num_experts, hidden))
    for number in range(experts.num_experts):
        found |= gated(f"mlp.experts.{number}", f"{_EXPERTS}{number}.", experts.width)
    return found


def native_adaptable(model: ModelConfig) -> Adaptable:
    """Return what adapters may change of a native model.

    The library's classes have the matrices of all experts in two parameters, and that of the router in one.
    """
    layers = [_merged_matrices(model, layer) for layer in range(model.num_layers)]
    parameters: dict[str, dict[str, list[list[str]]]] = {}
    if model.experts is not None:
        for layer in model.experts.layers:
            place, merged = f"model.layers.{layer}.mlp", layers[layer]
            parameters[f"{place}.gate"] = {"weight": [list(merged["router"])]}
            parameters[f"{place}.experts"] = {
                f"{kind}_proj": [
                    list(merged[f"{_EXPERTS}{expert}.{kind}"]) for expert in range(model.experts.num_experts)
                ]
                for kind in ("gate_up", "down")
            }
    shapes = {name: shape for merged in layers for parts in merged.values() for name, shape in parts.items()}
    return Adaptable(shapes, parameters)


def make_lora(
    adapter: AdapterCheckpoint,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    shard: Shard = WHOLE_MODEL,
    has_expert_loop: bool = True,
) -> LoraWeights:
    """Merge the parts of an adapter as those of the model's matrices are, and pack them for this machine.

    Args:
        model: the whole model.
        shard: the part of it that the adapter is for. B is divided where the matrix is divided by its outputs, and A
            where it is divided by its inputs: then the sum over all ranks is that of the adapter, too.
        has_expert_loop: whether ``ExpertLoop`` multiplies with the experts; otherwise theirs are stacked for a kernel.
    """
    found: dict[Hashable, Addition] = {}
    stacks: dict[tuple[int, str], ExpertStack] = {}
    expert_layers: set[Hashable] = set()
    own_model, memory = shard.config_of(model), HugePages()
    for layer in range(model.num_layers):
        own_matrices = _merged_matrices(own_model, layer)
        stacked: dict[str, dict[int, LowRankPair]] = {}
        for matrix, shapes in _merged_matrices(model, layer).items():
            own = own_matrices[matrix]
            parts = [_part(adapter.pairs.get(name), shard.part_of(shapes[name], own[name])) for name in shapes]
            if not any(parts):
                continue
            merged = _merged(parts, [outputs for outputs, _ in own.values()])
            if matrix.startswith(_EXPERTS):
                expert_layers.add(layer)
                if not has_expert_loop:
                    expert, kind = matrix.removeprefix(_EXPERTS).split(".")
                    stacked.setdefault(kind, {})[int(expert)] = merged
                    continue
            found[layer, matrix] = _packed(merged, dtype, device, memory)
        for kind, pairs in stacked.items():
            assert model.experts is not None
            stacks[layer, kind] = stack_experts(pairs, model.experts.num_experts, dtype, device)
    return LoraWeights(adapter.digest, found, stacks, frozenset(expert_layers))


def _part(pair: LowRankPair | None, part: tuple[slice, ...]) -> LowRankPair | None:
    outputs, inputs = part
    return None if pair is None else LowRankPair(pair.a[:, inputs], pair.b[outputs])


def make_unmerged_lora(
    digest: str,
    pairs: Mapping[str, LowRankPair],
    experts: Mapping[str, Mapping[str, ExpertMatrix]],
    dtype: torch.dtype,
    device: torch.device,
) -> LoraWeights:
    """Pack an adapter for a model whose matrices are those of its checkpoint, except those of experts.

    Args:
        experts: by the name of their module, and that of the matrix in it.
    """
    found: dict[Hashable, Addition] = {}
    memory = HugePages()
    of_experts = {name for matrices in experts.values() for matrix in matrices.values() for name in matrix.parts}
    for name, pair in pairs.items():
        if name not in of_experts:
            found[name] = _packed(_merged([pair], [len(pair.b)]), dtype, device, memory)
    expert_layers: set[Hashable] = set()
    for module, matrices in experts.items():
        for matrix, (shapes, order) in matrices.items():
            parts = [pairs.get(name) for name in shapes]
            if any(parts):
                down, up = _merged(parts, [outputs for outputs, _ in shapes.values()])
                merged = LowRankPair(down, up if order is None else up[order])
                found[module, matrix] = _packed(merged, dtype, device, memory)
                expert_layers.add(module)
    return LoraWeights(digest, found, expert_layers=frozenset(expert_layers))


def _merged(parts: Sequence[LowRankPair | None], sizes: Sequence[int]) -> LowRankPair:
    """Put the pairs of merged matrices, with ``sizes`` outputs each, into one pair in float32.

    Their ranks are filled up with zeros to a multiple that the kernels multiply fastest; zeros change no sum. Those of
    one parameter have the same A.
    """
    present = [part for part in parts if part is not None]
    is_shared = len({(part.a.data_ptr(), part.a.shape) for part in present}) == 1
    num_ranks = len(present[0].a) if is_shared else sum(len(part.a) for part in present)
    down = torch.zeros(-(-num_ranks // LANES) * LANES, present[0].a.shape[1])
    up = torch.zeros(sum(sizes), len(down))
    rank = output = 0
    for part, size in zip(parts, sizes, strict=True):
        if part is not None:
            ranks = slice(rank, rank + len(part.a))
            down[ranks] = part.a.float()
            up[output : output + size, ranks] = part.b
            rank = 0 if is_shared else ranks.stop
        output += size
    return LowRankPair(down, up)


def _packed(pair: LowRankPair, dtype: torch.dtype, device: torch.device, memory: HugePages) -> Addition:
    """Pack a pair beside the others of its adapter: memory of its own would take a huge page for each matrix."""
    addition = Addition(*(Linear(weight.to(device=device, dtype=dtype)) for weight in pair))
    addition.down.pack(memory=memory)
    addition.up.pack(memory=memory)
    return addition


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


class AdaptedExpertLoop(ExpertLoop):
    """The products of experts, and what adapters add to their results for the tokens that have them.

    Args:
        index: of the layer in ``LoraWeights.expert_layers``.
    """

    def __init__(self, base: ExpertLoop, index: Hashable, shares: Sequence[Share]) -> None:
        super().__init__(base.experts)
        self._base = base
        self._index = index
        self._shares = shares

    def _multiply(self, x: Tensor, groups: Groups, tokens: Tensor, dtype: torch.dtype, *, is_down: bool) -> Tensor:
        y = self._base._multiply(x, groups, tokens, dtype, is_down=is_down)
        ends = groups.ends.tolist()
        for share in self._shares:
            has_it = None if share.tokens is None else torch.isin(tokens, share.tokens)
            for expert, first, end in zip(groups.weights.tolist(), [0, *ends], ends, strict=False):
                matrix = f"{_EXPERTS}{expert}.{'down' if is_down else 'gate_up'}"
                addition = share.adapter.additions.get((self._index, matrix))
                pairs = None if has_it is None else has_it[first:end].nonzero()[:, 0]
                if addition is not None and (pairs is None or len(pairs)):
                    addition.add_to(y[first:end], x[first:end], pairs)
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
            qkv = _adapted(layer.qkv, "qkv", index, self._all)
            o = _adapted(layer.o, "o", index, later)
            yield replace(layer, qkv=qkv, o=o, mlp=_adapted_feed_forward(layer.mlp, index, later))

    def matrices(self) -> dict[Hashable, list[tuple[Addition, Tensor | None]]]:
        """Return what is added to each matrix, except those of experts, of a model whose layers compute every token."""
        found: dict[Hashable, list[tuple[Addition, Tensor | None]]] = {}
        for share in self._all:
            for matrix, addition in share.adapter.additions.items():
                if isinstance(matrix, str):
                    found.setdefault(matrix, []).append((addition, share.tokens))
        return found

    def experts(self) -> dict[Hashable, list[Share]]:
        """Return the adapters that change the experts of each layer, for such a model."""
        found: dict[Hashable, list[Share]] = {}
        for share in self._all:
            for layer in share.adapter.expert_layers:
                found.setdefault(layer, []).append(share)
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


def _adapted_feed_forward(base: FeedForward, index: int, shares: Sequence[Share]) -> FeedForward:
    if isinstance(base, Mlp):
        return Mlp(_adapted(base.gate_up, "gate_up", index, shares), _adapted(base.down, "down", index, shares))
    assert isinstance(base, Experts)
    product = base.product
    if changing := [share for share in shares if index in share.adapter.expert_layers]:
        product = _adapted_product(product, index, changing)
    return Experts(base.config, _adapted(base.router, "router", index, shares), product)


def _adapted_product(base: ExpertProduct, index: int, shares: Sequence[Share]) -> ExpertProduct:
    if isinstance(base, ExpertLoop):
        return AdaptedExpertLoop(base, index, shares)
    from common.engine.triton_kernels.grouped_linear import GroupedExperts  # imports triton

    assert isinstance(base, GroupedExperts)
    stacks = [(share.adapter.stacks, share.tokens) for share in shares]
    return base.with_additions(
        [ExpertAddition(found.get((index, "gate_up")), found.get((index, "down")), tokens) for found, tokens in stacks]
    )
