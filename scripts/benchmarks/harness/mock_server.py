"""Starts ``mock_openai.py`` as a process, loads it, and reads its records when it has stopped."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.run import run_load


class MockServer:
    """A running mock server; ``truth`` is filled at the end of the ``with`` block."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.truth: list[dict[str, Any]] = []


@contextmanager
def mock_server(folder: Path, *flags: str) -> Iterator[MockServer]:
    truth = folder / "truth.jsonl"
    command = [sys.executable, str(Path(__file__).with_name("mock_openai.py")), *flags, "--truth", str(truth)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        scheme = "https://localhost" if "--tls" in flags else "http://127.0.0.1"
        server = MockServer(f"{scheme}:{int(process.stdout.readline())}")
        try:
            yield server
        finally:
            process.terminate()
            process.wait(60)
    server.truth = [json.loads(line) for line in truth.read_text().splitlines()]


def load(server: MockServer, **options: object) -> Report:
    return run_load(LoadtestConfig(url=server.url, scrape="none", **options))  # type: ignore[arg-type]
