"""How positions turn queries and keys, as config.json says it: plain, or scaled to a context longer than the first one.

No torch: the numbers alone. ``layers`` makes frequencies of them.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.engine.checkpoint import Numbers
from common.errors import UnsupportedModelError

ROPE_TYPES = ("default", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: slow pairs are slowed further by ``factor``, fast ones stay, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071).

    Attributes:
        factor: by which slow pairs are slowed.
        original_context: tokens the model was first trained on.
        is_extended: the configuration names ``original_context``, so the context is that times ``factor``.
        beta_fast, beta_slow: pairs that turn more often than ``beta_fast`` in the original context stay, those that
            turn less often than ``beta_slow`` are slowed.
        attention_factor: cosines and sines are multiplied by it.
        truncate: the bounds between which pairs are blended are whole numbers of pairs.
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
        """Tokens the model can be given. Users turn YaRN on without raising ``max_position_embeddings``."""
        if isinstance(self.scaling, YarnScaling) and self.scaling.is_extended:
            return max(max_positions, int(self.scaling.factor * self.scaling.original_context))
        return max_positions


def parse_rope(config: dict[str, Any], max_positions: int, folder: Path) -> RopeConfig:
    """From either spelling: transformers 5 writes ``rope_parameters``, earlier ones ``rope_theta``, ``rope_scaling``.

    Where both are there, ``rope_scaling`` replaces the other, as it does there.

    Raises:
        UnsupportedModelError: another kind of scaling, or a head that is turned only in part.
        ConfigError: a number is missing or no number.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModelError(f"{folder}: rope by type of layer is not served; known is one for all layers")
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    if config.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(f"{folder}: rope type {kind} is not served; known are {', '.join(ROPE_TYPES)}")
    for source in (config, rope):
        if source.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError(f"{folder}: partial_rotary_factor is not served; known is the whole head")
    number = Numbers(rope, folder)
    theta = number.real("rope_theta")
    if kind == "llama3":
        return RopeConfig(theta, _llama3(number, max_positions))
    return RopeConfig(theta, _yarn(rope, number, max_positions) if kind == "yarn" else None)


def _llama3(number: Numbers, max_positions: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=number.real("factor"),
        low_freq_factor=number.real("low_freq_factor"),
        high_freq_factor=number.real("high_freq_factor"),
        original_context=number.positive("original_max_position_embeddings", max_positions),
    )


def _yarn(rope: dict[str, Any], number: Numbers, max_positions: int) -> YarnScaling:
    """Defaults are those of transformers' ``_compute_yarn_parameters``."""
    original = number.positive("original_max_position_embeddings", max_positions)
    factor = number.real("factor", max_positions / original)
    attention_factor = _mscale(factor, 1.0)
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
    """The paper's growth of attention with the context."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
