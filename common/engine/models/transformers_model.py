"""Computes a model with its own class in the library transformers, over Baton's pages.

The library lets an attention function be registered by name, and hands it the queries, keys and values of a layer. The
one here writes the new keys and values into their pages and calls the attention backend of the step. All tokens of a
step are one row ``[1, N]`` with their positions: there is no padding and no mask, and the library keeps no cache.

The library's class is not changed, except that on a CPU its linear layers are replaced by packed ones, and that the
projection to the vocabulary runs apart from the layers, only for the rows that need logits.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from common.config.shared import WeightDtype
from common.engine.attention.protocol import AttentionParams, LayerParams, StepAttention
from common.engine.cpu.huge_pages import HugePages
from common.engine.kv_pool import TORCH_DTYPES
from common.engine.models.linear import Linear
from common.engine.models.lora import StepAdapters
from common.engine.models.transformers_attention import AttentionHook, freeze_rope
from common.engine.models.transformers_config import TransformersConfig, load_library_config
from common.errors import ConfigError

log = logging.getLogger(__name__)


class TransformersModel:
    """``CausalModel`` on a model of the library.

    Args:
        model: of a class for text generation, in evaluation mode; its layers are taken out of it.
        hook: the model's attention function.
    """

    def __init__(self, config: TransformersConfig, model: Any, hook: AttentionHook, dtype: torch.dtype) -> None:
        self.config = config
        self._hook = hook
        self._dtype = dtype
        self._layers = model.base_model
        self._head = model
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
        assert adapters is None, "only the native decoder has LoRA adapters"
        hidden = self._hook.run(self._layers, tokens, positions, _PagedCalls(attention, self._dtype))
        return hidden if keep is None else hidden[keep]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float() if out is None else out.copy_(logits)

    def _attention_params(self) -> LayerParams:
        params = []
        for index, layer in enumerate(self.config.layers):
            sinks = None if layer.sinks is None else self._layer_weight(index, layer.sinks).float()
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


class _PagedCalls:
    """Attention of one step over pages."""

    def __init__(self, attention: StepAttention, dtype: torch.dtype) -> None:
        self._attention = attention
        self._dtype = dtype

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        parts = (self._packed(part) for part in (q, k, v))
        return self._attention.extend(module.layer_idx, *parts)[None]

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
    config: TransformersConfig, dtype: str, device: torch.device, weight_dtype: WeightDtype = "auto"
) -> TransformersModel:
    """Load the checkpoint in ``config.folder`` onto ``device``, converted to ``dtype`` (a resolved name).

    On a CPU weights stay in the mapped files until they are packed, one after the other.

    Raises:
        ConfigError: a tensor is missing or of the wrong shape; the message names it.
    """
    library_config = load_library_config(config.folder, config.overrides, trust_remote_code=config.trust_remote_code)
    hook = AttentionHook()
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            config.folder,
            config=library_config,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=hook.name,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise ConfigError(f"{config.folder}: transformers cannot load the weights ({error})") from error
    _check_tensors(config, loading)
    freeze_rope(model)
    model = model.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        pack(model, weight_dtype)
    return TransformersModel(config, model, hook, TORCH_DTYPES[dtype])


def _check_tensors(config: TransformersConfig, loading: Mapping[str, Any]) -> None:
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"{config.folder}: the tensors do not match config.json: {', '.join(missing[:5])} missing"
            + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        )
    if unused := sorted(loading["unexpected_keys"]):
        log.warning("%s: transformers has no use for %d tensors, such as %s", config.folder, len(unused), unused[0])


# ---- packed linear layers --------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A linear layer in the form in which this machine multiplies fastest."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._linear(rows).view(*x.shape[:-1], -1)


def pack(model: Any, dtype: WeightDtype = "auto") -> None:
    """Round every linear layer to ``dtype`` and repack it for this machine, one at a time, so that memory is enough.

    The projection to the vocabulary is rounded to 8 bits at least. Weights that are no linear layers, such as those of
    experts in one tensor, stay as they are.
    """
    memory = HugePages()
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    at_least_int8: WeightDtype = "int8" if dtype == "int4" else dtype
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if (linear := _linear_of(layer)) is None:
                continue
            is_tied = layer.weight is embedding
            linear.pack(at_least_int8 if layer is head else dtype, memory=memory, keep_weight=is_tied)
            setattr(parent, name, PackedLinear(linear))


def _linear_of(layer: nn.Module) -> Linear | None:
    """Return the weights of a linear layer; None if the module is something else, or more than that."""
    if type(layer) not in (nn.Linear, Conv1D):
        return None
    found: Any = layer
    weight = found.weight.data
    if type(layer) is Conv1D:  # of GPT-2: the weight is [in, out]
        weight = weight.T.contiguous()
    return Linear(weight, None if found.bias is None else found.bias.data)
