"""Samples tokens. A token is a pure function of its row's logits, parameters, tokens so far, seed and position.

Top-k, top-p and min-p of a row become one threshold on its logits, so that the order in which equal logits are sorted
does not matter; tokens that tie with the last kept token are kept too. A random row inverts its cumulative
distribution, in order of token id, at a uniform number that is a hash of (seed, position). There is no generator state,
so a retracted or moved request samples the same tokens. Weights are whole numbers (``weights``), so that all devices
sample the same token from the same logits.

On a GPU nothing here waits for the device, so that the next step can be queued behind the one that samples; there the
Triton kernels of ``triton_kernels.sampling`` draw, where that package is installed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.device_copies import to_device
from common.engine.sampling.constraints import StepMasks
from common.engine.sampling.logprobs import LogprobTensors, token_logprobs
from common.engine.sampling.penalties import TokenHistory, apply_penalties
from common.engine.sampling.token_masks import TokenMask, apply_token_masks
from common.engine.sampling.weights import factor_of, least_kept_by_min_p, token_weights
from common.sampling_params import SamplingParams

#: Strips of a row that are searched first for tokens above its threshold; the whole row only if they do not suffice.
NUM_STRIPS = 32
#: With a larger top-k, the strips may not hold its tokens; up to it there are as many strips as tokens.
MOST_STRIPS = 128
#: Rows that a GPU without Triton sorts at once, whose copies take 12 bytes for each logit.
ROWS_PER_SORT = 32
_MOST_PER_STRIP = 256


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One token to sample.

    Attributes:
        position: position of the token in the request; the prompt has positions ``0 .. prompt_len - 1``.
        history: the request's tokens so far; None without penalties.
        mask: its allowed tokens and bad words; None if it has neither.
        must_go_on: no token of ``end_ids`` may be sampled, even after ``min_tokens``.
    """

    params: SamplingParams
    position: int
    prompt_len: int
    end_ids: tuple[int, ...] = ()
    history: TokenHistory | None = None
    mask: TokenMask | None = None
    must_go_on: bool = False

    @property
    def is_end_masked(self) -> bool:
        is_late = self.must_go_on or self.position - self.prompt_len < self.params.min_tokens
        return bool(self.end_ids) and is_late


def sample(
    logits: Tensor, rows: Sequence[SamplingRow], masks: StepMasks | None = None
) -> tuple[Tensor, LogprobTensors | None]:
    """Sample one token per row.

    Args:
        logits: ``[R, vocab]`` float32; changed in place by biases, penalties and all masks. The logit
            of a token that must not be sampled is minus infinity afterwards; if that holds for a whole row, its token
            is arbitrary.
        masks: of rows with a grammar or a reasoning budget; None if there are none.
    Returns:
        Tokens ``[R]`` int64 on the logits' device, and log-probabilities of the unchanged distribution for the rows
        that asked (None if no row asked).
    """
    assert logits.dtype == torch.float32
    assert len(logits) == len(rows)
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    raw = logits[_indices(asked, logits.device)] if asked else None  # a copy
    apply_penalties(logits, [(row.params, row.history) for row in rows])
    apply_token_masks(logits, [(row.mask, row.end_ids if row.is_end_masked else ()) for row in rows])
    if masks is not None:
        masks.apply(logits)
    tokens = _draw_on_device(logits, rows) if _has_kernels(logits.device.type) else _draw(logits, rows)
    if raw is None:
        return tokens, None
    num_top = [rows[index].params.logprobs or 0 for index in asked]
    return tokens, token_logprobs(raw, tokens[_indices(asked, logits.device)], num_top)


@cache
def _has_kernels(device_type: str) -> bool:
    return device_type == "cuda" and find_spec("triton") is not None


def _draw_on_device(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return the tokens that ``_draw`` returns, in a few launches."""
    from common.engine.triton_kernels.sampling import draw_tokens, row_inputs  # imports triton

    inputs = row_inputs([row.params for row in rows], _uniforms(rows), logits.shape[1])
    return draw_tokens(logits, to_device(inputs, logits.device))


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return one token ``[R]`` per row: the likeliest if the row is greedy, else a random one."""
    tokens = _argmax(logits)
    for is_truncated, method in ((True, _sample_likely_strips), (False, _sample_whole_rows)):
        chosen = [
            i for i, row in enumerate(rows) if not row.params.is_greedy and _is_truncated(row.params) == is_truncated
        ]
        if chosen:
            index_of = _indices(chosen, logits.device)
            part = logits if len(chosen) == len(rows) else logits[index_of]
            tokens[index_of] = method(part, tokens[index_of], [rows[i] for i in chosen])
    return tokens


def _indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    return to_device(np.array(numbers, np.int64), device)


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) per (seed, position): SplitMix64's finalizer (Steele et al., OOPSLA 2014), twice."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + golden) + positions * golden)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _uniforms(rows: Sequence[SamplingRow]) -> NDArray[np.float64]:
    """Return the random number of each row, ``[R]``."""
    seeds = np.array([row.params.seed for row in rows], np.uint64)
    return uniforms(seeds, np.array([row.position for row in rows], np.uint64))


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _argmax(logits: Tensor) -> Tensor:
    """Return the index ``[R]`` of each row's first maximum.

    Strips are searched first, since torch finds a maximum much faster than its index.
    """
    strips = logits.view(len(logits), -1, _strip_size(logits.shape[1]))
    strip = strips.amax(dim=-1).argmax(dim=-1)
    inside = strips[torch.arange(len(strips), device=logits.device), strip].argmax(dim=-1)
    return strip * strips.shape[2] + inside


@cache
def _strip_size(width: int) -> int:
    """Return the largest divisor of ``width`` up to a bound, so that strips tile a row without padding."""
    return next(size for size in range(min(width, _MOST_PER_STRIP), 0, -1) if width % size == 0)


def _sample_likely_strips(logits: Tensor, likeliest: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Sample tokens ``[R]`` for rows that all have top-k, top-p or min-p.

    Only the strips with the largest maxima are searched; all other logits are at most ``bound``. k strips hold the k
    likeliest tokens. If a row's threshold is above ``bound``, the strips hold all its kept tokens; so they do if all
    other tokens are blocked. Otherwise the whole row is searched. A row's result depends on that row alone.
    """
    num_rows, vocab = logits.shape
    size = _strip_size(vocab)
    num_strips = max(NUM_STRIPS, *(row.params.top_k for row in rows if row.params.top_k <= MOST_STRIPS), 0)
    if vocab <= num_strips * size:
        return _sample_whole_rows(logits, likeliest, rows)
    if logits.device.type != "cpu":  # the host would have to wait for ``is_unsure``
        parts = [slice(first, first + ROWS_PER_SORT) for first in range(0, num_rows, ROWS_PER_SORT)]
        return torch.cat([_sample_whole_rows(logits[part], likeliest[part], rows[part]) for part in parts])
    strips = logits.view(num_rows, -1, size)
    best_strips = strips.amax(dim=-1).topk(num_strips + 1, dim=-1)
    bound = best_strips.values[:, -1:]
    chosen = best_strips.indices[:, :-1].sort(dim=-1).values  # back in order of token id
    values = strips.gather(1, chosen[:, :, None].expand(-1, -1, size)).flatten(1)
    best = logits.gather(1, likeliest[:, None])
    truncation = _Truncation(rows, vocab, logits.device)
    threshold = truncation.threshold(values, best, logits, truncation.scaled(bound, best))
    place = _invert(truncation.weights(values, best, threshold), truncation.uniforms)
    tokens = chosen.gather(1, place[:, None] // size)[:, 0] * size + place % size
    is_rest_blocked = (bound == -math.inf) & (truncation.top_k <= values.shape[1])
    is_unsure = ((threshold <= truncation.scaled(bound, best)) & ~is_rest_blocked)[:, 0].tolist()
    rest = [row for row in range(num_rows) if is_unsure[row]]
    if rest:
        index = torch.tensor(rest)
        tokens[index] = _sample_whole_rows(logits[index], likeliest[index], [rows[i] for i in rest])
    return tokens


def _sample_whole_rows(logits: Tensor, likeliest: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Sample tokens ``[R]`` for random rows from the whole of each row."""
    truncation = _Truncation(rows, logits.shape[1], logits.device)
    best = logits.gather(1, likeliest[:, None])
    is_truncated = any(_is_truncated(row.params) for row in rows)
    threshold = truncation.threshold(logits, best, logits) if is_truncated else None
    return _invert(truncation.weights(logits, best, threshold), truncation.uniforms)


class _RunningSums:
    """Sums of ``weights[row, : i + 1]`` for any i, from the sums of strips and the running sums of one strip.

    A float64 running sum of every weight would take twice the memory of the weights. All sums are exact.

    Args:
        weights: ``[R, width]`` whole numbers in float32, contiguous.
    """

    def __init__(self, weights: Tensor) -> None:
        self._size = _strip_size(weights.shape[1])
        self._strips = weights.view(len(weights), -1, self._size)
        self._ends = self._strips.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
        self.total = self._ends[:, -1:]

    def at(self, index: Tensor) -> Tensor:
        """Return the sums up to and including ``index`` ``[R, 1]``."""
        before, inside = self._look_into(index // self._size)
        return before + inside.gather(1, index % self._size)

    def find(self, target: Tensor, *, is_beyond: bool) -> Tensor:
        """Return the first index ``[R, 1]`` whose sum reaches ``target``, or with ``is_beyond`` exceeds it.

        If no sum does, the index is the width or more.
        """
        strip = torch.searchsorted(self._ends, target, right=is_beyond)
        before, inside = self._look_into(strip.clamp(max=self._ends.shape[1] - 1))
        return strip * self._size + torch.searchsorted(inside, target - before, right=is_beyond)

    def _look_into(self, strip: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum before strip ``[R, 1]`` and the running sums ``[R, size]`` inside it, both float64."""
        before = torch.where(strip > 0, self._ends.gather(1, (strip - 1).clamp(min=0)), 0.0)
        inside = self._strips.gather(1, strip[:, :, None].expand(-1, 1, self._size))[:, 0]
        return before, inside.double().cumsum(dim=-1)


class _Truncation:
    """The rows' parameters as columns ``[R, 1]``, and the weights and thresholds that follow from them."""

    def __init__(self, rows: Sequence[SamplingRow], vocab: int, device: torch.device) -> None:
        params = [row.params for row in rows]

        def column(values: Iterable[float], dtype: type[np.generic]) -> Tensor:
            return to_device(np.array([*values], dtype), device)[:, None]

        self.factor = column(map(factor_of, params), np.float32)
        self.top_k = column((p.top_k if 0 < p.top_k < vocab else vocab for p in params), np.int64)
        self.top_p = column((p.top_p for p in params), np.float64)
        self.min_scaled = column(map(least_kept_by_min_p, params), np.float32)
        self.needs_mass = any(p.top_p < 1 and not 0 < p.top_k < vocab for p in params)
        self.has_ranks = any(p.top_p < 1 or 0 < p.top_k < vocab for p in params)
        self.vocab = vocab
        self.uniforms = to_device(_uniforms(rows), device)

    def scaled(self, logits: Tensor, best: Tensor) -> Tensor:
        return (logits - best).mul_(self.factor)

    def weights(self, logits: Tensor, best: Tensor, threshold: Tensor | None) -> Tensor:
        """Return weights ``[R, width]``, 0 for tokens below the threshold."""
        return token_weights(self.scaled(logits, best), threshold)

    def threshold(self, logits: Tensor, best: Tensor, whole: Tensor, bound: Tensor | None = None) -> Tensor:
        """Return the smallest scaled logit that is kept, ``[R, 1]``, by min-p, by top-k and by top-p after top-k.

        Args:
            logits: ``[R, width]`` of the whole vocabulary or of its likeliest part; the result is minus infinity for a
                row whose part does not suffice to tell.
            whole: ``[R, vocab]``, the logits of the whole vocabulary.
            bound: ``[R, 1]``, what no scaled logit outside of the part exceeds.
        """
        if not self.has_ranks:
            return self.min_scaled
        ranked = _descending(self.scaled(logits, best))
        width = ranked.shape[1]
        running = _RunningSums(token_weights(ranked.clone()))
        last = self.top_k.clamp(max=width) - 1
        kept_mass = running.at(last)
        if self.needs_mass:
            mass = _RunningSums(self.weights(whole, best, None)).total
            kept_mass = torch.where(self.top_k < self.vocab, kept_mass, mass)
        reach = running.find(self.top_p * kept_mass, is_beyond=False)
        found = ranked.gather(1, torch.minimum(reach, last))
        keeps_all = (self.top_p >= 1) & (self.top_k >= self.vocab)
        found = torch.maximum(torch.where(keeps_all, -math.inf, found), self.min_scaled)
        is_beyond = ~keeps_all & (self.top_k > width) & ((self.top_k < self.vocab) | (reach >= width))
        if bound is not None:  # then the k likeliest are not all in the part, and their mass is not known
            is_beyond |= (self.top_p < 1) & (self.top_k < self.vocab) & (ranked.gather(1, last) < bound)
        return torch.where(is_beyond, -math.inf, found)


def _descending(values: Tensor) -> Tensor:
    """Sort rows, largest first. On the CPU numpy sorts, since torch also computes indices, at twenty times the cost."""
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    negated = values.neg()
    negated.numpy().sort(axis=-1)
    return negated.neg_()


def _invert(weights: Tensor, where: Tensor) -> Tensor:
    """Return the first index at which the running sum of ``weights`` exceeds ``where`` times their total.

    Rounding may lead past the last token with a weight; the token with the largest weight is taken then.

    Args:
        where: ``[R]`` float64 in [0, 1).
    """
    sums = _RunningSums(weights)
    index = sums.find(where[:, None] * sums.total, is_beyond=True).clamp(max=weights.shape[1] - 1)
    return torch.where(weights.gather(1, index) > 0, index, _argmax(weights)[:, None])[:, 0]
