"""``baton COMMAND``: what it does before a command runs."""

import sys

import pytest

from scripts import cli


class Loading:
    """A module at which Ctrl-C comes."""

    def __getattr__(self, name: str) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("serve", "scripts.serving.serve"),
        ("loadtest", "scripts.load_tester.main"),
        ("simulate", "scripts.simulator.main"),
        ("bench", "scripts.benchmarks.main"),
    ],
)
def test_ctrl_c_while_a_command_is_loading_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, command: str, module: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", command])
    monkeypatch.setitem(sys.modules, module, Loading())
    assert cli.main() == 130


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0), (["fly"], 2)], ids=str)
def test_no_command_says_which_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], status: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", *words])
    assert cli.main() == status
    said = capsys.readouterr()
    assert "Usage: baton COMMAND" in (said.err if status else said.out)
    assert ("fly is not a command" in said.err) is (words == ["fly"])
