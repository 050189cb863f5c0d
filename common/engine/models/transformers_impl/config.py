"""Reads the configuration of a model whose own class in the library transformers computes it.

What the pages and the attention backend have to know is observed and not derived from names in config.json: the model
is made on the meta device, without memory for weights, and runs two tokens through an attention function that only
notes how it is called. This module imports transformers, and with it torch, when it is used.
"""

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from common.engine.models.base_config import LENGTH_DEPENDENT_ROPE, BaseModelConfig, LayerAttention
from common.engine.models.checkpoints.checkpoint import (
    MAX_LAYERS,
    Numbers,
    StoredTensor,
    locate,
    read_json,
    stored_tensors,
)
from common.engine.models.checkpoints.quantized.config import CheckpointQuantization, parse_quantization
from common.engine.models.config import digest_of, eos_token_ids, generation_defaults, main_dtype, named_dtype
from common.errors import ConfigError, UnsupportedModelError, needs_extra

if TYPE_CHECKING:
    from torch import Tensor

    from common.engine.models.transformers_impl.attention import AttentionHook

log = logging.getLogger(__name__)

#: Architectures whose tiny models give the library's tokens, token for token, in Baton's tests. Of others, a reduced
#: copy is compared at each start.
TESTED = frozenset(
    {
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "DeepseekV3ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5ForCausalLM",
        "Exaone4ForCausalLM",
        "FlexOlmoForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTNeoXForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "NemotronForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoeForCausalLM",
        "OlmoForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "PhimoeForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
#: Keys of config.json that ``rope_parameters`` has replaced.
_OLD_ROPE_KEYS = ("rope_theta", "rope_scaling")
#: Keys from which the library derives ``layer_types`` where a file has none.
_MAKE_LAYER_TYPES = ("sliding_window_pattern", "max_window_layers")
#: Keywords of attention functions that the backends of Baton understand.
_UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
#: Keywords that say what holds anyway, or nothing about the result of attention.
_WITHOUT_EFFECT = frozenset(
    {"use_cache", "position_ids", "position_embeddings", "is_causal", "cache_position", "output_attentions"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(BaseModelConfig):
    """Configuration of a model that transformers computes.

    Attributes:
        architecture: name of the model's class.
        overrides: keys of config.json that have other values than in the file.
        trust_remote_code: whether code of the checkpoint may run.
        layer_attention: how each layer attends.
        quantization: of the checkpoint, whose matrices are decoded when they are loaded; None: they are plain.
        has_unseen_window: whether the library may apply a window that it does not name to the attention function, as
            classes do whose windows are only in their masks.
    """

    architecture: str
    overrides: Mapping[str, Any]
    trust_remote_code: bool
    layer_attention: tuple[LayerAttention, ...]
    values_per_head: int
    quantization: CheckpointQuantization | None = None
    has_unseen_window: bool = False

    @property
    def implementation(self) -> Literal["native", "transformers"]:
        return "transformers"

    @property
    def value_dim(self) -> int:
        return self.values_per_head

    @property
    def layers(self) -> tuple[LayerAttention, ...]:
        return self.layer_attention

    @classmethod
    def load(
        cls,
        path_or_hub_id: str,
        *,
        revision: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        has_dummy_weights: bool = False,
    ) -> "TransformersConfig":
        """Read a model's configuration from a local folder or from the Hugging Face hub.

        Args:
            has_dummy_weights: there need be no weights.
        Raises:
            ConfigError: the folder or model does not exist, or a file is damaged.
            UnsupportedModelError: the model cannot be computed over pages; the message says why.
        """
        folder = locate(path_or_hub_id, revision, with_weights=not has_dummy_weights, with_code=trust_remote_code)
        overrides = overrides or {}
        stored = {**read_json(folder / "config.json"), **overrides}
        generation = read_json(folder / "generation_config.json", required=False)
        Numbers(stored, folder).positive("num_hidden_layers", 1, most=MAX_LAYERS)  # the library makes all of them
        tensors = None if has_dummy_weights else stored_tensors(folder)
        if trust_remote_code:
            _warn_of_code("AutoConfig", stored.get("auto_map"), folder)
        config = load_library_config(folder, overrides, trust_remote_code=trust_remote_code)
        refuse_by_configuration(config, stored, folder)
        if tensors is None:
            quantization, dtype = None, named_dtype(stored, folder)
        else:
            quantization = parse_quantization(stored.get("quantization_config"), folder)
            dtype = main_dtype(_numbers(tensors), quantization, folder)
        hook = _make_hook()
        if trust_remote_code:
            _warn_of_code("AutoModelForCausalLM", getattr(config, "auto_map", None), folder)
        model = make_on_meta(config, folder, hook, trust_remote_code=trust_remote_code)
        shape = observe_attention(model, folder, hook)
        context_length = _context_length(config, folder)
        code = _digests_of_code(folder) if trust_remote_code else {}
        return cls(
            folder=folder,
            num_layers=len(shape.layers),
            hidden_size=config.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            values_per_head=shape.value_dim,
            intermediate_size=_intermediate_size(config),
            vocab_size=config.vocab_size,
            context_length=context_length,
            dtype=dtype,
            # The default of the library's class may be an ordinary token of this model.
            eos_token_ids=eos_token_ids(folder, generation, stored)
            or eos_token_ids(folder, {"eos_token_id": config.eos_token_id}),
            generation=generation_defaults(generation, folder),
            digest=digest_of({**stored, "model_impl": "transformers", "code": code}, tensors),
            architecture=type(model).__name__,
            overrides=overrides,
            trust_remote_code=trust_remote_code,
            layer_attention=shape.layers,
            quantization=quantization,
            has_unseen_window=_has_unseen_window(config, shape.layers, context_length),
            has_dummy_weights=has_dummy_weights,
        )


def _numbers(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors without masks and positions, which old versions of the library wrote into checkpoints."""
    return {name: tensor for name, tensor in tensors.items() if tensor.dtype not in ("BOOL", "U8", "I64")}


def load_library_config(folder: Path, overrides: Mapping[str, Any], *, trust_remote_code: bool) -> Any:
    """Return the library's own configuration object, of a plain model: Baton decodes quantized ones itself.

    Raises:
        ConfigError: transformers is missing, or an override has no effect on this model.
        UnsupportedModelError: the library does not know the model, or it needs code of the checkpoint.
    """
    try:
        from transformers import AutoConfig
        from transformers.utils import logging as library_logging
    except ImportError as error:
        raise ConfigError(f"--model-impl transformers {needs_extra('transformers')}") from error
    library_logging.disable_default_handler()  # Baton's log takes its messages
    library_logging.enable_propagation()
    library_logging.disable_progress_bar()
    stored = read_json(folder / "config.json")
    rope = {key: value for key, value in overrides.items() if key in _OLD_ROPE_KEYS}
    others = {key: value for key, value in overrides.items() if key not in rope}
    if {**stored, **others}.get("layer_types") and (given := [key for key in _MAKE_LAYER_TYPES if key in others]):
        raise ConfigError(f"--hf-overrides: {given[0]} has no effect on a model with layer_types; give these")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        unknown = sorted(key for key in others if key not in stored and not hasattr(config, key))
        if others and not unknown:  # again, so that keys which are derived from them follow
            kept = _without_overridden(stored, others)
            config = type(config).from_dict({**kept, **copy.deepcopy(others)}, name_or_path=str(folder))
    except Exception as error:  # the library's code, and that of checkpoints, may raise anything
        if not trust_remote_code and _needs_code({**stored, **overrides}):
            raise UnsupportedModelError(
                f"{folder}: this model is computed by Python code of the checkpoint; it needs --trust-remote-code, "
                "and runs that code"
            ) from error
        raise UnsupportedModelError(f"{folder}: transformers cannot read config.json ({_first_line(error)})") from error
    if unknown:
        raise ConfigError(f"--hf-overrides: {', '.join(unknown)} is not a key of this model's config.json")
    if rope:
        _override_rope(config, rope)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _without_overridden(stored: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without the types of layers, and without the older key of the rope, that overrides replace."""
    number = overrides.get("num_hidden_layers")
    return {
        key: value[:number] if key.endswith("layer_types") and isinstance(value, list) else value
        for key, value in stored.items()
        if key != "rope_scaling" or "rope_parameters" not in overrides
    }


def _override_rope(config: Any, given: Mapping[str, Any]) -> None:
    """Change the rope parameters by their older keys, which the library itself understands in files only.

    Raises:
        ConfigError: the model has none, or some for each type of layer.
    """
    now = rope_parameters(config)
    if now != [getattr(config, "rope_parameters", None)]:
        what = "has rope_parameters for each type of layer; give these" if now else "has no rotary embedding"
        raise ConfigError(f"--hf-overrides: {', '.join(given)} cannot be changed: this model {what}")
    kept = {key: now[0][key] for key in ("rope_theta", "partial_rotary_factor") if key in now[0]}
    changed = {**kept, **(given.get("rope_scaling", now[0]) or {})}  # null: no scaling
    if "rope_theta" in given:
        changed["rope_theta"] = given["rope_theta"]
    config.rope_parameters = changed
    config.standardize_rope_params()


def _needs_code(stored: Mapping[str, Any]) -> bool:
    """Whether the configuration itself is code of the checkpoint, of a type that the library does not know."""
    from transformers import CONFIG_MAPPING

    return str(stored.get("model_type")) not in CONFIG_MAPPING and "AutoConfig" in (stored.get("auto_map") or {})


def refuse_by_configuration(config: Any, stored: Mapping[str, Any], folder: Path) -> None:
    """Refuse models that Baton cannot compute, as far as the configuration tells.

    Raises:
        UnsupportedModelError: names the reason.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = [str(name) for name in stored.get("architectures") or ()]
    named = ", ".join(architectures) or f"model_type {config.model_type!r}"
    reason = ""
    if config.is_encoder_decoder:
        reason = "an encoder-decoder has attention to the encoder's output, which pages do not hold"
    elif config.get_text_config() is not config:
        reason = "it has parts beside the language model, such as vision or audio; only text models are served"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
        reason = "transformers has no class for text generation with it"
    elif not getattr(config, "is_causal", True):
        reason = "its tokens see later tokens (is_causal)"
    elif "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        reason = "its layers attend within chunks, and no attention backend does"
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        # The library takes a Mistral with layer_types for a Ministral.
        kinds = {kind.__name__, str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(stored.get("model_type")))}
        is_other = architectures and {*map(str.lower, kinds)}.isdisjoint(map(str.lower, architectures))
        reason = f"its weights are not those of a {kind.__name__}" if is_other else _class_conflict(kind)
    if reason:
        raise UnsupportedModelError(f"{folder}: {named} cannot be served: {reason}")


def _make_hook() -> "AttentionHook":
    from common.engine.models.transformers_impl.attention import AttentionHook

    return AttentionHook()


def make_on_meta(config: Any, folder: Path, hook: "AttentionHook", *, trust_remote_code: bool) -> Any:
    """Make the model without memory for its weights, with Baton's attention function.

    Raises:
        UnsupportedModelError: its class does not call attention through the library's interface, or keeps other state.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from common.engine.models.transformers_impl.attention import freeze_rope

    config._experts_implementation = "batched_mm"  # the others wait for numbers, which the meta device does not have
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=hook.name, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # as above
        raise UnsupportedModelError(f"{folder}: transformers cannot make the model ({_first_line(error)})") from error
    if reason := _class_conflict(type(model)):  # of code of the checkpoint, which no mapping knows
        raise UnsupportedModelError(f"{folder}: {type(model).__name__} cannot be served: {reason}")
    freeze_rope(model)
    return model.eval()


def _class_conflict(kind: Any) -> str:
    """Return why no model of this class of the library can be served; empty if some can."""
    if kind._is_stateful:
        return "its layers keep a state beside keys and values, as state-space models do"
    if not kind._supports_attention_backend and kind.__name__ not in TESTED:
        return "its class does not support attention functions from outside (_supports_attention_backend)"
    return ""


class AttentionShape(NamedTuple):
    """What the calls of attention in one forward pass have in common, and how each layer attends."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    layers: tuple[LayerAttention, ...]


class _Call(NamedTuple):
    layer: int
    shape: tuple[int, int, int, int]
    attention: LayerAttention
    complaint: str


class _Observer:
    """In place of a step's attention: notes the calls of the attention function."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def __call__(
        self, module: Any, q: "Tensor", k: "Tensor", v: "Tensor", mask: "Tensor | None", options: Mapping[str, Any]
    ) -> "Tensor":
        given = {name: value for name, value in options.items() if value is not None}
        sinks = given.get("s_aux")
        names = [name for name, parameter in module.named_parameters(recurse=False) if parameter is sinks]
        unknown = sorted(
            name
            for name, value in given.items()
            if name not in _UNDERSTOOD | _WITHOUT_EFFECT and not (name == "dropout" and value == 0)
        )
        complaint = ""
        if mask is not None:
            complaint = "it computes masks of its own"
        elif not getattr(module, "is_causal", True) or given.get("is_causal") is False:
            complaint = "its tokens see later tokens"
        elif unknown:
            complaint = f"its attention takes {', '.join(unknown)}, which no attention backend knows"
        elif k.shape[1] != v.shape[1]:
            complaint = f"its attention has {k.shape[1]} heads of keys and {v.shape[1]} of values"
        elif sinks is not None and not names:
            complaint = "its attention sinks are not weights of the layer"
        elif given.get("sliding_window", 1) < 1:
            complaint = f"its attention has a window of {given['sliding_window']} tokens (sliding_window)"
        attention = LayerAttention(
            scale=given.get("scaling"),
            window=given.get("sliding_window"),
            soft_cap=given.get("softcap"),
            sinks=names[0] if names else None,
        )
        shape = (q.shape[1], k.shape[1], k.shape[3], v.shape[3])
        self.calls.append(_Call(getattr(module, "layer_idx", -1), shape, attention, complaint))
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def observe_attention(model: Any, folder: Path, hook: "AttentionHook") -> AttentionShape:
    """Run two tokens through a model and return how its layers attend; its own results do not matter.

    Raises:
        UnsupportedModelError: pages cannot hold what its layers need, or a backend cannot compute it.
    """
    name = type(model).__name__
    observer = _Observer()
    try:
        import torch

        tokens = torch.zeros(2, dtype=torch.int64, device=model.device)
        with torch.no_grad():
            hook.run(model.base_model, tokens, tokens, observer)
    except Exception as error:  # as above
        raise UnsupportedModelError(
            f"{folder}: {name} cannot be served: its forward pass over pages fails ({_first_line(error)})"
        ) from error
    reason = _conflict(observer.calls, model.config.num_hidden_layers)
    if reason:
        raise UnsupportedModelError(f"{folder}: {name} cannot be served: {reason}")
    return AttentionShape(*observer.calls[0].shape, tuple(call.attention for call in observer.calls))


def _conflict(calls: Sequence[_Call], num_layers: int) -> str:
    """Return why pages or backends cannot serve these calls of attention; empty if they can."""
    if not calls:
        return "it does not call the attention function"
    for call in calls:
        if call.complaint:
            return call.complaint
    if [call.layer for call in calls] != list(range(num_layers)):
        return f"of its {num_layers} layers not each has keys and values of its own, once"
    shapes = sorted({call.shape for call in calls})
    if len(shapes) > 1:
        return f"its layers differ in heads (query heads, KV heads, key size, value size): {shapes}"
    num_heads, num_kv_heads, *_ = calls[0].shape
    if not num_kv_heads or num_heads % num_kv_heads:
        return f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads"
    return ""


def _intermediate_size(config: Any) -> int:
    """Numbers between the two matrices of a feed-forward part, which sizes of steps are estimated from."""
    num_experts = getattr(config, "num_experts_per_tok", None)
    of_expert = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    if num_experts and of_expert:
        return int(num_experts * of_expert)
    return int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)


def _context_length(config: Any, folder: Path) -> int:
    """Return the longest context in tokens for which the frequencies of a token depend on its position alone.

    Raises:
        ConfigError: the configuration does not tell.
    """
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ConfigError(
            f"{folder}/config.json: max_position_embeddings is missing; give "
            "--hf-overrides '{\"max_position_embeddings\": N}'"
        )
    for rope in rope_parameters(config):
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        kind = rope.get("rope_type", "default")
        if kind in LENGTH_DEPENDENT_ROPE or "long_mscale" in rope:
            length = min(length, original or length)
        elif kind == "yarn" and original and rope.get("factor"):
            length = max(length, int(rope["factor"] * original))
    return length


def _has_unseen_window(config: Any, layers: Sequence[LayerAttention], context_length: int) -> bool:
    window = getattr(config, "sliding_window", None)
    return isinstance(window, int) and 0 < window < context_length and all(layer.window is None for layer in layers)


def _warn_of_code(kind: str, auto_map: object, folder: Path) -> None:
    """Say that code of the checkpoint is about to run, if ``auto_map`` names a class in place of one of the library."""
    if isinstance(auto_map, dict) and auto_map.get(kind):
        log.warning(
            "--trust-remote-code: Python code of %s (%s) runs in this process, with the rights of its user",
            folder,
            auto_map[kind],
        )


def _digests_of_code(folder: Path) -> dict[str, str]:
    """Return the sha256 of the checkpoint's Python files: nodes with other code compute other numbers."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.py"))}


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the rope parameters of a configuration: one entry, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    return nested or ([rope] if rope else [])


def _first_line(error: Exception) -> str:
    """Return the kind of an error and its first line, with the reason below it if the line announces one."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {' '.join(lines[: 2 if lines[0].endswith(':') else 1])}"
