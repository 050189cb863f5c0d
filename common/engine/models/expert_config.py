"""Reads the part of ``config.json`` that describes a mixture of experts. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.engine.models.checkpoints.checkpoint import MAX_EXPERTS, MAX_LAYERS, Numbers
from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """How a family describes its experts in ``config.json`` and names their tensors.

    Attributes:
        width: the key of the experts' intermediate size.
        has_dense_layers: whether ``decoder_sparse_step`` and ``mlp_only_layers`` name layers without experts.
        is_normalised: whether the weights of a token's experts add up to 1; None: ``norm_topk_prob`` decides.
        renamed: parts of a tensor's name, and what replaces them here, where Qwen's names are used.
    """

    width: str
    has_dense_layers: bool = False
    is_normalised: bool | None = None
    renamed: Mapping[str, str] | None = None

    def name_of(self, stored: str) -> str:
        """Return the name here of a tensor that the checkpoint stores under the name ``stored``."""
        for theirs, ours in (self.renamed or {}).items():
            stored = stored.replace(theirs, ours)
        return stored

    def stored_name(self, name: str) -> str:
        """Return the name in the checkpoint of a tensor of a layer with experts; the inverse of ``name_of``."""
        for theirs, ours in (self.renamed or {}).items():
            name = name.replace(ours, theirs)
        return name


QWEN_EXPERTS = ExpertKeys("moe_intermediate_size", has_dense_layers=True)
MIXTRAL_EXPERTS = ExpertKeys(
    "intermediate_size",
    is_normalised=True,
    renamed={".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."},
)


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The experts of a model, of which each token takes a few in every layer that has them.

    Attributes:
        num_per_token: experts that a token takes: those with the highest scores.
        width: intermediate size of one expert.
        is_normalised: whether the weights of a token's experts are divided by their sum.
        layers: numbers of the layers with experts, ascending; the others are dense.
        keys: of the family.
    """

    num_experts: int
    num_per_token: int
    width: int
    is_normalised: bool
    layers: tuple[int, ...]
    keys: ExpertKeys


def parse_experts(config: dict[str, Any], keys: ExpertKeys, folder: Path) -> ExpertConfig:
    """Parse the experts of a model whose family has ``keys``.

    Raises:
        ConfigError: a number is missing or impossible.
    """
    number = Numbers(config, folder)
    # transformers 5 writes num_local_experts for both families; Qwen's own files have num_experts.
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    num_experts = number.positive(name, most=MAX_EXPERTS)
    num_per_token = number.positive("num_experts_per_tok")
    if not num_per_token <= num_experts or num_experts < 2:
        raise ConfigError(
            f"{folder}/config.json: num_experts_per_tok {num_per_token} of {num_experts} experts: there must be two "
            "experts at least, and as many as a token takes"
        )
    is_normalised = keys.is_normalised
    return ExpertConfig(
        num_experts=num_experts,
        num_per_token=num_per_token,
        width=number.positive(keys.width),
        is_normalised=bool(config.get("norm_topk_prob", False)) if is_normalised is None else is_normalised,
        layers=_layers_with_experts(config, number, keys),
        keys=keys,
    )


def _layers_with_experts(config: dict[str, Any], number: Numbers, keys: ExpertKeys) -> tuple[int, ...]:
    """Every ``decoder_sparse_step``-th layer has experts, except those in ``mlp_only_layers``."""
    every = number.positive("decoder_sparse_step", 1) if keys.has_dense_layers else 1
    dense = set(config.get("mlp_only_layers") or ()) if keys.has_dense_layers else set()
    layers = range(number.positive("num_hidden_layers", most=MAX_LAYERS))
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % every == 0)
