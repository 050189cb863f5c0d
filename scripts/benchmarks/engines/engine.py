"""Tokens per second of the engine, of ``transformers`` and of other engines, with the same shape, dtype and threads.

The model has Qwen3-0.6B's shape, or one with experts (``--shape``), and random weights. Decode starts from caches with
random KV, so that no prompt has to be computed first. All engines take turns. The limits are the times that the fastest
matrix product takes for the same operations, and that it takes to read what the decode steps read; they take their
turns too. Speeds are those of the best round, because other processes only make a round slower. Shares of the limit and
ratios are medians of the rounds, because the speeds of processor and memory change within seconds where other machines
share them. A step reads only the experts that its rows chose, which are counted. On CPUs the last row is a decode step
with int8 weights, beside that with bfloat16. "its classes" is the model's class in transformers over our pages, as
``--model-impl transformers`` computes it; it is left out for shapes with experts. The last column says which marks a
row misses: a share of its limit, and to be ahead of ``transformers``. A second table shows how long the engine waits
for the host between two decode steps, with and without overlap scheduling.

``--peer vllm=PYTHON`` and ``--peer llama.cpp=FOLDER`` measure other engines too, which must be installed.
"""

import argparse
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

from common.cache.page_layout import ITEM_BYTES
from common.config.shared import WeightDtype
from common.engine.attention import make_attention
from common.engine.attention.protocol import GraphSafeAttention
from common.engine.cpu.huge_pages import HugePages
from common.engine.cuda_graphs import CudaGraphRunner, batch_sizes_to_capture
from common.engine.executor import TorchExecutor
from common.engine.kv_pool import TORCH_DTYPES, KVPool
from common.engine.models import feed_forward
from common.engine.models.base_config import BaseModelConfig
from common.engine.models.config import ModelConfig, RopeConfig
from common.engine.models.decoder import Decoder, DecoderWeights, allocate_weights
from common.engine.models.expert_config import QWEN_EXPERTS, ExpertConfig
from common.engine.models.feed_forward import ExpertLoop, Experts, FeedForward, Mlp
from common.engine.models.linear import Linear
from common.engine.models.protocol import CausalModel
from common.engine.models.routing import Routing, route
from common.engine.sampling.grammar import GrammarCompiler
from common.errors import ConfigError
from common.sampling_params import SamplingParams
from common.step_plan import Admit, PageDelta, Row, StepPlan
from scripts.benchmarks.engines.overlap import Overlap, measure_overlap
from scripts.benchmarks.peers.llama_cpp import LlamaCppPeer
from scripts.benchmarks.peers.paged_transformers import NAME as LIBRARY
from scripts.benchmarks.peers.paged_transformers import paged_model
from scripts.benchmarks.peers.peer import Peer, Workload, parse_peers
from scripts.benchmarks.peers.transformers_peer import TransformersPeer
from scripts.benchmarks.peers.vllm_peer import VllmPeer
from scripts.load_tester.reporting.formats import counted

SHORTEST = ("--layers=1", "--prefill=64", "--batch=1", "--new-tokens=4", "--rounds=1", "--threads=1")
#: Qwen3-0.6B; and the same with experts in each layer, as those of Qwen3-30B-A3B: 0.3 GB for a layer in bfloat16.
SHAPES = ("qwen3-0.6b", "qwen3-moe-small")
PAGE_SIZE = 16
CONTEXT = 256
Options = argparse.Namespace  # the fields of `add_options`
#: Shares of the limit to reach, for a decode step by its largest number of rows, and for prefill. The mark of int8
#: weights is their speed relative to bfloat16.
DECODE_MARKS = ((4, 0.9), (8, 0.8), (math.inf, 0.7))
PREFILL_MARK = 0.85
INT8_MARK = 1.7
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=1 << 20)


@dataclass(frozen=True)
class MachineLimits:
    """What the machine does at most, with the speeds that each had by itself.

    Attributes:
        read: reads ``read_bytes`` bytes in the fastest way.
        multiply: does ``product_flops`` floating-point operations in the fastest way.
    """

    read_bytes_per_s: float
    flops_per_s: float
    read: Callable[[], object]
    read_bytes: int
    multiply: Callable[[], object]
    product_flops: int

    def reading_s(self, num_bytes: float, options: Options) -> Callable[[], float]:
        """Return a function that reads about so many bytes and returns the seconds that exactly so many take."""
        return in_proportion(self.read, num_bytes / self.read_bytes, options)

    def multiplying_s(self, flops: float, options: Options) -> Callable[[], float]:
        """Return the same for floating-point operations of matrix products."""
        return in_proportion(self.multiply, flops / self.product_flops, options)


@dataclass(frozen=True)
class Measurement:
    """One row of the table: seconds of each round.

    Attributes:
        num_tokens: of a round.
        limit_s: None for the row with int8 weights, which stands beside bfloat16.
        others_s: of other engines, or of another format, by name.
        mark: the share of the limit to reach; without a limit, the ratio to bfloat16.
    """

    name: str
    num_tokens: int
    ours_s: Sequence[float]
    limit_s: Sequence[float] | None
    others_s: Mapping[str, Sequence[float]]
    mark: float

    def speed(self, seconds: Sequence[float]) -> float:
        """Tokens per second of the best round."""
        return self.num_tokens / min(seconds)

    def ratio(self, seconds: Sequence[float]) -> float:
        """Our speed relative to that of the same round."""
        return median(theirs / ours for ours, theirs in zip(self.ours_s, seconds, strict=True))

    @property
    def missed(self) -> list[str]:
        """What this row should reach and does not: its mark, and to be ahead of transformers."""
        missed = []
        if self.limit_s is None:
            if self.ratio(self.others_s["bfloat16"]) < self.mark:
                missed.append(f"{self.mark} of bfloat16")
        elif self.ratio(self.limit_s) < self.mark:
            missed.append(f"{self.mark:.0%} of the limit")
        if TransformersPeer.name in self.others_s and self.ratio(self.others_s[TransformersPeer.name]) <= 1:
            missed.append(f"ahead of {TransformersPeer.name}")
        return missed


@dataclass(frozen=True)
class Engines:
    """The engines of one table.

    Attributes:
        quantized: ours with int8 weights; None on a GPU and for other dtypes than bfloat16.
        library: ours with the model's class in transformers; None without transformers and for shapes with experts.
    """

    ours: TorchExecutor
    quantized: TorchExecutor | None
    library: TorchExecutor | None
    peers: Sequence[Peer]


def add_options(parser: argparse.ArgumentParser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="(%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(TORCH_DTYPES), help="(%(default)s)")
    parser.add_argument(
        "--threads", default="", help="numbers of threads, such as 1,2, each with a table (one thread per core)"
    )
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], help="prompt lengths (%(default)s)")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 8, 32], help="decode batch sizes (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="decode steps (%(default)s)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (%(default)s)")
    parser.add_argument(
        "--shape", choices=SHAPES, default=SHAPES[0], help="shape of the model, without its layers (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every row (%(default)s)")
    parser.add_argument("--disable-cuda-graph", action="store_true", help="run every step of a GPU eagerly")
    parser.add_argument("--ours-only", action="store_true", help="do not measure transformers")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PATH", help="also vllm=PYTHON or llama.cpp=FOLDER"
    )


def run(options: Options) -> dict[str, float]:
    paths = parse_peers(options.peer)
    if "vllm" in paths and options.shape != SHAPES[0]:
        raise ConfigError(f"--peer vllm: it is measured with --shape {SHAPES[0]} only")
    if options.new_tokens < 2:
        raise ConfigError("--new-tokens must be at least 2: the second table has the time between two steps")
    figures: dict[str, float] = {}
    for num_threads in thread_counts(options.threads):
        torch.set_num_threads(num_threads)
        limits, rows, overlaps = measure(options, paths)
        part = {"memory GB/s": limits.read_bytes_per_s / 1e9, "products GFLOP/s": limits.flops_per_s / 1e9}
        for row in rows:
            part[f"{row.name}, tokens/s"] = row.speed(row.ours_s)
            if row.limit_s is not None:
                part[f"{row.name}, limit, tokens/s"] = row.speed(row.limit_s)
                part[f"{row.name}, of the limit"] = row.ratio(row.limit_s)
            part |= {f"{row.name}, {name}, tokens/s": row.speed(each) for name, each in row.others_s.items()}
            part |= {f"{row.name}, times {name}": row.ratio(each) for name, each in row.others_s.items()}
        for overlap in overlaps:
            part[f"batch {overlap.batch}, host time without overlap, us"] = overlap.without.idle_s * 1e6
            if overlap.with_overlap.idle_s > 0:  # on a GPU the next step is queued by then
                part[f"batch {overlap.batch}, host time with overlap, us"] = overlap.with_overlap.idle_s * 1e6
        figures |= {f"{num_threads} threads, {name}": value for name, value in part.items()}
    return figures


def thread_counts(text: str) -> list[int]:
    """Return the numbers in ``--threads``; the one that torch has chosen if there are none."""
    try:
        counts = [int(word) for word in text.split(",")] if text else [torch.get_num_threads()]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ConfigError(f"--threads {text}: give numbers of threads, such as 1,2")
    return counts


def measure(options: Options, paths: dict[str, Path]) -> tuple[MachineLimits, list[Measurement], list[Overlap]]:
    """Measure every row of both tables, and print each as soon as it is known."""
    torch.manual_seed(0)
    with ExitStack() as stack:
        shape = model_shape if options.shape == SHAPES[0] else expert_shape
        engines = build_all(shape(options.layers), options, paths, stack)
        limits = measure_limits(options)
        gc.collect()
        gc.freeze()  # as nodes do: a search of all modules takes 2 % of a prompt's time
        print(heading(options, limits, engines), flush=True)
        rows = []
        for measure_one, counts in ((measure_prefill, options.prefill), (measure_decode, options.batch)):
            for count in counts:
                rows.append(measure_one(count, engines, limits, options))
                print(row_of(rows[-1]), flush=True)
        if engines.quantized is not None and options.batch:
            rows.append(measure_quantized(min(options.batch), engines.ours, engines.quantized, options))
            print(row_of(rows[-1]), flush=True)
        overlaps = measure_overlap(engines.ours, options.batch, context=CONTEXT, num_steps=options.new_tokens)
    return limits, rows, overlaps


def model_shape(num_layers: int) -> ModelConfig:
    """Qwen3-0.6B with this number of layers."""
    return ModelConfig(
        folder=Path(),
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


def expert_shape(num_layers: int) -> ModelConfig:
    """In each layer 64 experts of 2.4 million weights, half of one of Qwen3-30B-A3B; a token takes 8 as there."""
    experts = ExpertConfig(64, 8, 768, is_normalised=True, layers=tuple(range(num_layers)), keys=QWEN_EXPERTS)
    return replace(model_shape(num_layers), experts=experts)


def build(
    config: ModelConfig,
    options: Options,
    grammars: GrammarCompiler | None = None,
    *,
    weight_dtype: WeightDtype = "auto",
) -> TorchExecutor:
    """Our engine with random weights."""
    weights, _ = random_weights(config, options.dtype, torch.device(options.device))
    return make_executor(config, weights, options, grammars, weight_dtype=weight_dtype)


def build_all(config: ModelConfig, options: Options, paths: dict[str, Path], stack: ExitStack) -> Engines:
    """All engines; those in this process start from one set of random tensors. The stack closes them."""
    workload = Workload(
        num_layers=options.layers,
        num_threads=torch.get_num_threads(),
        context=CONTEXT,
        num_steps=options.new_tokens,
        max_prompt=max([1, *options.prefill]),
        max_batch=max([1, *options.batch]),
        shape=options.shape,
    )
    weights, tensors = random_weights(config, options.dtype, torch.device(options.device))
    peers: list[Peer] = []
    if not options.ours_only:
        peers.append(stack.enter_context(closing(TransformersPeer(config, tensors, workload))))
    if "vllm" in paths:
        peers.append(stack.enter_context(closing(VllmPeer(paths["vllm"], workload))))
    if "llama.cpp" in paths:
        peers.append(stack.enter_context(closing(LlamaCppPeer(paths["llama.cpp"], workload))))
    quantized = None
    if options.device == "cpu" and options.dtype == "bfloat16":
        quantized = make_executor(config, with_own_linears(weights), options, weight_dtype="int8")
        stack.enter_context(closing(quantized))
    library = None
    if not options.ours_only and config.experts is None:
        library = stack.enter_context(closing(executor_over(paged_model(config, tensors), options)))
    ours = stack.enter_context(closing(make_executor(config, weights, options)))
    return Engines(ours, quantized, library, peers)


def random_weights(config: ModelConfig, dtype: str, device: torch.device) -> tuple[DecoderWeights, dict[str, Tensor]]:
    """Weights that are not packed yet, and their tensors by name."""
    weights, tensors = allocate_weights(config, TORCH_DTYPES[dtype], device)
    for name, tensor in tensors.items():
        tensor.fill_(1.0) if "norm" in name else tensor.normal_(0, 0.02)
    return weights, tensors


def with_own_linears(weights: DecoderWeights) -> DecoderWeights:
    """Return the same weights, to be packed in another form."""

    def other(linear: Linear) -> Linear:
        assert linear.weight is not None
        return Linear(linear.weight, linear.bias)

    def other_mlp(mlp: FeedForward) -> FeedForward:
        if isinstance(mlp, Experts):
            assert isinstance(mlp.product, ExpertLoop)
            experts = [Mlp(other(each.gate_up), other(each.down)) for each in mlp.product.experts]
            return Experts(mlp.config, other(mlp.router), ExpertLoop(experts))
        assert isinstance(mlp, Mlp)
        return Mlp(other(mlp.gate_up), other(mlp.down))

    layers = [
        replace(layer, qkv=other(layer.qkv), o=other(layer.o), mlp=other_mlp(layer.mlp)) for layer in weights.layers
    ]
    return replace(weights, layers=layers, head=None if weights.head is None else other(weights.head))


def make_executor(
    config: ModelConfig,
    weights: DecoderWeights,
    options: Options,
    grammars: GrammarCompiler | None = None,
    *,
    weight_dtype: WeightDtype = "auto",
) -> TorchExecutor:
    """An executor over weights, which it packs, and a pool with random KV."""
    weights.pack(weight_dtype)
    return executor_over(Decoder(config, weights), options, grammars)


def executor_over(model: CausalModel, options: Options, grammars: GrammarCompiler | None = None) -> TorchExecutor:
    """An executor over a model and a pool with random KV."""
    config = model.config
    device = torch.device(options.device)
    most_tokens = max(
        [*options.prefill, *(batch * (CONTEXT + options.new_tokens + 2 * PAGE_SIZE) for batch in options.batch)]
    )
    pool = KVPool(config.layout(PAGE_SIZE, options.dtype), most_tokens // PAGE_SIZE + 2, device)
    pool.pages.view(TORCH_DTYPES[options.dtype]).normal_()
    backend = make_attention("auto", pool, config.num_heads, model.attention_params)
    num_slots = max([1, *options.batch])
    executor = TorchExecutor(model, pool, backend, num_slots=num_slots, grammars=grammars)
    can_capture = config.implementation == "native" and isinstance(backend, GraphSafeAttention)
    if device.type == "cuda" and can_capture and not options.disable_cuda_graph:
        executor.capture_graphs(CudaGraphRunner(device), batch_sizes_to_capture(num_slots))
    return executor


def measure_limits(options: Options) -> MachineLimits:
    """Measure how fast the machine reads and multiplies; a CPU reads ordinary pages, and huge ones as weights have."""
    device = torch.device(options.device)
    ballasts = [torch.ones(64 << 20, dtype=torch.float32, device=device)]
    if device.type == "cpu":
        ballasts.append(HugePages(0).empty(tuple(ballasts[0].shape), torch.float32).fill_(1.0))
    readers: list[Callable[[], Tensor]] = []
    for each in ballasts:
        readers += [each.sum, partial(torch.dot, each, each), each.view(torch.int64).sum]
    seconds = [best_s(reader, 3 * options.rounds, device) for reader in readers]
    fastest = min(range(len(readers)), key=seconds.__getitem__)
    num_bytes = ballasts[0].nbytes
    multiply, product_flops, product_s = fastest_product(options)
    return MachineLimits(
        *(num_bytes / seconds[fastest], product_flops / product_s),
        *(readers[fastest], num_bytes, multiply, product_flops),
    )


def fastest_product(options: Options) -> tuple[Callable[[], object], int, float]:
    """A product, its floating-point operations and the seconds that it takes.

    Those that serve here are torch's in ``--dtype``, and on CPUs torch's in float32 and our own too.
    """
    device, dtype = torch.device(options.device), TORCH_DTYPES[options.dtype]
    # On CPUs no power of two: rows that far apart share few lines of the caches, and the product is a tenth slower.
    size = 4096 if device.type == "cuda" else 2080
    a = torch.randn(size, size, device=device)
    products: list[Callable[[], Tensor]] = []
    if device.type == "cpu":
        ours = Linear(a.to(dtype))
        ours.pack()
        products += [partial(torch.mm, a, a), partial(ours, a.to(dtype))]
    products.append(partial(torch.mm, a.to(dtype), a.to(dtype)))
    found: list[float] = []
    for product in products:
        first_s = timed(product, device)
        # A product without the processor's instructions for its format takes seconds, and is not the fastest.
        is_slow = bool(found) and first_s > 4 * min(found)
        found.append(first_s if is_slow else best_s(product, 3 * options.rounds, device))
    fastest = min(range(len(found)), key=found.__getitem__)
    return products[fastest], 2 * size**3, found[fastest]


def prefill_run(num_tokens: int, executor: TorchExecutor, options: Options) -> Callable[[], object]:
    """Return a run of one cold prompt in one step, up to its first token."""
    prompt = tuple(torch.randint(0, executor.model.config.vocab_size, (num_tokens,)).tolist())
    pages = tuple(range(executor.pool.layout.num_pages(num_tokens)))
    admits, deltas = (Admit(0, GREEDY, num_tokens, None),), (PageDelta(0, 0, pages),)
    return lambda: executor.run(StepPlan(0, admits, deltas, (Row(0, 0, prompt, True),)))


def decode_run(
    batch: int, executor: TorchExecutor, options: Options, adapters: Sequence[str] = ("",)
) -> Callable[[], object]:
    """Return a run of ``new_tokens`` steps of ``batch`` rows, each from ``CONTEXT`` cached tokens.

    The rows take the adapters in turn.
    """
    per_row = executor.pool.layout.num_pages(CONTEXT + options.new_tokens)
    admits = tuple(Admit(slot, GREEDY, CONTEXT, 1, adapter=adapters[slot % len(adapters)]) for slot in range(batch))
    deltas = tuple(PageDelta(slot, 0, tuple(range(slot * per_row, (slot + 1) * per_row))) for slot in range(batch))

    def run_all() -> None:
        for step in range(options.new_tokens):
            rows = tuple(Row(slot, CONTEXT + step, None, True) for slot in range(batch))
            executor.run(StepPlan(step, admits if step == 0 else (), deltas if step == 0 else (), rows))

    return run_all


def measure_prefill(num_tokens: int, engines: Engines, limits: MachineLimits, options: Options) -> Measurement:
    config = engines.ours.model.config
    theirs: dict[str, Callable[[], float]] = {peer.name: partial(peer.prefill_s, num_tokens) for peer in engines.peers}
    if engines.library is not None:
        theirs[LIBRARY] = in_seconds(prefill_run(num_tokens, engines.library, options), options)
    compute = in_seconds(prefill_run(num_tokens, engines.ours, options), options)
    ours_s, products_s, *theirs_s = times_by_round(
        [compute, limits.multiplying_s(prefill_flops(config, num_tokens), options), *theirs.values()], options
    )
    others_s = dict(zip(theirs, theirs_s, strict=True))
    return Measurement(f"prefill {num_tokens}", num_tokens, ours_s, products_s, others_s, mark=PREFILL_MARK)


def measure_decode(batch: int, engines: Engines, limits: MachineLimits, options: Options) -> Measurement:
    ours, steps = engines.ours, options.new_tokens
    theirs: dict[str, Callable[[], float]] = {peer.name: partial(peer.decode_s, batch) for peer in engines.peers}
    if engines.library is not None:
        theirs[LIBRARY] = in_seconds(decode_run(batch, engines.library, options), options)
    config = ours.model.config
    read = linear_parameters(config, with_head=True, num_experts=experts_read(ours, decode_run(batch, ours, options)))
    kv_bytes = batch * (CONTEXT + steps / 2) * ours.pool.layout.page_bytes / PAGE_SIZE
    reading_s = limits.reading_s(steps * (read * ITEM_BYTES[options.dtype] + kv_bytes), options)
    multiplying_s = limits.multiplying_s(steps * 2 * linear_parameters(config, with_head=True) * batch, options)
    ours_s, memory_s, products_s, *theirs_s = times_by_round(
        [in_seconds(decode_run(batch, ours, options), options), reading_s, multiplying_s, *theirs.values()], options
    )
    others_s = dict(zip(theirs, theirs_s, strict=True))
    mark = next(share for largest, share in DECODE_MARKS if batch <= largest)
    limit_s = list(map(max, memory_s, products_s))
    return Measurement(f"decode batch {batch}", batch * steps, ours_s, limit_s, others_s, mark=mark)


def measure_quantized(batch: int, plain: TorchExecutor, quantized: TorchExecutor, options: Options) -> Measurement:
    runs = [in_seconds(decode_run(batch, executor, options), options) for executor in (quantized, plain)]
    ours_s, plain_s = times_by_round(runs, options)
    num_tokens = batch * options.new_tokens
    return Measurement(f"int8, batch {batch}", num_tokens, ours_s, None, {"bfloat16": plain_s}, mark=INT8_MARK)


def take_turns(runs: Sequence[Callable[[], object]], options: Options) -> list[float]:
    """Return the best seconds of each run; they run alternately, after one round that warms up."""
    return best_times([in_seconds(each, options) for each in runs], options)


def best_times(rounds_of: Sequence[Callable[[], float]], options: Options) -> list[float]:
    """Return the least of what each function returns."""
    return list(map(min, times_by_round(rounds_of, options)))


def times_by_round(rounds_of: Sequence[Callable[[], float]], options: Options) -> list[tuple[float, ...]]:
    """Return what each function returns in every round. They take turns, and the first round does not count."""
    rounds = [[each() for each in rounds_of] for _ in range(max(2, options.rounds + 1))][1:]
    return list(zip(*rounds, strict=True))


def in_proportion(run: Callable[[], object], times: float, options: Options) -> Callable[[], float]:
    """Return a function that runs so many times, rounded, and returns the seconds of exactly so many."""
    whole = max(1, round(times))
    compute = in_seconds(lambda: [run() for _ in range(whole)], options)
    return lambda: compute() * times / whole


def in_seconds(run: Callable[[], object], options: Options) -> Callable[[], float]:
    return partial(timed, run, torch.device(options.device))


def best_s(run: Callable[[], object], rounds: int, device: torch.device) -> float:
    timed(run, device)
    return min(timed(run, device) for _ in range(rounds))


def timed(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def linear_parameters(config: BaseModelConfig, *, with_head: bool, num_experts: float | None = None) -> int:
    """Number of weights that a token is multiplied by; or a step, if it uses ``num_experts`` experts in each layer."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim + config.num_heads * config.head_dim
    layers = config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)
    if (experts := config.experts) is not None:
        chosen = experts.num_per_token if num_experts is None else num_experts
        more = experts.num_experts + 3 * (chosen * experts.width - config.intermediate_size)
        layers += round(len(experts.layers) * config.hidden_size * more)
    return layers + (config.vocab_size * config.hidden_size if with_head else 0)


def prefill_flops(config: BaseModelConfig, num_tokens: int) -> int:
    """Every token is multiplied by the weights of all layers; half of the products of attention are masked."""
    flops = 2 * linear_parameters(config, with_head=False) * num_tokens
    return flops + 4 * config.num_layers * config.num_heads * config.head_dim * num_tokens**2 // 2


def experts_read(executor: TorchExecutor, run: Callable[[], object]) -> float | None:
    """Run, and return how many experts a step reads in each layer that has them, on average; None without experts.

    The steps run eagerly: the replay of a CUDA graph calls no function.
    """
    counts: list[int] = []

    def counting(scores: Tensor, config: ExpertConfig) -> Routing:
        found = route(scores, config)
        counts.append(len(found.experts.unique()))
        return found

    with patch.object(feed_forward, "route", counting), patch.object(executor, "_graphs", None):
        run()
    return sum(counts) / len(counts) if counts else None


def heading(options: Options, limits: MachineLimits, engines: Engines) -> str:
    names = [peer.name for peer in engines.peers] + ([] if engines.library is None else [LIBRARY])
    return (
        f"\n{counted(options.layers, 'layer')} of the shape {options.shape}, {options.dtype}, {options.device}, "
        f"{counted(torch.get_num_threads(), 'thread')}, torch {torch.__version__}\n"
        f"limits: memory {limits.read_bytes_per_s / 1e9:.1f} GB/s, products {limits.flops_per_s / 1e9:.0f} GFLOP/s\n"
        f"{'tokens/s':<18}{'ours':>10}{'limit':>10}{'of limit':>10}"
        + "".join(f"{name:>14}{'ratio':>8}" for name in names)
        + "  mark"
    )


def row_of(row: Measurement) -> str:
    """The ratios are those of our speed to the other engine's."""
    limit_s = row.limit_s
    limit = f"{'':>20}" if limit_s is None else f"{row.speed(limit_s):>10.1f}{row.ratio(limit_s):>10.0%}"
    format_name = "  of bfloat16:" if limit_s is None else ""
    others = "".join(f"{row.speed(each):>14.1f}{row.ratio(each):>8.2f}" for each in row.others_s.values())
    mark = f"missed: {', '.join(row.missed)}" if row.missed else "met"
    return f"{row.name:<18}{row.speed(row.ours_s):>10.1f}{limit}{format_name}{others}  {mark}"
