"""The parts that a node process hands to the builder of its role."""

import os
import socket
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.cache.kv_window import UNBOUNDED, KVWindow
from common.cache.page_allocator import Owner, PageAllocator
from common.cache.page_layout import PageLayout
from common.cache.radix_cache import RadixCache
from common.clock import Clock
from common.config.node import NodeConfig
from common.errors import invariant
from common.node.loading.memory_plan import Capacity
from common.plugins import load_policy
from common.scheduling.in_batch_prefix_caching import InBatchPrefixLimits, prefix_limits_from_environ
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.factory import make_ordering
from common.scheduling.prefill_adder import LongPromptLimits, PrefillLimits
from common.wire.messages import Coverage


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The parts that a role is built from.

    Attributes:
        capacity: slots, pages and chunk size of this node.
        pool: the KV pool of this process, which is also its ``PageStore`` of the transfer plane.
        layout: of whole pages, with the KV heads of all ranks.
        digest: identifies the model and its weights; nodes that differ in it cannot share KV.
        incarnation: drawn at each start of a process, and again for each other role that it takes.
        adapters: ids of the LoRA adapters that the node has.
        other_ranks: connect to the transfer endpoint of each.
        environ: variables that are read beside the configuration.
    """

    config: NodeConfig
    capacity: Capacity
    pool: Any
    layout: PageLayout
    allocator: PageAllocator
    cache: RadixCache
    clock: Clock
    digest: str
    incarnation: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    adapters: Container[str] = ()
    other_ranks: Sequence[Callable[[], socket.socket]] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def sharing(self) -> InBatchPrefixLimits:
        """When a prompt waits for a prefix of another one. Raises ConfigError: a ``BATON_*`` variable has a wrong
        value."""
        return prefix_limits_from_environ(self.environ)

    @property
    def kv_window(self) -> KVWindow:
        """Which pages a request of this model needs in this role."""
        capacity, page_size = self.capacity, self.config.page_size
        most_at_once = capacity.alignment.most_at_once(capacity.chunk_tokens, page_size)
        if self.config.role == "prefill":
            return KVWindow.of_prefill(page_size, capacity.window, most_at_once)
        return KVWindow.of_decode(page_size, capacity.window, most_at_once, self.allocator.num_pages)

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request that the pool can serve."""
        longest = self.kv_window.max_tokens(self.allocator.num_pages)
        context_length = self.capacity.context_length
        return longest if context_length is None or longest < UNBOUNDED else context_length

    @property
    def longest_transfer(self) -> int:
        """The most pages that a transfer moves."""
        num_pages, window_pages = self.layout.num_pages(self.longest_tokens), self.allocator.window_pages
        return num_pages if window_pages is None else window_pages.groups.num_slabs(num_pages, num_pages)

    @property
    def most_held_tokens(self) -> int:
        """Tokens of the pool that one request holds at most, however long it gets; 0: all of its tokens."""
        kv_window = self.kv_window
        return kv_window.max_held * kv_window.page_size if kv_window.is_bounded else 0

    @property
    def prefill_limits(self) -> PrefillLimits:
        """Bounds of the prompts that are computed here, in either role. Raises as ``sharing``."""
        config, capacity = self.config, self.capacity
        return PrefillLimits(
            max_running=capacity.num_slots,
            max_queued=capacity.max_queued,
            context_length=capacity.context_length,
            max_prefill_tokens=config.max_prefill_tokens,
            chunk_tokens=capacity.chunk_tokens,
            alignment=capacity.alignment,
            sharing=self.sharing,
            max_skip_ahead=config.max_skip_ahead,
            long_prompts=LongPromptLimits(
                config.long_prefill_token_threshold, config.long_prompt_share, config.max_long_partial_prefills
            ),
            kv_window=self.kv_window,
        )

    def check_released(self) -> None:
        """Prove that a role has left nothing behind: every page is free, or cached and not in use.

        Raises:
            InvariantError: it has not.
        """
        self.allocator.check()
        self.cache.check()
        num_cached = self.allocator.count(Owner.RADIX)
        num_kept = self.allocator.num_pages - self.allocator.count(Owner.FREE) - num_cached
        invariant(not num_kept, f"{num_kept} pages still belong to requests or transfers of the last role")
        invariant(self.cache.num_evictable_pages == num_cached, "cached pages are still locked by the last role")

    @property
    def checksums(self) -> Coverage:
        """Which pages travel with a checksum, as ``--kv-checksum`` describes."""
        wanted = self.config.kv_checksum
        if wanted != "auto":
            return wanted
        if self.config.record:
            return "off"
        return "all" if self.pool.is_mapped else "sampled"

    def ordering(self) -> RequestOrdering:
        """The ordering of the role's queue. Raises ConfigError if the user's own policy cannot be made."""
        own_policy = load_policy(self.config.schedule_policy)
        return make_ordering(self.config, self.cache, own_policy=own_policy, sharing=self.sharing)


def make_cache(config: NodeConfig, allocator: PageAllocator) -> RadixCache:
    """The radix cache that the configuration asks for."""
    return RadixCache(
        allocator,
        config.page_size,
        is_enabled=not config.disable_radix_cache,
        eviction=config.radix_eviction_policy,
    )
