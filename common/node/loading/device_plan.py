"""Sizes of a node on CUDA: the batch sizes of its CUDA graphs, and its KV pool beside weights, graphs and steps.

The order at start is: weights, pool, graphs. Graphs hold the addresses of the pool, so their memory is estimated before
the pool is made; what they have left for steps is checked at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.cache.page_layout import ITEM_BYTES, PageLayout
from common.config.node import NodeConfig
from common.engine.models.base_config import BaseModelConfig
from common.errors import ConfigError
from common.node.loading.memory_plan import Capacity

#: The largest batch that is captured without --cuda-graph-max-bs.
MAX_GRAPH_BATCH = 256
#: Memory of a graph beside its tensors: what the driver keeps for each of its several hundred kernels. An estimate.
GRAPH_OVERHEAD_BYTES = 16 << 20
#: Kernels, workspaces of libraries, and fragments. An estimate.
STEP_OVERHEAD_BYTES = 512 << 20


def graph_conflict(config: NodeConfig, model: BaseModelConfig, layout: PageLayout, device: str) -> str:
    """Return why a node cannot capture CUDA graphs, with the fix; empty if it can.

    Raises:
        ConfigError: it cannot have its attention backend at all.
    """
    if device == "cpu":
        return "there are no CUDA graphs on a CPU; leave it out"
    if config.tp > 1:
        return "steps of several ranks are not captured; leave it out, or leave out --tp"
    if float(config.swa_full_tokens_ratio) < 1:
        return "steps with --swa-full-tokens-ratio below 1 are not captured; leave one out"
    if model.implementation != "native":
        return "steps of a model that transformers computes are not captured; leave it out"
    import torch

    from common.engine.attention import GRAPH_SAFE, resolve_attention

    attention = resolve_attention(config.attention_backend, torch.device(device), layout)
    if attention not in GRAPH_SAFE:
        return (
            f"--attention-backend {attention} runs every step eagerly; give {' or '.join(GRAPH_SAFE)}, or leave it out"
        )
    return ""


def plan_graphs(config: NodeConfig, conflict: str, num_slots: int) -> Sequence[int]:
    """Return the batch sizes to capture, ascending; none where graphs are off or impossible.

    Args:
        conflict: of ``graph_conflict``.
    Raises:
        ConfigError: graphs are asked for by name and impossible.
    """
    if conflict and config.cuda_graph_max_bs is not None:
        raise ConfigError(f"--cuda-graph-max-bs {config.cuda_graph_max_bs}: {conflict}")
    if conflict or config.disable_cuda_graph:
        return ()
    from common.engine.cuda_graphs import batch_sizes_to_capture

    return batch_sizes_to_capture(min(config.cuda_graph_max_bs or MAX_GRAPH_BATCH, num_slots))


@dataclass(frozen=True, slots=True)
class DeviceReserve:
    """Device memory, in bytes, that the KV pool leaves free.

    Attributes:
        graphs: CUDA graphs, with the inputs and the logits that they share.
        step: the largest eager step.
    """

    graphs: int = 0
    step: int = 0


def plan_reserve(
    config: NodeConfig, model: BaseModelConfig, layout: PageLayout, capacity: Capacity, batch_sizes: Sequence[int]
) -> DeviceReserve:
    """Estimate the memory that graphs and steps take."""
    item_bytes = ITEM_BYTES[model.resolve_dtype(config.dtype)]
    num_tokens = capacity.chunk_tokens or max(config.max_prefill_tokens, model.context_length)
    # Sampling holds the logits and what it computes from them: three tensors of their size.
    sampling = capacity.num_slots * model.vocab_size * 4 * 4
    step = STEP_OVERHEAD_BYTES + num_tokens * activation_bytes(model, item_bytes) + sampling
    if not batch_sizes:
        return DeviceReserve(step=step)
    logits = model.vocab_size * (4 + item_bytes)
    page_table = (capacity.num_slots + 1) * layout.num_pages(model.context_length) * 4
    tensors = max(batch_sizes) * (logits + activation_bytes(model, item_bytes)) + page_table
    return DeviceReserve(len(batch_sizes) * GRAPH_OVERHEAD_BYTES + tensors, step)


def activation_bytes(model: BaseModelConfig, item_bytes: int) -> int:
    """Return an upper bound of the bytes that a layer holds for one token at once."""
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attended = model.num_heads * model.head_dim
    # Each expert of a token has an input of its own, and its output in float32, twice.
    experts = 0 if model.experts is None else model.experts.num_per_token * model.hidden_size * (item_bytes + 8)
    return item_bytes * (4 * model.hidden_size + 2 * qkv + attended + 3 * model.active_width) + experts


def pages_on_device(
    config: NodeConfig, layout: PageLayout, capacity: Capacity, reserve: DeviceReserve, free_bytes: int
) -> int:
    """Pages for the pool once the weights are in memory: one more than requests can have, for padding rows of graphs.

    Args:
        free_bytes: of the device.
    Raises:
        ConfigError: there is no room for the configured pool, or for any.
    """
    num_extra = 1 if reserve.graphs else 0
    left = free_bytes - reserve.graphs - reserve.step
    needs = (
        f"of {_gb(free_bytes)} that the weights leave free, CUDA graphs need about {_gb(reserve.graphs)} and steps "
        f"{_gb(reserve.step)}"
    )
    if config.max_total_tokens is not None:
        num_bytes = layout.pool_bytes(capacity.num_pages + num_extra)
        if num_bytes > left:
            raise ConfigError(
                f"--max-total-tokens {config.max_total_tokens} needs {_gb(num_bytes)} for KV pages, and {needs}: lower "
                "it, --cuda-graph-max-bs or --chunked-prefill-size"
            )
        return capacity.num_pages + num_extra
    room = int(left * config.memory_fraction) // layout.page_bytes
    if room <= num_extra:
        raise ConfigError(
            f"--memory-fraction {config.memory_fraction} leaves no room for KV pages: {needs}: raise it, lower "
            "--cuda-graph-max-bs or --chunked-prefill-size, or serve fewer nodes on this device"
        )
    return min(room, capacity.num_pages + num_extra)


def check_left(reserve: DeviceReserve, free_bytes: int) -> None:
    """Check what is left once the graphs are captured.

    Raises:
        ConfigError: a step might not find the memory that it needs.
    """
    if free_bytes < reserve.step:
        raise ConfigError(
            f"{_gb(free_bytes)} of device memory are left beside weights, KV pages and CUDA graphs, and the largest "
            f"step needs about {_gb(reserve.step)}: lower --memory-fraction, --max-total-tokens, --cuda-graph-max-bs "
            "or --chunked-prefill-size, or give --disable-cuda-graph"
        )


def _gb(num_bytes: int) -> str:
    return f"{max(num_bytes, 0) / 1e9:.2f} GB"
