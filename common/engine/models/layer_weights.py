"""The weights of one layer of a decoder."""

from dataclasses import dataclass

from torch import Tensor

from common.engine.models.feed_forward import FeedForward
from common.engine.models.linear import Linear


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer. The rows of ``qkv`` are queries, keys, values."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    mlp: FeedForward
