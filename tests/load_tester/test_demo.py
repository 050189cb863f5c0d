"""``loadtest --demo`` with real processes."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest

from scripts.chaos_harness.process_resources import ProcessResources
from scripts.load_tester.main import main
from scripts.load_tester.output_files import FAILED, WRONG

WORDS = [sys.executable, "-m", "scripts.cli", "loadtest", "--demo", "--duration", "60s", "--no-live"]


def ctrl_c(process: "subprocess.Popen[str]") -> None:
    """Signal the whole group, as a terminal does."""
    os.killpg(process.pid, signal.SIGINT)


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()


def until_answered(url: str) -> None:
    """Wait until a request of the run has succeeded."""
    for _ in range(3000):
        with urllib.request.urlopen(url + "/metrics") as page:
            if b'baton_http_answers_total{path="/generate",status="200"}' in page.read():
                return
        time.sleep(0.1)
    raise AssertionError("no request was answered")


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [(ctrl_c, 130), (kill, -signal.SIGKILL)])
def test_the_service_of_a_demo_ends_with_it(
    tmp_path: Path, end: Callable[["subprocess.Popen[str]"], None], status: int
) -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen(
        WORDS, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout
        url = next(line.split()[1].strip(";") for line in process.stdout if line.startswith("loading http://"))
        until_answered(url)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 5, "the service, a gateway, two nodes, a client"
        resources = ProcessResources.of([one.pid for one in family])
        end(process)
        said = process.stdout.read()
        assert process.wait(60) == status
        _, alive = psutil.wait_procs(family, 60)
    assert not alive
    assert not resources.left()
    if status == 130:
        assert "stopped before its end" in said, "there is a report of what there was"
        assert (tmp_path / "loadtest-demo.html").exists()


def test_a_demo_of_another_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--demo", "--url", "http://127.0.0.1:9"]) == WRONG
    assert "leave --url or --demo out" in capsys.readouterr().err


def test_a_demo_leaves_standard_output_to_its_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.load_tester.demo.subprocess.Popen", MagicMock())  # it ends at once
    assert main(["--demo", "--json", "-"]) == FAILED
    printed = capsys.readouterr()
    assert (printed.out, printed.err.splitlines()[0]) == ("", "serving the small model ...")


@pytest.mark.parametrize("words", [["--no-stream"], ["--concurrency", "4"], ["--trace", "t.jsonl"], ["--sweep", "1,2"]])
def test_the_defaults_of_a_demo_give_way_to_other_options(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr("scripts.load_tester.demo.subprocess.Popen", MagicMock())  # it ends at once
    assert main(["--demo", *words]) == FAILED  # and not WRONG
