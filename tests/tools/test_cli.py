"""``baton COMMAND``: dispatch to the commands."""

import contextlib
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.version import VERSION
from scripts import cli, keygen

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("words", [["--version"], ["simulate", "--version"]], ids=" ".join)
def test_every_command_has_the_version_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", *words])
    with contextlib.suppress(SystemExit):
        assert cli.main() == 0
    assert capsys.readouterr().out == f"baton {VERSION}\n"
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert pyproject["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "common.version.VERSION"}


def run_simulate(monkeypatch: pytest.MonkeyPatch, main: Callable[[list[str]], int]) -> int:
    monkeypatch.setattr(sys, "argv", ["baton", "simulate"])
    monkeypatch.setitem(sys.modules, "scripts.simulator.main", SimpleNamespace(main=main))
    return cli.main()


@pytest.mark.parametrize("is_flushed", [False, True])
def test_output_for_which_the_disk_has_no_room_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_flushed: bool
) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        status = run_simulate(monkeypatch, lambda words: print("a table", flush=is_flushed) or 0)
    said = capsys.readouterr().err
    assert (status, said) == (1, "simulate: cannot write to standard output: No space left on device\n")


def test_a_list_of_commands_for_which_the_disk_has_no_room_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", "--help"])
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        status = cli.main()
    said = capsys.readouterr().err
    assert (status, said) == (1, "baton: cannot write to standard output: No space left on device\n")


def test_output_that_is_not_read_ends_a_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(OSError), open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        status = run_simulate(monkeypatch, lambda words: print("a table") or 0)
    assert (status, capsys.readouterr().err) == (1, "")


def test_a_failure_of_another_file_is_no_failure_of_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> int:
        raise FileNotFoundError(2, "No such file or directory", "/nowhere")

    with pytest.raises(FileNotFoundError):
        run_simulate(monkeypatch, fail)


def test_keygen_names_the_folder_that_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert keygen.main([str(file / "keys"), "a"]) == 2
    assert capsys.readouterr().err == f"keygen: cannot write {file / 'keys'}: Not a directory\n"


def test_keygen_names_its_folder_on_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")  # as a write says it, without a name

    monkeypatch.setattr(keygen, "write_folders", fail)
    assert keygen.main(["/keys", "a"]) == 2
    assert capsys.readouterr().err == "keygen: cannot write /keys: No space left on device\n"
