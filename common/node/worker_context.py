"""What the node process hands to a role, and what both roles make of it alike."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.clock import Clock
from common.config.node import NodeConfig
from common.node.memory_plan import Capacity
from common.plugins import load_policy
from common.scheduling.in_batch_prefix_caching import SharingLimits, sharing_limits_from
from common.scheduling.new_token_ratio import RatioConstants, constants_from
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.factory import make_order


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role is built of.

    Attributes:
        pool: the KV pool, which is also the ``PageStore`` of the transfer plane.
        capacity: slots, pages and chunk size that the configuration and this machine come to.
        digest: of the model; nodes that differ in it cannot share KV.
        incarnation: of this start of this process.
        environ: variables that are read beside the configuration.
    """

    config: NodeConfig
    capacity: Capacity
    pool: Any
    books: PageAllocator
    cache: RadixCache
    clock: Clock
    digest: str
    incarnation: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def constants(self) -> RatioConstants:
        """Raises ConfigError: a variable is no such number."""
        return constants_from(self.environ)

    @property
    def sharing(self) -> SharingLimits:
        """Raises ConfigError: a variable is no such number."""
        return sharing_limits_from(self.environ)

    def order(self) -> RequestOrdering:
        """The order of the role's queue. Raises ConfigError: a policy of the user's own cannot be made."""
        own_policy = load_policy(self.config.schedule_policy)
        return make_order(
            self.config, self.cache, own_policy=own_policy, sharing=self.sharing, constants=self.constants
        )


def cache_for(config: NodeConfig, books: PageAllocator) -> RadixCache:
    """The radix cache over these books, as the configuration wants it."""
    return RadixCache(
        books,
        config.page_size,
        is_enabled=not config.disable_radix_cache,
        eviction=config.radix_eviction_policy,
    )
