"""Drives a live service with a designed load: prompts of many lengths alone, then batches of several sizes."""

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.errors import ConfigError
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.client.request_headers import common_headers
from scripts.load_tester.client.server_info import ServerInfo, fetch_server_info, get_json
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.run import run_load
from scripts.simulator.calibration.samples import Samples, StreamedRequest

#: Share of the time for single requests; the rest is for batches.
ALONE_SHARE = 0.4
MAX_PROMPT = 8_192
NUM_LENGTHS = 8
ALONE_OUTPUT, BATCH_OUTPUT = 8, 48
BATCHES = (2, 4, 8, 16, 32)
NUM_ROWS = 5_000  # of a designed trace, more than any service answers in time


@dataclass(frozen=True, slots=True)
class ServiceSize:
    """What a service says about its nodes; 0 where it does not.

    Attributes:
        num_prefill, num_decode: nodes.
        pool_tokens: of one node.
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
    """Read the answers of the model list and, of a Baton service, of ``/v1/workers``."""
    listed = workers.get("workers") if isinstance(workers, dict) else None
    registers = [one.get("register") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    nodes = [one for one in registers if isinstance(one, dict)]
    model = server.model or "unknown"
    if not nodes:
        return ServiceSize(model, MAX_PROMPT)
    first = nodes[0]
    try:
        layout = first["layout"]
        item = {"float32": 4, "fp8_e4m3": 1, "int8": 1}.get(layout["dtype"], 2)
        values = 0 if layout.get("is_latent") else layout.get("value_dim") or layout["head_dim"]
        kv_bytes = layout["num_layers"] * layout["num_kv_heads"] * (layout["head_dim"] + values) * item
        return ServiceSize(
            model,
            int(first["context_length"]),
            sum(one["role"] == "prefill" for one in nodes),
            sum(one["role"] == "decode" for one in nodes),
            min(one["num_pages"] * one["layout"]["page_size"] for one in nodes),
            kv_bytes,
            min(int(one["max_running"]) for one in nodes),
            int(first.get("num_ranks", 1)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--calibrate: /v1/workers has an unknown form ({error!r})") from None


def ask_service(config: LoadtestConfig) -> tuple[ServerInfo, ServiceSize]:
    """Ask the service for its size. Raises ConfigError: it does not answer, or has several nodes of a kind."""
    headers = common_headers(config)
    server = fetch_server_info(config.url, headers)
    size = service_size(server, get_json(urlsplit(config.url), "/v1/workers", headers, True))
    refuse_several(size)
    return server, size


def refuse_several(size: ServiceSize) -> None:
    """Raise ConfigError if there are several nodes of a kind: clients cannot tell which of them served a request."""
    if size.num_prefill > 1 or size.num_decode > 1:
        raise ConfigError(
            f"--calibrate needs one prefill and one decode node, and the service has {size.num_prefill} and "
            f"{size.num_decode}: start one with fewer"
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
    """Send the designed load for about ``seconds`` and return what the clients saw."""
    samples = Samples()
    lengths = prompt_lengths(size)
    batches = [one for one in BATCHES if not size.max_running or one <= size.max_running]
    say(f"prompts of {lengths[0]} to {lengths[-1]} tokens, one at a time")
    alone_s = ALONE_SHARE * seconds
    samples.add_alone(_run(base, server, lengths, ALONE_OUTPUT, concurrency=1, seconds=alone_s, salt=0))
    if len(samples.prompts) < 2 * len(lengths):  # a slow service takes longer than it was given
        samples.add_alone(_run(base, server, lengths, ALONE_OUTPUT, concurrency=1, seconds=None, salt=len(BATCHES) + 1))
    for number, batch in enumerate(batches, 1):
        say(f"{batch} outputs at once")
        room = size.pool_tokens // batch - BATCH_OUTPUT if size.pool_tokens else lengths[-1]
        short = [length for length in lengths[: len(lengths) // 2 + 1] if length <= max(16, room // 2)] or lengths[:1]
        share_s = (1 - ALONE_SHARE) * seconds / len(batches)
        found = _run(base, server, short, BATCH_OUTPUT, concurrency=batch, seconds=share_s, salt=number)
        samples.add_together(found)
    return samples


def _run(
    base: LoadtestConfig,
    server: ServerInfo,
    lengths: Sequence[int],
    num_output: int,
    *,
    concurrency: int,
    seconds: float | None,
    salt: int,
) -> list[StreamedRequest]:
    """Keep ``concurrency`` requests in flight for ``seconds``; None sends each length twice."""
    with tempfile.TemporaryDirectory(prefix="baton-calibrate-") as folder:
        trace = Path(folder) / "designed.jsonl"
        trace.write_text("\n".join(json.dumps(row) for row in designed_rows(lengths, num_output)))
        duration = None if seconds is None else f"{seconds:.3f}"
        count = 2 * len(lengths) if seconds is None else None
        config = replace(base, trace=str(trace), concurrency=concurrency, duration=duration, num_requests=count)
        report = run_load(config, server=server, salt=salt)
    if report.was_stopped:
        raise KeyboardInterrupt
    if report.all_failed:
        first = next((one for one in report.records if one.error), None)
        raise ConfigError(
            f"--calibrate {base.url}: every request failed: {first.message if first else 'none was sent'}"
        )
    return [_streamed(one) for one in report.records if one.is_ok and one.stamps_s]


def _streamed(record: RequestRecord) -> StreamedRequest:
    return StreamedRequest(record.num_input, record.sent_s, record.stamps_s, record.timings)
