"""Weights of tokens: powers of two, whole, and the same bits from every implementation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from common.engine.cpu.kernels import load_kernels
from common.engine.sampling.weights import WEIGHT_BITS, factor_of, least_kept_by_min_p, token_weights, torch_weights
from common.sampling_params import SamplingParams

UNIT = 2**WEIGHT_BITS


def test_weights_of_whole_numbers_are_exact() -> None:
    scaled = torch.tensor([[0.0, -0.0, -1.0, -10.0, -34.0, -34.5, -1000.0, -math.inf]])
    assert token_weights(scaled).tolist() == [[UNIT, UNIT, UNIT >> 1, UNIT >> 10, 1, 0, 0, 0]]


def test_weights_are_powers_of_two_and_grow_with_the_logit() -> None:
    scaled = torch.linspace(-30, 0, 300_001)[None]
    weights = token_weights(scaled.clone())
    expected = scaled.double().exp2() * UNIT
    assert torch.equal(weights, weights.trunc())
    assert ((weights - expected).abs() <= 1 + 2e-7 * expected).all()
    assert (weights.diff() >= 0).all()


def test_tokens_below_the_threshold_weigh_nothing() -> None:
    scaled = torch.tensor([[0.0, -1.0, -2.0], [0.0, -1.0, -2.0]])
    weights = token_weights(scaled, torch.tensor([[-1.0], [-0.5]]))
    assert (weights / UNIT).tolist() == [[1, 0.5, 0], [1, 0, 0]]


@settings(max_examples=examples(40), deadline=None)
@given(
    width=st.sampled_from([1, 15, 16, 1000]),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([1e-9, 1e-3, 1.0, 50.0]),
    has_threshold=st.booleans(),
)
def test_the_compiled_kernel_has_the_bits_of_torch(width: int, seed: int, spread: float, has_threshold: bool) -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no C compiler here")
    torch.manual_seed(seed)
    scaled = -torch.rand(70, width) * spread
    scaled[0, 0] = -math.inf
    threshold = -torch.rand(70, 1) * spread if has_threshold else None
    expected = torch_weights(scaled.clone(), threshold)
    assert torch.equal(kernels.token_weights(scaled, threshold), expected)


def test_factors_and_limits_of_min_p() -> None:
    assert factor_of(SamplingParams(temperature=0.5)) == 2 * math.log2(math.e)
    assert math.isfinite(factor_of(SamplingParams(temperature=5e-324)))
    assert least_kept_by_min_p(SamplingParams(min_p=0.25)) == -2.0
    assert least_kept_by_min_p(SamplingParams()) == -math.inf
