"""The table of policies: choosing one is a lookup by ``--schedule-policy``."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common.cache.radix_cache import RadixCache
from common.config.scheduling import SchedulingOptions
from common.scheduling.in_batch_prefix_caching import SharingLimits
from common.scheduling.new_token_ratio import RatioConstants
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.adaptive import CHOICES, Adaptive
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


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What policies are made with.

    Attributes:
        options: of the command line.
        page_size: of the node's cache; 0 where there is none.
        sharing: who counts as having the prefix of another.
        constants: what is expected of outputs about which nothing is known.
    """

    options: SchedulingOptions = field(default_factory=SchedulingOptions)
    page_size: int = 0
    sharing: SharingLimits = field(default_factory=SharingLimits)
    constants: RatioConstants = field(default_factory=RatioConstants)


def _adaptive(settings: PolicySettings) -> Policy:
    policies = {name: _POLICIES[_with_cache(name, settings.page_size)](settings) for name in CHOICES}
    if settings.page_size:
        policies["lpm"] = _longest_prefix(settings, sys.maxsize)  # it is chosen where it is worth its time
    return Adaptive(policies)


def _longest_prefix(settings: PolicySettings, degrade_threshold: int) -> Policy:
    return LongestPrefixMatch(settings.page_size, sharing=settings.sharing, degrade_threshold=degrade_threshold)


#: By ``--schedule-policy``; ``common.config.scheduling.POLICIES`` has the same names.
_POLICIES: Mapping[str, Callable[[PolicySettings], Policy]] = {
    "fcfs": lambda settings: FirstComeFirstServed(),
    "lpm": lambda settings: _longest_prefix(settings, settings.options.lpm_degrade_threshold),
    "dfs-weight": lambda settings: DepthFirstByWeight(),
    "lof": lambda settings: LongestOutputFirst(),
    "random": lambda settings: Shuffled(settings.options.schedule_seed),
    "short-first": lambda settings: ShortestFirst(settings.constants),
    "hrrn": lambda settings: HighestResponseRatioNext(),
    "edf": lambda settings: EarliestDeadlineFirst(),
    "fair": lambda settings: Fair(settings.options.tenant_weights),
    "adaptive": _adaptive,
}
#: These order by what is cached; where nothing is, with ``--disable-radix-cache`` or in the gateway, they are ``fcfs``.
NEED_CACHE = ("lpm", "dfs-weight")


def make_order(
    options: SchedulingOptions,
    cache: RadixCache | None = None,
    *,
    own_policy: Policy | None = None,
    sharing: SharingLimits | None = None,
    constants: RatioConstants | None = None,
) -> RequestOrdering:
    """The order of a queue as the options want it.

    Args:
        cache: of this node; None in the gateway.
        own_policy: what ``plugins.load_policy`` made of a ``--schedule-policy`` of the user's own.
        sharing, constants: if not the defaults.
    """
    policy = own_policy or make_policy(
        options.schedule_policy,
        cache,
        options=options,
        sharing=sharing or SharingLimits(),
        constants=constants or RatioConstants(),
    )
    return RequestOrdering(policy, options.priority_rules)


def make_policy(
    name: str,
    cache: RadixCache | None = None,
    *,
    options: SchedulingOptions | None = None,
    sharing: SharingLimits | None = None,
    constants: RatioConstants | None = None,
) -> Policy:
    """The policy of this name, for the queue of a node with this cache."""
    page_size = cache.page_size if cache is not None and cache.is_enabled else 0
    settings = PolicySettings(
        options or SchedulingOptions(), page_size, sharing or SharingLimits(), constants or RatioConstants()
    )
    return _POLICIES[_with_cache(name, page_size)](settings)


def _with_cache(name: str, page_size: int) -> str:
    return "fcfs" if name in NEED_CACHE and not page_size else name
