"""``gpu_check`` as far as it goes without a GPU: what it names exists, and what it downloads is complete."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.gpu_wheels import NIXL, TESTS, THEIRS, command, needed

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check"


def run(*arguments: str, python: str = sys.executable, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=100, env={"PYTHON": python}, cwd=folder
    )


def test_every_file_of_tests_exists_and_has_tests_for_a_gpu() -> None:
    files = re.findall(r"tests/\S+\.py", SCRIPT.read_text())
    for path in (ROOT / "tests").rglob("test_*.py"):  # those of the engine it finds by their marks
        name = str(path.relative_to(ROOT))
        if not name.startswith("tests/common/engine/") and re.search(r"mark\.cuda|import DEVICES", path.read_text()):
            assert name in files or path == Path(__file__), name
    for name in files:
        assert re.search(r"mark\.cuda|DEVICES|fixture|transport", (ROOT / name).read_text()), name


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_apart_from_a_failure_by_the_python_that_a_relative_path_names(
    tmp_path: Path,
) -> None:
    python = tmp_path / "my python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    ended = run("tests", python="./my python", folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (
        2,
        "gpu_check: no usable GPU: AssertionError: torch finds no CUDA device\n",
    )
    assert run("wheels", "--help", python="./my python", folder=tmp_path).returncode == 0


def test_the_python_is_that_of_the_variable_or_else_of_an_active_environment_or_the_checkout(tmp_path: Path) -> None:
    script = tmp_path / "scripts/gpu_check"
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text())
    (tmp_path / "tests/common/engine").mkdir(parents=True)
    active = {"VIRTUAL_ENV": str(tmp_path / "active"), "CONDA_PREFIX": str(tmp_path / "conda")}
    for name in (".venv/bin/python", ".venv/bin/pytest", "active/bin/python", "conda/bin/python", "other"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {name} >&2\nexit 1\n")
        file.chmod(0o755)
    cases: list[tuple[dict[str, str], str]] = [
        ({}, ".venv/bin/python"),
        ({"CONDA_PREFIX": active["CONDA_PREFIX"]}, "conda/bin/python"),
        (active, "active/bin/python"),
        ({**active, "PYTHON": str(tmp_path / "other")}, "other"),
    ]
    for more, python in cases:
        environ = {"PATH": os.environ["PATH"], **more}
        ended = subprocess.run(["bash", script, "tests"], capture_output=True, text=True, timeout=100, env=environ)
        assert ended.stdout == f"gpu_check: no usable GPU: {python}\n"


def stand_in(folder: Path, name: str, lines: str) -> Path:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{lines}\n")
    file.chmod(0o755)
    return file


def run_with(python: Path, part: str, limit_s: int, *, path: str = os.environ["PATH"]) -> str:
    """The output of a part that may take ``limit_s``, run by a stand-in of python beside which it finds no tests."""
    root = python.parent
    for name in ("scripts", "tests/common/engine"):
        (root / name).mkdir(parents=True)
    script = root / "scripts/gpu_check"
    script.write_text(SCRIPT.read_text().replace("limit_s=450 ", f"limit_s={limit_s} "))
    environ = {"PATH": path, "PYTHON": str(python)}
    return subprocess.run(["bash", script, part], capture_output=True, text=True, timeout=100, env=environ).stdout


def test_what_has_failed_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    lines = "trap 'echo FAILED test_a; exit 2' INT; [ $1 = -c ] || while sleep 0.1; do :; done"
    found = run_with(stand_in(tmp_path, "python", lines), "tests", 2)
    assert found.endswith("FAILED test_a\ngpu_check: tests RAN OUT OF TIME\n")


def test_the_benchmark_ends_by_itself_before_its_time_is_over(tmp_path: Path) -> None:
    stand_in(tmp_path, "timeout", 'echo "$@"')
    found = run_with(stand_in(tmp_path, "python", ""), "benchmark", 450, path=f"{tmp_path}:{os.environ['PATH']}")
    [(limit_s, seconds)] = re.findall(
        r"(\d+) \S+ -m scripts.benchmarks.main gpu .*--seconds (\d+)$", found, re.MULTILINE
    )
    assert int(seconds) + 20 < int(limit_s)


def test_an_unknown_part_is_refused_and_help_names_all_parts() -> None:
    ended = run("everything")
    assert ended.returncode == 1
    assert ended.stderr == "gpu_check: everything: give tests, benchmark, wheels DIR or nothing\n"
    ended = run("--help")
    assert ended.returncode == 0
    assert re.findall(r"^  gpu_check (\w+)", ended.stdout, re.MULTILINE) == ["tests", "benchmark", "wheels"]
    assert ended.stdout.rstrip().endswith("2 if there is no usable GPU.")


def test_the_wheels_are_complete_and_leave_torch_alone() -> None:
    found = {line.split("==")[0]: line.split("==")[1] for line in needed(["fastapi>=0.1", "torch", *TESTS])}
    assert {
        "fastapi",
        "starlette",
        "pydantic-core",
        "anyio",
        "pytest",
        "execnet",
        "yarl",
        "markdown-it-py",
    } <= found.keys()
    assert all(re.match(r"\d", version) for version in found.values())
    assert not [name for name in found if name in THEIRS or name.startswith(("nvidia", "cuda"))]
    assert needed(["no-such-package>=1"]) == []


def test_nixl_is_downloaded_only_on_request() -> None:
    words = command("here", "3.12", has_nixl=False)
    assert words[1:4] == ["-m", "pip", "download"]
    assert {"--dest=here", "--python-version=3.12", "--no-deps", "--platform=manylinux_2_28_x86_64"} <= {*words}
    names = {word.split("==")[0] for word in words}
    assert {"msgspec", "pyzmq", "uvicorn", "llguidance"} <= names
    assert not {*NIXL} & names
    if "nixl" in {word.split("==")[0] for word in needed(["nixl"])}:
        more = {word.split("==")[0] for word in command("here", "3.12", has_nixl=True)}
        assert more - names == {*NIXL}
