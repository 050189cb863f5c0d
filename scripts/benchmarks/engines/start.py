"""Time until a node on a CPU is ready, beside the time that ``import torch`` takes.

The model has Qwen3-0.6B's shape and random weights, and stands in the page cache. Every round starts two processes, one
after the other: one that imports torch, and a decode node. The best round counts. Seconds of the processor are those
of all threads.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import BatonError
from scripts.benchmarks.harness.cpu_contention import cpu_seconds
from scripts.models.random_model import QWEN3_600M, random_model

SHORTEST = ("--layers=1", "--rounds=1", "--max-total-tokens=1024")
READY = "node ready"
#: A node is ready before it reaches its gateway. Nothing listens on the port for "discard".
NO_GATEWAY = "127.0.0.1:9"
Options = argparse.Namespace  # the fields of `add_options`


@dataclass(frozen=True)
class Start:
    elapsed_s: float
    processor_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="the best round counts (%(default)s)")
    parser.add_argument("--max-total-tokens", type=int, default=32_768, help="tokens of the KV pool (%(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="threads of the node (one per core)")


def run(options: Options) -> dict[str, float]:
    model = random_model({**QWEN3_600M, "num_hidden_layers": options.layers})
    (model / "model.safetensors").read_bytes()  # from now on in the page cache
    node = [
        *("-m", "scripts.serving.worker", "decode", "--device", "cpu", "--model", str(model)),
        *("--max-total-tokens", str(options.max_total_tokens), "--gateway", NO_GATEWAY),
        *(("--threads", str(options.threads)) if options.threads else ()),
    ]
    imports, starts = [], []
    start_once(node)  # compiles the kernels, and hashes the weights
    for _ in range(options.rounds):
        imports.append(start_once(["-c", f"import torch; print({READY!r}, flush=True); input()"]))
        starts.append(start_once(node))
    imported, started = (min(found, key=lambda one: one.elapsed_s) for found in (imports, starts))
    beyond = started.elapsed_s - imported.elapsed_s
    print(f"{'seconds':<26}{'elapsed':>10}{'processor':>12}")
    print(f"{'import torch':<26}{imported.elapsed_s:>10.2f}{imported.processor_s:>12.2f}")
    print(f"{'node ready':<26}{started.elapsed_s:>10.2f}{started.processor_s:>12.2f}")
    print(f"{'beyond import torch':<26}{beyond:>10.2f}{started.processor_s - imported.processor_s:>12.2f}")
    # Not the difference: beside other programs, the import of one round may take longer than the whole start.
    return {"import torch, s": imported.elapsed_s, "node ready, s": started.elapsed_s}


def start_once(arguments: Sequence[str]) -> Start:
    """Start this python until it prints ``READY``, then end it. Raises BatonError: it ends without that."""
    started_at = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    with process:
        for line in process.stdout:
            lines.append(line)
            if READY in line:
                break
        else:
            raise BatonError(f"the process ended before it was ready: {''.join(lines)[-1000:]}")
        elapsed_s = time.perf_counter() - started_at
        processor_s = cpu_seconds(process.pid)
        process.kill()
    return Start(elapsed_s, processor_s)
