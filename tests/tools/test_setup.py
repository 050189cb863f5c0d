"""Every command sets itself up from any folder, and the declared packages are the installed ones."""

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from scripts.requirements import missing, release, requirements, strays

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def command(*words: str, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in an empty folder, with this interpreter's environment active."""
    environ = {**os.environ, "VIRTUAL_ENV": sys.prefix, "BATON_VENV": str(folder / "venv"), **variables}
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=180)


def tools_alone(folder: Path, **scripts: str) -> Path:
    """A folder for PATH with what ``setup.sh`` calls and with these scripts, by name."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "flock", "ls", "readlink", "rm"):
        (tools / name).symlink_to(shutil.which(name))
    for name, text in scripts.items():
        write_script(tools / name, text)
    return tools


def write_script(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def found_python(folder: Path, tools: Path) -> str:
    """The interpreter that ``setup.sh`` finds with these tools alone, and without an active environment."""
    words = ("bash", "-c", f'. "{ROOT}/scripts/setup.sh"; echo "$baton_python"')
    found = command(*words, folder=folder, PATH=str(tools), VIRTUAL_ENV="", CONDA_PREFIX="")
    assert found.stderr == ""
    return found.stdout.strip()


def test_an_active_environment_that_meets_the_requirements_is_used(tmp_path):
    found = command("bash", "-c", f'. "{ROOT}/scripts/setup.sh"; echo "$baton_python"', folder=tmp_path)
    assert found.stdout.strip() == f"{sys.prefix}/bin/python"
    assert not (tmp_path / "venv").exists()


def test_a_relative_environment_is_that_of_the_folder_in_which_a_command_starts(tmp_path):
    words = ("bash", "-c", f'. "{ROOT}/scripts/setup.sh"; echo "$baton_venv"')
    assert command(*words, folder=tmp_path, BATON_VENV="my venv").stdout.strip() == f"{tmp_path}/my venv"


def test_commands_work_from_a_folder_with_packages_of_the_same_names(tmp_path):
    for name in ("common", "scripts", "decode_node", "click"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')")
    for name, first in (("decode", "Usage: decode"), ("serve", "Usage: serve"), ("baton", "Usage: baton")):
        shown = command(str(ROOT / "scripts" / name), "--help", folder=tmp_path)
        assert shown.stdout.startswith(first), shown
        assert shown.returncode == 0


def test_an_old_python_is_refused_with_what_to_install(tmp_path):
    tools = tools_alone(tmp_path, python3="exit 1")
    ended = command(str(ROOT / "scripts" / "serve"), folder=tmp_path, PATH=str(tools), VIRTUAL_ENV="")
    assert ended.returncode == 1
    assert "Python 3.11 or newer is needed" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_folder_with_other_files_is_not_cleared_for_an_environment(tmp_path):
    mine = tmp_path / "venv" / "mine"
    mine.parent.mkdir()
    mine.touch()
    tools = tools_alone(tmp_path, python3='case $1 in -I) exit 1 ;; -m) : > "$0.made" ;; esac')  # lacks packages
    ended = command(str(ROOT / "scripts" / "serve"), folder=tmp_path, PATH=str(tools), VIRTUAL_ENV="", CONDA_PREFIX="")
    assert ended.returncode == 1
    assert f"{mine.parent} has other files than those of an environment" in ended.stderr
    assert not (tools / "python3.made").exists()


def test_an_environment_is_checked_again_once_its_python_is_another_one(tmp_path):
    called, python = tmp_path / "called", tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    tools = tools_alone(tmp_path, python3="exit 1")  # lacks packages
    for name in ("python3.11", "python3.12"):
        write_script(tools / name, f': > "{called}"')

    def is_checked() -> bool:
        called.unlink(missing_ok=True)
        assert found_python(tmp_path, tools) == str(python)
        return called.exists()

    python.symlink_to(tools / "python3.11")
    assert [is_checked(), is_checked()] == [True, False]
    python.unlink()
    python.symlink_to(tools / "python3.12")  # as after an upgrade of the system
    assert [is_checked(), is_checked()] == [True, False]


def test_an_environment_without_pip_that_meets_the_requirements_is_not_cleared(tmp_path):
    called, python = tmp_path / "called", tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    write_script(python, f': > "{called}"; [ "$1" != -c ]')  # as uv makes it
    tools = tools_alone(tmp_path, python3="exit 1")
    assert found_python(tmp_path, tools) == str(python)
    called.unlink()
    assert found_python(tmp_path, tools) == str(python)
    assert not called.exists(), "it was checked again"


def test_versions_are_compared_by_number():
    assert release("2.13.0+cpu") == (2, 13, 0)
    assert release("2.9") < release("2.10")


def test_missing_and_old_packages_are_found(tmp_path):
    assert list(missing(["pytest>=1.0", "pytest>=9999", "no-such-package>=1"])) == [
        "pytest>=9999",
        "no-such-package>=1",
    ]
    pins = tmp_path / "pins.txt"
    pins.write_text("# a remark\npytest==0.1\nno-such-package==1\n")
    assert list(strays(str(pins))) == ["pytest==0.1"]


def test_every_requirement_is_pinned():
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in CONSTRAINTS.splitlines() if "==" in line}
    needed = {line.split(">=")[0].lower().replace("_", "-") for line in requirements(f"{ROOT}/pyproject.toml", ["dev"])}
    assert needed <= pinned
    assert "torch==2.13.0\n" in CONSTRAINTS


def test_the_dev_extra_includes_every_extra_that_needs_no_gpu():
    extras = PROJECT["project"]["optional-dependencies"]
    assert {*extras["nixl"], *extras["loadtest"]} <= set(extras["dev"]), "its tests would be skipped or fail"


def test_every_package_is_installed_and_checked():
    tops = {"common", "decode_node", "gateway", "kv_transfer", "prefill_node", "scripts"}
    folders = [path.parent for top in tops for path in (ROOT / top).rglob("__init__.py")]
    patterns = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    for name in (".".join(folder.relative_to(ROOT).parts) for folder in folders):
        assert any(fnmatch(name, pattern) for pattern in patterns), name
    assert tops == set(PROJECT["tool"]["mypy"]["packages"]) == set(PROJECT["tool"]["importlinter"]["root_packages"])


def test_a_command_that_is_stopped_during_setup_does_not_continue(tmp_path):
    slow = tmp_path / "bin" / "python"
    slow.parent.mkdir()
    # It ends once it has been told, so that bash, which waits for it, gets the signal first.
    slow.write_text('#!/bin/bash\ncd "$(dirname "$0")"\n: > begun\nuntil [ -e told ]; do sleep 0.02; done\nexit 1\n')
    slow.chmod(0o755)
    environ = {**os.environ, "VIRTUAL_ENV": str(tmp_path), "BATON_VENV": str(tmp_path / "venv")}
    words = ["bash", "-c", f'. "{ROOT}/scripts/setup.sh"; echo went on']
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        for name in ("begun", "told"):
            (slow.parent / name).unlink(missing_ok=True)
        # Parallel tests ignore SIGINT, and so would the shell.
        restore = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True, preexec_fn=restore) as process:
            while not (slow.parent / "begun").exists():
                time.sleep(0.01)
            process.send_signal(number)
            (slow.parent / "told").touch()
            assert process.communicate(timeout=60) == ("", None)
            assert process.returncode == status
