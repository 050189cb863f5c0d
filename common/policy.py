"""The table of policies: choosing one is a lookup by ``--schedule-policy``."""

from collections.abc import Callable

from common.fair import Fair
from common.order import Order
from common.policies import FirstComeFirstServed, LongestPrefixMatch, Policy
from common.radix import RadixCache
from common.scheduling import SchedulingOptions

#: By ``--schedule-policy``; ``common.scheduling.POLICIES`` has the same names.
_POLICIES: dict[str, Callable[[SchedulingOptions, RadixCache | None], Policy]] = {
    "fcfs": lambda options, cache: FirstComeFirstServed(),
    "lpm": lambda options, cache: LongestPrefixMatch(_there(cache), options.lpm_degrade_threshold),
    "fair": lambda options, cache: Fair(options.tenant_weights),
}
#: These order by what is cached; where nothing is, with ``--disable-radix-cache`` or in the gateway, they are ``fcfs``.
NEED_CACHE = ("lpm",)


def make_order(options: SchedulingOptions, cache: RadixCache | None = None) -> Order:
    """The order of a queue as the options want it.

    Args:
        cache: of this node; None in the gateway.
    """
    return Order(make_policy(options.schedule_policy, cache, options=options), options.priority_rules)


def make_policy(name: str, cache: RadixCache | None = None, *, options: SchedulingOptions | None = None) -> Policy:
    """The policy of this name, over this node's cache."""
    if name in NEED_CACHE and (cache is None or not cache.is_enabled):
        name = "fcfs"
    return _POLICIES[name](options or SchedulingOptions(), cache)


def _there(cache: RadixCache | None) -> RadixCache:
    assert cache is not None
    return cache
