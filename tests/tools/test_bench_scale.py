"""``bench scale`` without its services: its figures."""

import pytest

from scripts.benchmarks.services.scale import Table


def test_a_difference_that_is_less_than_its_noise_is_shown_and_is_no_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table()
    for name, value in (("memory", -0.3), ("CPU", 0.0), ("time", 0.5)):
        table.add_difference(name, value, "us")
    assert table.figures == {"time, us": 0.5}
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["memory", "-0.3", "us"], ["CPU", "0.0", "us"], ["time", "0.5", "us"],
    ]  # fmt: skip
