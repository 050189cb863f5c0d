"""Log-probabilities of the model's own distribution: before biases, penalties, temperature and cuts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.sampling_params import TokenLogprobs

#: Rows of logits that exist at once while a prompt is judged: 64 of 151,936 float32 are 39 MB.
ROWS_AT_ONCE = 64


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probability of one token per row, and of the likeliest at its place.

    Args:
        logits: ``[R, vocab]`` float32, as the model gave them.
        tokens: ``[R]`` int64, on the same device.
        num_top: R counts of alternatives, each perhaps 0.
    """
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    own: list[float] = (logits.gather(1, tokens[:, None]) - normalizer)[:, 0].tolist()
    width = min(max(num_top, default=0), logits.shape[1])
    if width == 0:
        return [TokenLogprobs(value) for value in own]
    top = logits.topk(width, dim=-1)
    ids: list[list[int]] = top.indices.tolist()
    values: list[list[float]] = (top.values - normalizer).tolist()
    return [
        TokenLogprobs(value, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for value, row_ids, row_values, count in zip(own, ids, values, num_top, strict=True)
    ]


def judge(
    hidden: Tensor, logits: Callable[[Tensor], Tensor], tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities of tokens that are known already, a few rows of logits at a time.

    Args:
        hidden: ``[R, hidden]`` of the positions before the tokens.
        logits: from some rows of ``hidden`` to float32 ``[rows, vocab]``.
        tokens, num_top: R of each; see ``token_logprobs``.
    """
    ids = torch.tensor(tokens, device=hidden.device)
    found: list[TokenLogprobs] = []
    for first in range(0, len(tokens), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        found += token_logprobs(logits(hidden[part]), ids[part], num_top[part])
    return found
