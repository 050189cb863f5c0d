"""Price of LoRA adapters: batches of the model alone, with one adapter, and with several.

The model has Qwen3-0.6B's shape with random weights, and each adapter changes every matrix of every layer. The same
engine runs all batches; they take turns, and the best round counts.
"""

import argparse
from collections.abc import Callable, Sequence

import torch

from common.engine.executor import TorchExecutor
from common.engine.models.config import ModelConfig
from common.engine.models.lora.adapters import native_adaptable
from common.engine.models.lora.checkpoint import AdapterCheckpoint, LowRankPair
from common.errors import ConfigError
from common.step_plan import Admit, PageDelta, Row, StepPlan
from scripts.benchmarks.engines import engine
from scripts.load_tester.reporting.formats import counted

SHORTEST = ("--layers=1", "--prefill=64", "--batch=4", "--new-tokens=4", "--rounds=1")
Options = argparse.Namespace  # the fields of `add_options`


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (one per core)")
    parser.add_argument("--adapters", type=int, default=4, help="adapters in a batch with several (%(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="rank of each adapter (%(default)s)")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="prompt lengths (%(default)s)")
    parser.add_argument("--batch", type=int, nargs="*", default=[4, 8, 32], help="decode batch sizes (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=16, help="decode steps (%(default)s)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the best round counts (%(default)s)")
    parser.set_defaults(device="cpu", dtype="bfloat16")


def run(options: Options) -> dict[str, float]:
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.adapters > max(options.batch, default=0):
        raise ConfigError(f"--adapters {options.adapters}: give a --batch of as many rows at least")
    torch.manual_seed(0)
    config = engine.model_shape(options.layers)
    executor = engine.build(config, options)
    names = [f"adapter-{number}" for number in range(options.adapters)]
    for name in names:
        adapter = random_adapter(config, options.rank)
        executor.adapters[name] = executor.model.make_lora(adapter)
    columns = {"none": [""], "one": names[:1], f"{options.adapters}": names}
    layers, threads = counted(options.layers, "layer"), counted(torch.get_num_threads(), "thread")
    print(
        f"{layers} of Qwen3-0.6B's shape, {options.dtype}, {threads}, rank {options.rank}\n"
        f"{'tokens/s, adapters:':<24}" + "".join(f"{name:>12}" for name in columns) + f"{'price':>10}"
    )
    figures: dict[str, float] = {}
    kinds = (("prefill", options.prefill, prefill_run), ("decode batch", options.batch, engine.decode_run))
    for kind, counts, make in kinds:
        for count in counts:
            num_tokens = count if kind == "prefill" else count * options.new_tokens
            runs = [make(count, executor, options, some) for some in columns.values()]
            speeds = [num_tokens / seconds for seconds in engine.take_turns(runs, options)]
            numbers = "".join(f"{speed:>12.1f}" for speed in speeds)
            print(f"{f'{kind} {count}':<24}{numbers}{speeds[0] / speeds[-1] - 1:>10.0%}", flush=True)
            for name, speed in zip(columns, speeds, strict=True):
                figures[f"{kind} {count}, {name} adapters, tokens/s"] = speed
    executor.close()
    return figures


def random_adapter(config: ModelConfig, rank: int) -> AdapterCheckpoint:
    """An adapter that changes every matrix."""
    pairs = {
        name: LowRankPair(torch.randn(rank, inputs) * 0.02, torch.randn(outputs, rank) * 0.02)
        for name, (outputs, inputs) in native_adaptable(config).matrices.items()
    }
    return AdapterCheckpoint("0" * 32, pairs)


def prefill_run(
    num_tokens: int, executor: TorchExecutor, options: Options, adapters: Sequence[str]
) -> Callable[[], object]:
    """Return a run of as many prompts as there are adapters, with ``num_tokens`` tokens together, in one step."""
    length = num_tokens // options.adapters
    width = executor.pool.layout.num_pages(length)
    vocab_size = executor.model.config.vocab_size
    admits, deltas, rows = [], [], []
    for slot in range(options.adapters):
        admits.append(Admit(slot, engine.GREEDY, length, None, adapter=adapters[slot % len(adapters)]))
        deltas.append(PageDelta(slot, 0, tuple(range(slot * width, (slot + 1) * width))))
        rows.append(Row(slot, 0, tuple(torch.randint(0, vocab_size, (length,)).tolist()), True))
    return lambda: executor.run(StepPlan(0, tuple(admits), tuple(deltas), tuple(rows)))
