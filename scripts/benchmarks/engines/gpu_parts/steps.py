"""Steps of the engine with random weights: decode against the bytes that it must read, prefill against the products."""

import time
from collections.abc import Sequence
from dataclasses import replace

from common.cache.page_layout import ITEM_BYTES
from common.engine.attention import make_attention
from common.engine.cuda_graphs import CudaGraphRunner
from common.engine.executor import TorchExecutor
from common.engine.kv_pool import KVPool
from common.engine.models.base_config import BaseModelConfig
from common.engine.models.config import ModelConfig
from common.engine.models.decoder import Decoder
from common.step_plan import Admit, PageDelta, Row, StepPlan
from scripts.benchmarks.engines.engine import GREEDY, linear_parameters, model_shape, random_weights
from scripts.benchmarks.engines.gpu_parts.device import Device, Limits

PAGE_SIZE = 16
#: Share of the free memory that the pool of a benchmark may take.
POOL_SHARE = 0.8
SHAPES: dict[str, ModelConfig] = {
    "qwen3-0.6b": model_shape(28),
    "llama-3.1-8b": replace(
        model_shape(32),
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=14_336,
        vocab_size=128_256,
        context_length=131_072,
        has_qk_norm=False,
        is_tied=False,
    ),
    "tiny": replace(
        model_shape(2),
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=128,
        vocab_size=1024,
        context_length=2048,
    ),
}


def random_executor(config: ModelConfig, device: Device, *, num_tokens: int, num_slots: int) -> TorchExecutor:
    """An engine with random weights and KV. The pool has room for ``num_tokens``, or for as many as fit."""
    weights, _ = random_weights(config, device.dtype_name, device.device)
    weights.pack()
    layout = config.layout(PAGE_SIZE, device.dtype_name)
    num_pages = min(layout.num_pages(num_tokens) + 1, int(device.free_bytes() * POOL_SHARE) // layout.page_bytes)
    pool = KVPool(layout, num_pages, device.device)
    pool.pages.view(device.dtype).normal_()
    backend = make_attention("auto", pool, config.num_heads)
    return TorchExecutor(Decoder(config, weights), pool, backend, num_slots=num_slots)


def capture_graphs(executor: TorchExecutor, batches: Sequence[int]) -> None:
    """Capture the decode steps of these batch sizes; a node captures more at its start."""
    executor.capture_graphs(CudaGraphRunner(executor.pool.device), batches)


def decode_step_s(executor: TorchExecutor, batch: int, context: int, num_steps: int) -> float | None:
    """Seconds of one step in a row of steps, each launched before the one before it is waited for.

    None: the pool is too small.
    """
    per_row = executor.pool.layout.num_pages(context + num_steps + 1)
    if batch * per_row > executor.num_pages or context + num_steps + 1 > executor.model.config.context_length:
        return None
    admits = tuple(Admit(slot, GREEDY, context, 1) for slot in range(batch))
    deltas = tuple(PageDelta(slot, 0, tuple(range(slot * per_row, (slot + 1) * per_row))) for slot in range(batch))

    def rows(step: int) -> tuple[Row, ...]:
        return tuple(Row(slot, context + step, None, True) for slot in range(batch))

    executor.run(StepPlan(0, admits, deltas, rows(0)))
    began_at = time.perf_counter()
    pending = [executor.launch(StepPlan(step, (), (), rows(step))) for step in range(1, num_steps + 1)]
    pending[-1].result()
    return (time.perf_counter() - began_at) / num_steps


def decode_least_s(config: BaseModelConfig, dtype: str, batch: int, context: int, limits: Limits) -> float:
    """Weights and KV are read once."""
    parameters = linear_parameters(config, with_head=True)
    kv = batch * context * config.layout(PAGE_SIZE, dtype).page_bytes // PAGE_SIZE
    return limits.seconds(num_bytes=parameters * ITEM_BYTES[dtype] + kv, flops=2 * parameters * batch)


def prefill_s(executor: TorchExecutor, num_tokens: int, chunk: int) -> float | None:
    """Seconds from the first chunk of a prompt to its first token; None: the pool is too small."""
    num_pages = executor.pool.layout.num_pages(num_tokens)
    if num_pages > executor.num_pages or num_tokens + 1 > executor.model.config.context_length:
        return None
    prompt = tuple(number % executor.model.config.vocab_size for number in range(num_tokens))
    plans: list[StepPlan] = []
    for start in range(0, num_tokens, chunk):
        tokens = prompt[start : start + chunk]
        row = Row(0, start, tokens, start + len(tokens) == num_tokens)
        first = start == 0
        admits = (Admit(0, GREEDY, num_tokens, None),) if first else ()
        plans.append(StepPlan(len(plans), admits, (PageDelta(0, 0, tuple(range(num_pages))),) if first else (), (row,)))
    began_at = time.perf_counter()
    pending = [executor.launch(plan) for plan in plans]
    pending[-1].result()
    return time.perf_counter() - began_at


def pool_tokens(batches: Sequence[int], contexts: Sequence[int], prompts: Sequence[int], num_steps: int) -> int:
    """Tokens of the largest item of a part."""
    decode = max(batches) * (max(contexts) + num_steps + 2 * PAGE_SIZE)
    return max([decode, *prompts])
