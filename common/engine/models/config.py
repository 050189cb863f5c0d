"""Reads a model's configuration from ``config.json`` and ``generation_config.json``.

Model families differ in values, not in code: Qwen3 normalises queries and keys per head, Qwen2 has biases on queries,
keys and values, Llama may have biases everywhere, Mistral has none. A setting that would change the numbers and is not
supported is refused, together with a list of what is supported. This module does not import torch.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.engine.models.base_config import DTYPES, BaseModelConfig
from common.engine.models.checkpoints.checkpoint import (
    MAX_INTEGER,
    MAX_LAYERS,
    Numbers,
    StoredTensor,
    locate,
    read_json,
    stored_tensors,
)
from common.engine.models.checkpoints.quantized.config import CheckpointQuantization, parse_quantization
from common.engine.models.expert_config import (
    MIXTRAL_EXPERTS,
    QWEN_EXPERTS,
    ExpertKeys,
    parse_experts,
)
from common.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Family:
    """Properties that follow from the architecture's name; ``config.json`` holds the others.

    Attributes:
        has_qk_norm: whether queries and keys are normalised per head.
        qkv_bias, o_bias: whether the attention matrices have biases; None: ``attention_bias`` in config.json decides.
        has_mlp_bias_key: whether ``mlp_bias`` in config.json has an effect.
        has_window_key: whether ``sliding_window`` in config.json has an effect.
        default_window, default_theta, default_eps: ``sliding_window``, ``rope_theta`` and ``rms_norm_eps`` of a
            config.json without these keys.
        experts: how its experts are described; None: its layers are dense.
    """

    has_qk_norm: bool = False
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    has_mlp_bias_key: bool = False
    has_window_key: bool = False
    default_window: int | None = None
    default_theta: float = 10_000.0
    default_eps: float = 1e-6
    experts: ExpertKeys | None = None


#: Supported architectures, by their names in config.json.
ARCHITECTURES = {
    "Qwen3ForCausalLM": Family(has_qk_norm=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False),
    "LlamaForCausalLM": Family(has_mlp_bias_key=True),
    "MistralForCausalLM": Family(qkv_bias=False, o_bias=False, has_window_key=True, default_window=4096),
    "Qwen3MoeForCausalLM": Family(has_qk_norm=True, experts=QWEN_EXPERTS),
    "MixtralForCausalLM": Family(
        qkv_bias=False,
        o_bias=False,
        has_window_key=True,
        default_theta=1_000_000.0,
        default_eps=1e-5,
        experts=MIXTRAL_EXPERTS,
    ),
}
GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
ROPE_TYPES = ("default", "llama3", "yarn")
#: Types of plain tensors, by their names in safetensors files.
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rope scaling of Llama 3.1: divides low frequencies by ``factor``, keeps high ones, blends between the two."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Rope scaling by YaRN (arXiv 2309.00071).

    Attributes:
        factor: low frequencies are divided by this.
        original_context: context length of the first training, in tokens.
        is_extended: whether the configuration names ``original_context``; the context length is then at least
            ``factor * original_context``.
        beta_fast, beta_slow: a pair with more than ``beta_fast`` rotations in the original context keeps its frequency;
            a pair with fewer than ``beta_slow`` rotations has it divided by ``factor``.
        attention_factor: multiplies cosines and sines.
        truncate: whether the bounds of the blended range are rounded to whole pairs.
    """

    factor: float
    original_context: int
    is_extended: bool
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864)."""

    theta: float
    scaling: Llama3Scaling | YarnScaling | None = None

    @property
    def attention_factor(self) -> float:
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0

    def context_length(self, max_positions: int) -> int:
        """Return the context length in tokens. Users enable YaRN without raising ``max_position_embeddings``."""
        if isinstance(self.scaling, YarnScaling) and self.scaling.is_extended:
            return max(max_positions, int(self.scaling.factor * self.scaling.original_context))
        return max_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(BaseModelConfig):
    """Configuration of a model that the native decoder computes.

    Attributes:
        intermediate_size: of the dense layers.
        quantization: of the checkpoint, whose matrices are decoded when they are loaded; None: they are plain.
    """

    rms_norm_eps: float
    rope: RopeConfig
    has_qk_norm: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    is_tied: bool
    quantization: CheckpointQuantization | None = None

    @property
    def implementation(self) -> Literal["native", "transformers"]:
        return "native"

    @classmethod
    def load(
        cls,
        path_or_hub_id: str,
        *,
        revision: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        has_dummy_weights: bool = False,
    ) -> "ModelConfig":
        """Read a model's configuration from a local folder or from the Hugging Face hub.

        Args:
            overrides: keys of config.json that have other values than in the file.
            has_dummy_weights: there need be no weights.
        Raises:
            ConfigError: the folder or model does not exist, or a file is damaged.
            UnsupportedModelError: Baton does not support the model; the message lists what it supports.
        """
        folder = locate(path_or_hub_id, revision, with_weights=not has_dummy_weights)
        stored, overrides = read_json(folder / "config.json"), overrides or {}
        generation = read_json(folder / "generation_config.json", required=False)
        tensors = None if has_dummy_weights else stored_tensors(folder)
        try:
            config = _NotedKeys(_with_overrides(stored, overrides))
            parsed = parse_config(config, generation, tensors, folder)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{folder}/config.json or generation_config.json: cannot be parsed ({error})") from error
        if unknown := sorted(overrides.keys() - stored.keys() - config.asked):
            raise ConfigError(f"--hf-overrides: {', '.join(unknown)} is not a key of this model's config.json")
        return parsed


class _NotedKeys(dict[str, Any]):
    """A configuration that notes which keys it was asked for: others have no effect.

    Attributes:
        asked: those that ``get`` was called with.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def _with_overrides(stored: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with other values of some keys.

    In a file with ``rope_parameters``, the older keys of the rope change these; ``parse_rope`` would overlook them, or
    the base of the frequencies in the file. Overridden ``rope_parameters`` replace its ``rope_scaling`` as well, which
    would win over them.
    """
    if "rope_parameters" in overrides:
        stored = {key: value for key, value in stored.items() if key != "rope_scaling"}
    rope = {**stored, **overrides}.get("rope_parameters")
    if not rope or stored.get("rope_scaling") or not {"rope_theta", "rope_scaling"} & overrides.keys():
        return {**stored, **overrides}
    base = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    changed = {**base, **(overrides.get("rope_scaling", rope) or {})}  # null: no scaling
    if "rope_theta" in overrides:
        changed["rope_theta"] = overrides["rope_theta"]
    kept = {key: value for key, value in overrides.items() if key not in ("rope_theta", "rope_scaling")}
    return {**stored, **kept, "rope_parameters": changed}


def parse_config(
    config: dict[str, Any], generation: dict[str, Any], tensors: dict[str, StoredTensor] | None, folder: Path
) -> ModelConfig:
    """Build a ``ModelConfig`` from parsed files; without tensors, of dummy weights.

    Raises the same errors as ``ModelConfig.load``.
    """
    family = _known_family(config, folder)
    _refuse_what_is_not_served(config, folder)
    _refuse_windows(config, family, folder)
    number = Numbers(config, folder)
    num_heads = number.positive("num_attention_heads")
    num_kv_heads = number.positive("num_key_value_heads", num_heads)
    hidden_size = number.positive("hidden_size")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{folder}/config.json: num_attention_heads {num_heads} is not a multiple of"
            f" num_key_value_heads {num_kv_heads}"
        )
    head_dim = number.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"{folder}/config.json: head_dim {head_dim} is odd; rotary embedding needs an even number")
    max_positions = number.positive("max_position_embeddings")
    rope = parse_rope(config, max_positions, folder, family.default_theta)
    quantization = None if tensors is None else parse_quantization(config.get("quantization_config"), folder)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        folder=folder,
        num_layers=number.positive("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=number.positive("intermediate_size"),
        vocab_size=number.positive("vocab_size"),
        context_length=rope.context_length(max_positions),
        rms_norm_eps=number.real("rms_norm_eps", family.default_eps),
        rope=rope,
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        has_o_bias=attention_bias if family.o_bias is None else family.o_bias,
        has_mlp_bias=family.has_mlp_bias_key and bool(config.get("mlp_bias", False)),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        dtype=named_dtype(config, folder) if tensors is None else main_dtype(tensors, quantization, folder),
        eos_token_ids=eos_token_ids(folder, generation, config),
        generation=generation_defaults(generation, folder),
        digest=digest_of(config, tensors),
        experts=None if family.experts is None else parse_experts(config, family.experts, folder),
        quantization=quantization,
        has_dummy_weights=tensors is None,
    )


def _known_family(config: dict[str, Any], folder: Path) -> Family:
    named = config.get("architectures") or []
    for architecture in named:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    names = ", ".join(map(str, named)) or f"model_type {config.get('model_type')!r}"
    raise UnsupportedModelError(f"{folder}: architecture {names} is not supported; use {', '.join(ARCHITECTURES)}")


def _refuse_what_is_not_served(config: dict[str, Any], folder: Path) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"{folder}: hidden_act {config['hidden_act']} is not supported; only silu is")
    if not config.get("is_causal", True):
        raise UnsupportedModelError(f"{folder}: is_causal false is not supported: a token must not see later ones")


def _refuse_windows(config: dict[str, Any], family: Family, folder: Path) -> None:
    """Refuse sliding windows.

    Qwen models enable them with ``use_sliding_window`` or ``layer_types``, Mistral models with ``sliding_window`` or
    without that key.
    """
    window = config.get("sliding_window", family.default_window) if family.has_window_key else None
    layer_types = set(config.get("layer_types") or ())
    if config.get("use_sliding_window") or window is not None or layer_types - {"full_attention"}:
        missing = "" if window is None or "sliding_window" in config else f" (a missing sliding_window means {window})"
        raise UnsupportedModelError(
            f"{folder}: sliding windows are not supported{missing}; only full attention in every layer is"
        )


def main_dtype(tensors: dict[str, StoredTensor], quantization: CheckpointQuantization | None, folder: Path) -> str:
    """Return the type of most tensors that are not quantized; refuse a checkpoint with one of an unsupported type."""
    counts: dict[str, int] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in STORED_DTYPES:
            is_scale = quantization is not None and quantization.is_scale(name)
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + (not is_scale)
        elif quantization is None:
            supported = ", ".join(STORED_DTYPES)
            raise UnsupportedModelError(f"{folder}: {name} has type {tensor.dtype}; supported are {supported}")
    if not counts:
        raise ConfigError(f"{folder}: the *.safetensors files hold no tensors of {', '.join(DTYPES)}")
    return STORED_DTYPES[max(counts, key=lambda dtype: counts[dtype])]


def named_dtype(config: dict[str, Any], folder: Path) -> str:
    """Return the type that config.json names, for a model whose tensors are not read."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"{folder}/config.json: dtype {dtype}; supported are {', '.join(DTYPES)}")
    return str(dtype)


def eos_token_ids(folder: Path, *sources: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids of all sources in order, without duplicates; ``eos_token_id`` is an int, a list or absent.

    Raises:
        ConfigError: it is something else.
    """
    ids: list[int] = []
    for source in sources:
        found = source.get("eos_token_id")
        ids += found if isinstance(found, list) else [] if found is None else [found]
    for token in ids:
        if type(token) is not int or abs(token) > MAX_INTEGER:
            raise ConfigError(
                f"{folder}: eos_token_id in config.json and generation_config.json should be a token id or a list of "
                f"token ids, not {token!r}"
            )
    return tuple(dict.fromkeys(ids))


def generation_defaults(generation: dict[str, Any], folder: Path) -> dict[str, float]:
    """Return the sampling defaults of generation_config.json; ``do_sample`` is ignored, as in vLLM and SGLang.

    Raises:
        ConfigError: one of them is not a finite number.
    """
    found = {key: generation[key] for key in GENERATION_DEFAULTS if generation.get(key) is not None}
    for key, value in found.items():
        if not isinstance(value, int | float) or not abs(value) <= MAX_INTEGER:
            raise ConfigError(f"{folder}/generation_config.json: {key} should be a number, not {value!r}")
    return {key: float(value) for key, value in found.items()}


def digest_of(config: dict[str, Any], tensors: dict[str, StoredTensor] | None) -> str:
    """Return the model's digest; without tensors, that of dummy weights."""
    shapes: Any = "dummy"
    if tensors is not None:
        shapes = {name: [tensor.dtype, list(tensor.shape)] for name, tensor in tensors.items()}
    canonical = json.dumps([config, shapes], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


# ---- rotary position embedding ---------------------------------------------------------------------------------------


def parse_rope(config: dict[str, Any], max_positions: int, folder: Path, default_theta: float) -> RopeConfig:
    """Parse the rope parameters in either spelling.

    transformers 5 writes ``rope_parameters``; earlier versions write ``rope_theta`` and ``rope_scaling``. If both are
    present, ``rope_scaling`` wins, as in transformers.

    Raises:
        UnsupportedModelError: the kind of scaling is unknown, or only part of each head is rotated.
        ConfigError: a number is missing or not a number.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModelError(f"{folder}: rope by type of layer is not supported; only one for all layers is")
    rope.setdefault("rope_theta", config.get("rope_theta", default_theta))
    if config.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(f"{folder}: rope type {kind} is not supported; use {', '.join(ROPE_TYPES)}")
    for source in (config, rope):
        if source.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError(f"{folder}: partial_rotary_factor is not supported; only the whole head is")
    number = Numbers(rope, folder)
    theta = number.real("rope_theta")
    if kind == "yarn" and theta <= 1:
        raise ConfigError(f"{folder}/config.json: rope_theta should be above 1 with rope type yarn, not {theta:g}")
    if kind == "llama3":
        return RopeConfig(theta, _parse_llama3(number, max_positions))
    return RopeConfig(theta, _parse_yarn(rope, number, max_positions) if kind == "yarn" else None)


def _parse_llama3(number: Numbers, max_positions: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=number.real("factor"),
        low_freq_factor=number.real("low_freq_factor"),
        high_freq_factor=number.real("high_freq_factor"),
        original_context=number.positive("original_max_position_embeddings", max_positions),
    )


def _parse_yarn(rope: dict[str, Any], number: Numbers, max_positions: int) -> YarnScaling:
    # Defaults are those of transformers' ``_compute_yarn_parameters``.
    original = number.positive("original_max_position_embeddings", max_positions)
    factor = number.real("factor", max_positions / original, most=MAX_INTEGER / original)
    # ``attn_factor`` is a parameter of YaRN's own code, which vLLM and SGLang have too, and transformers has not.
    attention_factor = _mscale(factor, 1.0) * number.real("attn_factor", 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = _mscale(factor, number.real("mscale")) / _mscale(factor, number.real("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_context=original,
        is_extended=rope.get("original_max_position_embeddings") is not None,
        beta_fast=number.real("beta_fast", 32.0) if rope.get("beta_fast") else 32.0,
        beta_slow=number.real("beta_slow", 1.0) if rope.get("beta_slow") else 1.0,
        attention_factor=number.real("attention_factor", attention_factor),
        truncate=bool(rope.get("truncate", True)),
    )


def _mscale(factor: float, scale: float) -> float:
    """Return the attention factor of the YaRN paper, section 3.4, for a context longer by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
