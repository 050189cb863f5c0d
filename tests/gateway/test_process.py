"""The gateway process: no torch, no prompt in its log, a clean stop, and a sentence when it cannot start."""

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import aiohttp
import pytest
from support.gateway.fake_nodes import MODEL, FakeNode, events, silent

from gateway.__main__ import yield_to

ROOT = str(Path(__file__).resolve().parents[2])


def command(folder, *flags):
    return [
        sys.executable, "-m", "gateway", "--model", str(folder), "--served-model-name", MODEL,
        "--port", "0", "--control-port", "0", *flags,
    ]  # fmt: skip


async def test_slow_work_is_done_by_two_threads_that_let_the_event_loop_go_on_soon():
    interval_s = sys.getswitchinterval()
    try:
        yield_to(asyncio.get_running_loop())
        assert sys.getswitchinterval() < interval_s
    finally:
        sys.setswitchinterval(interval_s)
    is_over, begun = threading.Event(), []

    def work(number):
        begun.append(number)
        assert is_over.wait(60)

    tasks = [asyncio.create_task(asyncio.to_thread(work, number)) for number in range(4)]
    while len(begun) < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert sorted(begun) == [0, 1]
    is_over.set()
    await asyncio.gather(*tasks)


class Process:
    """A gateway process and its log."""

    def __init__(self, process):
        self.process = process
        self.log = ""

    async def said(self, pattern):
        while not (found := re.search(pattern, self.log)):
            line = await self.process.stderr.readline()
            assert line, f"it ended: {self.log}"
            self.log += line.decode()
        return found.group(1)

    async def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        out, err = await self.process.communicate()
        self.log += err.decode()
        assert out == b""


@contextlib.asynccontextmanager
async def gateway_process(folder, *flags):
    process = await asyncio.create_subprocess_exec(
        *command(folder, *flags), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_process_serves_logs_no_prompt_and_stops_cleanly(folder, number):
    flags = ("--log-level", "debug", "--drain-timeout", "1")
    async with gateway_process(folder, *flags) as gateway, aiohttp.ClientSession() as client:
        control = await gateway.said(r"nodes dial (\S+)")
        url = await gateway.said(r"listening (http://\S+)")
        nodes = [await FakeNode(control, role).registered() for role in ("prefill", "decode")]
        async with client.post(f"{url}/v1/completions", json={"prompt": "SECRETS", "max_tokens": 7}) as answer:
            assert (await answer.json())["choices"][0]["text"] == "SECRETS"
        async with client.post(f"{url}/v1/completions", json={"prompt": "SECRETS", "max_tokens": -7}) as answer:
            assert answer.status == 400
        nodes[1].on_generate = silent
        body = {"prompt": "SECRETS", "max_tokens": 7, "stream": True}
        async with client.post(f"{url}/v1/completions", json=body) as answer:
            arriving = events(answer)
            assert (await anext(arriving))["choices"][0]["text"] == "S"
            await gateway.stop(number)
            assert (await anext(arriving))["error"]["code"] == "shutting_down"
        assert gateway.process.returncode == 0
        assert "SECRETS" not in gateway.log
        assert "Traceback" not in gateway.log
        for node in nodes:
            await node.kill()


@pytest.mark.slow
async def test_requests_are_answered_although_nothing_reads_the_log(folder):
    async with gateway_process(folder, "--log-format", "json") as gateway, aiohttp.ClientSession() as client:
        control = await gateway.said(r"nodes dial ([\d.:]+)")
        url = await gateway.said(r"listening (http://[\w.:]+)")
        nodes = [await FakeNode(control, role).registered() for role in ("prefill", "decode")]
        gateway.process.stderr._transport.pause_reading()
        for _ in range(20):  # 2,000 lines are several times what a pipe holds
            body = {"prompt": ["a"] * 100, "max_tokens": 1}
            async with client.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200
        gateway.process.stderr._transport.resume_reading()
        await gateway.stop()
        lines = [json.loads(line) for line in gateway.log.splitlines()]
        assert sum(line["message"] == "request ended" for line in lines) == 2_000
        assert {line["process"] for line in lines} == {"gateway"}
        for node in nodes:
            await node.kill()


@pytest.mark.slow
def test_torch_and_transformers_are_never_imported(folder):
    code = """
import asyncio, json, sys
from pathlib import Path
from common.config.gateway import GatewayConfig
import gateway.__main__
from gateway.server import Gateway
from gateway.workers.served_models import load_models
async def start_and_stop():
    config = GatewayConfig(model=sys.argv[1], port=0, control_port=0)
    gateway = Gateway(config, load_models(config, {"m": Path(sys.argv[1])}))
    await gateway.start()
    await gateway.stop()
asyncio.run(start_and_stop())
import huggingface_hub
huggingface_hub.snapshot_download
print(json.dumps([name for name in ("torch", "transformers", "numpy", "tokenizers") if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, check=True)
    loaded = json.loads(done.stdout)
    assert "tokenizers" in loaded
    assert "torch" not in loaded
    assert "transformers" not in loaded


@pytest.mark.slow
def test_a_failed_start_names_the_flag(folder, tmp_path):
    for words, flags in (
        ("--model", ["--model", str(tmp_path / "nothing")]),
        ("tokenizer.json", ["--model", str(tmp_path)]),
        ("--control-host", ["--control-host", "0.0.0.0"]),
    ):
        done = subprocess.run(command(folder, *flags), cwd=ROOT, capture_output=True, timeout=180)
        assert done.returncode == 2
        assert words in done.stderr.decode()
        assert b"Traceback" not in done.stderr


@pytest.mark.slow
async def test_a_port_in_use_is_one_sentence(folder):
    async with gateway_process(folder) as gateway:
        url = await gateway.said(r"listening (http://\S+)")
        port = url.rpartition(":")[2]
        for name in ("port", "control-port"):
            done = await asyncio.to_thread(
                subprocess.run, command(folder, f"--{name}", port), cwd=ROOT, capture_output=True, timeout=180
            )
            assert done.returncode == 2
            host = name.replace("port", "host")
            where = f"--{host} 127.0.0.1 --{name} {port}"
            sentence = f" ERROR gateway cannot bind {where}: address already in use; choose another with --{name}\n"
            assert done.stderr.decode().endswith(sentence)
            assert done.stderr.count(b"\n") == 1
        await gateway.stop()
