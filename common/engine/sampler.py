"""Choose tokens: a pure function of logits, parameters, text so far, seed and position, row by row.

Every row's cuts become one threshold on its logits, so that nothing depends on the order in which equals are sorted,
and tokens that tie with the last one kept are kept too. The draw inverts the cumulative distribution, in order of token
id, at a uniform number that is a hash of (seed, position): no state, so a request that moves or comes back draws the
same.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.logprobs import token_logprobs
from common.engine.penalties import History, adjust
from common.sampling_params import SamplingParams, TokenLogprobs

#: Strips of a row that are looked at first where a cut is asked for; the rest of the row only if that was not enough.
NUM_STRIPS = 32
_MOST_PER_STRIP = 256


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be chosen.

    Attributes:
        params: of its request.
        position: of the token to be chosen, in its text; the prompt has positions ``0 .. prompt_len``.
        prompt_len: tokens of the original prompt.
        end_ids: tokens that would end the output.
        history: its tokens so far, if it has penalties.
    """

    params: SamplingParams
    position: int
    prompt_len: int
    end_ids: tuple[int, ...] = ()
    history: History | None = None

    @property
    def is_end_masked(self) -> bool:
        return bool(self.end_ids) and self.position - self.prompt_len < self.params.min_tokens


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, tuple[TokenLogprobs | None, ...]]:
    """One token per row.

    Args:
        logits: ``[R, vocab]`` float32; changed in place by biases, penalties, and ``min_tokens``.
        draws: R of them.
    Returns:
        ``[R]`` int64 on the logits' device; and the log-probabilities of the raw distribution for rows that ask (``()``
        if none does).
    """
    assert logits.dtype == torch.float32
    assert len(logits) == len(draws)
    asked = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    raw = logits[asked] if asked else None  # a copy
    adjust(logits, draws)
    for row, draw in enumerate(draws):
        if draw.is_end_masked:
            logits[row, list(draw.end_ids)] = -math.inf
    tokens = _argmax(logits)
    for is_cut, method in ((True, _draw_among_likely), (False, _draw)):
        rows = _rows(draws, is_cut=is_cut)
        if rows:
            index = torch.tensor(rows, device=logits.device)
            part = logits if len(rows) == len(draws) else logits[index]
            tokens[index] = method(part, tokens[index], [draws[row] for row in rows])
    return tokens, _align(raw, tokens, draws, asked) if raw is not None else ()


def _align(
    raw: Tensor, tokens: Tensor, draws: Sequence[Draw], asked: Sequence[int]
) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities of the rows that asked, whose raw logits these are; None for the others."""
    found: list[TokenLogprobs | None] = [None] * len(draws)
    counts = [draws[row].params.logprobs or 0 for row in asked]
    for row, logprobs in zip(asked, token_logprobs(raw, tokens[asked], counts), strict=True):
        found[row] = logprobs
    return tuple(found)


def _rows(draws: Sequence[Draw], *, is_cut: bool) -> list[int]:
    """Rows that draw at random, with or without a cut."""
    return [row for row, draw in enumerate(draws) if not draw.params.is_greedy and _has_cut(draw.params) == is_cut]


def _has_cut(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), one per (seed, position), by SplitMix64's finalizer (Steele et al., OOPSLA 2014), twice."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + golden) + positions * golden)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _argmax(logits: Tensor) -> Tensor:
    """Index ``[R]`` of each row's first largest. In two levels: torch finds a maximum fast, but its place slowly."""
    strips = logits.view(len(logits), -1, _strip_size(logits.shape[1]))
    strip = strips.amax(dim=-1).argmax(dim=-1)
    inside = strips[torch.arange(len(strips), device=logits.device), strip].argmax(dim=-1)
    return strip * strips.shape[2] + inside


@cache
def _strip_size(width: int) -> int:
    """Largest divisor of ``width`` up to a bound: strips tile a row without padding."""
    return next(size for size in range(min(width, _MOST_PER_STRIP), 0, -1) if width % size == 0)


def _draw_among_likely(logits: Tensor, likeliest: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens ``[R]`` for rows that all have a cut.

    Only the strips with the largest maxima are looked at. Whatever they leave out is at most ``bound``; a row whose
    threshold is above that has all its kept tokens in them, any other is drawn from in full. A row's outcome depends on
    the row alone.
    """
    num_rows, vocab = logits.shape
    size = _strip_size(vocab)
    if vocab <= NUM_STRIPS * size:
        return _draw(logits, likeliest, draws)
    strips = logits.view(num_rows, -1, size)
    best_strips = strips.amax(dim=-1).topk(NUM_STRIPS + 1, dim=-1)
    bound = best_strips.values[:, -1:]
    chosen = best_strips.indices[:, :-1].sort(dim=-1).values  # back in order of token id
    values = strips.gather(1, chosen[:, :, None].expand(-1, -1, size)).flatten(1)
    best = logits.gather(1, likeliest[:, None])
    cut = _Cut(draws, vocab, logits.device)
    threshold = cut.threshold(values, best, _mass(logits, best, cut) if cut.needs_mass else None)
    place = _invert(cut.weights(values, best, threshold), cut.uniforms)
    tokens = chosen.gather(1, place[:, None] // size)[:, 0] * size + place % size
    is_unsure = (threshold <= cut.scaled(bound, best))[:, 0].tolist()
    rest = [row for row in range(num_rows) if is_unsure[row]]
    if rest:
        index = torch.tensor(rest, device=logits.device)
        tokens[index] = _draw(logits[index], likeliest[index], [draws[row] for row in rest])
    return tokens


def _draw(logits: Tensor, likeliest: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens ``[R]`` for rows that are all random, from the whole of each row."""
    cut = _Cut(draws, logits.shape[1], logits.device)
    best = logits.gather(1, likeliest[:, None])
    threshold = None
    if any(_has_cut(draw.params) for draw in draws):
        threshold = cut.threshold(logits, best, _mass(logits, best, cut) if cut.needs_mass else None)
    return _invert(cut.weights(logits, best, threshold), cut.uniforms)


def _mass(logits: Tensor, best: Tensor, cut: "_Cut") -> Tensor:
    """Sum of all weights of each row, ``[R, 1]`` float64."""
    return _RunningSums(cut.weights(logits, best, None)).total


class _RunningSums:
    """Sums of ``weights[row, : i + 1]`` for any i, without a float64 for each: strips are summed, then one looked into.

    Args:
        weights: ``[R, width]`` float32, contiguous.
    """

    def __init__(self, weights: Tensor) -> None:
        self._size = _strip_size(weights.shape[1])
        self._strips = weights.view(len(weights), -1, self._size)
        self._ends = self._strips.sum(dim=-1).double().cumsum(dim=-1)  # pairwise inside: float32 is enough
        self.total = self._ends[:, -1:]

    def at(self, index: Tensor) -> Tensor:
        """The sums up to and with ``index`` ``[R, 1]``."""
        before, inside = self._look_into(index // self._size)
        return before + inside.gather(1, index % self._size)

    def find(self, target: Tensor, *, is_beyond: bool) -> Tensor:
        """First index ``[R, 1]`` whose sum reaches ``target``, or exceeds it; the width or thereabouts if none does."""
        strip = torch.searchsorted(self._ends, target, right=is_beyond)
        before, inside = self._look_into(strip.clamp(max=self._ends.shape[1] - 1))
        return strip * self._size + torch.searchsorted(inside, target - before, right=is_beyond)

    def _look_into(self, strip: Tensor) -> tuple[Tensor, Tensor]:
        """What was summed before strip ``[R, 1]``, and the running sums ``[R, size]`` inside of it; float64."""
        before = torch.where(strip > 0, self._ends.gather(1, (strip - 1).clamp(min=0)), 0.0)
        inside = self._strips.gather(1, strip[:, :, None].expand(-1, 1, self._size))[:, 0]
        return before, inside.double().cumsum(dim=-1)


class _Cut:
    """The rows' parameters as columns ``[R, 1]``, and the arithmetic of weights and thresholds over them.

    A token's scaled logit is its distance below the row's best over the temperature, at most 0; its weight is e to
    that.
    """

    def __init__(self, draws: Sequence[Draw], vocab: int, device: torch.device) -> None:
        params = [draw.params for draw in draws]

        def column(values: Iterable[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(list(values), dtype=dtype).to(device)[:, None]

        self.temperature = column((p.temperature for p in params), torch.float32)
        self.top_k = column((p.top_k if 0 < p.top_k < vocab else vocab for p in params), torch.int64)
        self.top_p = column((p.top_p for p in params), torch.float64)
        self.min_scaled = column((math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params), torch.float32)
        self.needs_mass = any(p.top_p < 1 and not 0 < p.top_k < vocab for p in params)
        self.has_ranks = any(p.top_p < 1 or 0 < p.top_k < vocab for p in params)
        self.vocab = vocab
        seeds = np.array([p.seed for p in params], np.uint64)
        positions = np.array([draw.position for draw in draws], np.uint64)
        self.uniforms = torch.from_numpy(uniforms(seeds, positions)).to(device)

    def scaled(self, logits: Tensor, best: Tensor) -> Tensor:
        return (logits - best).div_(self.temperature)

    def weights(self, logits: Tensor, best: Tensor, threshold: Tensor | None) -> Tensor:
        """``[R, width]``; 0 for tokens below the threshold."""
        scaled = self.scaled(logits, best)
        if threshold is None:
            return scaled.exp_()
        return scaled.masked_fill_(scaled < threshold, -math.inf).exp_()

    def threshold(self, logits: Tensor, best: Tensor, mass: Tensor | None) -> Tensor:
        """What a scaled logit must reach to be kept, ``[R, 1]``: by min-p, by top-k, by top-p of what top-k left.

        Args:
            logits: ``[R, width]``, of the whole vocabulary or of its likeliest part. Where a part does not reach far
                enough down to tell, the answer is minus infinity.
            mass: from ``_mass``, where ``needs_mass``.
        """
        if not self.has_ranks:
            return self.min_scaled.clamp(max=0.0)
        ranked = _descending(self.scaled(logits, best))
        width = ranked.shape[1]
        running = _RunningSums(ranked.exp())
        last = self.top_k.clamp(max=width) - 1
        kept_mass = running.at(last)
        if mass is not None:
            kept_mass = torch.where(self.top_k < self.vocab, kept_mass, mass)
        reach = running.find(self.top_p * kept_mass, is_beyond=False)
        found = ranked.gather(1, torch.minimum(reach, last))
        keeps_all = (self.top_p >= 1) & (self.top_k >= self.vocab)
        found = torch.maximum(torch.where(keeps_all, -math.inf, found), self.min_scaled).clamp(max=0.0)
        is_beyond = ~keeps_all & (self.top_k > width) & ((self.top_k < self.vocab) | (reach >= width))
        return torch.where(is_beyond, -math.inf, found)


def _descending(values: Tensor) -> Tensor:
    """Rows sorted, largest first. On the CPU by numpy: torch carries indices along, at twenty times the cost."""
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    negated = values.neg()
    negated.numpy().sort(axis=-1)
    return negated.neg_()


def _invert(weights: Tensor, where: Tensor) -> Tensor:
    """First index at which the running sum of ``weights`` exceeds ``where`` (``[R]`` float64, in [0, 1)) of its total.

    Rounding may land a hair beyond the last token with a weight; then the heaviest is as good as any.
    """
    sums = _RunningSums(weights)
    index = sums.find(where[:, None] * sums.total, is_beyond=True).clamp(max=weights.shape[1] - 1)
    return torch.where(weights.gather(1, index) > 0, index, _argmax(weights)[:, None])[:, 0]
