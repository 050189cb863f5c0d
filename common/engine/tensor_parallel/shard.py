"""Which part of a model, of its tensors and of its KV heads one rank has. Arithmetic only.

Queries, keys, values, gate and up are divided by their outputs, so that a rank computes whole heads; the matrices after
them (o and down) by their inputs, so that the sum over all ranks is the result. Every rank has a part of every expert.
Norms, the embedding and the routers of experts are whole on every rank. Rank 0 alone has the projection to the
vocabulary, since it alone samples.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

from common.cache.page_layout import kv_heads_of
from common.engine.models.base_config import BaseModelConfig
from common.engine.models.config import ModelConfig
from common.errors import ConfigError

_Config = TypeVar("_Config", bound=BaseModelConfig)

#: Added to sums over all ranks, so that one rank alone may have them.
_SUMMED_BIASES = ("o_proj.bias", "down_proj.bias")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank. Without ranks there is one shard, which is the whole model."""

    rank: int = 0
    size: int = 1

    def config_of(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of the smaller model that this rank computes.

        Raises:
            ConfigError: the model cannot be divided among ``size`` ranks.
        """
        check_divisible(config, self.size)
        experts = config.experts and replace(config.experts, width=config.experts.width // self.size)
        return replace(
            self.with_own_heads(config), intermediate_size=config.intermediate_size // self.size, experts=experts
        )

    def with_own_heads(self, config: _Config) -> _Config:
        """Return a configuration with the numbers of heads that this rank has.

        Raises:
            ConfigError: the heads cannot be divided among ``size`` ranks.
        """
        check_heads(config, self.size)
        return replace(
            config, num_heads=config.num_heads // self.size, num_kv_heads=len(self.kv_heads(config.num_kv_heads))
        )

    def kv_heads(self, num_kv_heads: int) -> range:
        """Return the KV heads of this rank; where ranks are more than heads, several ranks compute the same one."""
        return kv_heads_of(self.rank, self.size, num_kv_heads)

    def device(self, first: str) -> str:
        """Return this rank's device, from that of rank 0: ``cpu``, or as many devices further as its number."""
        kind, _, index = first.partition(":")
        return kind if kind == "cpu" else f"{kind}:{int(index or 0) + self.rank}"

    def part_of(self, whole: tuple[int, ...], own: tuple[int, ...]) -> tuple[slice, ...]:
        """Return where the rank's part of a tensor lies, from the shape of the tensor and that of the part."""
        found = []
        for length, part in zip(whole, own, strict=True):
            index = self.rank * (length // part) // self.size
            found.append(slice(index * part, (index + 1) * part))
        return tuple(found)

    def has(self, name: str) -> bool:
        """Whether this rank adds the tensor of this name, or leaves that to rank 0."""
        return self.rank == 0 or not name.endswith(_SUMMED_BIASES)


WHOLE_MODEL = Shard()


def check_divisible(config: BaseModelConfig, num_ranks: int) -> None:
    """Refuse a number of ranks among which the native implementation cannot divide this model.

    Raises:
        ConfigError: names the number of heads, or the width, that is not divisible.
    """
    check_heads(config, num_ranks)
    divided = [("intermediate size", config.intermediate_size)]
    if config.experts is not None:
        divided.append(("the experts' intermediate size", config.experts.width))
    for what, number in divided:
        check_number(config, num_ranks, what, number)


def check_heads(config: BaseModelConfig, num_ranks: int) -> None:
    """Refuse a number of ranks among which the heads of this model cannot be divided.

    Raises:
        ConfigError: names the number of heads.
    """
    check_number(config, num_ranks, "attention heads", config.num_heads)
    if config.num_kv_heads % num_ranks and num_ranks % config.num_kv_heads:
        raise ConfigError(
            f"--tp {num_ranks}: it must divide the {config.num_kv_heads} KV heads of {config.folder.name}, or be a "
            "multiple of them; give another number, or leave out --tp"
        )


def check_number(config: BaseModelConfig, num_ranks: int, what: str, number: int) -> None:
    """Raises ConfigError: the number of ``what`` in the model cannot be divided among ``num_ranks`` ranks."""
    if number % num_ranks:
        raise ConfigError(
            f"--tp {num_ranks}: {what} {number} of {config.folder.name} cannot be divided by it; give another number, "
            "or leave out --tp"
        )
