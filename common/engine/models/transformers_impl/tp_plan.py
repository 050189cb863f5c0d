"""How a model of the library is divided among ranks: as the plan of its configuration says (``base_model_tp_plan``).

The plan names modules and parameters, each with a style. Only its names are the library's: Baton takes the part of each
parameter itself, and ranks meet in Baton's own group, since the library's code needs torch's global process
group. What the plan does not name is whole on every rank, and so is the embedding.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from common.engine.models.lora.checkpoint import LowRankPair
from common.engine.models.transformers_impl.attention import AttentionHook
from common.engine.models.transformers_impl.config import (
    TransformersConfig,
    load_library_config,
    make_on_meta,
    observe_attention,
)
from common.engine.tensor_parallel.shard import Shard
from common.errors import ConfigError, UnsupportedModelError


class Collectives(Protocol):
    """The operations of ``RankGroup`` that a divided model needs."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Style:
    """What a plan says about a module or a parameter.

    Attributes:
        divided: the side of a matrix that is divided; empty: it is whole on every rank.
        num_groups: merged matrices on that side, such as gate and up, each of which is divided.
        splits_input: whether the module gets its input whole, and has to take its part of it.
        joined: how the outputs of all ranks become one; empty: each goes on with its own.
    """

    divided: Literal["", "outputs", "inputs"] = ""
    num_groups: int = 1
    splits_input: bool = False
    joined: Literal["", "sum", "gather"] = ""


_STYLES = {
    "colwise": _Style("outputs"),
    "colwise_gather_output": _Style("outputs", joined="gather"),
    "colwise_rep": _Style("outputs", joined="gather"),
    "packed_colwise": _Style("outputs", num_groups=2),
    "rowwise": _Style("inputs", joined="sum"),
    "rowwise_split_input": _Style("inputs", splits_input=True, joined="sum"),
    "rowwise_rep": _Style("inputs", splits_input=True, joined="sum"),
    "packed_rowwise": _Style("inputs", num_groups=2),
    "moe_tp_experts": _Style(joined="sum"),
    "all_reduce": _Style(joined="sum"),
    # Whole here: embeddings, and what differs from a whole module in training only.
    "embedding_colwise": _Style(),
    "embedding_rowwise": _Style(),
    "local_params": _Style(),
    "mla_kv_a_proj": _Style(),
    "replicate": _Style(),
    "replicated_with_grad_allreduce": _Style(),
}
#: Modules of which several ranks have the same KV head where ranks are more than KV heads.
_KEYS_OR_VALUES = ("k_proj", "v_proj", "k_norm")


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of a parameter.

    Attributes:
        pieces: first index and length of what it has of dimension ``dim``; none: zeros in place of the parameter.
        size: of the whole parameter in this dimension.
    """

    dim: int
    pieces: tuple[tuple[int, int], ...]
    size: int = 0

    def of(self, whole: nn.Parameter) -> nn.Parameter:
        """Return a copy of the part, so that the whole parameter can be given back."""
        if self.pieces:
            part = self.cut(whole.data, self.dim)
        else:
            part = torch.zeros_like(whole.data)
        parameter = nn.Parameter(part, requires_grad=False)
        vars(parameter).update(vars(whole))  # the library's note that this is no random number any more
        return parameter

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """Return a copy of the pieces of a tensor's dimension ``dim``."""
        return torch.cat([whole.narrow(dim, *piece) for piece in self.pieces], dim)


class TpPlan:
    """One rank's part of a model, by the names of its parameters, and what joins the outputs of all ranks.

    Args:
        config: of the whole model.
        model: of the library; on the meta device, or any copy of it.
    Raises:
        ConfigError: the class has no plan, or this number of ranks does not allow the plan; the message says why.
    """

    def __init__(self, config: TransformersConfig, model: Any, shard: Shard) -> None:
        self._config = config
        self._shard = shard
        self._styles: dict[str, str] = model.tp_plan or {}
        self._parts: dict[str, _Part] = {}
        self._joined: dict[str, _Style] = {}
        for name, module in model.base_model.named_modules(prefix=model.base_model_prefix):
            if not isinstance(module, nn.Embedding):
                self._add(name, module)
        if not self._parts:
            raise self._refusal("transformers has no plan to divide this model (base_model_tp_plan)")

    def _add(self, name: str, module: nn.Module) -> None:
        given = self._styles.get(_without_numbers(name))
        style = self._style(name, given)
        if style.divided and type(module) is not nn.Linear:
            raise self._refusal(f"its plan divides {name}, which is not a plain linear layer")
        if style.joined:
            self._joined[name] = style
        for own, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{own}"
            named = "colwise" if given is None and self._is_norm_of_heads(name, parameter) else given
            kind = self._style(full, self._styles.get(_without_numbers(full), named))
            if kind.divided == "inputs" and kind.joined and own == "bias":
                if self._shard.rank:  # rank 0 alone adds it to the sum
                    self._parts[full] = _Part(0, ())
            elif kind.divided and parameter.numel():  # without shared experts they have no numbers
                self._parts[full] = self._part(full, parameter, kind)

    def _style(self, name: str, given: str | None) -> _Style:
        if given is not None and given not in _STYLES:
            raise self._refusal(f"its plan divides {name} in the style {given}, which Baton does not know")
        return _STYLES["replicate" if given is None else given]

    def _is_norm_of_heads(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a norm that no plan names has weights for each head of a projection that is divided (Command R+)."""
        num_heads = {"q_norm": self._config.num_heads, "k_norm": self._config.num_kv_heads}.get(name.split(".")[-1])
        projection = _without_numbers(name).removesuffix("norm") + "proj"
        return parameter.shape == (num_heads, self._config.head_dim) and self._styles.get(projection) == "colwise"

    def _part(self, name: str, parameter: nn.Parameter, style: _Style) -> _Part:
        dim = max(parameter.ndim - 2, 0) if style.divided == "outputs" else parameter.ndim - 1
        size, shard, num_kv_heads = parameter.shape[dim], self._shard, self._config.num_kv_heads
        in_group = size // style.num_groups
        length = in_group // shard.size
        is_shared = name.split(".")[-2] in _KEYS_OR_VALUES and num_kv_heads < shard.size
        if is_shared and style == _STYLES["colwise"] and size % num_kv_heads == 0:
            length = size // num_kv_heads
        elif size % (style.num_groups * shard.size):
            of = "" if style.num_groups == 1 else f" in {style.num_groups} groups"
            raise self._refusal(
                f"{name} has {size} {style.divided}{of}, which {shard.size} ranks cannot divide",
                "give a --tp that divides them, or leave it out",
            )
        [own] = shard.part_of((in_group,), (length,))
        return _Part(dim, tuple((group * in_group + own.start, length) for group in range(style.num_groups)), size)

    def _refusal(self, reason: str, fix: str = "leave out --tp") -> ConfigError:
        number, config = self._shard.size, self._config
        return ConfigError(f"--tp {number}: {config.architecture} cannot be divided: {reason}; {fix}")

    def whole_shape(self, matrix: str, own: tuple[int, int]) -> tuple[int, int]:
        """Return outputs and inputs of a whole matrix, from those of this rank's part of it."""
        part = self._parts.get(f"{matrix}.weight")
        if part is None:
            return own
        return (part.size, own[1]) if part.dim == 0 else (own[0], part.size)

    def part_of_pair(self, matrix: str, pair: LowRankPair) -> LowRankPair:
        """Return what an adapter adds to this rank's part of a matrix."""
        part = self._parts.get(f"{matrix}.weight")
        if part is None:
            return pair
        return LowRankPair(pair.a, part.cut(pair.b, 0)) if part.dim == 0 else LowRankPair(part.cut(pair.a, 1), pair.b)

    def divide(self, model: Any) -> None:
        """Replace every parameter of a model by this rank's part of it."""
        for name, part in self._parts.items():
            module_name, _, own = name.rpartition(".")
            module = model.get_submodule(module_name)
            module.register_parameter(own, part.of(module.get_parameter(own)))

    @contextlib.contextmanager
    def dividing(self, kind: Any) -> Iterator[Any]:
        """Give a class like ``kind`` whose models keep this rank's part of each parameter that the library reads.

        So no more than one parameter is in memory as a whole, or one layer's experts where the library stacks them.
        """
        parts: dict[nn.Module, dict[str, _Part]] = {}

        def begin(model: Any, *args: Any, **options: Any) -> None:
            kind.__init__(model, *args, **options)
            for name, part in self._parts.items():
                module_name, _, own = name.rpartition(".")
                parts.setdefault(model.get_submodule(module_name), {})[own] = part
            head = model.get_output_embeddings()
            if self._shard.rank and isinstance(head, nn.Linear) and not model.config.tie_word_embeddings:
                parts[head] = {"weight": _Part(0, ((0, 0),))}  # only rank 0 computes logits

        def keep_part(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
            part = parts.get(module, {}).get(name)
            return None if part is None or parameter.is_meta else part.of(parameter)

        # torch's type leaves out that a hook may return another parameter.
        handle = register_module_parameter_registration_hook(keep_part)  # type: ignore[arg-type]
        try:  # the library reads the source of the class's module
            yield type(kind.__name__, (kind,), {"__init__": begin, "__module__": kind.__module__})
        finally:
            handle.remove()

    def check_divided(self, model: Any) -> None:
        """Refuse a loaded model of which a parameter is not this rank's part of it.

        Raises:
            ConfigError: names the parameter.
        """
        for name, part in self._parts.items():
            parameter = model.get_parameter(name)
            length = sum(length for _, length in part.pieces)
            if parameter.shape[part.dim] != length if part.pieces else parameter.any():
                raise self._refusal(f"this release of transformers has loaded {name} whole")

    def connect(self, model: Any, ranks: Collectives) -> None:
        """Have a divided model split inputs, and sum and gather outputs, over all ranks."""
        shard = self._shard

        def split(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return inputs[0].chunk(shard.size, dim=-1)[shard.rank], *inputs[1:]

        def total(_: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            return ranks.all_reduce(output.contiguous())

        def gather(_: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            return ranks.all_gather(output.contiguous())

        for name, style in self._joined.items():
            module = model.get_submodule(name)
            if style.splits_input:
                module.register_forward_pre_hook(split)
            module.register_forward_hook(total if style.joined == "sum" else gather)


def _without_numbers(name: str) -> str:
    """Return the name of a module as plans have it: ``layers.*.mlp``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


class _MetaRanks:
    """``Collectives`` of tensors without memory."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], self._num_ranks * x.shape[-1])


def check_tp_plan(config: TransformersConfig, num_ranks: int) -> None:
    """Refuse a number of ranks among which this model cannot be divided, before any weight is read.

    Raises:
        ConfigError: names the reason.
    """
    shard = Shard(0, num_ranks)
    own = shard.with_own_heads(config)
    trust, hook = config.trust_remote_code, AttentionHook()
    library_config = load_library_config(config.folder, config.overrides, trust_remote_code=trust)
    model = make_on_meta(library_config, config.folder, hook, trust_remote_code=trust)
    plan = TpPlan(config, model, shard)
    plan.divide(model)
    plan.connect(model, _MetaRanks(num_ranks))
    try:
        found = observe_attention(model, config.folder, hook)[:4]
    except UnsupportedModelError as error:
        raise ConfigError(f"--tp {num_ranks}: {error}; leave out --tp") from error
    # Each rank computes its heads, or all of them where the plan leaves attention whole.
    part, whole = ((one.num_heads, one.num_kv_heads, one.head_dim, one.value_dim) for one in (own, config))
    if found not in (part, whole):
        raise ConfigError(
            f"--tp {num_ranks}: {config.architecture} cannot be divided: its plan gives a rank {found} (query heads, "
            f"KV heads, key size, value size), which is neither its part {part} nor all of {whole}; leave out --tp"
        )
