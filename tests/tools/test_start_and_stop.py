"""How commands begin and end in a terminal: a sentence for a wrong model, word of what is awaited, a quiet Ctrl-C."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from support.service.service import Service
from support.waiting import until

from common.wire.mailbox import Mailbox
from common.wire.messages import FromNode
from common.wire.process_id import new_incarnation

ROOT = Path(__file__).resolve().parents[2]


def start(command: str, *flags: str, **options) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "scripts.cli", command, *flags]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


#: Nodes of both roles load a model in the same way, so that they share the mistakes.
MISSING = {
    "serve": ("/nonexistent", "empty", "nobody/nothing"),
    "gateway": ("/nonexistent", "empty", "nobody/nothing"),
    "prefill": ("/nonexistent", "nobody/nothing"),
    "decode": ("empty",),
}


@pytest.mark.slow(sample=0.2)
@pytest.mark.parametrize(("command", "model"), [(command, model) for command in MISSING for model in MISSING[command]])
def test_a_model_that_is_not_there_is_one_sentence(command, model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = str(tmp_path) if model == "empty" else model
    with start(command, "--model", model, "--log-level", "warning") as process:
        out, err = process.communicate(timeout=180)
    assert process.returncode == 2
    assert out == "" and len(err.splitlines()) == 1, err
    assert f"--model {model}: " in err


@pytest.mark.slow(sample=0.2)
@pytest.mark.parametrize("command", ["serve", "gateway", "prefill"])
def test_a_hub_that_cannot_be_reached_is_no_reason_not_to_start_again(command, tmp_path, monkeypatch):
    with socket.socket() as closed:  # bound, but it does not listen
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        with start(command, "--model", "nobody/nothing", "--log-level", "warning") as process:
            out, err = process.communicate(timeout=180)
    assert process.returncode == 1, err
    assert out == "" and "--model nobody/nothing: neither a local folder nor available" in err


@pytest.mark.slow
def test_serve_ends_with_status_2_if_a_node_refuses_its_options():
    flags = ["--device", "cpu", "--attention-backend", "flash-attn", "--max-total-tokens", "1024"]
    with start("serve", "--port", "0", *flags) as process:
        out, err = process.communicate(timeout=180)
    assert process.returncode == 2, err
    assert out == "" and "--attention-backend flash-attn: runs on CUDA; give auto or cpu" in err
    said = "ended with status 2; see its output above"  # the other node may refuse them too, a moment later
    assert any(line.endswith(said) for line in err.splitlines()), err


@pytest.mark.slow(sample=0.34)
@pytest.mark.parametrize(
    ("module", "part", "run"),
    [
        ("gateway.__main__", "model_folders", "main([])"),
        ("scripts.serving.serve", "with_ports", "main([])"),
        ("common.node.worker_main", "load_policy", "run(m.NodeConfig(), {}, '')"),
    ],
)
def test_an_error_that_is_not_foreseen_is_in_the_log_with_its_traceback(module, part, run):
    code = f"import sys, {module} as m\ndef fail(*_): raise ZeroDivisionError('unforeseen')\n"
    words = [sys.executable, "-c", f"{code}m.{part} = fail; sys.exit(m.{run})"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "ZeroDivisionError: unforeseen" in done.stderr


def await_first_import(process):
    """Wait until the program runs, and imports what it needs; until then Ctrl-C is up to Python itself."""
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "msgspec" not in maps.read_text():
        time.sleep(0.005)


#: After the first import. Nodes of both roles start in the same way, so that they share the moments.
MOMENTS_S = {
    "serve": (0.0, 0.3, 0.7, 1.2, 2.2),
    "gateway": (0.0, 0.3, 0.7, 1.2, 2.2),
    "prefill": (0.0, 0.7, 2.2),
    "decode": (0.3, 1.2),
}


@pytest.mark.slow(sample=0.2)
@pytest.mark.parametrize(
    ("command", "seconds"), [(command, moment) for command, moments in MOMENTS_S.items() for moment in moments]
)
def test_ctrl_c_at_any_moment_of_the_start_leaves_no_traceback_and_no_process(command, seconds):
    ports = {"serve": ["--port=0"], "gateway": ["--port=0", "--control-port=0"]}
    with start(command, *ports.get(command, []), start_new_session=True) as process:
        await_first_import(process)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=180)  # no child holds the pipes any more
    assert "Traceback" not in err and "KeyboardInterrupt" not in err
    assert process.returncode in (0, 130, -signal.SIGINT)


def check_waiting(service: Service, node: str, address: str, reason: str) -> str:
    """Check that a node says twice what it waits for, and that Ctrl-C stops it; return its log."""
    waiting = f"still waiting for the gateway at {address}{reason}"
    service.start(node)
    log = until(lambda: service.log().count(waiting) > 1 and service.log(), 180)
    assert service.stop(node, signal.SIGINT) == 0
    return log


def test_a_node_without_a_gateway_says_what_it_waits_for_again_and_again(tmp_path):
    with closing(Service(tmp_path / "logs")) as service:
        address = f"127.0.0.1:{service.control_port}"
        log = check_waiting(service, "decode-0", address, "; start one, or name another with --gateway HOST:PORT")
    assert re.search(rf"node ready.*dialling the gateway at {address}", log)


def test_a_node_whose_registration_is_not_answered_says_so_again_and_again(tmp_path):
    context = zmq.Context()
    gateway = Mailbox(context, new_incarnation(), FromNode, bind="tcp://127.0.0.1:*")
    address = f"127.0.0.1:{gateway.port}"
    with closing(Service(tmp_path / "logs", node_options={"gateway": address, "insecure": True})) as service:
        check_waiting(service, "prefill-0", address, " to answer: it is connected, and has not registered us")
    gateway.close()
    context.term()


@pytest.mark.slow
def test_the_command_shown_when_the_service_is_ready_works_as_it_is_pasted():
    with start("serve", "--port", "0", "--max-total-tokens", "4096") as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().removeprefix("ready ").strip()
        lines = []
        while not lines or "see it:" not in lines[-1]:
            lines.append(process.stderr.readline())
        (command,) = [found.group(1) for line in lines if (found := re.search(r"try it: (curl .*)", line))]
        done = subprocess.run(f"{command} --silent", shell=True, capture_output=True, text=True, timeout=180)
        assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0
        assert f"see it: {url}/ in a browser" in lines[-1]
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=180)
        assert out == ""
        assert process.returncode == 0
