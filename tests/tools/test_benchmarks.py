"""Every benchmark runs in its shortest form and measures something."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.main import BENCHMARKS, NAMES, empty_figures, main
from scripts.benchmarks.services.cpu_quota import why_no_quota

ROOT = Path(__file__).resolve().parents[2]


#: One of services and one in virtual time, of those that take a few seconds.
FAST = {"loadtest", "scheduler"}


@pytest.mark.parametrize(
    "command",
    [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
    + [
        pytest.param("engine --shape=qwen3-moe-small", marks=pytest.mark.slow),
        pytest.param(
            "scale --no-pairing --rates-only --gateway-share=25",
            marks=[pytest.mark.slow, pytest.mark.skipif(bool(why_no_quota()), reason="no control group can be made")],
        ),
    ],
)
def test_the_shortest_form_prints_figures_greater_than_zero(command: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    name, *options = command.split()
    ended = subprocess.run(
        [sys.executable, "-m", "scripts.cli", "bench", name, "--shortest", *options, f"--json={path}"],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:] + ended.stdout[-4000:]
    figures = json.loads(path.read_text())
    assert figures
    assert [figure for figure in empty_figures(figures) if not figure.startswith("goodput")] == []
    assert ended.stdout.strip()


def test_sigterm_stops_a_benchmark_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given_back: list[str] = []

    def run(name: str, words: list[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            return 0
        finally:
            given_back.append(name)

    monkeypatch.setattr("scripts.benchmarks.main._run", run)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["scheduler"]) == 130
    assert given_back == ["scheduler"]
    assert capsys.readouterr().err == "bench scheduler: stopped\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["nothing"], "bench: nothing is not a benchmark"),
        (["scheduler", "--json=/nowhere/figures"], "bench scheduler: --json /nowhere/figures: there is no such folder"),
        (["scale", "--nodes=0"], "bench scale: --nodes must be greater than 0, not 0"),
        (["scale", "--nodes=1"], "bench scale: --nodes and --pairing-nodes must be at least 2"),
        (["placement", "--loads=0.5,0"], "bench placement: --loads must be greater than 0, not 0.0"),
        (["placement", "--nodes=2+0"], "bench placement: --nodes must be greater than 0, not 0"),
        (["simulate", "--scale=nan"], "bench simulate: --scale must be greater than 0, not nan"),
        (["overload", "--window=20"], "bench overload: --seconds must be at least twice --window"),
        (["pictures", "--trace=/nowhere"], "bench pictures: --trace /nowhere cannot be read: No such file"),
        (["pictures", "--folder=/dev/null"], "bench pictures: --folder /dev/null: /dev/null is a file"),
        (["planner", "--trace=/nowhere"], "bench planner: --trace /nowhere cannot be read: No such file"),
        (["planner", "--save=/nowhere/cells"], "bench planner: --save /nowhere/cells: there is no such folder"),
        (["engine", "--new-tokens=1"], "bench engine: --new-tokens must be at least 2"),
        (["loadtest", "--output-len=1"], "bench loadtest: --output-len must be at least 2"),
    ],
)
def test_a_mistake_is_named_before_anything_is_measured(
    words: list[str], mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(mistake)


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["transfer", "--transports=shm,foo"], "'foo' is none of shm, cuda-ipc, tcp, nixl, gloo, nccl"),
        (["gpu", "--transports=foo"], "'foo' is none of shm, cuda-ipc, tcp, nixl, gloo, nccl"),
        (["placement", "--loads=a"], "'a' is not a list of numbers"),
        (["grammar", "--dtype=fp9"], "argument --dtype: invalid choice: 'fp9'"),
    ],
)
def test_a_wrong_choice_is_named_before_anything_is_measured(
    words: list[str], mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert mistake in capsys.readouterr().err


def test_a_file_that_a_benchmark_cannot_open_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "scripts.benchmarks.virtual_time.scheduler.run", lambda options: Path("/nowhere/trace").read_text()
    )
    assert main(["scheduler"]) == 1
    assert capsys.readouterr().err == "bench scheduler: /nowhere/trace: No such file or directory\n"


def test_figures_for_which_the_disk_has_no_room_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.benchmarks.virtual_time.scheduler.run", lambda options: {"figure": 1.0})
    assert main(["scheduler", "--json=/dev/full"]) == 1
    assert capsys.readouterr().err == ("bench scheduler: --json /dev/full cannot be written: No space left on device\n")


def test_zero_infinite_and_undefined_figures_are_empty() -> None:
    assert empty_figures({"chunks": 0.0, "answers": 3.0, "rate": math.inf, "gap": math.nan, "lag": -1.0}) == [
        "chunks", "rate", "gap", "lag",
    ]  # fmt: skip


def test_the_list_names_every_benchmark_with_its_durations_in_80_columns() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "scripts.cli", "bench", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    lines = ended.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for name in NAMES:
        _, whole, shortest = BENCHMARKS[name]
        assert [line.split() for line in lines if line.startswith(f"  {name} ")] == [
            [name, *whole.split(), *shortest.split()]
        ]
    assert {path.stem for path in (ROOT / "scripts" / "benchmarks").glob("*/*.py")} >= set(NAMES)
