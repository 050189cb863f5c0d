"""``baton COMMAND``: dispatch to the commands."""

import sys

import pytest

from scripts import cli


class Loading:
    """A module that is interrupted by Ctrl-C while it loads."""

    def __getattr__(self, name: str) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("serve", "scripts.serving.serve"),
        ("loadtest", "scripts.load_tester.main"),
        ("simulate", "scripts.simulator.main"),
        ("chaos", "scripts.chaos_harness.main"),
        ("bench", "scripts.benchmarks.main"),
    ],
)
def test_ctrl_c_while_a_command_is_loading_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, command: str, module: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", command])
    monkeypatch.setitem(sys.modules, module, Loading())
    assert cli.main() == 130


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0), (["fly"], 2)], ids=str)
def test_without_a_known_command_the_commands_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], status: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", *words])
    assert cli.main() == status
    said = capsys.readouterr()
    assert "Usage: baton COMMAND" in (said.err if status else said.out)
    assert ("fly is not a command" in said.err) is (words == ["fly"])
