"""Choose tokens: a pure function of logits, parameters, seed and position, row by row.

Every row's cuts become one threshold on its logits, so that nothing depends on the order in which equals are sorted,
and tokens that tie with the last one kept are kept too. The draw inverts the cumulative distribution, in order of token
id, at a uniform number that is a hash of (seed, position): no state, so a request that moves or comes back draws the
same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.sampling import SamplingParams, TokenLogprobs

#: Tokens looked at before a whole row is sorted for top-p: enough unless the distribution is nearly flat.
TOP_P_CANDIDATES = 1024
_STRIP = 512  # tokens per strip of the two-level cumulative sum


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be chosen.

    Attributes:
        params: of its request.
        position: of the token to be chosen, in its text; the prompt has positions ``0 .. prompt_len``.
        prompt_len: tokens of the original prompt.
        end_ids: tokens that would end the output.
    """

    params: SamplingParams
    position: int
    prompt_len: int
    end_ids: tuple[int, ...] = ()

    @property
    def is_end_masked(self) -> bool:
        return bool(self.end_ids) and self.position - self.prompt_len < self.params.min_tokens


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, tuple[TokenLogprobs | None, ...]]:
    """One token per row.

    Args:
        logits: ``[R, vocab]`` float32; end tokens that ``min_tokens`` forbids are overwritten in place.
        draws: R of them.
    Returns:
        ``[R]`` int64 on the logits' device; and the log-probabilities of the raw distribution for rows that ask (``()``
        if none does).
    """
    assert logits.dtype == torch.float32
    assert len(logits) == len(draws)
    raw = _RawLogprobs(logits, draws)
    for row, draw in enumerate(draws):
        if draw.is_end_masked:
            logits[row, list(draw.end_ids)] = -math.inf
    tokens = logits.argmax(dim=-1)
    random_rows = [row for row, draw in enumerate(draws) if not draw.params.is_greedy]
    if len(random_rows) == len(draws):
        tokens = _draw(logits, draws, tokens)
    elif random_rows:
        index = torch.tensor(random_rows, device=logits.device)
        tokens[index] = _draw(logits[index], [draws[row] for row in random_rows], tokens[index])
    return tokens, raw.of(tokens, logits)


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


def _draw(logits: Tensor, draws: Sequence[Draw], likeliest: Tensor) -> Tensor:
    """Tokens ``[R]`` for rows that are all random. ``likeliest`` is each row's argmax."""
    device = logits.device
    params = [draw.params for draw in draws]
    best = logits.gather(1, likeliest[:, None])
    temperatures = torch.tensor([p.temperature for p in params], device=device)[:, None]
    scaled = (logits - best) / temperatures  # 0 for the likeliest
    weights = scaled.exp()
    threshold = _threshold(scaled, weights, params)
    if threshold is not None:
        weights = torch.where(scaled >= threshold, weights, 0.0)
    seeds = np.array([p.seed for p in params], np.uint64)
    positions = np.array([draw.position for draw in draws], np.uint64)
    tokens = _invert(weights, torch.from_numpy(uniforms(seeds, positions)).to(device))
    # Rounding may land a hair beyond the last kept token; then the likeliest is as good as any.
    return torch.where(weights.gather(1, tokens[:, None])[:, 0] > 0, tokens, likeliest)


def _invert(weights: Tensor, where: Tensor) -> Tensor:
    """First index at which the running sum of ``weights`` exceeds ``where`` (``[R]`` float64, in [0, 1)) of its total.

    Two levels, strips and then tokens of one strip, so that only one pass runs over the vocabulary.
    """
    rows, vocab = weights.shape
    strips = torch.nn.functional.pad(weights, (0, -vocab % _STRIP)).view(rows, -1, _STRIP)
    running = strips.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = where[:, None] * running[:, -1:]
    strip = torch.searchsorted(running, target, right=True).clamp(max=strips.shape[1] - 1)
    before = torch.where(strip > 0, running.gather(1, (strip - 1).clamp(min=0)), 0.0)
    inside = strips.gather(1, strip[:, :, None].expand(-1, 1, _STRIP))[:, 0].double().cumsum(dim=-1)
    offset = torch.searchsorted(inside, target - before, right=True).clamp(max=_STRIP - 1)
    return (strip * _STRIP + offset)[:, 0].clamp(max=vocab - 1)


def _threshold(scaled: Tensor, weights: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """The scaled logit ``[R, 1]`` that a token must reach to be kept, None if all are: min-p, top-k, then top-p."""
    device, vocab = scaled.device, scaled.shape[1]
    has_top_k = any(0 < p.top_k < vocab for p in params)
    has_top_p = any(p.top_p < 1 for p in params)
    cuts: list[Tensor] = []
    if any(p.min_p > 0 for p in params):
        logs = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        cuts.append(torch.tensor(logs, device=device)[:, None])
    if has_top_k or has_top_p:
        cuts.append(_rank_threshold(scaled, weights, params, has_top_p))
    if not cuts:
        return None
    return torch.stack(cuts).amax(dim=0).clamp(max=0.0)


def _rank_threshold(scaled: Tensor, weights: Tensor, params: Sequence[SamplingParams], has_top_p: bool) -> Tensor:
    """Threshold of top-k followed by top-p (of what top-k left)."""
    device, vocab = scaled.device, scaled.shape[1]
    kept = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    widest = max((k for k in kept if k < vocab), default=1)
    needs_all = has_top_p and any(p.top_p < 1 and k == vocab for p, k in zip(params, kept, strict=True))
    width = min(vocab, max(widest, TOP_P_CANDIDATES if needs_all else 1))
    ranked = scaled.topk(width, dim=-1).values
    limits = torch.tensor(kept, device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)[:, None]
    total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    threshold, is_found = _nucleus(ranked, limits, top_p, total)
    if needs_all and width < vocab and not bool(is_found.all()):
        threshold, _ = _nucleus(scaled.sort(dim=-1, descending=True).values, limits, top_p, total)
    return threshold


def _nucleus(ranked: Tensor, limits: Tensor, top_p: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Threshold ``[R, 1]`` from logits ranked best first, and whether the ranks reached far enough to know it.

    Args:
        ranked: ``[R, width]``.
        limits: ``[R, 1]`` tokens that top-k keeps (the vocabulary if it keeps all).
        top_p, total: ``[R, 1]`` float64; ``total`` is the sum of weights over the whole vocabulary.
    """
    width = ranked.shape[1]
    running = ranked.exp().double().cumsum(dim=-1)
    last = limits.clamp(max=width) - 1
    mass = torch.where(limits <= width, running.gather(1, last), total)
    # Tokens before the one that reaches top_p number exactly those whose running sum falls short of it.
    reach = torch.searchsorted(running, top_p * mass)
    is_found = (limits <= width) | (reach < width) | (top_p >= 1)
    index = torch.minimum(reach, last)
    keeps_all = (top_p >= 1) & (limits > width)
    return torch.where(keeps_all, -math.inf, ranked.gather(1, index)), is_found


class _RawLogprobs:
    """Log-probabilities before anything touches the logits, for the rows that ask."""

    def __init__(self, logits: Tensor, draws: Sequence[Draw]) -> None:
        self._asked = [
            (row, draw.params.logprobs) for row, draw in enumerate(draws) if draw.params.logprobs is not None
        ]
        self._num_rows = len(draws)
        if not self._asked:
            return
        self._index = torch.tensor([row for row, _ in self._asked], device=logits.device)
        chosen = logits[self._index]
        self._normalizer = chosen.logsumexp(dim=-1)
        width = max(count or 0 for _, count in self._asked)
        self._top = chosen.topk(min(width, logits.shape[1]), dim=-1) if width else None

    def of(self, tokens: Tensor, logits: Tensor) -> tuple[TokenLogprobs | None, ...]:
        """The chosen tokens' own logits were not overwritten, since a forbidden token cannot be chosen."""
        if not self._asked:
            return ()
        own = (logits[self._index, tokens[self._index]] - self._normalizer).tolist()
        ids: list[list[int]] = self._top.indices.tolist() if self._top else [[] for _ in own]
        values = (self._top.values - self._normalizer[:, None]).tolist() if self._top else [[] for _ in own]
        found: list[TokenLogprobs | None] = [None] * self._num_rows
        for (row, count), token, row_ids, row_values in zip(self._asked, own, ids, values, strict=True):
            found[row] = TokenLogprobs(token, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        return tuple(found)
