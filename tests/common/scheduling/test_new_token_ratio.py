"""The new-token ratio falls with each step and rises after a retraction."""

import pytest

from common.cache.kv_window import KVWindow
from common.errors import ConfigError
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.new_token_ratio import (
    NewTokenRatio,
    RatioConstants,
    expected_tokens,
    ratio_constants_from_environ,
)


def running(max_new: int, num_output: int, *, ignore_eos: bool = False) -> Request:
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=ignore_eos)
    return Request("r", 0, (1, 2, 3), sampling, output=[0] * num_output)


def test_the_ratio_falls_to_its_floor_over_six_hundred_steps() -> None:
    ratio = NewTokenRatio(RatioConstants())
    assert ratio.value == 0.7
    ratio.decoded()
    assert ratio.value == pytest.approx(0.7 - 0.7 * 0.86 / 600)
    for _ in range(599):
        ratio.decoded()
    assert ratio.value == pytest.approx(0.098)
    ratio.decoded()
    assert ratio.value == pytest.approx(0.098)
    ratio.reset()
    assert ratio.value == 0.7


def test_after_a_retraction_the_ratio_follows_the_remaining_requests() -> None:
    ratio = NewTokenRatio(RatioConstants())
    ratio.retracted([running(100, 30), running(299, 70)])
    assert ratio.value == (100 + 20 * 2) / (399 + 1)
    ratio.retracted([running(10, 9)])
    assert ratio.value == 1.0  # 29 / 11
    ratio.retracted([])
    assert ratio.value == 0.0


def test_expected_tokens_are_clipped_and_scaled_except_with_ignore_eos() -> None:
    requests = [running(100, 20), running(10_000, 0), running(50, 10, ignore_eos=True)]
    assert expected_tokens(requests, 0.5, 4096, KVWindow(1)) == 40 + 2048 + 40
    assert expected_tokens([running(3, 0)], 0.5, 4096, KVWindow(1)) == 2
    assert expected_tokens([], 0.5, 4096, KVWindow(1)) == 0


def test_constants_come_from_the_environment() -> None:
    assert ratio_constants_from_environ({}) == RatioConstants(0.7, 0.14, 600, 20, 4096)
    environ = {
        "BATON_INIT_NEW_TOKEN_RATIO": "0.5",
        "BATON_MIN_NEW_TOKEN_RATIO_FACTOR": "0.2",
        "BATON_NEW_TOKEN_RATIO_DECAY_STEPS": "100",
        "BATON_RETRACT_DECODE_STEPS": "0",
        "BATON_CLIP_MAX_NEW_TOKENS_ESTIMATION": "512",
    }
    assert ratio_constants_from_environ(environ) == RatioConstants(0.5, 0.2, 100, 0, 512)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BATON_INIT_NEW_TOKEN_RATIO", "1.5"),
        ("BATON_INIT_NEW_TOKEN_RATIO", "nan"),
        ("BATON_MIN_NEW_TOKEN_RATIO_FACTOR", "much"),
        ("BATON_NEW_TOKEN_RATIO_DECAY_STEPS", "0"),
        ("BATON_RETRACT_DECODE_STEPS", "-1"),
        ("BATON_CLIP_MAX_NEW_TOKENS_ESTIMATION", "4e3"),
    ],
)
def test_an_invalid_constant_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ratio_constants_from_environ({name: value})
