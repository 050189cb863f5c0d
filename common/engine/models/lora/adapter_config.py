"""Reads ``adapter_config.json`` of a LoRA adapter in PEFT's format.

What would change the numbers and is not supported is refused by name, and so is a setting that is not known: an adapter
that is half understood would answer with noise. The format is that of PEFT's ``LoraConfig``
(https://huggingface.co/docs/peft/package_reference/lora).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.engine.models.checkpoints.checkpoint import read_json
from common.engine.models.lora.name_patterns import NamePattern
from common.errors import ConfigError

#: Keys that change no number of an adapter that is only applied, or that are read here.
_KNOWN = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "target_modules", "peft_type", "init_lora_weights", "bias"),
        *("rank_pattern", "alpha_pattern", "target_parameters"),
        *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"),
        *("lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "eva_config"),
        "fan_in_fan_out",  # how the model's own weight is stored
        *("megatron_core", "qalora_group_size", "runtime_config"),
    }
)
#: Ways to draw the first weights that leave those of the model as they are.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
#: Far above what adapters have, which is about their rank.
MAX_ALPHA = 1e9
MAX_BYTES = 1 << 20
#: Of one setting; an adapter may have one for each of its matrices, such as 882 in 126 layers of seven.
MAX_PATTERNS = 1024


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of an adapter's configuration that decides what its tensors mean.

    Attributes:
        rank_patterns, alpha_patterns: for names of matrices and parameters; the first that matches counts.
        parameters: ``target_parameters``.
    """

    rank: int
    alpha: float
    is_rank_stabilised: bool
    rank_patterns: Sequence[tuple[NamePattern, int]]
    alpha_patterns: Sequence[tuple[NamePattern, float]]
    parameters: Sequence[str]

    @property
    def max_rank(self) -> int:
        return max([self.rank, *(rank for _, rank in self.rank_patterns)])

    def rank_of(self, name: str) -> int:
        return next((rank for pattern, rank in self.rank_patterns if pattern.matches(name)), self.rank)

    def scale_of(self, name: str, rank: int) -> float:
        """Return the factor of a product of this rank (rank-stabilised: arXiv 2312.03732)."""
        alpha = next((one for pattern, one in self.alpha_patterns if pattern.matches(name)), self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank

    def is_target(self, parameter: str) -> bool:
        """Whether ``target_parameters`` names this one, in whole or by its end."""
        return any(f".{parameter}".endswith(f".{target}") for target in self.parameters)


def read_config(file: Path, max_rank: int) -> AdapterConfig:
    """Read ``adapter_config.json``.

    Raises:
        ConfigError: the file is damaged, a setting is not supported, or a rank is above ``max_rank``.
    """
    if file.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{file}: has more than {MAX_BYTES} bytes, which no configuration of an adapter has")
    config = read_json(file)
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{file}: peft_type is {config.get('peft_type')!r}; only LORA is supported")
    for key, value in config.items():
        if key not in _KNOWN and value:
            raise ConfigError(f"{file}: {key} {value!r} is not supported; leave it out when the adapter is trained")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{file}: bias {config['bias']!r} is not supported; only none is")
    start = config.get("init_lora_weights", True)
    if (start.lower() if isinstance(start, str) else start) not in _PLAIN_STARTS:
        raise ConfigError(
            f"{file}: init_lora_weights {start!r} has changed the model's own weights; convert the adapter with PEFT's"
            " path_initial_model_for_weight_conversion"
        )
    ranks, alphas = (list(_patterns(config, key, file)) for key in ("rank_pattern", "alpha_pattern"))
    return AdapterConfig(
        rank=_rank(config.get("r"), f"{file}: r", max_rank),
        alpha=_alpha(config.get("lora_alpha"), f"{file}: lora_alpha"),
        is_rank_stabilised=bool(config.get("use_rslora")),
        rank_patterns=[(pattern, _rank(value, what, max_rank)) for what, pattern, value in ranks],
        alpha_patterns=[(pattern, _alpha(value, what)) for what, pattern, value in alphas],
        parameters=_parameters(config, file),
    )


def _rank(rank: Any, what: str, max_rank: int) -> int:
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"{what} should be a positive integer, not {rank!r}")
    if rank > max_rank:
        raise ConfigError(f"{what} is {rank}, and --max-lora-rank is {max_rank}; raise it on all nodes")
    return rank


def _alpha(alpha: Any, what: str) -> float:
    if type(alpha) not in (int, float) or not abs(alpha) <= MAX_ALPHA:
        raise ConfigError(f"{what} should be a number, not {alpha!r}")
    return float(alpha)


def _patterns(config: Mapping[str, Any], key: str, file: Path) -> Iterator[tuple[str, NamePattern, Any]]:
    """Return the patterns of a setting with their values, and how errors name them."""
    given: Any = config.get(key) or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{file}: {key} should be an object, not {given!r}")
    if len(given) > MAX_PATTERNS:
        raise ConfigError(f"{file}: {key} has {len(given)} patterns; at most {MAX_PATTERNS} are read")
    for pattern, value in given.items():
        try:
            yield f"{file}: {key} {pattern!r}", NamePattern(pattern), value
        except ValueError as error:
            raise ConfigError(f"{file}: {key} {pattern!r}: {error}") from error


def _parameters(config: Mapping[str, Any], file: Path) -> list[str]:
    given: Any = config.get("target_parameters") or []
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ConfigError(f"{file}: target_parameters should be a list of names, not {given!r}")
    return given
