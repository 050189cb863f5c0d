"""Output tokens per second of a prefill and a decode node that share the device, end to end over HTTP."""

import json
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

from common.config.shared import SMALL_MODEL
from scripts.benchmarks.harness.service_fixture import measured_load, running_service
from scripts.load_tester.config import LoadtestConfig
from scripts.models.random_model import QWEN3_600M, random_model

#: config.json of a model with the dimensions of Llama-3.1-8B, as the architecture for which weights can be made.
LLAMA_8B = {
    **QWEN3_600M,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 128_256,
}
MODELS = {"qwen3-0.6b": QWEN3_600M, "llama-3.1-8b": LLAMA_8B}
CONCURRENCIES = (1, 32)


class ServiceRate(NamedTuple):
    """Output tokens per second with ``concurrency`` requests in flight; ``transports``: by which their pages came."""

    concurrency: int
    tokens_per_s: float
    transports: str


def measure(shape: str, device: str, *, timeout_s: float) -> Iterator[ServiceRate]:
    """Run one service with random weights, or with the small model for any other shape, and load it.

    Raises:
        ServiceStartError: the service was not ready in time.
    """
    is_random = shape in MODELS
    folder = str(random_model(MODELS[shape])) if is_random else SMALL_MODEL
    num_input, num_output = (512, 128) if is_random else (32, 8)
    pool_tokens = 2 * max(CONCURRENCIES) * (num_input + num_output)
    flags = [f"--model={folder}", f"--device={device}", "--prefill=1", "--decode=1", "--weight-version=random"]
    with running_service([*flags, f"--max-total-tokens={pool_tokens}"], timeout_s=timeout_s) as url:
        for concurrency in CONCURRENCIES:
            config = LoadtestConfig(
                url=url,
                concurrency=concurrency,
                num_requests=4 * concurrency,
                input_len=str(num_input),
                output_len=str(num_output),
                return_token_ids=True,
                scrape="none",
                live=False,
            )
            report, _ = measured_load(config, salt=concurrency)
            rate = report.throughput["output_tokens_per_s"]
            yield ServiceRate(concurrency, rate, _transports(url))


def _transports(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/workers", timeout=60) as answer:
        workers = json.load(answer)["workers"]
    return ", ".join(sorted({pair["transport"] for worker in workers for pair in worker["pairs"]}))
