"""What a model is, read from its ``config.json`` and ``generation_config.json``, or refused by name.

The known families differ by values, not by code: Qwen3 normalises queries and keys per head, Qwen2 has biases on
queries, keys and values, Llama may have them everywhere, Mistral nowhere. Anything that would change the numbers and is
not understood here is refused, with the list of what is. No torch: the numbers alone.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cache.page_layout import ITEM_BYTES, PageLayout
from common.engine.checkpoint import Numbers, StoredTensor, locate, read_json, stored_tensors
from common.engine.rope_config import RopeConfig, parse_rope
from common.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's name alone says; config.json says the rest.

    Attributes:
        has_qk_norm: queries and keys are normalised per head.
        qkv_bias, o_bias: biases of attention's matrices; None where ``attention_bias`` in config.json says.
        has_mlp_bias_key: ``mlp_bias`` in config.json means something.
        default_window: the sliding window that a config.json without the key ``sliding_window`` means; None where that
            key alone means nothing.
    """

    name: str
    has_qk_norm: bool = False
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    has_mlp_bias_key: bool = False
    default_window: int | None = None


#: by their name in config.json
ARCHITECTURES = {
    "Qwen3ForCausalLM": Family("qwen3", has_qk_norm=True),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, o_bias=False),
    "LlamaForCausalLM": Family("llama", has_mlp_bias_key=True),
    "MistralForCausalLM": Family("mistral", qkv_bias=False, o_bias=False, default_window=4096),
}
GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
DTYPES = tuple(ITEM_BYTES)
_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model of a known family.

    Attributes:
        folder: where config.json and the safetensors files lie.
        family: ``qwen3``, ``qwen2``, ``llama`` or ``mistral``.
        dtype: what ``auto`` stands for: the type most of the checkpoint's tensors are stored in.
        context_length: tokens, prompt and output together, that the model was made for, or is scaled to.
        eos_token_ids: ids that end an output, from generation_config.json and config.json, each once.
        generation: the model's own sampling defaults, those of ``GENERATION_DEFAULTS`` that it names.
        digest: sha256 over configuration and the names, types and shapes of all tensors; nodes that differ in it cannot
            share KV. The tensors' bytes are not read.
    """

    folder: Path
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    has_qk_norm: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    is_tied: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    generation: dict[str, float]
    digest: str

    @classmethod
    def load(cls, path_or_hub_id: str, *, revision: str | None = None) -> "ModelConfig":
        """Read a model's configuration from a local folder or a hub id.

        Raises:
            ConfigError: no such folder or model, or a damaged file.
            UnsupportedModelError: a model that Baton does not serve, with the list of what it does.
        """
        folder = locate(path_or_hub_id, revision)
        config = read_json(folder / "config.json")
        generation = read_json(folder / "generation_config.json", required=False)
        tensors = stored_tensors(folder)
        try:
            return parse_config(config, generation, tensors, folder)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{folder}/config.json or generation_config.json: not understood ({error})") from error

    def geometry(self, page_size: int, dtype: str) -> PageLayout:
        """Pages of this model, ``page_size`` tokens each, in ``float32``, ``bfloat16`` or ``float16``."""
        return PageLayout(self.num_layers, self.num_kv_heads, self.head_dim, page_size, self.resolve_dtype(dtype))

    @property
    def crossover_tokens(self) -> float:
        """Context at which attention costs a token as many multiplications as a layer's matrices do."""
        heads = self.num_heads * self.head_dim
        matrices = self.hidden_size * (2 * heads + 2 * self.num_kv_heads * self.head_dim + 3 * self.intermediate_size)
        return matrices / (2 * heads)

    def resolve_dtype(self, dtype: str) -> str:
        """``auto`` becomes the checkpoint's own type; anything unknown is a ConfigError."""
        resolved = self.dtype if dtype == "auto" else dtype
        if resolved not in DTYPES:
            raise ConfigError(f"--dtype {dtype}: not one of auto, {', '.join(DTYPES)}")
        return resolved


def parse_config(
    config: dict[str, Any], generation: dict[str, Any], tensors: dict[str, StoredTensor], folder: Path
) -> ModelConfig:
    """``ModelConfig`` from the parsed files; see ``ModelConfig.load`` for what it raises."""
    family = _known_family(config, folder)
    _refuse_what_is_not_served(config, folder)
    _refuse_windows(config, family, folder)
    number = Numbers(config, folder)
    num_heads = number.positive("num_attention_heads")
    num_kv_heads = number.positive("num_key_value_heads", num_heads)
    hidden_size = number.positive("hidden_size")
    if num_heads % num_kv_heads:
        raise ConfigError(f"{folder}/config.json: {num_heads} heads do not divide among {num_kv_heads} KV heads")
    head_dim = number.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"{folder}/config.json: head_dim {head_dim} is odd; rotary embedding turns pairs")
    max_positions = number.positive("max_position_embeddings")
    rope = parse_rope(config, max_positions, folder)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        folder=folder,
        family=family.name,
        num_layers=number.positive("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=number.positive("intermediate_size"),
        vocab_size=number.positive("vocab_size"),
        context_length=rope.context_length(max_positions),
        rms_norm_eps=number.real("rms_norm_eps", 1e-6),
        rope=rope,
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        has_o_bias=attention_bias if family.o_bias is None else family.o_bias,
        has_mlp_bias=family.has_mlp_bias_key and bool(config.get("mlp_bias", False)),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        dtype=_main_dtype(tensors, folder),
        eos_token_ids=_eos_token_ids(generation, config),
        generation=_generation_defaults(generation),
        digest=_digest(config, tensors),
    )


def _known_family(config: dict[str, Any], folder: Path) -> Family:
    named = config.get("architectures") or []
    for architecture in named:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    names = ", ".join(map(str, named)) or f"model_type {config.get('model_type')!r}"
    raise UnsupportedModelError(f"{folder}: architecture {names} is not served; known are {', '.join(ARCHITECTURES)}")


def _refuse_what_is_not_served(config: dict[str, Any], folder: Path) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unnamed")
        known = ", ".join(DTYPES)
        raise UnsupportedModelError(f"{folder}: quantized checkpoint ({method}) is not served; known are plain {known}")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"{folder}: hidden_act {config['hidden_act']} is not served; known is silu")


def _refuse_windows(config: dict[str, Any], family: Family, folder: Path) -> None:
    """Qwen's are turned on by a key of their own or by layer; Mistral's by being there, and by a missing key."""
    window = config.get("sliding_window", family.default_window) if family.default_window else None
    layer_types = set(config.get("layer_types") or ())
    if config.get("use_sliding_window") or window is not None or layer_types - {"full_attention"}:
        missing = "" if window is None or "sliding_window" in config else f" (a missing sliding_window means {window})"
        raise UnsupportedModelError(
            f"{folder}: sliding windows are not served{missing}; known is full attention in every layer"
        )


def _main_dtype(tensors: dict[str, StoredTensor], folder: Path) -> str:
    """The type that most tensors are stored in; any type outside the known three means a foreign checkpoint."""
    counts: dict[str, int] = {}
    if not tensors:
        raise ConfigError(f"{folder}: no tensors in its *.safetensors files")
    for name, tensor in tensors.items():
        if tensor.dtype not in _STORED_DTYPES:
            known = ", ".join(_STORED_DTYPES)
            raise UnsupportedModelError(f"{folder}: {name} is stored as {tensor.dtype}; known are {known}")
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
    return _STORED_DTYPES[max(counts, key=lambda dtype: counts[dtype])]


def _eos_token_ids(*sources: dict[str, Any]) -> tuple[int, ...]:
    """Ids from every source, in order, each once. ``eos_token_id`` is an integer, a list, or absent."""
    ids: list[int] = []
    for source in sources:
        found = source.get("eos_token_id")
        ids += found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys(int(token) for token in ids))


def _generation_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """Values that generation_config.json names, whatever its ``do_sample`` says: as vLLM and SGLang take them."""
    return {key: float(generation[key]) for key in GENERATION_DEFAULTS if generation.get(key) is not None}


def _digest(config: dict[str, Any], tensors: dict[str, StoredTensor]) -> str:
    shapes = {name: [tensor.dtype, list(tensor.shape)] for name, tensor in tensors.items()}
    canonical = json.dumps([config, shapes], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
