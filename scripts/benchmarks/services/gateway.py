"""Throughput of the gateway beside others: answers and streamed chunks per second on one core.

Every gateway is pinned to the same core. The client and what stands behind the gateways (nodes without an engine for
Baton, a mock SGLang worker for the others) share the rest. Gateways are measured in turns, with the same client; the
table shows medians. Streams proceed in steps, as a decode node makes them: once half of the streams have their chunk at
the client, they get their next tokens. So every chunk holds one token.

The processor time of a gateway per event, of all its threads, tells more than the rate: its inverse is the rate that
the gateway could reach if client and nodes were never slower. The others forward bytes; they neither tokenize nor
format. Baton encrypts its messages to nodes and back (CURVE). ``baton plain`` is Baton with ``--insecure``, without
encryption, as the others speak plain HTTP to their workers. ``raw uvloop`` answers every request with the same bytes,
which is the limit of one process on uvloop.

A completion of one token is the prefill node's alone; one of two tokens takes both nodes.
"""

import argparse
import contextlib
import math
import os
import statistics
from collections.abc import Sequence

import uvloop

from common.config.shared import SMALL_MODEL_NAME
from scripts.benchmarks.services.gateways.baton import baton
from scripts.benchmarks.services.gateways.client import Gateway, Load, Measurement, measure
from scripts.benchmarks.services.gateways.peers import ROUTERS, installed_peers, peer, raw_server
from scripts.benchmarks.services.gateways.processes import split_cores

#: Baton without keys.
PLAIN = "baton plain"
SHORTEST = ("--seconds=0.3", "--rounds=1", "--no-peers")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LINE = {"model": SMALL_MODEL_NAME, "prompt": "Shall I compare thee to a summer's day?", "max_tokens": 1}
LETTER = {"model": SMALL_MODEL_NAME, "prompt": "a"}
TURN = {"model": SMALL_MODEL_NAME, "messages": [{"role": "user", "content": "a"}]}
LOADS = (
    Load("completions, 1 connection", COMPLETIONS, LINE, 1),
    Load("completions, 16 connections", COMPLETIONS, LINE, 16, with_peers=True),
    Load("completions of two tokens", COMPLETIONS, {**LINE, "max_tokens": 2}, 16, with_peers=True),
    Load("chats, 16 connections", CHAT, {**TURN, "max_tokens": 1}, 16),
    Load("completion chunks, 1 stream", COMPLETIONS, LETTER, 1, is_streaming=True),
    Load("completion chunks, 64 streams", COMPLETIONS, LETTER, 64, is_streaming=True),
    Load("chat chunks, 64 streams", CHAT, TURN, 64, is_streaming=True, with_peers=True),
    Load("chat chunks with stop strings", CHAT, {**TURN, "stop": ["THE END", "\n\n"]}, 64, is_streaming=True),
)


async def measure_all(
    gateways: Sequence[Gateway], seconds: float, rounds: int
) -> dict[tuple[str, str], list[Measurement]]:
    """Measurements by load and gateway."""
    measurements: dict[tuple[str, str], list[Measurement]] = {}
    for _ in range(rounds):
        for load in LOADS:
            for gateway in gateways if load.with_peers else gateways[:1]:
                measurement = await measure(gateway, load, seconds)
                measurements.setdefault((load.name, gateway.name), []).append(measurement)
    return measurements


async def run_all(options: argparse.Namespace) -> dict[str, float]:
    commands = {} if options.no_peers else installed_peers(dict(options.peer))
    cores = split_cores()
    async with contextlib.AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(baton(cores)),
            await stack.enter_async_context(baton(cores, name=PLAIN, options=("--insecure",))),
        ]
        for name, command in commands.items():
            gateways.append(await stack.enter_async_context(peer(name, command, cores)))
        gateways.append(await stack.enter_async_context(raw_server(cores)))
        measurements = await measure_all(gateways, options.seconds, options.rounds)
    medians = {
        key: Measurement(
            statistics.median(one.per_second for one in several), statistics.median(one.cpu_us for one in several)
        )
        for key, several in measurements.items()
    }
    print_table(medians)
    if not options.no_peers and (absent := [name for name in ROUTERS if name not in commands]):
        print(f"not installed: {', '.join(absent)} (--peer NAME=PROGRAM)")
    return {
        f"{load}, {gateway}, {unit}": value
        for (load, gateway), median in medians.items()
        for unit, value in (("per second", median.per_second), ("us of CPU each", median.cpu_us))
    }


def print_table(medians: dict[tuple[str, str], Measurement]) -> None:
    print(
        f"{'':30} {'':14} {'measured':>11} {'CPU each':>11} {'per core':>11}   "
        "Baton reaches, measured and per core; without keys"
    )
    for (load, gateway), median in medians.items():
        ours, plain = medians[load, "baton"], medians.get((load, PLAIN))
        per_core = _share(1e6, median.cpu_us)
        line = f"{load:30} {gateway:14} {median.per_second:9,.0f}/s {median.cpu_us:8.1f} us {per_core:9,.0f}/s"
        if gateway not in ("baton", PLAIN):
            line += f"   {_share(ours.per_second, median.per_second):.2f} {_share(median.cpu_us, ours.cpu_us):.2f}"
            line += "" if plain is None else f"; {_share(median.cpu_us, plain.cpu_us):.2f}"
        print(line)


def _share(one: float, other: float) -> float:
    return one / other if other else math.nan  # nothing was measured


def named_program(text: str) -> tuple[str, str]:
    """An argparse type for NAME=PROGRAM."""
    name, _, program = text.partition("=")
    if name not in ROUTERS or not os.access(program, os.X_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PROGRAM, where NAME is one of {', '.join(ROUTERS)}")
    return name, program


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind (%(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="measure Baton and the raw server alone")
    parser.add_argument(
        "--peer", type=named_program, action="append", default=[], metavar="NAME=PROGRAM",
        help=f"where a peer is, if not in PATH; {', '.join(ROUTERS)}",
    )  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = uvloop.run(run_all(options))
    return figures
