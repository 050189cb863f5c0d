"""The programs in docs/examples and the curl commands of the pages run against real processes with the small model."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.service.processes import environment, free_port

from common.plugins import RequestFacts, load_policy, load_priority_function
from common.request import Request
from common.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SMALL_NODES = ["--threads=1", "--max-total-tokens=8192"]


def variables(**more: str) -> dict[str, str]:
    """The environment of a shell in which this interpreter's environment is active."""
    path = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
    return {**environment(), "VIRTUAL_ENV": sys.prefix, "PATH": path, **more}


@contextlib.contextmanager
def serving(log: Path, *flags: str) -> Iterator[str]:
    """The URL of ``./scripts/serve`` with these flags, once it is ready."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [ROOT / "scripts" / "serve", "--port=0", *SMALL_NODES, *flags],
            env=variables(PYTHONPATH=str(EXAMPLES)),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready http://"), log.read_text()
        yield line.split()[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service that orders requests by the example's policy, and reads tool calls."""
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, "--schedule-policy=own_policy:ShortPromptsFirst") as found:
        yield found


def stream(*words: str) -> "subprocess.CompletedProcess[str]":
    """What the streaming client prints."""
    return subprocess.run(
        [sys.executable, EXAMPLES / "streaming_client.py", *words],
        capture_output=True,
        text=True,
        timeout=180,
        env=variables(),
    )


# ---- commands of the pages ------------------------------------------------------------------------------------------


def curl_commands() -> list[str]:
    """Commands after ``$`` in console blocks that ask a local gateway. A command may have several lines."""
    found = []
    for page in (ROOT / "README.md", ROOT / "docs" / "operations.md", ROOT / "docs" / "api.md"):
        blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), flags=re.S | re.M)
        commands = [command for block in blocks for command in re.split(r"^\$ ", block, flags=re.M)]
        found += [command for command in commands if command.startswith("curl ")]
    return found


@pytest.mark.parametrize("command", curl_commands())
def test_the_curl_commands_of_the_pages_succeed(url: str, command: str) -> None:
    command = command.replace("curl ", "curl --silent --show-error --fail ", 1).replace("http://127.0.0.1:8000", url)
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=180)
    assert found.returncode == 0, found.stderr
    assert found.stdout


def python_blocks(page: Path) -> list[str]:
    """Python blocks that use OpenAI's client."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M)
    return [block for block in blocks if "import OpenAI" in block]


def test_the_openai_client_of_the_readme_prints_what_the_schema_allows(url: str) -> None:
    (code,) = python_blocks(ROOT / "README.md")
    found = run_python("-c", code.replace("http://127.0.0.1:8000", url))
    assert found.returncode == 0, found.stderr
    assert re.fullmatch(r"is_about_food=(True|False) stars=[1-5]", found.stdout.strip())


# ---- official client ------------------------------------------------------------------------------------------------


def run_python(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300, env=variables()
    )


def test_the_tools_example_runs_the_function_that_the_model_calls(url: str) -> None:
    found = run_python(EXAMPLES / "tools.py", "How warm is it in Rome?", f"--url={url}", "--required")
    assert found.returncode == 0, found.stderr
    call, _, text = found.stdout.partition("\n")
    assert re.fullmatch(r'get_temperature\(\{"city": "(\w+)"\}\) -> \{\'city\': \'\1\', \'celsius\': \d+\}', call)
    assert text.strip()


@pytest.mark.slow
def test_the_structured_output_example_prints_what_the_schema_allows(url: str) -> None:
    found = run_python(EXAMPLES / "structured_output.py", "The soup was cold.", f"--url={url}")
    assert found.returncode == 0, found.stderr
    chat, _, text = found.stdout.partition("\n")
    assert re.fullmatch(r"mood (glad|neutral|sad), [1-5] stars, about food: (True|False)", chat)
    assert set(json.loads(text)) == {"mood", "stars", "is_about_food"}


# ---- streaming client -----------------------------------------------------------------------------------------------


def test_the_streaming_client_prints_the_answer_and_its_length(url: str) -> None:
    found = stream("What news from Verona?", f"--url={url}", "--max-tokens=20")
    assert found.returncode == 0, found.stderr
    text, _, usage = found.stdout.strip().rpartition("\n")
    assert len(text) > 20
    assert re.fullmatch(r"\[\d+ tokens in, 20 out\]", usage)


def test_the_streaming_client_reports_an_error_in_the_servers_words(url: str) -> None:
    found = stream("What news?", f"--url={url}", "--max-tokens=-1")
    assert found.returncode == 1
    assert found.stdout == ""
    assert "400" in found.stderr
    assert "max_tokens" in found.stderr


def chunk(content: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": content}}]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("body", "status", "out"),
    [
        (chunk("Good ") + chunk("night.") + b"data: [DONE]\n\n", 0, "Good night."),
        (chunk("Good ") + b'data: {"error": {"message": "the node was lost"}}\n\n', 1, "the node was lost"),
        (chunk("Good "), 1, "closed before the end"),
    ],
    ids=["whole", "an error in the stream", "cut off"],
)
def test_the_streaming_client_retries_a_full_server_and_checks_the_end(body: bytes, status: int, out: str) -> None:
    tries: list[int] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            tries.append(429 if not tries else 200)
            self.send_response(tries[-1])
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0" if tries[-1] == 429 else str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if tries[-1] == 429 else body)

        def log_message(self, *words: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found = stream("x", f"--url=http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
    assert tries == [429, 200]
    assert found.returncode == status
    assert out in found.stdout + found.stderr


# ---- own policy -----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_policy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("own_policy", EXAMPLES / "own_policy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def waiting(rid: str, num_prompt: int, arrived_at: float) -> Request:
    return Request(rid, 0, tuple(range(num_prompt)), SamplingParams(max_new_tokens=4), arrived_at=arrived_at)


def test_the_own_policy_puts_short_prompts_first_but_none_waits_for_ever(own_policy: ModuleType) -> None:
    policy = own_policy.ShortPromptsFirst()
    requests = [waiting("old", 900, 0.0), waiting("long", 90, 5.0), waiting("short", 9, 6.0)]
    assert [request.rid for request in policy.order(requests, now=9.0)] == ["short", "long", "old"]
    assert [request.rid for request in policy.order(requests, now=10.0)] == ["old", "short", "long"]


def test_policy_and_priority_function_are_loaded_by_their_flags(own_policy: ModuleType) -> None:
    policy = load_policy("own_policy:ShortPromptsFirst")
    assert policy is not None
    assert policy.name == "own_policy:ShortPromptsFirst"
    function = load_priority_function("own_policy:short_answers_first")
    assert function is not None
    facts = dict.fromkeys(("model", "tenant", "priority_class"), "") | {"priority": None, "num_prompt_tokens": 9}
    priorities = [
        function(RequestFacts(**facts, max_new_tokens=length, expected_output=0, deadline_s=60.0))
        for length in (32, 33)
    ]
    assert priorities == [10, None]
    assert function.failures.count == 0


def test_a_service_runs_under_the_own_policy(url: str) -> None:
    with urllib.request.urlopen(f"{url}/server_info") as answer:
        assert json.load(answer)["config"]["schedule_policy"] == "own_policy:ShortPromptsFirst"
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        failures = re.findall(rb"^baton_node_own_policy_failures_total\{.*\} (\S+)$", answer.read(), re.M)
    assert all(float(count) == 0 for count in failures)


# ---- recording and replay -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_commands_for_recordings_write_one_that_replays_identically(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    commands = re.findall(r"^\$ (\./scripts/.*(?:--record|--replay) .*)$", page, flags=re.M)
    serve, simulate = (shlex.split(command.replace("/tmp/run", f"{tmp_path}/run")) for command in commands)
    assert serve[0] == "./scripts/serve"
    with serving(tmp_path / "log", *serve[1:]) as found:
        assert stream("What news from Verona?", f"--url={found}", "--max-tokens=20").returncode == 0
    replayed = subprocess.run(simulate, cwd=ROOT, capture_output=True, text=True, timeout=300, env=variables())
    assert replayed.returncode == 0, replayed.stderr
    assert "identical" in replayed.stdout


# ---- two hosts ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_hosts_serve_a_request_over_tcp_and_stop(tmp_path: Path) -> None:
    ports = {"PORT": str(free_port()), "CONTROL_PORT": str(free_port())}
    with (tmp_path / "log").open("wb") as log:
        found = subprocess.run(
            [EXAMPLES / "two_hosts.sh", *SMALL_NODES],
            env=variables(**ports),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=500,
        )
    said = (tmp_path / "log").read_text()
    assert found.returncode == 0, said
    assert "tokens in, 20 out]" in found.stdout
    assert sorted(re.findall(r"^(prefill|decode) \S+ pairs: (.*)$", found.stdout, re.M)) == [
        ("decode", "['tcp']"),
        ("prefill", "['tcp']"),
    ]
    assert "Traceback" not in said


# ---- discovery ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")
def test_two_gateways_serve_through_nodes_that_found_them_in_etcd() -> None:
    names = ("PORT", "OTHER_PORT", "ETCD_PORT", "ETCD_PEER_PORT")
    found = subprocess.run(
        [EXAMPLES / "etcd.sh", *SMALL_NODES],
        env=variables(**{name: str(free_port()) for name in names}),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("tokens in, 20 out]") == 2
    assert "Traceback" not in found.stderr
