"""Sizes of a node: slots, pages and chunks, from the configuration or from what the machine has room for."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from common.cache.kv_window import UNBOUNDED, KVWindow
from common.cache.page_layout import PageLayout
from common.cache.window_pages import MAX_UNCOMMITTED, LayerGroups
from common.config.batching import LONG_PROMPTS
from common.config.node import NodeConfig
from common.config.options import check_unset
from common.errors import ConfigError
from common.scheduling.chunked_prefill import ChunkAlignment
from common.system.control_groups import control_groups

MAX_SLOTS = 256
MAX_QUEUED = 1_024
CPU_CHUNK_TOKENS = 256
CUDA_CHUNK_TOKENS = 8_192
#: Used where the model's shape is not known. A small model has a few thousand, one of 8 billion parameters 27,000.
CROSSOVER_TOKENS = 16_384.0
#: Tokens of a pool on a CPU, where it shares memory with everything else and few requests are decoded at once.
CPU_POOL_TOKENS = 131_072
#: The share of the remaining memory that a pool takes at most, unless its size or a larger share is configured. Steps
#: need the rest for their activations.
MEMORY_SHARE = 0.8
#: ``--swa-full-tokens-ratio auto`` expects requests of this share of the context length.
USUAL_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of a node.

    Attributes:
        num_slots: rows of the largest batch.
        num_pages: pages of the KV pool that requests can have.
        max_queued: requests that may wait.
        chunk_tokens: prompt tokens of one step; None computes prompts whole.
        alignment: where a prompt may be cut.
        context_length: tokens of prompt and output together; None for as many as the pool holds.
        window: tokens that a token sees, itself included, if no layer sees more; None if a layer sees all.
    """

    num_slots: int
    num_pages: int
    max_queued: int
    chunk_tokens: int | None
    alignment: ChunkAlignment = field(default_factory=ChunkAlignment)
    context_length: int | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryLayout(PageLayout):
    """What a page takes of memory where window layers have ``ratio`` pages of their own for each page of the others."""

    num_window_layers: int = 0
    ratio: float = 1.0

    @property
    def page_bytes(self) -> int:
        return math.ceil(self.layer_bytes * (self.num_layers - self.num_window_layers * (1 - self.ratio)))


def plan_capacity(
    config: NodeConfig,
    layout: PageLayout,
    *,
    device: str,
    context_length: int,
    crossover_tokens: float = CROSSOVER_TOKENS,
    window: int | None = None,
) -> Capacity:
    """The sizes that the configuration and this machine give.

    Args:
        crossover_tokens: context length at which attention costs as much as the rest of the model.
        window: tokens that a token sees; None if a layer sees all.

    Raises:
        ConfigError: not one page fits into memory, a chunk is smaller than the alignment, or options for long prompts
            have no effect because of it.
    """
    num_slots = config.max_running_requests or MAX_SLOTS
    tokens = config.max_total_tokens
    if tokens is None:
        tokens = num_slots * context_length
        if device == "cpu":  # on CUDA the weights are read first: see ``device_plan``
            room = int(free_bytes(device) * config.memory_fraction) // layout.page_bytes * config.page_size
            tokens = min(room, tokens, max(CPU_POOL_TOKENS, context_length))
    num_pages = tokens // config.page_size
    if num_pages < 1:
        raise ConfigError("--memory-fraction leaves no room for a single KV page; raise it or free some memory")
    chunk = chunk_size(config, device)
    max_queued = MAX_QUEUED if config.max_queued_requests is None else config.max_queued_requests
    alignment = _alignment(config, crossover_tokens)
    if 0 <= chunk < alignment.align_tokens:
        raise ConfigError(
            f"--truncation-align-size {alignment.align_tokens} exceeds --chunked-prefill-size {chunk}: lower one or "
            "raise the other"
        )
    if 0 <= chunk < (least := 2 * alignment.unit(config.page_size)):
        why = f"has no effect with --chunked-prefill-size {chunk}; with this alignment, give at least {least}"
        check_unset(config, LONG_PROMPTS, why)
    chunk_tokens = None if chunk < 0 else chunk
    return Capacity(min(num_slots, num_pages), num_pages, max_queued, chunk_tokens, alignment, context_length, window)


def chunk_size(config: NodeConfig, device: str) -> int:
    """The value of ``--chunked-prefill-size``, or the default of the device, in tokens; negative: no chunks."""
    if config.chunked_prefill_size is not None:
        return config.chunked_prefill_size
    return max(CPU_CHUNK_TOKENS if device == "cpu" else CUDA_CHUNK_TOKENS, config.page_size)


def _alignment(config: NodeConfig, crossover_tokens: float = CROSSOVER_TOKENS) -> ChunkAlignment:
    crossover = crossover_tokens if config.enable_dynamic_chunking else None
    return ChunkAlignment(config.truncation_align_size or 1, crossover)


def most_window_pages(config: NodeConfig, groups: LayerGroups, alignment: ChunkAlignment, chunk: int | None) -> int:
    """The most window pages of a request computed in chunks of ``chunk`` tokens; ``UNBOUNDED`` if computed whole.

    When it decodes, it may hold those of more tokens than a very short chunk has.
    """
    most_at_once = max(alignment.most_at_once(chunk, config.page_size) or UNBOUNDED, 1 + MAX_UNCOMMITTED)
    return KVWindow(config.page_size, max(groups.window, 2)).max_span(most_at_once)


def auto_window_ratio(config: NodeConfig, groups: LayerGroups | None, *, device: str, context_length: int) -> float:
    """What ``--swa-full-tokens-ratio auto`` stands for.

    It is the window tokens that one request can hold, divided by the length that requests are taken to have, a share of
    the context length. Where ``--max-total-tokens`` is given, a request has at least its share of the pool, and one
    request fits.
    """
    chunk = chunk_size(config, device)
    if groups is None or chunk < 0 or config.record:
        return 1.0
    num_held = most_window_pages(config, groups, _alignment(config), chunk) * config.page_size
    usual = min(context_length, config.context_length or context_length) * USUAL_SHARE
    total = config.max_total_tokens
    if total is not None:
        usual = max(usual, total / (config.max_running_requests or MAX_SLOTS))
        usual = min(usual, total // config.page_size * config.page_size)
    return min(1.0, math.ceil(100 * num_held / usual) / 100)


def num_window_pages(config: NodeConfig, groups: LayerGroups | None, capacity: Capacity, num_pages: int) -> int:
    """Pages of window layers beside ``num_pages`` of the others.

    Raises:
        ConfigError: they are too few for one request.
    """
    if groups is None:
        return num_pages
    of_one = most_window_pages(config, groups, capacity.alignment, capacity.chunk_tokens)
    count = math.ceil(num_pages * float(config.swa_full_tokens_ratio))
    if count < of_one:
        needs = "prompts that are computed whole" if of_one == UNBOUNDED else f"the {of_one} that one request can hold"
        raise ConfigError(
            f"--swa-full-tokens-ratio {config.swa_full_tokens_ratio} gives window layers {count} of {num_pages} "
            f"pages, too few for {needs}: raise it or the size of the pool, or lower --chunked-prefill-size"
        )
    return count


def attention_bytes(layout: PageLayout, capacity: Capacity, *, copied_bytes: int, free_bytes: int) -> int:
    """Memory of the copies that attention makes on a CPU: ``copied_bytes`` for each token of the longest request."""
    copied_bytes *= layout.page_size
    num_pages = capacity.num_pages if capacity.context_length is None else layout.num_pages(capacity.context_length)
    if capacity.window is None:  # with a window, a request may be longer than the pool
        # A pool that its copies leave too little memory becomes smaller, and so does the longest request.
        num_fitting = max(free_bytes, 0) // (layout.page_bytes + copied_bytes)
        num_pages = min(num_pages, capacity.num_pages, num_fitting)
    return num_pages * copied_bytes


def num_pages_that_fit(
    config: NodeConfig, layout: PageLayout, num_pages: int, free_bytes: int, attention_bytes: int
) -> int:
    """Pages for the pool of a CPU, once the weights are in memory: ``num_pages``, or fewer if none are configured.

    Args:
        num_pages: as planned.
        free_bytes, attention_bytes: see the functions of these names.

    Raises:
        ConfigError: there is no room for the configured pool.
    """
    room = (free_bytes - attention_bytes) // layout.page_bytes
    if config.max_total_tokens is not None:
        if num_pages <= room:
            return num_pages
        raise ConfigError(
            f"--max-total-tokens {config.max_total_tokens} needs {layout.pool_bytes(num_pages) / 1e9:.2f} GB for KV "
            f"pages and {attention_bytes / 1e9:.2f} GB for the copies of its threads, and "
            f"{max(free_bytes, 0) / 1e9:.2f} GB of memory are free: lower it, --context-length or --threads, or free "
            "some memory"
        )
    room = int(room * max(MEMORY_SHARE, config.memory_fraction))
    if room < 1:
        raise ConfigError("the model leaves no memory for KV pages: free some, or serve fewer nodes on this machine")
    return min(num_pages, room)


def free_bytes(device: str) -> int:
    """Free memory in bytes: of the GPU, or of this machine, or of the control groups that limit this process."""
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()  # memory that torch keeps for later would not count as free
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free_bytes = int(line.split()[1]) * 1024
    left = [num_bytes for folder in control_groups("memory") if (num_bytes := _left_in_group(folder)) is not None]
    return min([free_bytes, *left])


def _left_in_group(folder: Path) -> int | None:
    """Bytes that a control group leaves free, with files in its cache, which are given back; None without a limit."""
    limit, used, prefix = "memory.max", "memory.current", ""
    if not (folder / limit).exists():
        limit, used, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    try:
        left = int((folder / limit).read_text()) - int((folder / used).read_text())
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return left + sum(int(rows.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    except (OSError, ValueError):
        return None
