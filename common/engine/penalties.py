"""What changes logits before anything is chosen: biases, then penalties for tokens that are in the text already.

A request with penalties has a ``History``, made of all its tokens when it takes a slot and grown by what is sampled. It
counts distinct tokens, so that its size follows the text, not the vocabulary, and its outcome follows the text alone:
whoever else is in the batch, and wherever the text was made.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.sampling_params import SamplingParams

Ids = NDArray[np.int64]
Values = NDArray[np.float32]
#: row of the logits, token ids, one value for each
Entry = tuple[int, Ids, Values]


class History:
    """Distinct tokens of one request, and how often each is in the output.

    Args:
        tokens: all so far, prompt and output.
        prompt_len: how many of them are the prompt.
    """

    def __init__(self, tokens: Sequence[int], prompt_len: int) -> None:
        assert len(tokens) >= prompt_len, "a request with penalties came without its tokens"
        self._prompt: Ids = np.unique(np.array(tokens[:prompt_len], np.int64))
        self._output: Ids = np.empty(16, np.int64)
        self._counts = np.empty(16, np.int64)
        self._places: dict[int, int] = {}
        for token in tokens[prompt_len:]:
            self.append(token)

    def append(self, token: int) -> None:
        """One more output token."""
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
        """How often each of ``output`` was sampled."""
        return self._counts[: len(self._places)]

    @property
    def tokens(self) -> Ids:
        """Distinct tokens of the prompt, then those of the output; one that is in both comes twice."""
        return np.concatenate([self._prompt, self.output])


class Adjusted(Protocol):
    """What is asked of a row; ``sampler.Draw`` is one."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def history(self) -> History | None: ...


def adjust(logits: Tensor, draws: Sequence[Adjusted]) -> None:
    """Biases, repetition penalty, presence and frequency penalties, in this order, in place.

    Repetition divides positive logits and multiplies the others (CTRL, arXiv:1909.05858) for tokens of prompt and
    output. The other two are OpenAI's, for tokens of the output alone.

    Args:
        logits: ``[R, vocab]`` float32, contiguous.
        draws: R of them; those with penalties have a history.
    """
    biases: list[Entry] = []
    repetitions: list[Entry] = []
    occurrences: list[Entry] = []
    for row, draw in enumerate(draws):
        params, history = draw.params, draw.history
        if params.logit_bias:
            bias = dict(params.logit_bias)
            biases.append((row, np.array([*bias], np.int64), np.array([*bias.values()], np.float32)))
        if not params.has_penalties:
            continue
        assert history is not None, "a row with penalties has no history"
        if params.repetition_penalty != 1.0:
            tokens = history.tokens
            repetitions.append((row, tokens, np.full(len(tokens), params.repetition_penalty, np.float32)))
        if params.presence_penalty or params.frequency_penalty:
            amounts = params.presence_penalty + params.frequency_penalty * history.counts
            occurrences.append((row, history.output, amounts.astype(np.float32)))
    flat = logits.view(-1)
    if biases:
        places, values = _joined(biases, logits)
        flat[places] += values
    if repetitions:
        places, values = _joined(repetitions, logits)
        found = flat[places]  # read before any is written: a token that comes twice is changed once
        flat[places] = torch.where(found > 0, found / values, found * values)
    if occurrences:
        places, values = _joined(occurrences, logits)
        flat[places] -= values


def _joined(entries: Sequence[Entry], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Every entry's places in the flattened logits, and their values, ``[sum of sizes]`` each."""
    width = logits.shape[1]
    places = np.concatenate([row * width + ids for row, ids, _ in entries])
    values = np.concatenate([values for _, _, values in entries])
    return torch.from_numpy(places).to(logits.device), torch.from_numpy(values).to(logits.device)
