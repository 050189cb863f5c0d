"""What a node has to know of a decoder-only model, whichever implementation computes it. Does not import torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.cache.page_layout import PageLayout
from common.cache.window_pages import LayerGroups
from common.engine.models.expert_config import ExpertConfig
from common.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
#: Kinds of rotary embedding whose frequencies depend on the longest request of a step, beyond the original context.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends: ``common.engine.attention.protocol.AttentionParams`` before any weight is loaded.

    Attributes:
        sinks: name of the layer's attention sinks in its attention module; None without sinks.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelConfig(ABC):
    """Configuration of a decoder-only model.

    Attributes:
        head_dim: numbers of a query and of a key of one head.
        dtype: the type of most of the checkpoint's tensors; ``auto`` resolves to it.
        context_length: longest prompt and output together, in tokens, rope scaling included.
        eos_token_ids: token ids that end an output, from generation_config.json and config.json, without duplicates; a
            node adds that of its tokenizer.
        generation: the model's own sampling defaults; its keys are among ``GENERATION_DEFAULTS``.
        digest: sha256 of the configuration and of the names, types and shapes of all tensors, not of their contents.
        weight_version: identifies the contents of the tensors: ``--weight-version`` or a fingerprint of the files.
            Empty where the configuration alone is read.
        experts: of the native implementation; None if all layers are dense there.
        tokenizer_folder: where the tokenizer is, if not in ``folder``.
        has_dummy_weights: the weights are random numbers, and no file is read.
    """

    folder: Path
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    generation: dict[str, float]
    digest: str
    weight_version: str = ""
    experts: ExpertConfig | None = None
    tokenizer_folder: Path | None = None
    has_dummy_weights: bool = False

    @property
    @abstractmethod
    def implementation(self) -> Literal["native", "transformers"]:
        """What computes the model."""

    @property
    def identity(self) -> str:
        """Digest and weight version. Nodes that differ in it cannot share KV pages."""
        return f"{self.digest}:{self.weight_version}"

    @property
    def value_dim(self) -> int:
        """Numbers of a value of one head."""
        return self.head_dim

    @property
    def layers(self) -> tuple[LayerAttention, ...]:
        """How each layer attends."""
        return (LayerAttention(),) * self.num_layers

    @property
    def window(self) -> int | None:
        """Tokens that a token sees in the layer that sees most; None if that is the whole context."""
        widest = max(layer.window or self.context_length for layer in self.layers)
        return widest if widest < self.context_length else None

    @property
    def layer_groups(self) -> LayerGroups | None:
        """The layers that see the whole context, and those with a window; None if there are not both."""
        windows = [layer.window or self.context_length for layer in self.layers]
        full = tuple(layer for layer, window in enumerate(windows) if window >= self.context_length)
        windowed = tuple(layer for layer, window in enumerate(windows) if window < self.context_length)
        if not full or not windowed:
            return None
        return LayerGroups(full, windowed, max(windows[layer] for layer in windowed))

    def layout(self, page_size: int, dtype: str, kv_cache_dtype: str = "auto") -> PageLayout:
        """Return the layout of KV pages of ``page_size`` tokens.

        Args:
            dtype: of the weights, as for ``resolve_dtype``.
            kv_cache_dtype: a value of ``--kv-cache-dtype``.
        """
        named = {"auto": self.resolve_dtype(dtype), "fp8": "fp8_e4m3"}
        page_dtype = named.get(kv_cache_dtype, kv_cache_dtype)
        return PageLayout(self.num_layers, self.num_kv_heads, self.head_dim, page_size, page_dtype, self.value_dim)

    @property
    def crossover_tokens(self) -> float:
        """Context length at which attention takes as many multiplications per token as a layer's matrices."""
        heads = self.num_heads * self.head_dim
        matrices = self.hidden_size * (2 * heads + 2 * self.num_kv_heads * self.head_dim + 3 * self.active_width)
        return matrices / (2 * heads)

    @property
    def active_width(self) -> int:
        """The intermediate size of a layer for one token: that of all its experts together, if it has experts."""
        return self.intermediate_size if self.experts is None else self.experts.num_per_token * self.experts.width

    def resolve_dtype(self, dtype: str) -> str:
        """Return ``float32``, ``bfloat16`` or ``float16``; ``auto`` is the checkpoint's own type.

        Raises:
            ConfigError: ``dtype`` is unknown.
        """
        resolved = self.dtype if dtype == "auto" else dtype
        if resolved not in DTYPES:
            raise ConfigError(f"--dtype {dtype}: unknown; give auto, {', '.join(DTYPES)}")
        return resolved
