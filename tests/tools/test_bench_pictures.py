"""``bench pictures`` against the mock server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.benchmarks.harness.mock_server import MockServer, mock_server
from scripts.benchmarks.main import main
from scripts.benchmarks.services import pictures as bench_pictures


@pytest.mark.slow
def test_arrangements_get_the_same_requests_and_a_row_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers: list[tuple[list[str], MockServer]] = []

    @contextmanager
    def running_service(flags: list[str]) -> Iterator[str]:
        folder = tmp_path / f"mock{len(servers)}"
        folder.mkdir()
        with mock_server(folder, "--ttft", "0.01") as server:
            servers.append((flags, server))
            yield server.url

    monkeypatch.setattr(bench_pictures, "running_service", running_service)
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": at, "input_length": 900, "output_length": 50, "hash_ids": [1, 2]} for at in range(0, 900, 90)]
    trace.write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "d").mkdir()
    words = ["--rates=20", "--seconds=0.5", f"--trace={trace}", "--trace-rate=20", f"--folder={tmp_path / 'd'}"]
    assert main(["pictures", *words]) == 0
    assert [flags[0] for flags, _ in servers] == ["--prefill=1", "--prefill=0", "--prefill=1"]
    # Requests sent within a few milliseconds may arrive in another order on a busy machine.
    first, second = (sorted(json.dumps(one["body"]) for one in server.truth) for _, server in servers[:2])
    assert first == second and len(first) > 30
    page = capsys.readouterr().out
    assert page.count("| 1 prefill + 1 decode | 20 |") == page.count("| 2 colocated | 20 |") == 1
    assert "format Mooncake" in page and "of 34" not in page
    for name in ("time-to-first-token-by-rate", "gap-between-tokens-by-rate", "trace-time-to-first-token"):
        assert (tmp_path / "d" / f"{name}.svg").is_file()
