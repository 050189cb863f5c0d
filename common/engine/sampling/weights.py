"""The weights of tokens in a random choice: powers of 2 in fixed point, with the same bits on every device.

A token's scaled logit is ``(logit - best logit of the row) * factor``, where the factor is log2(e) / temperature, so
that it is 0 for the likeliest token and less for all others. The token's weight is 2 to the power of the scaled logit,
in units of ``2**-WEIGHT_BITS``, cut to an integer. Sums of integers are the same in every order, so that a draw depends
neither on the number of threads nor on the blocks in which a kernel adds.

The power is defined by single IEEE operations in float32, none of which may be fused into another: by this module in
torch, by ``baton_token_weights`` in C and by the kernels of ``common.engine.triton_kernels.sampling``.
"""

import math

import torch
from torch import Tensor

from common.engine.cpu.kernels import load_kernels
from common.sampling_params import SamplingParams

#: The likeliest token has the weight ``2**WEIGHT_BITS``; float64 holds sums of ``2**19`` such weights exactly.
WEIGHT_BITS = 34
#: Tokens whose scaled logit is less have the weight 0.
LEAST_SCALED = -float(WEIGHT_BITS + 2)
#: ``2**x = 1 + x * (C1 + x * (C2 + ...))`` for x in [0, 1), with an error of 2e-7: a minimax fit, C5 first.
POWER = (0.0018671302, 0.00901703, 0.055799913, 0.24016444, 0.6931513)
_MOST_FACTOR = 1e30  # an infinite factor times a difference of 0 would be NaN


def factor_of(params: SamplingParams) -> float:
    """Return the factor of scaled logits for a row that is not greedy; to be rounded to float32."""
    return min(math.log2(math.e) / params.temperature, _MOST_FACTOR)


def least_kept_by_min_p(params: SamplingParams) -> float:
    """Return the smallest scaled logit that min-p keeps; to be rounded to float32."""
    return min(math.log2(params.min_p), 0.0) if params.min_p > 0 else -math.inf


def token_weights(scaled: Tensor, threshold: Tensor | None = None) -> Tensor:
    """Return the weights ``[R, width]``, float32 whole numbers, of scaled logits, which are overwritten.

    Args:
        threshold: ``[R, 1]``; tokens with a smaller scaled logit have the weight 0. None keeps all.
    """
    kernels = load_kernels() if scaled.device.type == "cpu" else None
    if kernels is not None:
        return kernels.token_weights(scaled, threshold)
    return torch_weights(scaled, threshold)


def torch_weights(scaled: Tensor, threshold: Tensor | None) -> Tensor:
    """``token_weights`` in torch, on any device: the definition."""
    if threshold is not None:
        scaled = scaled.masked_fill_(scaled < threshold, -math.inf)
    scaled = scaled.clamp_(min=LEAST_SCALED)
    whole = scaled.floor()
    part = scaled.sub_(whole)
    power = part * POWER[0]
    for coefficient in POWER[1:]:
        power.add_(coefficient).mul_(part)
    power.add_(1.0)
    exponent = (whole.to(torch.int32) + WEIGHT_BITS) << 23
    return (power.view(torch.int32) + exponent).view(torch.float32).trunc_()
