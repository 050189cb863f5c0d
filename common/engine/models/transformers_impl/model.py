"""Computes a model with its own class in the library transformers, over Baton's pages.

The library lets an attention function be registered by name, and hands it the queries, keys and values of a layer. The
one here writes the new keys and values into their pages and calls the attention backend of the step. All tokens of a
step are one row ``[1, N]`` with their positions: there is no padding and no mask, and the library keeps no cache.

The library's class is not changed, except that on a CPU its linear layers and experts are replaced by packed ones, that
ranks have parts of its parameters (``tp_plan``), and that the projection to the vocabulary runs apart from the layers,
only for the rows that need logits, and returns float32.
"""

import contextlib
import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from common.config.shared import WeightDtype
from common.engine.attention.protocol import AttentionParams, LayerParams, StepAttention
from common.engine.cpu.huge_pages import HugePages
from common.engine.kv_pool import TORCH_DTYPES
from common.engine.models.checkpoints.quantized.late_tensors import LateTensor, decoded_tensors
from common.engine.models.checkpoints.tensor_sources import CheckpointFiles
from common.engine.models.dummy_weights import DummyTensor
from common.engine.models.linear import Linear
from common.engine.models.lora.adapters import Addition, ExpertMatrix, LoraWeights, StepAdapters, make_unmerged_lora
from common.engine.models.lora.checkpoint import Adaptable, AdapterCheckpoint
from common.engine.models.transformers_impl.attention import AttentionHook, freeze_rope
from common.engine.models.transformers_impl.config import TransformersConfig, load_library_config, make_on_meta
from common.engine.models.transformers_impl.experts import PackedExperts, can_pack
from common.engine.models.transformers_impl.tp_plan import TpPlan
from common.engine.tensor_parallel.group import RankGroup
from common.engine.tensor_parallel.shard import WHOLE_MODEL, Shard
from common.errors import ConfigError, UnsupportedModelError

log = logging.getLogger(__name__)

#: Tells the library to read without threads, which would read ahead and hold many whole parameters.
_NO_READING_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"


class TransformersModel:
    """``CausalModel`` on a model of the library, or on one rank's part of it.

    Args:
        config: of the whole model.
        model: of a class for text generation, in evaluation mode; its layers are taken out of it.
        hook: the model's attention function.
        shard: the part that ``model`` is.
        group: the ranks that compute all parts together; None: ``model`` is whole.
        plan: by which ``model`` is divided; None: it is whole, or gets no adapters.
    """

    def __init__(
        self,
        config: TransformersConfig,
        model: Any,
        hook: AttentionHook,
        dtype: torch.dtype,
        *,
        shard: Shard = WHOLE_MODEL,
        group: RankGroup | None = None,
        plan: TpPlan | None = None,
    ) -> None:
        self.config = shard.with_own_heads(config)
        self._plan = plan
        self._hook = hook
        self._dtype = dtype
        self._group = group
        self._heads = _OwnHeads(config, shard)
        self._layers = model.base_model
        self._head = model
        self._linear_layers = _named_linear_layers(model)
        named = model.base_model.named_modules(prefix=model.base_model_prefix)
        self._experts = {name: layer for name, layer in named if plan is None and isinstance(layer, PackedExperts)}
        setattr(model, model.base_model_prefix, _GivenHiddenStates())
        self.attention_params: LayerParams = self._attention_params()

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        keep: Tensor | None = None,
        *,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        if self._group is not None:
            tokens = self._group.broadcast(tokens)
        calls = _PagedCalls(attention, self._dtype, self._heads, self._group)
        with contextlib.ExitStack() as added:
            for name, additions in ({} if adapters is None else adapters.matrices()).items():
                layer, _ = self._linear_layers[str(name)]
                hook = functools.partial(_add, additions)
                # Before the hooks of the plan, which join the outputs of all ranks.
                added.enter_context(layer.register_forward_hook(hook, prepend=True))
            for name, shares in ({} if adapters is None else adapters.experts()).items():
                added.enter_context(self._experts[str(name)].adapted(str(name), shares))
            hidden = self._hook.run(self._layers, tokens, positions, calls)
        return hidden if keep is None else hidden[keep]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float() if out is None else out.copy_(logits)

    @property
    def adaptable(self) -> Adaptable:
        plan, own = self._plan, {name: shape for name, (_, shape) in self._linear_layers.items()}
        if plan is not None:
            own = {name: plan.whole_shape(name, shape) for name, shape in own.items()}
        for matrix in (matrix for matrices in self._expert_matrices().values() for matrix in matrices.values()):
            own |= matrix.parts
        return Adaptable(own, {name: layer.parameters_of(name) for name, layer in self._experts.items()})

    def _expert_matrices(self) -> dict[str, dict[str, ExpertMatrix]]:
        return {name: layer.matrices_of(name) for name, layer in self._experts.items()}

    def make_lora(self, adapter: AdapterCheckpoint) -> LoraWeights:
        pairs, plan = adapter.pairs, self._plan
        if plan is not None:
            pairs = {name: plan.part_of_pair(name, pair) for name, pair in pairs.items()}
        device = next(self._layers.parameters()).device
        return make_unmerged_lora(adapter.digest, pairs, self._expert_matrices(), self._dtype, device)

    def _attention_params(self) -> LayerParams:
        params = []
        for index, layer in enumerate(self.config.layers):
            sinks = None if layer.sinks is None else self._layer_weight(index, layer.sinks).float()
            if sinks is not None and len(sinks) > self.config.num_heads:
                sinks = sinks[self._heads.queries]
            params.append(AttentionParams(layer.scale, layer.window, layer.soft_cap, sinks))
        return params

    def _layer_weight(self, layer: int, name: str) -> Tensor:
        found: Tensor
        (found,) = (
            module.get_parameter(name).data
            for module in self._layers.modules()
            if getattr(module, "layer_idx", None) == layer and name in dict(module.named_parameters(recurse=False))
        )
        return found


def _named_linear_layers(model: Any) -> dict[str, tuple[nn.Module, tuple[int, int]]]:
    """Return the linear layers with their outputs and inputs, by their names in checkpoints; none within experts.

    An adapter adds rows by the tokens of a step, of which experts compute only some. Shared experts compute all.
    """
    found: dict[str, tuple[nn.Module, tuple[int, int]]] = {}
    for name, layer in model.base_model.named_modules():
        if any("expert" in part and not part.startswith("shared_expert") for part in name.split(".")):
            continue
        if isinstance(layer, PackedLinear):
            found[f"{model.base_model_prefix}.{name}"] = layer, layer.shape
        elif type(layer) in (nn.Linear, Conv1D):
            found[f"{model.base_model_prefix}.{name}"] = layer, _shape_of(layer)
    return found


def _add(
    additions: Sequence[tuple[Addition, Tensor | None]], _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    """After a linear layer: add to its output what adapters add."""
    x = inputs[0].reshape(-1, inputs[0].shape[-1]).contiguous()
    rows = output.view(len(x), -1)
    for addition, tokens in additions:
        addition.add_to(rows, x, tokens)


class _OwnHeads:
    """The heads of a rank among those of the whole model."""

    def __init__(self, config: TransformersConfig, shard: Shard) -> None:
        num_own = config.num_heads // shard.size
        keys = shard.kv_heads(config.num_kv_heads)
        self.queries = slice(shard.rank * num_own, (shard.rank + 1) * num_own)
        self.keys = slice(keys.start, keys.stop)
        self.num_queries = num_own


class _PagedCalls:
    """Attention of one step over pages."""

    def __init__(self, attention: StepAttention, dtype: torch.dtype, heads: _OwnHeads, group: RankGroup | None) -> None:
        self._attention = attention
        self._dtype = dtype
        self._heads = heads
        self._group = group

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        own = self._heads
        if q.shape[1] == own.num_queries:
            return self._attend(module.layer_idx, q, k, v)[None]
        # The plan leaves attention whole. A rank computes its own heads all the same: its pages have no others.
        assert self._group is not None
        attended = self._attend(module.layer_idx, q[:, own.queries], k[:, own.keys], v[:, own.keys])
        return self._group.all_gather(attended.flatten(1)).view(1, len(attended), q.shape[1], -1)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention.extend(layer, *(self._packed(part) for part in (q, k, v)))

    def _packed(self, part: Tensor) -> Tensor:
        """Return ``[N, heads, size]`` of ``[1, heads, N, size]``; no copy where the library made a view of it."""
        rows = part[0].transpose(0, 1).to(self._dtype).contiguous()
        # A dimension of one element may have any stride; kernels read the strides.
        return rows.as_strided(rows.shape, (rows.shape[1] * rows.shape[2], rows.shape[2], 1))


class _Outputs:
    """Outputs of a model of the library, of which only the hidden states are there."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        assert index == 0
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


class _GivenHiddenStates(nn.Module):
    """In place of the layers of a model of the library: returns the hidden states that it gets as embeddings."""

    def forward(self, *_ids: Any, inputs_embeds: Tensor, **_: Any) -> _Outputs:
        return _Outputs(inputs_embeds)


def load_transformers_model(
    config: TransformersConfig,
    dtype: str,
    device: torch.device,
    weight_dtype: WeightDtype = "auto",
    shard: Shard = WHOLE_MODEL,
) -> Callable[[RankGroup | None], TransformersModel]:
    """Load the checkpoint in ``config.folder`` onto ``device``, converted to ``dtype`` (a resolved name).

    On a CPU weights stay in the mapped files until they are packed, one after the other; quantized ones are decoded
    first.

    Args:
        shard: the part to load.
    Returns:
        A function that makes the model once the ranks that compute it are connected.
    Raises:
        ConfigError: a tensor is missing or of the wrong shape; the message names it.
    """
    hook = AttentionHook()
    trust = config.trust_remote_code
    library_config = load_library_config(config.folder, config.overrides, trust_remote_code=trust)
    on_meta = make_on_meta(copy.deepcopy(library_config), config.folder, hook, trust_remote_code=trust)
    plan = None if shard == WHOLE_MODEL else TpPlan(config, on_meta, shard)
    with _reading_parts(plan, type(on_meta)) as kind:
        model = _load_weights(
            config,
            kind,
            library_config,
            _given_tensors(config, on_meta, TORCH_DTYPES[dtype]),
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=hook.name,
            trust_remote_code=trust,
        )
    if plan is not None:
        plan.check_divided(model)
    freeze_rope(model)
    if shard.rank:  # only rank 0 computes logits
        for name, part in list(model.named_children()):
            if part is not model.base_model:
                setattr(model, name, nn.Identity())
    model = model.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        pack(model, weight_dtype)
    else:
        widen_logits(model)

    def make(group: RankGroup | None) -> TransformersModel:
        if plan is not None and group is not None:
            plan.connect(model, group)
        return TransformersModel(config, model, hook, TORCH_DTYPES[dtype], shard=shard, group=group, plan=plan)

    return make


@contextlib.contextmanager
def _reading_parts(plan: TpPlan | None, kind: Any) -> Iterator[Any]:
    """Give the class to load: ``kind``, or one that reads one parameter after the other, and keeps a rank's parts."""
    if plan is None:
        yield kind
        return
    before = os.environ.get(_NO_READING_AHEAD)
    os.environ[_NO_READING_AHEAD] = "1"
    try:
        with plan.dividing(kind) as dividing:
            yield dividing
    finally:
        if before is None:
            del os.environ[_NO_READING_AHEAD]
        else:
            os.environ[_NO_READING_AHEAD] = before


def _given_tensors(config: TransformersConfig, on_meta: Any, dtype: torch.dtype) -> dict[str, LateTensor] | None:
    """Return the tensors that the library cannot read itself, by their names in the checkpoint; None: it can."""
    if config.has_dummy_weights:
        files = CheckpointFiles({})
        shapes = {name: tuple(one.shape) for name, one in on_meta.named_parameters()}
        return {name: LateTensor(DummyTensor(name, shape), files) for name, shape in shapes.items()}
    return None if config.quantization is None else decoded_tensors(config.folder, config.quantization, dtype)


def _load_weights(
    config: TransformersConfig, kind: Any, library_config: Any, tensors: dict[str, LateTensor] | None, **options: Any
) -> Any:
    source = {"pretrained_model_name_or_path": config.folder if tensors is None else None, "state_dict": tensors}
    try:
        model, loading = kind.from_pretrained(
            **source,
            config=library_config,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (ValueError, RuntimeError, KeyError, OSError, SafetensorError) as error:
        raise ConfigError(f"{config.folder}: transformers cannot load the weights ({error})") from error
    if not config.has_dummy_weights:
        _check_tensors(config, loading, tensors or {})
    return model


def _check_tensors(config: TransformersConfig, loading: Mapping[str, Any], decoded: Mapping[str, LateTensor]) -> None:
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"{config.folder}: the tensors do not match config.json: {', '.join(missing[:5])} missing"
            + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        )
    # AutoGPTQ gives every matrix a bias.
    unused = sorted(loading["unexpected_keys"])
    biases = [name for name in unused if name in decoded and name.endswith(".bias")]
    if lost := [name for name in biases if decoded[name][...].any()]:
        raise ConfigError(f"{config.folder}: the model has no {', '.join(lost[:5])}, which are not zero")
    # AWQ may divide the inputs of a matrix by scales in the activation before it; the library's plain class does not.
    if scales := [name for name in unused if name in decoded and name.endswith(".scales")]:
        raise UnsupportedModelError(
            f"{config.folder}: {scales[0]} belongs to no matrix; scales of activations are not supported"
        )
    unused = [name for name in unused if name not in biases]
    if unused:
        log.warning("%s: transformers has no use for %d tensors, such as %s", config.folder, len(unused), unused[0])


# ---- packed linear layers --------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A linear layer in the form in which this machine multiplies fastest.

    Args:
        shape: outputs and inputs.
        weight_dtype: of the plain weight.
        dtype: of the results, by default that of the inputs.
    Attributes:
        weight: without data, for classes that ask for its format.
    """

    def __init__(
        self,
        linear: Linear,
        shape: tuple[int, int],
        weight_dtype: torch.dtype,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._linear = linear
        self.shape = shape
        self.weight = torch.empty(shape, dtype=weight_dtype, device="meta")
        self._dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._linear(rows, self._dtype).view(*x.shape[:-1], -1)


def pack(model: Any, dtype: WeightDtype = "auto") -> None:
    """Round every linear layer to ``dtype`` and repack it for this machine, one at a time, so that memory is enough.

    So are experts, all of a layer at a time. The projection to the vocabulary is rounded to 8 bits at least. Other
    weights stay as they are.
    """
    memory = HugePages()
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    at_least_int8: WeightDtype = "int8" if dtype == "int4" else dtype
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if can_pack(layer):
                setattr(parent, name, PackedExperts(layer, dtype, memory))
            if (linear := _linear_of(layer)) is None:
                continue
            is_tied, is_head = layer.weight is embedding, layer is head
            linear.pack(at_least_int8 if is_head else dtype, memory=memory, keep_weight=is_tied, in_float32=is_head)
            results = torch.float32 if is_head else None
            setattr(parent, name, PackedLinear(linear, _shape_of(layer), layer.weight.dtype, results))


def widen_logits(model: Any) -> None:
    """Let the projection to the vocabulary return its sums in float32, without rounding them to the model's dtype."""
    head = model.get_output_embeddings()
    if (linear := _linear_of(head)) is not None:
        model.set_output_embeddings(PackedLinear(linear, _shape_of(head), head.weight.dtype, torch.float32))


def _shape_of(layer: Any) -> tuple[int, int]:
    """Return outputs and inputs of a linear layer."""
    rows, columns = layer.weight.shape
    return (columns, rows) if type(layer) is Conv1D else (rows, columns)


def _linear_of(layer: nn.Module) -> Linear | None:
    """Return the weights of a linear layer; None if it has none, or if the module is something else, or more."""
    found: Any = layer
    if type(layer) not in (nn.Linear, Conv1D) or not found.weight.numel():  # as without shared experts
        return None
    weight = found.weight.data
    if type(layer) is Conv1D:  # of GPT-2: the weight is [in, out]
        weight = weight.T.contiguous()
    return Linear(weight, None if found.bias is None else found.bias.data)
