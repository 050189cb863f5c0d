"""Sampling: worked examples of top-k, top-p and min-p, a naive reference, and independence of other rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.devices import DEVICES
from support.examples import examples

from common.engine.sampling import sampler
from common.engine.sampling.sampler import SamplingRow, sample, uniforms
from common.sampling_params import SamplingParams


def log_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def tokens_of(logits: torch.Tensor, params: SamplingParams, num_draws: int = 400) -> list[int]:
    """Sample one row at many positions."""
    draws = [SamplingRow(params, position, 0) for position in range(num_draws)]
    tokens, _ = sample(logits.expand(num_draws, -1).clone(), draws)
    return tokens.tolist()


def is_acceptable(token: int, logits: list[float], draw: SamplingRow) -> bool:
    """Whether the definition may sample this token. Within rounding error of a limit, both outcomes are accepted."""
    nudges = (0.0, -1e-5, 1e-5)
    return any(naive(logits, draw, cut, where) == token for cut in nudges for where in nudges)


def naive(logits: list[float], draw: SamplingRow, cut_nudge: float = 0.0, where_nudge: float = 0.0) -> int:
    """Sample by the definition, in float64, one token at a time."""
    params = draw.params
    masked = [
        -math.inf if draw.is_end_masked and token in draw.end_ids else logit for token, logit in enumerate(logits)
    ]
    if params.is_greedy:
        return int(np.argmax(masked))
    scaled = np.array(masked, np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    kept = set(range(len(weights)))
    if 0 < params.top_k < len(weights):
        limit = sorted(weights, reverse=True)[params.top_k - 1]
        kept = {token for token in kept if weights[token] >= limit}
    mass = sum(sorted((weights[token] for token in kept), reverse=True)[: params.top_k or None])
    if params.top_p < 1:
        reached, limit = 0.0, 0.0
        for weight in sorted((weights[token] for token in kept), reverse=True):
            reached, limit = reached + weight, weight
            if reached >= (params.top_p + cut_nudge) * mass:
                break
        kept = {token for token in kept if weights[token] >= limit}
    kept = {token for token in kept if weights[token] >= params.min_p + cut_nudge}
    weights = np.where([token in kept for token in range(len(weights))], weights, 0.0)
    uniform = uniforms(np.array([params.seed], np.uint64), np.array([draw.position], np.uint64))[0]
    where = min(max(uniform + where_nudge, 0.0), 1 - 1e-9) * weights.sum()
    return int(np.searchsorted(np.cumsum(weights), where, side="right"))


def test_the_uniform_numbers_are_splitmix64() -> None:
    """For seed 0 and position 0 the first hash is SplitMix64's published first output for state 0."""
    first = sampler._mix(np.array([0x9E3779B97F4A7C15], np.uint64))
    assert hex(int(first[0])) == "0xe220a8397b1dcdaf"
    numbers = uniforms(np.arange(20_000, dtype=np.uint64) % 100, np.arange(20_000, dtype=np.uint64) // 100)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert np.histogram(numbers, bins=10, range=(0, 1))[0].min() > 1_800


def test_greedy_takes_the_likeliest() -> None:
    tokens, logprobs = sample(log_of(0.2, 0.5, 0.3), [SamplingRow(SamplingParams(temperature=0.0), 5, 2)])
    assert tokens.tolist() == [1]
    assert logprobs is None


def test_draws_follow_the_distribution() -> None:
    tokens = tokens_of(log_of(0.1, 0.6, 0.3), SamplingParams(seed=3), 4_000)
    shares = np.bincount(tokens, minlength=3) / 4_000
    assert np.abs(shares - [0.1, 0.6, 0.3]).max() < 0.03


def test_temperature_sharpens_and_flattens() -> None:
    """At temperature 1/2 probabilities are squared: 0.64 and 0.04 of 0.68."""
    tokens = tokens_of(log_of(0.8, 0.2), SamplingParams(temperature=0.5), 4_000)
    assert abs(tokens.count(1) / 4_000 - 0.04 / 0.68) < 0.02


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=1), {2}),
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_k=9), {0, 1, 2, 3}),
        (SamplingParams(top_p=0.39), {2}),
        (SamplingParams(top_p=0.41), {1, 2}),
        (SamplingParams(top_p=0.75), {0, 1, 2}),
        (SamplingParams(top_k=2, top_p=0.56), {2}),  # 0.4 of the 0.7 that top-k left is 0.57
        (SamplingParams(top_k=2, top_p=0.58), {1, 2}),
        (SamplingParams(min_p=0.8), {2}),
        (SamplingParams(min_p=0.7), {1, 2}),
        (SamplingParams(min_p=0.4), {0, 1, 2}),
        (SamplingParams(temperature=1e-6), {2}),
    ],
)
def test_top_k_top_p_and_min_p_keep_exactly_their_tokens(params: SamplingParams, kept: set[int]) -> None:
    assert set(tokens_of(log_of(0.2, 0.3, 0.4, 0.1), params)) == kept


def test_tokens_that_tie_with_the_last_kept_token_are_kept() -> None:
    assert set(tokens_of(log_of(0.4, 0.2, 0.2, 0.2), SamplingParams(top_k=2))) == {0, 1, 2, 3}


def test_end_tokens_wait_for_min_tokens() -> None:
    """Output tokens 0 and 1 may not end the output, token 2 may; other tokens are not affected."""
    params = SamplingParams(temperature=0.0, min_tokens=2, logprobs=1)
    draws = [SamplingRow(params, position, 10, end_ids=(1, 2)) for position in (10, 11, 12)]
    tokens, logprobs = sample(log_of(0.1, 0.5, 0.4).expand(3, -1).clone(), draws)
    assert tokens.tolist() == [0, 0, 1]
    assert logprobs is not None
    first = logprobs.read()[0]
    assert math.isclose(first.token, math.log(0.1), rel_tol=1e-5)  # of the model's own distribution
    assert first.top[0][0] == 1


def test_log_probabilities_are_the_models_own() -> None:
    params = SamplingParams(temperature=0.1, top_k=1, logprobs=2)
    draws = [
        SamplingRow(params, 4, 4),
        SamplingRow(SamplingParams(temperature=0.0), 4, 4),
        SamplingRow(SamplingParams(logprobs=0), 4, 4),
    ]
    _, logprobs = sample(log_of(0.2, 0.5, 0.3).expand(3, -1).clone() + 7.0, draws)
    assert logprobs is not None
    first, last = logprobs.read()  # the second row did not ask
    assert math.isclose(first.token, math.log(0.5), rel_tol=1e-5)
    assert [token for token, _ in first.top] == [1, 2]
    assert np.allclose([value for _, value in first.top], np.log([0.5, 0.3]))
    assert last.top == ()


params_strategy = st.builds(
    lambda **fields: SamplingParams(**fields),  # named alone, it would get random values for all other fields
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 60, 10_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.sampled_from([0, 3]),
    logprobs=st.sampled_from([None, None, 0, 4]),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 7, 701, 9_000])
def test_every_row_of_a_batch_samples_what_the_definition_samples(vocab: int, device: str) -> None:
    """Rows with different parameters share a batch, and each samples the same token as alone."""

    @settings(max_examples=examples(30), deadline=None)
    @given(params=st.lists(params_strategy, min_size=1, max_size=5), seed=st.integers(0, 1000), spread=st.floats(0, 4))
    def check(params: list[SamplingParams], seed: int, spread: float) -> None:
        random = np.random.default_rng(seed)
        # Values on a grid give many exact ties.
        steps = np.round(random.normal(0, spread, (len(params), vocab)) * 32) / 32
        logits = torch.from_numpy(steps.astype(np.float32)).to(device)
        ends = (0,) if vocab > 1 else ()
        draws = [SamplingRow(p, int(random.integers(8, 14)), 9, ends) for p in params]
        tokens, _ = sample(logits.clone(), draws)
        alone = [sample(logits[i : i + 1].clone(), [draw])[0].item() for i, draw in enumerate(draws)]
        assert tokens.tolist() == alone
        for token, row, draw in zip(alone, logits.tolist(), draws, strict=True):
            assert is_acceptable(token, row, draw)

    check()


def test_a_nearly_flat_distribution_is_searched_completely() -> None:
    """More tokens are kept than the strips searched first can hold: ties keep all of the best 20,000 tokens."""
    logits = torch.zeros(1, 60_000)
    logits[0, ::3] += 1e-3
    for params in (SamplingParams(top_p=0.3), SamplingParams(top_k=15_000), SamplingParams(min_p=0.9995)):
        tokens = tokens_of(logits, params, 100)
        assert {token % 3 for token in tokens} == {0}
        assert len({token // 6_000 for token in tokens}) == 10


@pytest.mark.parametrize("most_strips", [32, 128])
@pytest.mark.parametrize("top_k", [20, 40, 50, 100, 1_000])
def test_likely_strips_sample_the_same_tokens_as_whole_rows(
    top_k: int, most_strips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer strips than top-k, some of its tokens may lie outside, and so does their mass."""
    monkeypatch.setattr(sampler, "MOST_STRIPS", most_strips)
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (80, 60_000)).astype(np.float32))
    params = [SamplingParams(top_k=top_k, top_p=top_p) for top_p in (0.5, 0.8, 0.9, 0.95)]
    params += [SamplingParams(top_p=0.5), SamplingParams(top_k=top_k), SamplingParams(top_k=top_k, min_p=0.05)]
    draws = [SamplingRow(params[row % 7]._replace(seed=row), row, 0) for row in range(80)]
    narrow, _ = sample(logits.clone(), draws)
    monkeypatch.setattr(sampler, "NUM_STRIPS", 1_000_000)
    whole, _ = sample(logits.clone(), draws)
    assert torch.equal(narrow, whole)
