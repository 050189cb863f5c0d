"""What an adapter adds to the experts of a layer, in the form in which a kernel multiplies all of them at once."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.models.lora.checkpoint import LowRankPair


class ExpertStack(NamedTuple):
    """What an adapter adds to one matrix of each expert of a layer.

    Attributes:
        places: ``[experts]`` int64, the place of each expert in the two others; -1 for one that is not changed.
        down: ``[changed, ranks, in]``, the A of the changed experts, filled up with zeros to the same number of ranks.
        up: ``[changed, out, ranks]``, their B, the adapter's scale included.
    """

    places: Tensor
    down: Tensor
    up: Tensor


class ExpertAddition(NamedTuple):
    """What an adapter adds to the experts of a layer, for some tokens of a step.

    Attributes:
        gate_up, down: None if the adapter does not change this matrix of any expert.
        tokens: ``[T]`` int64 on the device, the places of the tokens in the step; None: all tokens.
    """

    gate_up: ExpertStack | None
    down: ExpertStack | None
    tokens: Tensor | None


def stack_experts(
    pairs: Mapping[int, LowRankPair], num_experts: int, dtype: torch.dtype, device: torch.device
) -> ExpertStack:
    """Put the pairs of experts, by their numbers, into one stack on the device."""
    ranks = max(len(pair.a) for pair in pairs.values())
    first = next(iter(pairs.values()))
    down = torch.zeros(len(pairs), ranks, first.a.shape[1], dtype=dtype)
    up = torch.zeros(len(pairs), len(first.b), ranks, dtype=dtype)
    places = torch.full((num_experts,), -1)
    for place, (expert, (a, b)) in enumerate(pairs.items()):
        places[expert] = place
        down[place, : len(a)] = a
        up[place, :, : len(a)] = b
    return ExpertStack(places.to(device), down.to(device), up.to(device))
