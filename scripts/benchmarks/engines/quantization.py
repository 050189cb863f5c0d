"""Error and speed of int8 and int4 weights, and of KV pages in int8, beside bfloat16.

The error is that of the small model, which was trained, on verse that it has not seen: perplexity, and the distance of
its distributions from those of float32 weights. The speed is that of Qwen3-0.6B's shape with random weights. Formats
take turns, and the best round counts. Attention of one row to a long context is a share of the memory's speed.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from common.config.shared import SMALL_MODEL, WeightDtype
from common.engine.attention import make_attention
from common.engine.attention.protocol import write_kv
from common.engine.batch import RowArrays, StepBatch, make_batch
from common.engine.kv_pool import KVPool
from common.engine.models.checkpoints.weights import load_weights
from common.engine.models.config import ModelConfig
from common.engine.models.decoder import Decoder
from scripts.benchmarks.engines import engine
from scripts.benchmarks.engines.verse import VERSE

SHORTEST = ("--layers=1", "--prefill=64", "--batch=1", "--new-tokens=4", "--rounds=1", "--context=64")
Options = argparse.Namespace  # the fields of `add_options`
FORMATS: Sequence[WeightDtype] = get_args(WeightDtype)
NAMES = ("bfloat16", *FORMATS[1:])
INT8_PAGES = "bfloat16, int8 KV"
PAGES = ("bfloat16", "int8")
NUM_LAYERS_READ = 2  # of attention, so that no cache holds the context


@dataclass(frozen=True)
class Error:
    """Of one format, against float32 weights.

    Attributes:
        perplexity: of the text.
        divergence: mean Kullback-Leibler divergence from the distributions of float32, in nats per token.
        distance: mean distance between the logits of a position, after their means, relative to their spread.
        agreement: share of positions with the same likeliest token.
    """

    perplexity: float
    divergence: float
    distance: float
    agreement: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (one per core)")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="prompt lengths (%(default)s)")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 8, 32], help="decode batch sizes (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="decode steps (%(default)s)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the best round counts (%(default)s)")
    parser.add_argument("--context", type=int, default=32_768, help="tokens that attention reads (%(default)s)")
    parser.set_defaults(device="cpu", dtype="bfloat16")


def run(options: Options) -> dict[str, float]:
    if options.threads:
        torch.set_num_threads(options.threads)
    figures: dict[str, float] = {}
    print(f"{'small model':<24}{'perplexity':>12}{'divergence':>12}{'logit distance':>16}{'same likeliest':>16}")
    for name, error in measure_errors(Path(SMALL_MODEL)).items():
        figures |= {f"{name}, perplexity": error.perplexity, f"{name}, likeliest token agrees": error.agreement}
        numbers = f"{error.perplexity:>12.3f}{error.divergence:>12.5f}{error.distance:>16.4f}{error.agreement:>16.1%}"
        print(f"{name:<24}{numbers}", flush=True)
    return figures | measure_speeds(options) | measure_attention(options)


def measure_errors(folder: Path) -> dict[str, Error]:
    """The error of every format on ``VERSE``; "bfloat16" is that of plain weights."""
    tokens = torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(VERSE).ids)
    exact = log_distributions(folder, "float32", "auto", tokens)
    found = {
        name: error_of(log_distributions(folder, "bfloat16", weights, tokens), exact, tokens)
        for name, weights in zip(NAMES, FORMATS, strict=True)
    }
    pages = log_distributions(folder, "bfloat16", "auto", tokens, kv_cache_dtype="int8")
    return found | {INT8_PAGES: error_of(pages, exact, tokens)}


def log_distributions(
    folder: Path, dtype: str, weight_dtype: WeightDtype, tokens: Tensor, *, kv_cache_dtype: str = "auto"
) -> Tensor:
    """Return the logarithms of the probabilities after each token, ``[N, vocab]`` float64."""
    config = ModelConfig.load(str(folder))
    weights = load_weights(config, dtype, torch.device("cpu"))
    weights.pack(weight_dtype)
    pool = KVPool(config.layout(16, dtype, kv_cache_dtype), -(-len(tokens) // 16))
    table = np.arange(pool.num_pages, dtype=np.int32)[None]
    batch = make_batch(RowArrays(np.array([0]), np.array([len(tokens)]), table, 16), pool.device)
    model = Decoder(config, weights)
    attention = make_attention("auto", pool, config.num_heads).prepare(batch)
    with torch.inference_mode():
        hidden = model.hidden_states(tokens, batch.positions, attention, torch.arange(len(tokens)))
        logits = model.logits(hidden)
    pool.close()
    return logits.double().log_softmax(dim=-1)


def error_of(found: Tensor, exact: Tensor, tokens: Tensor) -> Error:
    loss = -found[:-1].gather(1, tokens[1:, None]).mean().item()
    apart = (found - found.mean(1, keepdim=True)) - (exact - exact.mean(1, keepdim=True))
    return Error(
        perplexity=math.exp(loss),
        divergence=(exact.exp() * (exact - found)).sum(dim=1).mean().item(),
        distance=(apart.norm(dim=1) / (exact - exact.mean(1, keepdim=True)).norm(dim=1)).mean().item(),
        agreement=(found.argmax(1) == exact.argmax(1)).double().mean().item(),
    )


def measure_speeds(options: Options) -> dict[str, float]:
    """Measure every row with every format in turn, and print tokens per second and their ratios to bfloat16."""
    torch.manual_seed(0)
    executors = [engine.build(engine.model_shape(options.layers), options, weight_dtype=name) for name in FORMATS]
    threads = torch.get_num_threads()
    print(f"\n{f'tokens/s, {threads} threads':<24}{'bfloat16':>12}{'int8':>12}{'ratio':>8}{'int4':>12}{'ratio':>8}")
    figures: dict[str, float] = {}
    kinds = (("prefill", options.prefill, engine.prefill_run), ("decode batch", options.batch, engine.decode_run))
    for kind, counts, make in kinds:
        for count in counts:
            num_tokens = count if kind == "prefill" else count * options.new_tokens
            times = engine.take_turns([make(count, each, options) for each in executors], options)
            plain, *others = (num_tokens / seconds for seconds in times)
            ratios = "".join(f"{other:>12.1f}{other / plain:>8.2f}" for other in others)
            print(f"{f'{kind} {count}':<24}{plain:>12.1f}{ratios}", flush=True)
            for name, speed in zip(NAMES, (plain, *others), strict=True):
                figures[f"{kind} {count}, {name}, tokens/s"] = speed
    for each in executors:
        each.close()
    return figures


def measure_attention(options: Options) -> dict[str, float]:
    """Measure decode attention of one row to ``--context`` tokens in each format of pages, and print GB/s."""
    limit = engine.measure_limits(options).read_bytes_per_s
    pools = [context_pool(page_dtype, options.context) for page_dtype in PAGES]
    times = engine.take_turns([attention_run(pool, options.context) for pool in pools], options)
    print(f"\nattention to {options.context} tokens, memory {limit / 1e9:.1f} GB/s")
    figures = {"memory GB/s": limit / 1e9}
    for page_dtype, pool, seconds in zip(PAGES, pools, times, strict=True):
        speed = options.context * pool.layout.bytes_per_token / seconds
        print(
            f"{f'{page_dtype} pages':<24}{1e3 * seconds:>9.2f} ms{speed / 1e9:>9.1f} GB/s{speed / limit:>8.0%}",
            flush=True,
        )
        figures |= {f"{page_dtype} pages, GB/s": speed / 1e9, f"{page_dtype} pages, ms": 1e3 * seconds}
        pool.close()
    return figures


def context_pool(page_dtype: str, num_tokens: int) -> KVPool:
    """A pool whose pages hold random KV of ``num_tokens`` tokens and have room for one more."""
    config = engine.model_shape(NUM_LAYERS_READ)
    pool = KVPool(
        replace(config.layout(engine.PAGE_SIZE, "bfloat16"), dtype=page_dtype), num_tokens // engine.PAGE_SIZE + 1
    )
    batch = context_batch(pool, 0, num_tokens)
    for layer in range(NUM_LAYERS_READ):
        k, v = torch.randn(2, num_tokens, config.num_kv_heads, config.head_dim)
        write_kv(pool.layer(layer), k, v, batch)
    return pool


def context_batch(pool: KVPool, start: int, num_new: int) -> StepBatch:
    table = np.arange(pool.num_pages, dtype=np.int32)[None]
    return make_batch(RowArrays(np.array([start]), np.array([num_new]), table, engine.PAGE_SIZE), pool.device)


def attention_run(pool: KVPool, context: int) -> Callable[[], object]:
    """Return the attention of one decode row in all layers of the pool."""
    config = engine.model_shape(NUM_LAYERS_READ)
    step = make_attention("auto", pool, config.num_heads).prepare(context_batch(pool, context, 1))
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (torch.randn(1, count, config.head_dim).bfloat16() for count in heads)
    return lambda: [step.extend(layer, q, k, v) for layer in range(NUM_LAYERS_READ)]
