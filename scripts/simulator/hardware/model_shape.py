"""Sizes of a model that decide how long its steps take."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cache.page_layout import ITEM_BYTES
from common.engine.models.config import parse_rope
from common.errors import ConfigError, UnsupportedModelError, reason_of

#: Fields of config.json that say that only a part of the weights computes each token, which no formula here models.
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
MAX_CONFIG_BYTES = 1 << 20
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a dense decoder-only model.

    Attributes:
        item_bytes: bytes of a weight and of a number in the KV cache.
        is_tied: whether the output matrix is the embedding.
        context_length: tokens of prompt and output together; None if unknown.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool = False
    item_bytes: int = 2
    context_length: int | None = None

    @property
    def layer_weights(self) -> int:
        """Weights of all layers, through which every token goes."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.num_layers * self.hidden_size * (2 * heads + 2 * kv_heads + 3 * self.intermediate_size)

    @property
    def output_weights(self) -> int:
        """Weights of the output matrix, through which only tokens go after which one is sampled."""
        return self.hidden_size * self.vocab_size

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that every step reads."""
        return (self.layer_weights + self.output_weights) * self.item_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self.step_bytes + (0 if self.is_tied else self.output_weights * self.item_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.item_bytes


KNOWN_MODELS = {
    found.name: found
    for found in (
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151_936, is_tied=True),
        # Two matrices of 20,480 per layer, written as three: this family has no gate.
        ModelShape("opt-13b", 40, 5120, 40, 40, 128, 13_653, 50_272, is_tied=True),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28_672, 128_256),
    )
}


def find_shape(name_or_folder: str) -> ModelShape:
    """The shape of a model by a well-known name, or of a folder with its config.json.

    Raises ConfigError: there is neither, or the model is not dense.
    """
    known = KNOWN_MODELS.get(name_or_folder.lower())
    if known is not None:
        return known
    file = Path(name_or_folder).expanduser() / "config.json"
    if not file.is_file():
        names = ", ".join(KNOWN_MODELS)
        raise ConfigError(f"--model {name_or_folder} is neither {names} nor a folder with a config.json")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{file}: more than {MAX_CONFIG_BYTES:,} bytes is not a model's configuration")
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {reason_of(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return _parse(content, file)


def _parse(content: dict[str, Any], file: Path) -> ModelShape:
    for name in EXPERT_FIELDS:
        if content.get(name):
            raise ConfigError(f"{file}: {name} is set; models of several experts are not modelled: use --calibrate")

    def number(name: str, default: int | None = None) -> int:
        value = content.get(name)
        if value is None:
            value = default
        if type(value) is not int or not 0 < value < 1 << 40:
            raise ConfigError(f"{file}: {name} must be a whole number above 0, not {value!r}")
        return value

    dtype = content.get("torch_dtype", content.get("dtype", "bfloat16"))
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"{file}: torch_dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}")
    hidden_size, num_heads = number("hidden_size"), number("num_attention_heads")
    positions = None if content.get("max_position_embeddings") is None else number("max_position_embeddings")
    return ModelShape(
        file.parent.name,
        number("num_hidden_layers"),
        hidden_size,
        num_heads,
        number("num_key_value_heads", num_heads),
        number("head_dim", max(1, hidden_size // num_heads)),
        number("intermediate_size"),
        number("vocab_size"),
        is_tied=content.get("tie_word_embeddings") is True,
        item_bytes=ITEM_BYTES[dtype],
        context_length=None if positions is None else _extended(positions, content, file.parent),
    )


def _extended(max_positions: int, content: dict[str, Any], folder: Path) -> int:
    """The context length, which YaRN may extend beyond ``max_position_embeddings``. No base of the rope changes it."""
    try:
        return parse_rope(content, max_positions, folder, DEFAULT_THETA).context_length(max_positions)
    except UnsupportedModelError:  # another embedding of positions, which changes no cost
        return max_positions
