"""Log-probabilities of sampled tokens and of prompt tokens, with the most likely tokens at their positions.

The distribution is the model's own: before biases, penalties, temperature, top-k, top-p and min-p.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.engine.device_copies import HostCopies, to_device
from common.sampling_params import TokenLogprobs

#: Rows of logits in memory at once for prompt log-probabilities: 64 rows of 151,936 float32 are 39 MB.
ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of one token per row, on the device or on their way to the host.

    Attributes:
        own: ``[R]`` of the tokens.
        top_ids, top: ``[R, width]`` of the most likely tokens.
        num_top: number of alternatives that each row asked for, at most ``width``.
    """

    own: Tensor
    top_ids: Tensor
    top: Tensor
    num_top: Sequence[int]

    def copied(self, copies: HostCopies) -> "LogprobTensors":
        """Begin to copy the tensors to the host."""
        return LogprobTensors(copies.add(self.own), copies.add(self.top_ids), copies.add(self.top), self.num_top)

    def read(self) -> list[TokenLogprobs]:
        """Return the values of each row; waits for the device if the tensors are there."""
        ids: list[list[int]] = self.top_ids.tolist()
        values: list[list[float]] = self.top.tolist()
        return [
            TokenLogprobs(value, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
            for value, row_ids, row_values, count in zip(self.own.tolist(), ids, values, self.num_top, strict=True)
        ]


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: Sequence[int]) -> LogprobTensors:
    """Return the log-probability of one token per row, and of the most likely tokens at its position.

    Args:
        logits: ``[R, vocab]`` float32, unchanged.
        tokens: ``[R]`` int64, on the same device.
        num_top: number of alternatives for each row, 0 or more.
    """
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    own = (logits.gather(1, tokens[:, None]) - normalizer)[:, 0]
    top = logits.topk(min(max(num_top, default=0), logits.shape[1]), dim=-1)
    return LogprobTensors(own, top.indices, top.values - normalizer, num_top)


def prompt_logprobs(
    hidden: Tensor, logits: Callable[[Tensor], Tensor], tokens: Sequence[int], num_top: Sequence[int]
) -> list[LogprobTensors]:
    """Return log-probabilities of prompt tokens; computes a few rows of logits at a time.

    Args:
        hidden: ``[R, hidden]``, hidden states of the positions before the tokens.
        logits: maps some rows of ``hidden`` to float32 ``[rows, vocab]``.
        tokens, num_top: R of each, as for ``token_logprobs``.
    """
    ids = to_device(np.array(tokens, np.int64), hidden.device)
    found: list[LogprobTensors] = []
    for first in range(0, len(tokens), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        found.append(token_logprobs(logits(hidden[part]), ids[part], num_top[part]))
    return found
