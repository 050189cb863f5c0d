"""Tokens per second of the engine and of ``transformers``, with the same weights, dtype and threads.

The model has Qwen3-0.6B's shape and random weights. Decode starts from caches with random KV, so that no prompt has to
be computed first. Both sides take turns, and the best round counts, because other processes only make a round slower.
The limits are measured in the same run: memory bandwidth, and the fastest matrix product. A second table shows how long
the engine waits for the host between two decode steps, with and without overlap scheduling.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.cache.page_layout import ITEM_BYTES
from common.engine.attention import make_attention
from common.engine.attention.protocol import GraphSafeAttention
from common.engine.cuda_graphs import CudaGraphRunner, batch_sizes_to_capture
from common.engine.executor import TorchExecutor
from common.engine.kv_pool import TORCH_DTYPES, KVPool
from common.engine.models.config import ModelConfig, RopeConfig
from common.engine.models.decoder import Decoder, allocate_weights
from common.engine.sampling.grammar import GrammarCompiler
from common.sampling_params import SamplingParams
from common.step_plan import Admit, PageDelta, Row, StepPlan
from scripts.benchmarks.overlap import Overlap, measure_overlap

SHORTEST = ("--layers=1", "--prefill=64", "--batch=1", "--new-tokens=4", "--rounds=1")
PAGE_SIZE = 16
CONTEXT = 256
Options = argparse.Namespace  # the fields of `add_options`
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=1 << 20)


@dataclass(frozen=True)
class MachineLimits:
    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Measurement:
    """One row of the table, in tokens per second."""

    name: str
    ours: float
    transformers: float | None
    limit: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(TORCH_DTYPES))
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (one per core)")
    parser.add_argument("--attention", default="auto", help="attention backend (%(default)s)")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], help="prompt lengths (%(default)s)")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="decode batch sizes (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="decode steps (%(default)s)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the best round counts (%(default)s)")
    parser.add_argument("--disable-cuda-graph", action="store_true", help="run every step of a GPU eagerly")
    parser.add_argument("--ours-only", action="store_true", help="do not measure transformers")


def run(options: Options) -> dict[str, float]:
    if options.threads:
        torch.set_num_threads(options.threads)
    limits, lines, overlaps = measure(options)
    figures = {"memory GB/s": limits.read_bytes_per_s / 1e9, "products GFLOP/s": limits.flops_per_s / 1e9}
    for line in lines:
        figures[f"{line.name}, tokens/s"] = line.ours
        if line.transformers is not None:
            figures[f"{line.name}, transformers, tokens/s"] = line.transformers
    for overlap in overlaps:
        figures[f"batch {overlap.batch}, host time without overlap, us"] = overlap.without.idle_s * 1e6
        figures[f"batch {overlap.batch}, host time with overlap, us"] = overlap.with_overlap.idle_s * 1e6
    return figures


def measure(options: Options) -> tuple[MachineLimits, list[Measurement], list[Overlap]]:
    """Measure every row of both tables, and print each as soon as it is known."""
    torch.manual_seed(0)
    config = model_shape(options.layers)
    ours, theirs = build(config, options)
    limits = measure_limits(options)
    print(heading(options, limits), flush=True)
    lines = []
    for measure_one, counts in ((measure_prefill, options.prefill), (measure_decode, options.batch)):
        for count in counts:
            lines.append(measure_one(count, ours, theirs, limits, options))
            print(row_of(lines[-1]), flush=True)
    overlaps = measure_overlap(ours, options.batch, context=CONTEXT, num_steps=options.new_tokens)
    ours.close()
    return limits, lines, overlaps


def model_shape(num_layers: int) -> ModelConfig:
    """Qwen3-0.6B with this number of layers."""
    return ModelConfig(
        folder=Path(),
        family="qwen3",
        num_layers=num_layers,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151_936,
        context_length=40_960,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1_000_000.0),
        has_qk_norm=True,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        is_tied=True,
        dtype="bfloat16",
        eos_token_ids=(),
        generation={},
        digest="",
    )


def build(config: ModelConfig, options: Options, grammars: GrammarCompiler | None = None) -> tuple[TorchExecutor, Any]:
    """Both engines over one set of random tensors, which ours repacks."""
    device = torch.device(options.device)
    weights, places = allocate_weights(config, TORCH_DTYPES[options.dtype], device)
    for name, tensor in places.items():
        tensor.fill_(1.0) if "norm" in name else tensor.normal_(0, 0.02)
    theirs = transformers_model(config, places) if not options.ours_only else None
    most_tokens = max(
        [*options.prefill, *(batch * (CONTEXT + options.new_tokens + 2 * PAGE_SIZE) for batch in options.batch)]
    )
    pool = KVPool(config.layout(PAGE_SIZE, options.dtype), most_tokens // PAGE_SIZE + 2, device)
    pool.pages.view(TORCH_DTYPES[options.dtype]).normal_()
    weights.pack()
    backend = make_attention(options.attention, pool, config.num_heads)
    num_slots = max([1, *options.batch])
    executor = TorchExecutor(Decoder(config, weights), pool, backend, num_slots=num_slots, grammars=grammars)
    if device.type == "cuda" and isinstance(backend, GraphSafeAttention) and not options.disable_cuda_graph:
        executor.capture_graphs(CudaGraphRunner(device), batch_sizes_to_capture(num_slots))
    return executor, theirs


def transformers_model(config: ModelConfig, places: dict[str, torch.Tensor]) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    theirs = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=True,
    )
    theirs._attn_implementation = "sdpa"
    embedding = places["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = Qwen3ForCausalLM(theirs)
    model.load_state_dict({**places, "lm_head.weight": embedding}, assign=True, strict=True)
    # Buffers are not in the state dict: make the rotary ones again, outside the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs).to(embedding.device)
    return model.eval()


def measure_limits(options: Options) -> MachineLimits:
    device = torch.device(options.device)
    ballast = torch.ones(64 << 20, dtype=torch.float32, device=device)
    readers = [lambda: ballast.sum(), lambda: torch.dot(ballast, ballast), lambda: ballast.view(torch.int64).sum()]
    read = max(ballast.nbytes / best_s(reader, 3 * options.rounds, device) for reader in readers)
    size = 4096 if options.dtype != "float32" or device.type == "cuda" else 2048
    a = torch.randn(size, size, device=device).to(TORCH_DTYPES[options.dtype])
    flops = 2 * size**3 / best_s(lambda: a @ a, 3 * options.rounds, device)
    return MachineLimits(read, flops)


def measure_prefill(
    num_tokens: int, ours: TorchExecutor, theirs: Any, limits: MachineLimits, options: Options
) -> Measurement:
    """Measure one cold prompt in one step, up to its first token."""
    config = ours.model.config
    prompt = torch.randint(0, config.vocab_size, (num_tokens,)).tolist()
    pages = tuple(range(ours.pool.layout.num_pages(num_tokens)))
    plan = StepPlan(
        0, (Admit(0, GREEDY, num_tokens, None),), (PageDelta(0, 0, pages),), (Row(0, 0, tuple(prompt), True),)
    )

    def run_theirs() -> None:
        with torch.inference_mode():
            logits = theirs(input_ids=torch.tensor([prompt], device=options.device), logits_to_keep=1).logits
            logits.argmax().item()

    ours_s, theirs_s = take_turns(lambda: ours.run(plan), run_theirs if theirs else None, options)
    flops = 2 * linear_parameters(config, with_head=False) * num_tokens
    flops += 4 * config.num_layers * config.num_heads * config.head_dim * num_tokens**2 // 2
    return measurement(f"prefill {num_tokens}", num_tokens, ours_s, theirs_s, flops / limits.flops_per_s)


def measure_decode(
    batch: int, ours: TorchExecutor, theirs: Any, limits: MachineLimits, options: Options
) -> Measurement:
    """Measure ``new_tokens`` steps of ``batch`` rows, each from ``CONTEXT`` cached tokens."""
    config, steps = ours.model.config, options.new_tokens
    per_row = ours.pool.layout.num_pages(CONTEXT + steps)
    admits = tuple(Admit(slot, GREEDY, CONTEXT, 1) for slot in range(batch))
    deltas = tuple(PageDelta(slot, 0, tuple(range(slot * per_row, (slot + 1) * per_row))) for slot in range(batch))

    def run_ours() -> None:
        for step in range(steps):
            rows = tuple(Row(slot, CONTEXT + step, None, True) for slot in range(batch))
            ours.run(StepPlan(step, admits if step == 0 else (), deltas if step == 0 else (), rows))

    def run_theirs() -> None:
        with torch.inference_mode():
            decode_transformers(theirs, batch, steps, options)

    ours_s, theirs_s = take_turns(run_ours, run_theirs if theirs else None, options)
    parameters = linear_parameters(config, with_head=True)
    kv_bytes = batch * (CONTEXT + steps / 2) * ours.pool.layout.page_bytes / PAGE_SIZE
    memory_s = (parameters * ITEM_BYTES[options.dtype] + kv_bytes) / limits.read_bytes_per_s
    limit_s = max(memory_s, 2 * parameters * batch / limits.flops_per_s) * steps
    return measurement(f"decode batch {batch}", batch * steps, ours_s, theirs_s, limit_s)


def decode_transformers(model: Any, batch: int, steps: int, options: Options) -> None:
    """Decode as ``generate`` does, from a cache with random KV."""
    from transformers import DynamicCache

    config = model.config
    cache = DynamicCache(config=config)
    shape = (batch, config.num_key_value_heads, CONTEXT, config.head_dim)
    for layer in range(config.num_hidden_layers):
        kv = torch.randn(shape, device=options.device).to(TORCH_DTYPES[options.dtype])
        cache.update(kv, kv, layer)
    tokens = torch.ones(batch, 1, dtype=torch.int64, device=options.device)
    for _ in range(steps):
        tokens = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(dim=-1)
        tokens.tolist()


def take_turns(
    ours: Callable[[], object], theirs: Callable[[], object] | None, options: Options
) -> tuple[float, float | None]:
    """Best seconds of both, run alternately after one warm-up round."""
    device = torch.device(options.device)
    pairs = [
        (timed(ours, device), timed(theirs, device) if theirs else None) for _ in range(max(2, options.rounds + 1))
    ][1:]
    theirs_s = [pair[1] for pair in pairs if pair[1] is not None]
    return min(pair[0] for pair in pairs), min(theirs_s) if theirs_s else None


def best_s(run: Callable[[], object], rounds: int, device: torch.device) -> float:
    timed(run, device)
    return min(timed(run, device) for _ in range(rounds))


def timed(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def linear_parameters(config: ModelConfig, *, with_head: bool) -> int:
    """Number of weights that every token is multiplied by."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim + config.num_heads * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return config.num_layers * layer + (config.vocab_size * config.hidden_size if with_head else 0)


def measurement(name: str, num_tokens: int, ours_s: float, theirs_s: float | None, limit_s: float) -> Measurement:
    return Measurement(name, num_tokens / ours_s, num_tokens / theirs_s if theirs_s else None, num_tokens / limit_s)


def heading(options: Options, limits: MachineLimits) -> str:
    return (
        f"{options.layers} layers of Qwen3-0.6B's shape, {options.dtype}, {options.device}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}\n"
        f"limits: memory {limits.read_bytes_per_s / 1e9:.1f} GB/s, products {limits.flops_per_s / 1e9:.0f} GFLOP/s\n"
        f"{'tokens/s':<18}{'ours':>10}{'transformers':>14}{'ratio':>8}{'limit':>10}{'of limit':>10}"
    )


def row_of(each: Measurement) -> str:
    theirs = f"{each.transformers:>14.1f}{each.ours / each.transformers:>8.2f}" if each.transformers else f"{'':>22}"
    return f"{each.name:<18}{each.ours:>10.1f}{theirs}{each.limit:>10.1f}{each.ours / each.limit:>10.0%}"
