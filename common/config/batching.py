"""Options of the pool, the batch and the steps of a node, and which of them cannot be together."""

from dataclasses import dataclass
from typing import Any

from common.cache.eviction import EvictionPolicy
from common.config.options import option
from common.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Batching:
    """What bounds the pool, the batch and the steps of a node; the simulator takes the same."""

    page_size: int = option(16, "Tokens per KV page, the unit of caching and shipping.", minimum=1, maximum=65536)
    max_total_tokens: int | None = option(
        None, "Tokens of KV that the pool of a node holds; otherwise as --memory-fraction allows.", minimum=1
    )
    context_length: int | None = option(
        None, "Longest prompt and output together, if less than the model's.", minimum=2
    )
    max_running_requests: int | None = option(
        None, "Requests that a node works on at once; otherwise what its pool has room for, at most 256.", minimum=1
    )
    max_prefill_tokens: int = option(16384, "Input tokens of one prefill batch at most.", minimum=1)
    prefill_max_requests: int | None = option(
        None, "Requests of one prefill batch at most; otherwise any number.", minimum=1
    )
    chunked_prefill_size: int | None = option(
        None,
        "Tokens of a prompt computed in one step; -1 computes prompts whole; otherwise chosen by device.",
        minimum=-1,
    )
    enable_mixed_chunk: bool = option(
        False,
        "Decode nodes: chunks of prompts that are computed there ride in the same steps as the decode rows; otherwise "
        "the two take turns.",
    )
    enable_dynamic_chunking: bool = option(
        False, "Chunks shrink as a prompt's prefix grows, so that every step takes about as long as the first."
    )
    truncation_align_size: int | None = option(
        None, "Chunks end at a multiple of so many tokens, as well as of --page-size.", minimum=1
    )
    stream_interval: int = option(1, "Output tokens per streamed message, after the first token.", minimum=1)
    disable_radix_cache: bool = option(False, "Keep no KV for later requests with the same beginning.")
    radix_eviction_policy: EvictionPolicy = option(
        "lru",
        "Which cached prefix goes first: least recently used, least often used (lfu), oldest (fifo), or that of the "
        "least urgent requests (priority).",
    )
    schedule_conservativeness: float = option(
        1.0,
        "Decode nodes: above 1 more is reserved for outputs and fewer requests are retracted; below 1 less and more.",
        minimum=0.0,
    )


def check_batching(config: Any) -> None:
    """Raises ConfigError where options of ``Batching`` cannot be together."""
    chunk = config.chunked_prefill_size
    if chunk == 0:
        raise ConfigError("--chunked-prefill-size 0 would compute nothing; -1 turns chunking off")
    if chunk is not None and 0 < chunk < config.page_size:
        raise ConfigError(f"--chunked-prefill-size {chunk} is less than a page (--page-size {config.page_size})")
    if chunk == -1:
        for name in ("enable_dynamic_chunking", "truncation_align_size"):
            if getattr(config, name):
                raise ConfigError(f"--{name.replace('_', '-')} has no effect with --chunked-prefill-size -1")
    if config.disable_radix_cache and config.radix_eviction_policy != "lru":
        raise ConfigError("--radix-eviction-policy has no effect with --disable-radix-cache")
    if config.radix_eviction_policy == "priority" and not config.enable_priority_scheduling:
        raise ConfigError("--radix-eviction-policy priority needs --enable-priority-scheduling")
    if config.num_reserved_decode_tokens is not None and config.schedule_conservativeness != 1.0:
        raise ConfigError("--schedule-conservativeness has no effect with --num-reserved-decode-tokens")
    if config.max_total_tokens is not None and config.max_total_tokens < config.page_size:
        raise ConfigError(
            f"--max-total-tokens {config.max_total_tokens} is less than a page (--page-size {config.page_size})"
        )
