"""Which experts each token takes."""

from typing import NamedTuple

from torch import Tensor

from common.engine.models.expert_config import ExpertConfig


class Routing(NamedTuple):
    """Which experts each token takes.

    Attributes:
        experts: ``[rows, num_per_token]`` int64, the best first.
        weights: ``[rows, num_per_token]`` float32, factors of what the experts return.
    """

    experts: Tensor
    weights: Tensor


def route(scores: Tensor, config: ExpertConfig) -> Routing:
    """Choose the experts with the highest ``scores`` ``[rows, experts]`` float32 (Mixtral, arXiv 2401.04088).

    The weights are the softmax over all experts, divided by the sum of the chosen ones if the model says so.
    """
    weights, experts = scores.softmax(dim=-1).topk(config.num_per_token, dim=-1)
    if config.is_normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(experts, weights)
