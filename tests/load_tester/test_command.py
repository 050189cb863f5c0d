"""The command line: refusals, messages, and interruption."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.config.cli import parse
from common.errors import ConfigError
from scripts.benchmarks.harness.mock_server import load, mock_server
from scripts.load_tester import command
from scripts.load_tester.client.client_pool import ClientPool
from scripts.load_tester.client.request_headers import client_setup, common_headers
from scripts.load_tester.command import check_outputs
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.main import main
from scripts.load_tester.output_files import WRONG
from scripts.load_tester.reporting.text_report import summary_lines
from scripts.load_tester.workload.request_classes import request_classes_of

KEYS = {"api_key": "k", "header": "Authorization: Basic abc"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sweep": "1,0"}, r"--sweep must be rates \(1e-06 to 1e\+06 per second\)"),
        ({"sweep": "1,2000000"}, "--sweep must be rates"),
        ({"slo_ttft": "0"}, "--slo-ttft must be more than 0"),
        ({"slo_attainment": 0.99}, "--slo-attainment needs a limit, such as --slo-ttft"),
        ({"endpoint": "chat", "vocab_size": 100}, "--vocab-size needs --prompt ids, and no --endpoint chat: it has no"),
        ({"mix": "a:deadline=0"}, "deadline=0 is not valid"),
        ({"mix": "a:slo-itl=0"}, "slo-itl=0 is not valid"),
        ({"header": "a b: c"}, "--header must be 'NAME: VALUE'"),
        ({"header": ": c"}, "--header must be"),
        ({"header": "x: s3cret\u00fc"}, "--header must be"),
        ({"header": "x: s3cret\r\ny: z"}, "--header must be"),
        ({"header": "content-length: 3"}, "sets it itself"),
        (KEYS, "choose one"),
        ({"url": "http://127.0.0.1:1/\u00fc"}, "must be ASCII"),
        ({"url": "http://127.0.0.1:1/a b"}, "must be ASCII"),
        ({"url": "http://127.0.0.1:1?api=2"}, "would not be sent"),
        ({"url": "http://node..local:1"}, "must be http://HOST:PORT"),
        ({"url": f"http://{'n' * 64}:1"}, "must be http://HOST:PORT"),
        ({"url": "http://127.0.0.1:1/v1/chat/completions"}, "leave /v1/chat/completions out"),
        ({"scrape": "http://127.0.0.1:1/metrics#x"}, "would not be sent"),
        ({"jsonl": "-"}, "--jsonl - does not write to standard output: name a file, or ./-"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_sent(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        understand(options)
    assert "s3cret" not in str(refused.value)


def test_a_word_without_a_flag_is_refused_with_the_flag_for_a_server() -> None:
    with pytest.raises(ConfigError, match=r"\(http://127\.0\.0\.1:1\); give the server as --url$"):
        parse(LoadtestConfig, ["http://127.0.0.1:1"], command="loadtest")


def test_the_objective_of_a_single_run_may_be_any_share_of_its_requests() -> None:
    understand({"slo_attainment": 0.99, "slo_ttft": "1s"})
    understand({"slo_attainment": 0.99, "mix": "a:deadline=2s"})
    understand({"slo_attainment": 0.99, "trace": "lines-with-limits.jsonl"})


def understand(options: dict[str, Any]) -> None:
    config = LoadtestConfig(**options)
    check_outputs(config)
    request_classes_of(config)


def test_a_sweep_may_have_blanks_and_a_file_may_have_bare_numbers(tmp_path: Path) -> None:
    assert LoadtestConfig(sweep="1, 2.5").sweep == "1, 2.5"
    (tmp_path / "c.toml").write_text("[loadtest]\nrate = 4\nduration = 2.5\ninput-len = 300\n")
    config = parse(LoadtestConfig, ["--config", str(tmp_path / "c.toml")], command="loadtest")
    assert (config.rate, config.duration_s, config.input_len) == ("4", 2.5, "300")


def test_a_comparison_does_not_overwrite_its_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    assert main(["--compare", str(path), str(path), "--html", str(path)]) == WRONG
    assert "--compare and --html name the same file" in capsys.readouterr().err and path.read_text() == "{}"


def test_a_header_goes_with_every_request_and_replaces_the_default(tmp_path: Path) -> None:
    config = LoadtestConfig(url="http://127.0.0.1:9", header="hOst: elsewhere:80", api_key="k")
    lines = client_setup(config).head.decode().split("\r\n")
    assert "hOst: elsewhere:80" in lines and sum(line.lower().startswith("host:") for line in lines) == 1
    assert common_headers(config) == {"Authorization": "Bearer k", "hOst": "elsewhere:80"}
    with mock_server(tmp_path, "--want", "api-key:k") as server:
        with pytest.raises(ConfigError, match="requires an API key"):
            load(server, num_requests=1)
        report = load(server, num_requests=2, rate="50", output_len="1", header="api-key:k")
    assert report.server["model"] == "mock" and report.errors["count"] == 0


def test_a_report_names_the_model_that_was_asked_for(tmp_path: Path) -> None:
    with mock_server(tmp_path) as server:
        report = load(server, num_requests=1, output_len="1", endpoint="generate", model="adapter")
    assert report.server["model"] == server.truth[0]["body"]["model"] == "adapter"


def test_a_self_signed_certificate_is_refused_unless_trusted_or_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.pem"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(own), "-out", str(tmp_path / "c.pem")]
    if not shutil.which("openssl") or subprocess.run([*made.split(), *names], capture_output=True).returncode:
        pytest.skip("no openssl here to make a certificate")
    own.write_text(own.read_text() + (tmp_path / "c.pem").read_text())
    with mock_server(tmp_path, "--tls", str(own), "--ttft", "0.01") as server:
        with pytest.raises(ConfigError, match=r"not trusted \(self-signed certificate\): use --no-verify-tls"):
            load(server, num_requests=1)
        unchecked = load(server, num_requests=5, rate="50", output_len="3", verify_tls=False)
        monkeypatch.setenv("SSL_CERT_FILE", str(own))
        vouched = load(server, num_requests=5, rate="50", output_len="3")
    for report in (unchecked, vouched):
        assert report.errors["count"] == 0 and report.tokens["output_counted"] == 15


@pytest.mark.parametrize(
    ("line", "endpoint", "complaint"),
    [
        ('{"messages": [{"role": "user", "content": "x"}]}', "completions", "use --endpoint chat"),
        ('{"prompt": "x"}', "chat", "use --endpoint completions"),
    ],
)
def test_a_trace_of_another_endpoint_is_refused(tmp_path: Path, line: str, endpoint: str, complaint: str) -> None:
    (tmp_path / "t.jsonl").write_text(line)
    with mock_server(tmp_path) as server, pytest.raises(ConfigError, match=complaint):
        load(server, trace=str(tmp_path / "t.jsonl"), endpoint=endpoint)


def test_a_response_that_ends_between_two_checks_but_after_the_timeout_counts_as_failed(tmp_path: Path) -> None:
    """Client processes check once a second; two tokens take 0.1 s, fifty-five 5.4 s."""
    mix = "short:output=2;long:output=55"
    with mock_server(tmp_path, "--itl", "0.1") as server:
        report = load(server, num_requests=12, rate="40", mix=mix, timeout="5s")
    for record in report.records:  # a short one has failed as well if the machine stood still for so long
        assert (record.error == "timeout") == (record.ended_s - record.released_s > 5.0)
    assert all(record.error == "timeout" for record in report.records if record.class_name == "long")
    assert set(report.errors["kinds"]) == {"timeout"}


def test_the_verdict_names_the_failures_and_files_are_written_though_the_disk_has_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mock_server(tmp_path, "--refuse", "4") as server:
        report = load(server, num_requests=8, rate="50", output_len="1", max_send_lateness="5s")
    assert "2 of 8 requests failed" in "\n".join(summary_lines(report))
    file = tmp_path / "report.json"
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space left"):
            command._finish(LoadtestConfig(json=str(file)), report)
    assert json.loads(file.read_text())["errors"]["count"] == 2


def test_ctrl_c_ends_a_run_whose_server_is_silent() -> None:
    """Signal the whole group, as a terminal does, while the first client process still imports."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = ["loadtest", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]
        command = [sys.executable, "-m", "scripts.cli", *words]
        with subprocess.Popen(command, stdout=-1, stderr=-1, start_new_session=True) as process:
            own, deadline_at = psutil.Process(process.pid), time.monotonic() + 60
            while not (clients := own.children()) and time.monotonic() < deadline_at:
                time.sleep(0.002)
            time.sleep(0.03)
            os.killpg(process.pid, signal.SIGINT)
            said = process.communicate(timeout=60)
    assert process.returncode == 130, "not 2, as when the server has not answered in time"
    assert said == (b"", b"") and clients and not any(client.is_running() for client in clients)


def test_a_run_stopped_before_its_first_request_has_no_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ClientPool._until_ready

    async def stopped(self: ClientPool) -> None:
        await real(self)
        self.stop()
        await asyncio.sleep(60)  # the processes end first

    monkeypatch.setattr(ClientPool, "_until_ready", stopped)
    with mock_server(tmp_path) as server:
        report = load(server, num_requests=3)
    assert report.was_stopped and report.num_requests == 0
    assert report.length_s == 0 and report.start_up_s is None
    assert any("no request was sent" in line for line in summary_lines(report))
