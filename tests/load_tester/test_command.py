"""The command as a user meets it: what it refuses, what it says, and how it ends when it is interrupted."""

import asyncio
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
from support.load_mock import load, mock_server

from common.config.cli import parse
from common.errors import ConfigError
from scripts.load_tester.client.client_pool import Crew
from scripts.load_tester.client.request_headers import own_headers, setup_of
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.main import WRONG, check_outputs, main
from scripts.load_tester.reporting.text_report import summary_lines
from scripts.load_tester.workload.request_classes import kinds_of

KEYS = {"api_key": "k", "header": "Authorization: Basic abc"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sweep": "1,0"}, r"--sweep must be rates \(1e-06 to 1e\+06 per second\)"),
        ({"sweep": "1,2000000"}, "--sweep must be rates"),
        ({"slo_ttft": "0"}, "--slo-ttft must be more than 0"),
        ({"mix": "a:deadline=0"}, "deadline=0: cannot be"),
        ({"mix": "a:slo-itl=0"}, "slo-itl=0: cannot be"),
        ({"header": "a b: c"}, "--header must be 'NAME: VALUE'"),
        ({"header": ": c"}, "--header must be"),
        ({"header": "x: s3cret\u00fc"}, "--header must be"),
        ({"header": "x: s3cret\r\ny: z"}, "--header must be"),
        ({"header": "content-length: 3"}, "says itself how long"),
        (KEYS, "choose one"),
        ({"url": "http://127.0.0.1:1/\u00fc"}, "plain letters"),
        ({"url": "http://127.0.0.1:1/a b"}, "plain letters"),
        ({"url": "http://127.0.0.1:1?api=2"}, "would not be sent"),
        ({"url": "http://127.0.0.1:1/v1/chat/completions"}, "leave /v1/chat/completions out"),
        ({"scrape": "http://127.0.0.1:1/metrics#x"}, "would not be sent"),
        ({"jsonl": "-"}, "--jsonl -: only --json can go to standard output"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        understand(options)
    assert "s3cret" not in str(refused.value)


def understand(options: dict[str, Any]) -> None:
    config = LoadtestConfig(**options)
    check_outputs(config)
    kinds_of(config)


def test_a_sweep_may_have_blanks_and_numbers_in_a_file_need_no_quotes(tmp_path: Path) -> None:
    assert LoadtestConfig(sweep="1, 2.5").sweep == "1, 2.5"
    (tmp_path / "c.toml").write_text("[loadtest]\nrate = 4\nduration = 2.5\ninput-len = 300\n")
    config = parse(LoadtestConfig, ["--config", str(tmp_path / "c.toml")], command="loadtest")
    assert (config.rate, config.duration_s, config.input_len) == ("4", 2.5, "300")


def test_a_comparison_does_not_write_over_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    assert main(["--compare", str(path), str(path), "--html", str(path)]) == WRONG
    assert "--compare and --html name the same file" in capsys.readouterr().err and path.read_text() == "{}"


def test_a_header_goes_with_all_that_is_asked_and_takes_the_place_of_our_own(tmp_path: Path) -> None:
    config = LoadtestConfig(url="http://127.0.0.1:9", header="hOst: elsewhere:80", api_key="k")
    lines = setup_of(config).head.decode().split("\r\n")
    assert "hOst: elsewhere:80" in lines and sum(line.lower().startswith("host:") for line in lines) == 1
    assert own_headers(config) == {"Authorization": "Bearer k", "hOst": "elsewhere:80"}
    with mock_server(tmp_path, "--want", "api-key:k") as server:
        with pytest.raises(ConfigError, match="wants an API key"):
            load(server, num_requests=1)
        report = load(server, num_requests=2, rate="50", output_len="1", header="api-key:k")
    assert report.server["model"] == "mock" and report.errors["count"] == 0


def test_a_certificate_of_ones_own_is_refused_unless_it_is_vouched_for_or_not_to_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.pem"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(own), "-out", str(tmp_path / "c.pem")]
    if not shutil.which("openssl") or subprocess.run([*made.split(), *names], capture_output=True).returncode:
        pytest.skip("no openssl here to make a certificate")
    own.write_text(own.read_text() + (tmp_path / "c.pem").read_text())
    with mock_server(tmp_path, "--tls", str(own), "--ttft", "0.01") as server:
        with pytest.raises(ConfigError, match=r"not to be trusted \(self-signed certificate\): --no-verify-tls"):
            load(server, num_requests=1)
        unchecked = load(server, num_requests=5, rate="50", output_len="3", verify_tls=False)
        monkeypatch.setenv("SSL_CERT_FILE", str(own))
        vouched = load(server, num_requests=5, rate="50", output_len="3")
    for report in (unchecked, vouched):
        assert report.errors["count"] == 0 and report.tokens["output_counted"] == 15


@pytest.mark.parametrize(
    ("line", "endpoint", "complaint"),
    [
        ('{"messages": [{"role": "user", "content": "x"}]}', "completions", "--endpoint chat takes those"),
        ('{"prompt": "x"}', "chat", "--endpoint completions takes those"),
    ],
)
def test_a_trace_of_another_endpoint_is_refused(tmp_path: Path, line: str, endpoint: str, complaint: str) -> None:
    (tmp_path / "t.jsonl").write_text(line)
    with mock_server(tmp_path) as server, pytest.raises(ConfigError, match=complaint):
        load(server, trace=str(tmp_path / "t.jsonl"), endpoint=endpoint)


def test_an_answer_after_the_timeout_counts_as_failed_though_nobody_looked_just_then(tmp_path: Path) -> None:
    """Clients look twice a second; five tokens take 0.09 s, thirty 0.34."""
    mix = "short:output=5;long:output=30"
    with mock_server(tmp_path, "--ttft", "0.05", "--itl", "0.01") as server:
        report = load(server, num_requests=12, rate="40", mix=mix, timeout="250ms")
    failed = [record.class_name for record in report.records if record.error == "timeout"]
    assert set(failed) == {"long"} and len(failed) == sum(one.class_name == "long" for one in report.records)
    assert report.errors["kinds"] == {"timeout": len(failed)}


def test_failures_are_beside_the_verdict(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--refuse", "4") as server:
        report = load(server, num_requests=8, rate="50", output_len="1", max_send_lateness="5s")
    assert report.reasons or summary_lines(report)[-1].endswith("the client kept up. 2 of 8 failed.")


def test_ctrl_c_counts_at_once_while_a_server_is_silent_and_clients_are_coming_up() -> None:
    """As a terminal does it: to the whole group, here as soon as there is a client process, which still imports."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = ["loadtest", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]
        command = [sys.executable, "-m", "scripts.cli", *words]
        with subprocess.Popen(command, stdout=-1, stderr=-1, start_new_session=True) as process:
            own, deadline_at = psutil.Process(process.pid), time.monotonic() + 20
            while not (clients := own.children()) and time.monotonic() < deadline_at:
                time.sleep(0.002)
            time.sleep(0.03)
            os.killpg(process.pid, signal.SIGINT)
            began_at = time.monotonic()
            said = process.communicate(timeout=20)
    assert process.returncode == 130 and time.monotonic() - began_at < 5, "it would ask for ten seconds"
    assert said == (b"", b"") and clients and not any(client.is_running() for client in clients)


def test_a_run_stopped_before_its_first_request_has_no_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Crew._until_ready

    async def stopped(self: Crew) -> None:
        await real(self)
        self.halt()
        await asyncio.sleep(60)  # the processes end first

    monkeypatch.setattr(Crew, "_until_ready", stopped)
    with mock_server(tmp_path) as server:
        report = load(server, num_requests=3)
    assert report.was_stopped and report.num_requests == 0
    assert report.length_s < 5 and report.start_up_s is None
    assert any("no request was sent" in line for line in summary_lines(report))
