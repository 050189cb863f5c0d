"""Changes logits before sampling: logit biases, then penalties for tokens that already occur in the request.

A request with penalties has a ``TokenHistory``, built from all its tokens at admission and extended by each sampled
token. It counts distinct tokens, so that its size depends on the text and not on the vocabulary. The result depends on
the request's tokens alone, not on the batch or on the node that sampled them.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.device_copies import to_device
from common.sampling_params import SamplingParams

Ids = NDArray[np.int64]
Values = NDArray[np.float32]
#: Row of the logits, token ids, one value for each id.
Entry = tuple[int, Ids, Values]
#: Repetition penalties below it count as this: a logit that is divided must stay a number.
LEAST_PENALTY = 1e-9


class TokenHistory:
    """Distinct tokens of one request, and the number of times each occurs in the output.

    Args:
        tokens: all tokens so far, prompt and output.
        prompt_len: number of them that are the prompt.
    """

    def __init__(self, tokens: Sequence[int], prompt_len: int) -> None:
        assert len(tokens) >= prompt_len, "a request with penalties came without its tokens"
        self._prompt: Ids = np.array(sorted(set(tokens[:prompt_len])), np.int64)  # np.unique would import modules now
        self._output: Ids = np.empty(16, np.int64)
        self._counts = np.empty(16, np.int64)
        self._places: dict[int, int] = {}
        for token in tokens[prompt_len:]:
            self.append(token)

    def append(self, token: int) -> None:
        """Count one more output token."""
        num_distinct = len(self._places)
        place = self._places.setdefault(token, num_distinct)
        if place < num_distinct:
            self._counts[place] += 1
            return
        if place == len(self._output):
            self._output, self._counts = (np.concatenate([old, old]) for old in (self._output, self._counts))
        self._output[place], self._counts[place] = token, 1

    @property
    def output(self) -> Ids:
        """Distinct tokens of the output."""
        return self._output[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of occurrences of each token of ``output``."""
        return self._counts[: len(self._places)]

    @property
    def tokens(self) -> Ids:
        """Distinct tokens of the prompt, then distinct tokens of the output; a token in both occurs twice."""
        return np.concatenate([self._prompt, self.output])


def apply_penalties(logits: Tensor, rows: Iterable[tuple[SamplingParams, TokenHistory | None]]) -> None:
    """Apply biases, the repetition penalty, then presence and frequency penalties, in place.

    The repetition penalty divides positive logits and multiplies others (CTRL, arXiv:1909.05858) for tokens of prompt
    and output. Presence and frequency penalties follow OpenAI's formula, for tokens of the output only.

    Args:
        logits: ``[R, vocab]`` float32, contiguous.
        rows: parameters of the R rows; a row with penalties has a history.
    """
    biases: list[Entry] = []
    repetitions: list[Entry] = []
    occurrences: list[Entry] = []
    for row, (params, history) in enumerate(rows):
        if params.logit_bias:
            bias = dict(params.logit_bias)
            biases.append((row, np.array([*bias], np.int64), np.array([*bias.values()], np.float32)))
        if not params.has_penalties:
            continue
        assert history is not None, "a row with penalties has no history"
        if params.repetition_penalty != 1.0:
            tokens = history.tokens
            penalty = max(params.repetition_penalty, LEAST_PENALTY)
            repetitions.append((row, tokens, np.full(len(tokens), penalty, np.float32)))
        if params.presence_penalty or params.frequency_penalty:
            amounts = params.presence_penalty + params.frequency_penalty * history.counts
            occurrences.append((row, history.output, amounts.astype(np.float32)))
    flat = logits.view(-1)
    if biases:
        places, values = _joined(biases, logits)
        flat[places] += values
    if repetitions:
        places, values = _joined(repetitions, logits)
        found = flat[places]  # all are read before one is written: a token that occurs twice is changed once
        flat[places] = torch.where(found > 0, found / values, found * values)
    if occurrences:
        places, values = _joined(occurrences, logits)
        flat[places] -= values


def _joined(entries: Sequence[Entry], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of all entries in the flattened logits, and their values, ``[sum of sizes]`` each."""
    width = logits.shape[1]
    places = np.concatenate([row * width + ids for row, ids, _ in entries])
    values = np.concatenate([values for _, _, values in entries])
    return to_device(places, logits.device), to_device(values, logits.device)
