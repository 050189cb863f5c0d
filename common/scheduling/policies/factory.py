"""Makes the policy that ``--schedule-policy`` names."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from common.cache.radix_cache import RadixCache
from common.config.scheduling import SchedulingOptions
from common.scheduling.in_batch_prefix_caching import InBatchPrefixLimits
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.base import (
    EarliestDeadlineFirst,
    FirstComeFirstServed,
    HighestResponseRatioNext,
    LongestOutputFirst,
    LongestPrefixMatch,
    Policy,
    ShortestFirst,
    Shuffled,
)
from common.scheduling.policies.dfs_weight import DepthFirstByWeight
from common.scheduling.policies.fair import Fair


class PolicySettings(NamedTuple):
    options: SchedulingOptions
    page_size: int  # of the node's cache; 0 without a cache
    sharing: InBatchPrefixLimits  # which requests share enough of a prefix, for ``lpm``


#: By name; ``common.config.scheduling.POLICIES`` lists the same names.
_POLICIES: Mapping[str, Callable[[PolicySettings], Policy]] = {
    "fcfs": lambda settings: FirstComeFirstServed(),
    "lpm": lambda settings: LongestPrefixMatch(settings.page_size, settings.sharing),
    "dfs-weight": lambda settings: DepthFirstByWeight(),
    "lof": lambda settings: LongestOutputFirst(),
    "random": lambda settings: Shuffled(settings.options.schedule_seed),
    "short-first": lambda settings: ShortestFirst(),
    "hrrn": lambda settings: HighestResponseRatioNext(),
    "edf": lambda settings: EarliestDeadlineFirst(),
    "fair": lambda settings: Fair(settings.options.tenant_weights),
}
#: Policies that order by cached prefixes. Without a cache (``--disable-radix-cache``, or in the gateway) they are
#: ``fcfs``.
NEED_CACHE = ("lpm", "dfs-weight")


def make_ordering(
    options: SchedulingOptions,
    cache: RadixCache | None = None,
    *,
    own_policy: Policy | None = None,
    sharing: InBatchPrefixLimits | None = None,
) -> RequestOrdering:
    """The ordering that the options ask for.

    Args:
        cache: of this node; None in the gateway.
        own_policy: a user's policy, loaded by ``plugins.load_policy``; it replaces ``--schedule-policy``.
    """
    name = options.schedule_policy
    policy = own_policy or make_policy(name, cache, options=options, sharing=sharing)
    return RequestOrdering(policy, options.priority_rules)


def make_policy(
    name: str,
    cache: RadixCache | None = None,
    *,
    options: SchedulingOptions | None = None,
    sharing: InBatchPrefixLimits | None = None,
) -> Policy:
    """The policy of this name for a node with this cache; arguments as for ``make_ordering``."""
    page_size = cache.page_size if cache is not None and cache.is_enabled else 0
    settings = PolicySettings(options or SchedulingOptions(), page_size, sharing or InBatchPrefixLimits())
    return _POLICIES["fcfs" if name in NEED_CACHE and not page_size else name](settings)
