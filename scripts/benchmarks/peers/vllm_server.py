"""Runs vLLM's OpenAI server on CPUs for the length of a ``with`` block."""

import contextlib
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.harness.service_fixture import ServiceStartError, running_process
from scripts.benchmarks.peers.vllm_peer import serving_environment
from scripts.serving.serve import free_port

START_TIMEOUT_S, POLL_S = 600.0, 0.25


@contextlib.contextmanager
def running_vllm(python: Path, model: str, *, num_threads: int, max_model_len: int, kv_bytes: int) -> Iterator[str]:
    """Serve a model in bfloat16 on a free port; yields the server's URL once it is healthy.

    All other options are vLLM's defaults: prompts are computed in chunks, in the same steps as decode rows.

    Args:
        python: one with vLLM for CPUs.
        kv_bytes: what the KV of all requests needs.

    Raises:
        ServiceStartError: the server ended or was not healthy in time; the message contains its output.
    """
    port = free_port("127.0.0.1", 0, "--port")
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--host=127.0.0.1",
        f"--port={port}", "--dtype=bfloat16", f"--max-model-len={max_model_len}", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    environ = serving_environment(python, num_threads, kv_bytes, os.environ)
    with tempfile.TemporaryFile("w+") as log:
        with running_process(command, environ, output=log, log=log) as process:
            ends_at = time.monotonic() + START_TIMEOUT_S
            while not is_healthy(url):
                if process.poll() is not None or time.monotonic() > ends_at:
                    log.seek(0)
                    raise ServiceStartError(f"--peer vllm={python}: its server is not healthy:\n{log.read()[-3000:]}")
                time.sleep(POLL_S)
            yield url


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
