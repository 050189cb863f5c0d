"""How many instances groups have after commands."""

from typing import Any

import pytest

from common.errors import ConfigError
from scripts.cluster_manager.config import Bounds, ClusterConfig, Group
from scripts.cluster_manager.counts import Counts, counts_of, scaled, upgraded


def config(gateway: int = 1, prefill: int = 1, decode: int = 2, **options: Any) -> ClusterConfig:
    return ClusterConfig(
        gateway=Group(count=gateway, options=options), prefill=Group(count=prefill), decode=Group(count=decode)
    )


def bounded(least: int, most: int, count: int = 2) -> ClusterConfig:
    decode = Group(count=count, autoscale=Bounds(least, most))
    return ClusterConfig(gateway=Group(count=1), prefill=Group(count=1), decode=decode)


def counts(gateway: int = 1, prefill: int = 1, decode: int = 2) -> Counts:
    return {"gateway": gateway, "prefill": prefill, "decode": decode}


@pytest.mark.parametrize(
    ("found", "changes", "is_autoscaling", "words"),
    [
        (config(), {"gateway": 0}, False, "--gateway must be at least 1"),
        (config(), {"decode": 0}, False, "--decode must be at least 1"),
        (config(), {"prefill": 10_001}, False, "--prefill must be at most 10,000, not 10,001"),
        (config(), {"prefill": 0}, False, "--prefill = 0 leaves no node to compute prompts"),
        (config(), {}, True, "--autoscale needs bounds"),
        (bounded(2, 4), {"decode": 5}, True, r"--decode 5 is not within decode.autoscale \(2 to 4\)"),
    ],
)
def test_scaling_refuses_what_a_file_may_not_have(
    found: ClusterConfig, changes: Counts, is_autoscaling: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        scaled(found, counts_of(found), changes, is_autoscaling=is_autoscaling)


def test_scaling_changes_the_counts_that_are_given() -> None:
    assert scaled(config(), counts(), {"decode": 5}, is_autoscaling=False) == counts(decode=5)
    assert scaled(bounded(2, 4), counts(), {"decode": 5}, is_autoscaling=False) == counts(decode=5)
    found = config(local_prefill="always")
    assert scaled(found, counts(), {"prefill": 0}, is_autoscaling=False) == counts(prefill=0)


def test_an_upgrade_keeps_counts_unless_the_file_changes_them() -> None:
    present = counts(prefill=3, decode=7)
    assert upgraded(config(), config(), present, is_autoscaling=False) == present
    assert upgraded(config(), config(decode=4), present, is_autoscaling=False) == counts(prefill=3, decode=4)


@pytest.mark.parametrize(("bounds", "expected"), [((1, 8), 6), ((1, 4), 4), ((7, 9), 7)])
def test_an_upgrade_keeps_what_was_scaled_by_advice_within_the_new_bounds(
    bounds: tuple[int, int], expected: int
) -> None:
    new = bounded(*bounds, count=bounds[0])
    assert upgraded(bounded(1, 8), new, counts(decode=6), is_autoscaling=True) == counts(decode=expected)


def test_an_upgrade_to_a_file_without_bounds_keeps_the_count() -> None:
    assert upgraded(bounded(1, 8), config(), counts(decode=6), is_autoscaling=True) == counts(decode=6)


def test_an_upgrade_refuses_counts_that_the_new_file_may_not_have() -> None:
    old = config(local_prefill="always")
    with pytest.raises(ConfigError, match=r"prefill\.count = 0 leaves no node"):
        upgraded(old, config(), counts(prefill=0), is_autoscaling=False)
