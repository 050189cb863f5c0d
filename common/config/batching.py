"""Options of a node's KV pool, batches and steps."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from common.cache.eviction import EvictionPolicy
from common.config.options import check_unset, option
from common.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    page_size: int = option(16, "Tokens per KV page, the unit of caching and transfer.", minimum=1, maximum=65536)
    max_total_tokens: int | None = option(
        None,
        "Size of a node's KV pool in tokens. Without it: as much as --memory-fraction allows, but on CPUs at most "
        "131,072, or the context length if that is more.",
        minimum=1,
    )
    swa_full_tokens_ratio: str = option(
        "1",
        "For models with both sliding-window and full-attention layers: size of the KV pool of window layers relative "
        "to that of full layers, 0.01 to 1. Below 1, window layers get a pool of their own; all nodes must agree "
        "whether they have one. auto: window and one chunk, divided by an eighth of the context length.",
        metavar="FLOAT|auto",
    )
    context_length: int | None = option(
        None, "Maximum number of tokens of prompt and output together. Without it: the model's.", minimum=2
    )
    max_running_requests: int | None = option(
        None,
        "Maximum number of requests that a node runs at once. Without it: as many as fit its KV pool, at most 256.",
        minimum=1,
    )
    max_prefill_tokens: int = option(16384, "Maximum number of prompt tokens in a prefill batch.", minimum=1)
    chunked_prefill_size: int | None = option(
        None,
        "Maximum number of prompt tokens computed in one step; -1: no limit. Without it: 256 on CPUs, 8192 on CUDA.",
        minimum=-1,
    )
    long_prompt_share: float = option(
        0.5,
        "Share of a step's chunk budget that all long prompts together get while shorter ones wait; 1: prompts that "
        "have begun come first and may take all of it.",
        minimum=0.05,
        maximum=1.0,
    )
    long_prefill_token_threshold: int | None = option(
        None,
        "A prompt with more uncomputed tokens than this counts as long. Without it: --chunked-prefill-size.",
        minimum=1,
    )
    max_long_partial_prefills: int = option(
        2, "Maximum number of long prompts that a node computes in turns; others wait until one ends.", minimum=1
    )
    enable_mixed_chunk: bool = option(
        False,
        "Decode nodes: compute prompt chunks in the same steps as decode rows. Without it, the two alternate.",
    )
    enable_dynamic_chunking: bool = option(
        False, "Make chunks smaller as more of a prompt is computed, so that all steps take about the same time."
    )
    truncation_align_size: int | None = option(
        None, "End chunks at multiples of this number of tokens and of --page-size.", minimum=1
    )
    stream_interval: int = option(1, "Output tokens per message to the gateway, after the first token.", minimum=1)
    disable_radix_cache: bool = option(False, "Do not cache KV pages for later requests with the same prefix.")
    radix_eviction_policy: EvictionPolicy = option(
        "lru",
        "Which cached prefix is evicted first: the least recently used (lru), the least frequently used (lfu), or the "
        "one with the lowest priority (priority).",
    )
    retraction_policy: Literal["auto", "shortest-output", "priority"] = option(
        "auto",
        "The request that a decode node retracts when it runs out of pages: shortest-output (least work lost) or "
        "priority (the least urgent); auto is priority with --enable-priority-scheduling, else shortest-output.",
    )
    num_reserved_decode_tokens: int = option(
        128,
        "Tokens of room that a decode node keeps for the further output of each request. Less serves more requests at "
        "once, of which more are retracted when pages run short.",
        minimum=0,
    )
    resume_prefill_threshold: int | None = option(
        1024,
        "A retracted request with more uncached tokens than this is computed again by its prefill node, any other by "
        "the decode node; none: all by the decode node.",
        minimum=0,
    )


#: Options that act only where prompts of one step share its chunk budget.
LONG_PROMPTS = ("long_prompt_share", "long_prefill_token_threshold", "max_long_partial_prefills")


def parse_window_ratio(given: str) -> float | None:
    """Return the value of ``--swa-full-tokens-ratio``; None for ``auto``. Raises ConfigError: it is neither."""
    if given == "auto":
        return None
    try:
        ratio = float(given)
    except ValueError:
        ratio = math.nan
    if not 0.01 <= ratio <= 1:
        raise ConfigError(f"--swa-full-tokens-ratio {given}: give auto, or a number from 0.01 to 1")
    return ratio


def check_batching(config: Any) -> None:
    parse_window_ratio(config.swa_full_tokens_ratio)
    chunk = config.chunked_prefill_size
    if chunk == 0:
        raise ConfigError("--chunked-prefill-size 0 would compute nothing; give -1 to turn chunking off")
    if chunk is not None and 0 < chunk < config.page_size:
        raise ConfigError(
            f"--chunked-prefill-size {chunk} is less than a page; give at least --page-size {config.page_size}"
        )
    if chunk == -1:
        names = ("enable_dynamic_chunking", "truncation_align_size", *LONG_PROMPTS)
        check_unset(config, names, "has no effect with --chunked-prefill-size -1; leave one out")
    if config.long_prompt_share == 1.0:
        check_unset(config, LONG_PROMPTS[1:], "has no effect with --long-prompt-share 1; leave one out")
    if config.disable_radix_cache and config.radix_eviction_policy != "lru":
        raise ConfigError("--radix-eviction-policy has no effect with --disable-radix-cache; leave one out")
    if config.radix_eviction_policy == "priority" and not config.enable_priority_scheduling:
        raise ConfigError("--radix-eviction-policy priority needs --enable-priority-scheduling; add that")
    if config.retraction_policy == "priority" and not config.enable_priority_scheduling:
        raise ConfigError("--retraction-policy priority needs --enable-priority-scheduling; add that")
    if config.max_total_tokens is not None and config.max_total_tokens < config.page_size:
        raise ConfigError(
            f"--max-total-tokens {config.max_total_tokens} is less than a page; give at least --page-size "
            f"{config.page_size}"
        )
