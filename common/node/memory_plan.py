"""How much a node holds: what the configuration says, and otherwise what this machine has room for."""

import os
from dataclasses import dataclass, field

from common.cache.page_layout import PageLayout
from common.config.node import NodeConfig
from common.errors import ConfigError
from common.scheduling.chunked_prefill import ChunkAlignment

MAX_SLOTS = 256
MAX_QUEUED = 1_024
CPU_CHUNK_TOKENS = 512
CUDA_CHUNK_TOKENS = 8_192
#: Of a model whose shape is not known: a few thousand tokens for small ones, 27,000 for one of 8 billion parameters.
CROSSOVER_TOKENS = 16_384.0
#: On a CPU the pool shares memory with everything else, and more tokens than this are rarely decoded there at once.
CPU_POOL_TOKENS = 131_072
#: Of the memory that is left, what a pool may take whose size nobody has asked for.
SPARED = 0.8


@dataclass(frozen=True, slots=True)
class Capacity:
    """Attributes:
    num_slots: requests in the batch at once.
    num_pages: of the KV pool.
    max_queued: requests that may wait.
    chunk_tokens: of one step; None computes prompts whole.
    cut: where prompts are cut.
    context_length: tokens of one request, prompt and output together; None: as many as the pool holds.
    """

    num_slots: int
    num_pages: int
    max_queued: int
    chunk_tokens: int | None
    cut: ChunkAlignment = field(default_factory=ChunkAlignment)
    context_length: int | None = None


def plan_capacity(
    config: NodeConfig,
    geometry: PageLayout,
    *,
    device: str,
    context_length: int,
    crossover_tokens: float = CROSSOVER_TOKENS,
) -> Capacity:
    """Slots, pages and chunk size for this node.

    Args:
        crossover_tokens: context at which attention costs a token of this model as much as everything else.

    Raises:
        ConfigError: not even one page fits into the memory that the pool may take, or no cut into a chunk.
    """
    num_slots = config.max_running_requests or MAX_SLOTS
    tokens = config.max_total_tokens
    if tokens is None:
        room = int(free_bytes(device) * config.memory_fraction) // geometry.page_bytes * config.page_size
        tokens = min(room, num_slots * context_length)
        if device == "cpu":
            tokens = min(tokens, max(CPU_POOL_TOKENS, context_length))
    num_pages = tokens // config.page_size
    if num_pages < 1:
        raise ConfigError("--memory-fraction leaves no room for a single KV page; raise it or free some memory")
    chunk = config.chunked_prefill_size
    if chunk is None:
        chunk = CPU_CHUNK_TOKENS if device == "cpu" else CUDA_CHUNK_TOKENS
        chunk = max(chunk, config.page_size)
    max_queued = MAX_QUEUED if config.max_queued_requests is None else config.max_queued_requests
    cut = ChunkAlignment(
        config.truncation_align_size or 1, crossover_tokens if config.enable_dynamic_chunking else None
    )
    if 0 <= chunk < cut.align_tokens:
        raise ConfigError(
            f"--truncation-align-size {cut.align_tokens} is more than a chunk (--chunked-prefill-size {chunk})"
        )
    chunk_tokens = None if chunk < 0 else chunk
    return Capacity(min(num_slots, num_pages), num_pages, max_queued, chunk_tokens, cut, context_length)


def num_pages_that_fit(config: NodeConfig, geometry: PageLayout, num_pages: int, free_bytes: int) -> int:
    """Pages of a pool in this machine's memory, with the weights in it: as many as planned, or, where nobody has asked
    for a number, what is left.

    Args:
        free_bytes: see ``free_bytes``.

    Raises:
        ConfigError: the pool that the configuration asks for has no room; names the flag.
    """
    room = free_bytes // geometry.page_bytes
    if num_pages <= room:
        return num_pages
    if config.max_total_tokens is not None:
        raise ConfigError(
            f"--max-total-tokens {config.max_total_tokens} needs {geometry.pool_bytes(num_pages) / 1e9:.2f} GB for KV "
            f"pages, and {max(free_bytes, 0) / 1e9:.2f} GB of memory are free"
        )
    room = int(room * SPARED)
    if room < 1:
        raise ConfigError("the model leaves no memory for KV pages: free some, or serve fewer nodes on this machine")
    return room


def free_bytes(device: str) -> int:
    """Bytes that nobody uses: of the GPU, or of this machine (of this container, where one bounds it)."""
    if device != "cpu":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free_bytes = int(line.split()[1]) * 1024
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            free_bytes = min(free_bytes, int(limit.read()) - int(used.read()) + _cached_bytes())
    except (OSError, ValueError):
        pass  # no such bound
    return free_bytes


def _cached_bytes() -> int:
    """Of this container's memory, what files are kept in and is given back when others need it."""
    with open("/sys/fs/cgroup/memory.stat") as file:
        rows = dict(line.split() for line in file)
    return int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))
