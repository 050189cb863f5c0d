"""Drives a live service with a designed load: prompts of many lengths alone, then batches of several sizes."""

import itertools
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from common.errors import ConfigError
from common.wire.messages import LayoutMessage
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.client.request_headers import common_headers
from scripts.load_tester.client.server_info import ServerInfo, fetch_server_info, get_json
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.formats import counted
from scripts.load_tester.run import run_load
from scripts.simulator.calibration.fit import TooFewSamples
from scripts.simulator.calibration.samples import Samples, StreamedRequest

#: Shares of the time for single requests and for prompts beside outputs; the rest is for batches.
ALONE_SHARE, BESIDE_SHARE = 0.4, 0.25
MOST_ROUNDS, LEAST_ROUND_S = 3, 30.0
MAX_PROMPT = 8_192
NUM_LENGTHS = 8
ALONE_OUTPUT, BATCH_OUTPUT = 8, 48
BATCHES = (2, 4, 8, 16, 32)
#: Outputs at once beside prompts; of the prompts two are in flight, of which one waits, so that none is computed alone.
BATCHES_BESIDE, PROMPTS_BESIDE = (1, 4, 12), 2
#: Lengths of prompts beside outputs: long enough to keep a node busy, short enough for one chunk.
LENGTHS_BESIDE = (64, 512)
#: Tokens of an output on one of two decode nodes: long outputs, so that prompts are rare.
PAIR_OUTPUT = 256
NUM_ROWS = 5_000  # of a designed trace, more than any service answers in time


@dataclass(frozen=True, slots=True)
class ServiceSize:
    """What a service says about its nodes; 0 where it does not.

    Attributes:
        num_prefill, num_decode: nodes.
        pool_tokens: of one node.
        num_devices: accelerators of each node.
    """

    model: str
    context_length: int
    num_prefill: int = 0
    num_decode: int = 0
    pool_tokens: int = 0
    kv_bytes_per_token: int = 0
    max_running: int = 0
    num_devices: int = 1


def service_size(server: ServerInfo, workers: Any) -> ServiceSize:
    """Read the answers of the model list and, of a Baton service, of ``/v1/workers``.

    Raises ConfigError: the form of an answer is unknown, or nodes have different numbers of devices.
    """
    listed = workers.get("workers") if isinstance(workers, dict) else None
    registers = [one.get("register") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    nodes = [one for one in registers if isinstance(one, dict)]
    model = server.model or "unknown"
    if not nodes:
        return ServiceSize(model, MAX_PROMPT)
    first = nodes[0]
    try:
        kv_bytes = msgspec.convert(first["layout"], LayoutMessage).layout().bytes_per_token
        num_devices = {int(one.get("num_ranks", 1)) for one in nodes}
        if len(num_devices) > 1:
            counts = " and ".join(map(str, sorted(num_devices)))
            raise ConfigError(
                f"--calibrate: the nodes have {counts} devices, and a profile is of nodes that are alike: start them "
                "with the same --tp"
            )
        return ServiceSize(
            model,
            int(first["context_length"]),
            sum(one["role"] == "prefill" for one in nodes),
            sum(one["role"] == "decode" for one in nodes),
            min(one["num_pages"] * one["layout"]["page_size"] for one in nodes),
            kv_bytes,
            min(int(one["max_running"]) for one in nodes),
            *num_devices,
        )
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"--calibrate: /v1/workers has an unknown form ({error!r})") from None


def ask_service(config: LoadtestConfig, *, num_decode: int = 1) -> tuple[ServerInfo, ServiceSize]:
    """Ask the service for its size. Raises ConfigError: it does not answer, or has other numbers of nodes."""
    headers = common_headers(config)
    server = fetch_server_info(config.url, headers)
    size = service_size(server, get_json(urlsplit(config.url), "/v1/workers", headers, True))
    if num_decode == 1:
        refuse_several(size)
    else:
        refuse_other_pairs(size)
    return server, size


def refuse_several(size: ServiceSize) -> None:
    """Raise ConfigError if there are several nodes of a kind: clients cannot tell which of them served a request."""
    if size.num_prefill > 1 or size.num_decode > 1:
        raise ConfigError(
            f"--calibrate needs one prefill and one decode node, and the service has {size.num_prefill} and "
            f"{size.num_decode}: start one with fewer"
        )


def refuse_other_pairs(size: ServiceSize) -> None:
    """Raise ConfigError unless there are two decode nodes, each of which gets half of the requests."""
    if (size.num_prefill, size.num_decode) != (1, 2):
        has = f"{size.num_prefill} and {size.num_decode}" if size.num_decode else "nodes that it does not name"
        raise ConfigError(
            f"--calibrate with --hardware PROFILE needs one prefill and two decode nodes, and the service has {has}"
        )


def prompt_lengths(size: ServiceSize) -> list[int]:
    """Lengths from 16 tokens to half of the context, evenly on a logarithmic scale."""
    most = min(MAX_PROMPT, size.context_length // 2, size.pool_tokens // 2 or MAX_PROMPT)
    least = min(16, most)
    ratio = (most / least) ** (1 / (NUM_LENGTHS - 1))
    return sorted({round(least * ratio**number) for number in range(NUM_LENGTHS)})


def designed_rows(lengths: Sequence[int], num_output: int) -> Iterator[dict[str, int]]:
    """Requests of a designed trace: all lengths once in ascending order, then shuffled again and again."""
    order = list(lengths)
    draw = random.Random(0)
    for number in range(NUM_ROWS):
        yield {"input_length": order[number % len(order)], "output_length": num_output}
        if number % len(order) == len(order) - 1:
            draw.shuffle(order)


def measure(
    base: LoadtestConfig, server: ServerInfo, size: ServiceSize, *, seconds: float, say: Callable[[str], None]
) -> Samples:
    """Send the designed load for about ``seconds`` and return what the clients saw.

    Everything is measured several times over, so that work that something else does meanwhile falls on a few samples of
    each kind.
    """
    num_rounds = max(1, min(MOST_ROUNDS, int(seconds // LEAST_ROUND_S)))
    driver = Driver(base, server, size, say)
    for number in range(num_rounds):
        say(f"round {number + 1} of {num_rounds}")
        if size.num_decode > 1:
            driver.measure_decode_nodes(BESIDE_SHARE * seconds / num_rounds)
        else:
            driver.measure_round(seconds / num_rounds)
    return driver.samples


class Driver:
    """Sends the phases of the designed load."""

    def __init__(self, base: LoadtestConfig, server: ServerInfo, size: ServiceSize, say: Callable[[str], None]) -> None:
        self.samples = Samples()
        self._base = base
        self._server = server
        self._size = size
        self._say = say
        self._lengths = prompt_lengths(size)
        self._batches = [one for one in BATCHES if not size.max_running or one <= size.max_running]
        self._num_runs = 0

    def measure_round(self, seconds: float) -> None:
        samples = self.samples
        self._say(f"prompts of {self._lengths[0]} to {self._lengths[-1]} tokens, one at a time")
        samples.add_alone(self._send_alone(ALONE_SHARE * seconds))
        if len(samples.prompts) < 2 * len(self._lengths):  # a slow service takes longer than it was given
            samples.add_alone(self._send_alone(None))
        batches = self._batches_beside()
        if samples.prompts[0].prefill_s is None:  # how long a prompt took beside others is not known
            batches = []
        beside_s = BESIDE_SHARE * seconds if batches else 0.0
        for batch in self._batches:
            self._say(f"{counted(batch, 'output')} at once")
            share_s = ((1 - ALONE_SHARE) * seconds - beside_s) / len(self._batches)
            samples.add_together(self._send_batch(batch, share_s))
        for batch in batches:
            self._say(f"prompts beside {counted(batch, 'output')}")
            samples.add_beside(*self._send_beside(batch, beside_s / len(batches)))

    def measure_decode_nodes(self, seconds: float) -> None:
        """Send outputs to two decode nodes, of which each computes half."""
        batches = self._batches_beside()
        for batch in batches:
            self._say(f"{counted(batch, 'output')} at once on each of two decode nodes")
            self.samples.add_on_two_nodes(self._send_pairs(batch, seconds / len(batches)))

    def _batches_beside(self) -> list[int]:
        return [one for one in BATCHES_BESIDE if one <= max(self._batches, default=1)]

    def _send_pairs(self, batch: int, seconds: float) -> list[StreamedRequest]:
        """Keep ``batch`` outputs in flight on each of two decode nodes for ``seconds``."""
        size, length = self._size, self._lengths[0]
        room = (size.pool_tokens // 2 or MAX_PROMPT) // batch - length
        num_output = max(BATCH_OUTPUT, min(PAIR_OUTPUT, room, size.context_length // 2))
        return self._send(designed_rows([length], num_output), concurrency=2 * batch, seconds=seconds)

    def _send_alone(self, seconds: float | None) -> list[StreamedRequest]:
        """Send one request after another for ``seconds``; None sends each length twice."""
        count = 2 * len(self._lengths) if seconds is None else None
        return self._send(designed_rows(self._lengths, ALONE_OUTPUT), concurrency=1, seconds=seconds, count=count)

    def _send_batch(self, batch: int, seconds: float) -> list[StreamedRequest]:
        """Keep ``batch`` requests with short prompts in flight for ``seconds``."""
        lengths, size = self._lengths, self._size
        room = size.pool_tokens // batch - BATCH_OUTPUT if size.pool_tokens else lengths[-1]
        short = [length for length in lengths[: len(lengths) // 2 + 1] if length <= max(16, room // 2)] or lengths[:1]
        return self._send(designed_rows(short, BATCH_OUTPUT), concurrency=batch, seconds=seconds)

    def _send_beside(self, batch: int, seconds: float) -> tuple[list[StreamedRequest], list[StreamedRequest]]:
        """Send ``batch`` outputs that last about ``seconds``, and prompts meanwhile; return both.

        Raises TooFewSamples: how long a step takes is not known.
        """
        low, high = LENGTHS_BESIDE
        size, first = self._size, self._lengths[0]
        prompts = [length for length in self._lengths if low <= length <= high] or self._lengths[-1:]
        # A step that is quick by comparison, so that no output ends before its time. Tokens may have come all at once.
        steps_s = [one.seconds for one in self.samples.steps if one.num_rows <= batch and one.seconds > 0]
        if not steps_s:
            raise TooFewSamples(f"0 decode steps of at most {counted(batch, 'output')} were measured")
        step_s = float(np.quantile(steps_s, 0.25))
        room = (size.pool_tokens // 2 or MAX_PROMPT) // batch
        num_output = max(BATCH_OUTPUT, min(int(seconds / step_s), room - first, size.context_length // 2))
        outputs = ({"input_length": first, "output_length": num_output} for _ in range(batch))
        rows = itertools.chain(outputs, designed_rows(prompts, 2))
        found = self._send(rows, concurrency=batch + PROMPTS_BESIDE, seconds=seconds)
        return [one for one in found if len(one.stamps_s) > 2], [one for one in found if len(one.stamps_s) <= 2]

    def _send(
        self, rows: Iterable[dict[str, int]], *, concurrency: int, seconds: float | None, count: int | None = None
    ) -> list[StreamedRequest]:
        """Keep ``concurrency`` requests of a designed trace in flight, for ``seconds`` or until ``count`` were sent."""
        self._num_runs += 1
        with tempfile.TemporaryDirectory(prefix="baton-calibrate-") as folder:
            trace = Path(folder) / "designed.jsonl"
            trace.write_text("\n".join(json.dumps(row) for row in rows))
            duration = None if seconds is None else f"{seconds:.3f}"
            load: dict[str, Any] = {
                "trace": str(trace),
                "concurrency": concurrency,
                "duration": duration,
                "num_requests": count,
            }
            report = run_load(replace(self._base, **load), server=self._server, salt=self._num_runs)
        if report.was_stopped:
            raise KeyboardInterrupt
        if report.all_failed:
            first = next((one for one in report.records if one.error), None)
            raise ConfigError(
                f"--calibrate {self._base.url}: every request failed: {first.message if first else 'none was sent'}"
            )
        return [_streamed(one) for one in report.records if one.is_ok and one.stamps_s]


def _streamed(record: RequestRecord) -> StreamedRequest:
    """A request with an instant for each token, of which an event may have several."""
    stamps_s = [at for at, count in zip(record.stamps_s, record.counts, strict=True) for _ in range(count)]
    return StreamedRequest(record.num_input, record.sent_s, stamps_s, record.timings)
