"""The end of a child process in words."""

import pytest

from common.system.exit_status import how_ended


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "ended with status 0"), (3, "ended with status 3"), (-9, "killed by SIGKILL"), (-35, "killed by signal 35")],
)
def test_a_status_is_told_even_of_a_signal_without_a_name(status: int, words: str) -> None:
    assert how_ended(status) == words
