"""Other load-test tools, for benchmarks that set ours beside them: aiperf 0.13 and guidellm 0.8.

Each comes from an environment of its own (``python -m venv V && V/bin/pip install aiperf``); the benchmarks are given
the paths of their programs.
"""

import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from common.config.shared import SMALL_MODEL

REVISION = "0" * 40
#: From program, server's address, requests per second, how many, output tokens, folder, and API to a command line.
Command = Callable[[str, str, float, int, int, Path, str], list[str]]


def aiperf_words(program: str, url: str, rate: float, count: int, tokens: int, folder: Path, api: str) -> list[str]:
    """aiperf at Poisson arrivals; its report goes to ``folder / "aiperf"``. ``api`` is chat or completions."""
    shutil.rmtree(folder / "aiperf", ignore_errors=True)
    words = f"profile -m mock --endpoint-type {api} --streaming --arrival-pattern poisson --isl 64 --osl {tokens}"
    words += f" --request-rate {rate:g} --request-count {count} --ui none --tokenizer baton/small"
    return [program, *words.split(), "--url", url, "--output-artifact-dir", str(folder / "aiperf")]


def guidellm_words(program: str, url: str, rate: float, count: int, tokens: int, folder: Path, api: str) -> list[str]:
    """guidellm at Poisson arrivals."""
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    return [
        program, "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url},model=mock,validate_backend=false,request_format={path}",
        "--profile", f"kind=poisson,rate={rate:g}",
        "--constraint", f"kind=max_requests,count={count}",
        "--tokenizer", f"kind=huggingface_auto,model={SMALL_MODEL}",
        "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={tokens}",
        "--output", f"kind=json,path={folder / 'guidellm.json'}",
    ]  # fmt: skip


def cpu_of(words: list[str], folder: Path) -> float:
    """CPU seconds of a tool and of all of its processes.

    Raises:
        RuntimeError: it failed; holds the end of what it said.
    """
    environ = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ran.returncode:
        raise RuntimeError(f"{words[0]} ended with status {ran.returncode}:\n{ran.stdout[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def keep_tokenizer(folder: Path) -> None:
    """The small model's tokenizer as a hub cache would hold it, so that aiperf needs no network."""
    cache = folder / "hf" / "hub" / "models--baton--small"
    shutil.copytree(SMALL_MODEL, cache / "snapshots" / REVISION)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(REVISION)
