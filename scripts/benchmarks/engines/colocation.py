"""Slowdown of decode on one core by prefill on another, compared with the cost of the memory that they share.

Two processes with one thread each, pinned to a core, have a model of Qwen3-0.6B's shape with random weights. One
decodes while the other computes prompts one after the other, or waits. Reading memory on the decode core, alone and
beside the same prompts, shows what shared bandwidth and cache cost. The two states take turns, and the best round
counts.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import torch

from scripts.benchmarks.engines import engine

SHORTEST = ("--layers=1", "--prompt=64", "--batch=1", "--new-tokens=4", "--rounds=1")
IDLE_S = 1.0
#: The longest time for loading a node, or for one prompt.
MAX_WAIT_S = 600.0
Options = argparse.Namespace  # the fields of `add_options`


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8], help="decode batch sizes (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="decode steps of a round (%(default)s)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the best round counts (%(default)s)")
    parser.set_defaults(device="cpu", dtype="bfloat16")


def run(options: Options) -> dict[str, float]:
    options.prefill = [options.prompt]
    cpus = sorted(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    prefill = spawn.Process(target=prefill_node, args=(theirs, cpus[0], options), daemon=True)
    prefill.start()
    theirs.close()
    os.sched_setaffinity(0, {cpus[-1]})
    try:
        torch.set_num_threads(1)
        print(f"prefill on CPU {cpus[0]}, decode on CPU {cpus[-1]}, {options.layers} layers", flush=True)
        return measure(Prefill(ours), options)
    finally:
        os.sched_setaffinity(0, cpus)
        ours.close()  # ends the other process
        prefill.join()


class Prefill:
    """The process that computes prompts, which is ready when this is made."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._answer()

    def beside(self, measure: Callable[[], float]) -> float:
        """Return what ``measure`` does while prompts are computed."""
        self._connection.send("compute")
        found = measure()
        self._connection.send("stop")
        self._answer()
        return found

    def idle_processor_s(self) -> float:
        """Return the processor time of the process in a second without prompts."""
        self._connection.send("wait")
        return self._answer()

    def _answer(self) -> float:
        assert self._connection.poll(MAX_WAIT_S), "the process that computes prompts does not answer"
        found: float = self._connection.recv()
        return found


def prefill_node(connection: Connection, cpu: int, options: Options) -> None:
    os.sched_setaffinity(0, {cpu})
    torch.set_num_threads(1)
    executor = engine.build(engine.model_shape(options.layers), options)
    compute = engine.prefill_run(options.prompt, executor, options)
    compute()
    connection.send(0.0)
    try:
        while True:
            if connection.recv() == "wait":
                connection.send(idle_processor_s())
                continue
            while not connection.poll():
                compute()
            connection.recv()
            connection.send(0.0)
    except (EOFError, ConnectionError):
        executor.close()


def measure(prefill: Prefill, options: Options) -> dict[str, float]:
    executor = engine.build(engine.model_shape(options.layers), options)
    ballast = torch.ones(64 << 20, dtype=torch.float32)
    runs: dict[str, tuple[float, Callable[[], object]]] = {"memory, GB/s": (ballast.nbytes / 1e9, ballast.sum)}
    for batch in options.batch:
        decode = engine.decode_run(batch, executor, options)
        runs[f"decode batch {batch}, tokens/s"] = (batch * options.new_tokens, decode)
    print(f"{'':<28}{'alone':>10}{'beside prefill':>16}{'slower':>10}")
    figures: dict[str, float] = {}
    for name, (amount, each) in runs.items():
        alone = engine.in_seconds(each, options)
        alone_s, beside_s = engine.best_times([alone, partial(prefill.beside, alone)], options)
        figures |= {f"{name}, alone": amount / alone_s, f"{name}, beside prefill": amount / beside_s}
        speeds = f"{amount / alone_s:>10.1f}{amount / beside_s:>16.1f}"
        print(f"{name:<28}{speeds}{beside_s / alone_s - 1:>10.1%}", flush=True)
    own_ms, their_ms = (1e3 * seconds / IDLE_S for seconds in (idle_processor_s(), prefill.idle_processor_s()))
    print(f"processor time when idle: decode {own_ms:.1f} ms, prefill {their_ms:.1f} ms in a second")
    executor.close()
    return figures


def idle_processor_s() -> float:
    """Return the processor time that all threads of this process take in a second without work."""
    before = time.process_time()
    time.sleep(IDLE_S)
    return time.process_time() - before
