"""vLLM for CPUs, in a process of its own Python: compiled, and with Intel's OpenMP runtime where it is installed."""

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from common.errors import ConfigError
from common.system.cpu_cores import usable_cores
from scripts.benchmarks.peers.peer import Workload
from scripts.models.random_model import QWEN3_600M

#: Of one token: keys and values of eight heads of 128 numbers in bfloat16.
LAYER_KV_BYTES = 2 * 8 * 128 * 2
BLOCK_TOKENS = 128  # vLLM's default on CPUs
DRIVER = Path(__file__).with_name("vllm_driver.py")


class VllmPeer:
    """Runs ``vllm_driver.py`` with ``python``, which answers each line of JSON with one.

    Raises:
        ConfigError: the driver ends before it is ready.
    """

    name = "vllm"

    def __init__(self, python: Path, workload: Workload) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-vllm-")
        config = {**QWEN3_600M, "num_hidden_layers": workload.num_layers, "max_position_embeddings": 40_960}
        (Path(self._folder.name) / "config.json").write_text(json.dumps(config))
        self._log = (Path(self._folder.name) / "log").open("w+")
        self._driver = subprocess.Popen(
            [python, DRIVER, json.dumps({**vars(workload), "model": self._folder.name})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=self._folder.name,
            env=environment(python, workload, os.environ),
        )  # fmt: skip
        try:
            self._answer()
        except ConfigError:
            self.close()
            raise

    def prefill_s(self, num_tokens: int) -> float:
        return self._ask(["prefill", num_tokens])

    def decode_s(self, batch: int) -> float:
        return self._ask(["decode", batch])

    def close(self) -> None:
        with self._driver:  # closes its input, at which it ends
            pass
        self._log.close()
        self._folder.cleanup()

    def _ask(self, question: list[object]) -> float:
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps(question) + "\n")
        self._driver.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        if not line:
            self._log.seek(0)
            raise ConfigError(f"--peer vllm: its process has ended: {self._log.read()[-2000:].strip()}")
        return float(json.loads(line))


def environment(python: Path, workload: Workload, own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the driver: ours without those that choose packages, and vLLM's settings."""
    row_blocks = math.ceil((workload.context + workload.num_steps + 1) / BLOCK_TOKENS)
    num_blocks = math.ceil(workload.max_prompt / BLOCK_TOKENS) + workload.max_batch * row_blocks
    kv_bytes = num_blocks * BLOCK_TOKENS * workload.num_layers * LAYER_KV_BYTES
    return serving_environment(python, workload.num_threads, kv_bytes, own) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def serving_environment(python: Path, num_threads: int, kv_bytes: int, own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for vLLM's server, which computes in a process of its own.

    Args:
        kv_bytes: of the pool; vLLM gets whole GiB, and at least one more than these.
    """
    kept = {name: value for name, value in own.items() if not name.startswith(("PYTHON", "OMP_", "VIRTUAL_ENV"))}
    cpus = [core[0] for core in usable_cores()][:num_threads]
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return kept | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_CPU_KVCACHE_SPACE": str(1 + math.ceil(kv_bytes / (1 << 30))),  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "KMP_BLOCKTIME": "1",  # ms that idle threads spin, while others are measured
        "OMP_NUM_THREADS": str(num_threads),
        **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
    }
