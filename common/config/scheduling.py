"""Options of scheduling, which gateway and nodes share."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from common.config.options import check_unset, option
from common.errors import ConfigError

#: Built-in values of --schedule-policy; see common/scheduling/policies/factory.py.
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "short-first", "hrrn", "edf", "fair")
PREEMPTION_THRESHOLD = 10
#: Largest priority of a request; the lowest is its negative.
MAX_PRIORITY = 2**31 - 1
#: MODULE:NAME of an object of the user's own.
_USER_DEFINED = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"


@dataclass(frozen=True, slots=True)
class PriorityRules:
    """The effect of priorities and priority classes.

    Attributes:
        preemption_threshold: a waiting request preempts a running one only if its priority is higher by more than this.
        preemption_cooldown_s: seconds for which a preempted request that runs again cannot be preempted.
        max_preemptions: a request is preempted no more often on one node; None for no limit.
        aging_per_s: added to a priority for each second of waiting. Once a request comes before another one, that one
            cannot preempt it any more, whatever their priorities.
        class_weights: weights by name of the class, in the order of the flag; empty without classes.
    """

    is_enabled: bool = False
    preemption_threshold: int = PREEMPTION_THRESHOLD
    preemption_cooldown_s: float = 0.0
    max_preemptions: int | None = None
    aging_per_s: float = 0.0
    class_weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    default_class: str = ""


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    schedule_policy: str = option(
        "fcfs",
        "Order of waiting requests: fcfs (by arrival), lpm (longest cached prefix), dfs-weight (subtree of the cache "
        "with the most requests), lof (longest allowed output), random, short-first (fewest tokens to compute and to "
        "expect), hrrn (waiting time over tokens to compute), edf (objective or deadline), fair (tenant with the least "
        "service); or MODULE:NAME, a class of your own. For lpm and dfs-weight the gateway, which has no cache, orders "
        "by arrival. With --enable-priority-scheduling the policy orders requests of equal priority.",
        metavar="|".join(POLICIES) + "|MODULE:NAME",
    )
    schedule_seed: int = option(0, "Seed of the random numbers of --schedule-policy random.")
    enable_priority_scheduling: bool = option(False, "Order requests by priority first, then by --schedule-policy.")
    default_priority_value: int | None = option(
        None,
        "Priority of requests that name none. Without it: such requests come after all others.",
        minimum=-MAX_PRIORITY,
        maximum=MAX_PRIORITY,
    )
    schedule_low_priority_values_first: bool = option(
        False, "Treat lower priority values as more urgent. Without it, higher values are."
    )
    priority_scheduling_preemption_threshold: int = option(
        PREEMPTION_THRESHOLD,
        "A waiting request preempts a running one only if its priority is higher by more than this.",
        minimum=0,
    )
    preemption_cooldown: float = option(
        1.0, "Seconds for which a request that was preempted and runs again cannot be preempted.", minimum=0.0
    )
    max_preemptions: int | None = option(
        8, "Maximum number of times that a node preempts one request; none: no limit.", minimum=0
    )
    priority_aging_per_second: float = option(
        0.0, "Amount added to a priority for each second of waiting, so that no request starves.", minimum=0.0
    )
    priority_function: str | None = option(
        None,
        "Your own function, called for each request, and again about every second while it waits: it takes "
        "common.plugins.RequestFacts and returns a priority (higher is more urgent), or None to keep the current one.",
        metavar="MODULE:NAME",
    )
    priority_classes: tuple[str, ...] = option(
        (),
        "Priority classes and their weights, for example high:8,normal:3,low:1. Classes with waiting requests share "
        "the tokens in proportion to their weights. Priorities and --schedule-policy order the requests of one class.",
        metavar="NAME:WEIGHT,...",
    )
    default_priority_class: str | None = option(
        None, "Class of requests that name none. Without it: the class with the lowest weight."
    )
    tenant_shares: tuple[str, ...] = option(
        (),
        "Shares of tenants for --schedule-policy fair, for example search:4,batch:1; all other tenants have 1.",
        metavar="NAME:WEIGHT,...",
    )
    max_skip_ahead: int = option(
        8, "Number of smaller requests that may overtake a request that does not fit into memory; 0: none.", minimum=0
    )

    @property
    def class_weights(self) -> dict[str, float]:
        """Weights of --priority-classes by name, in the order of the flag; empty without classes."""
        return parse_weights(self.priority_classes, "--priority-classes")

    @property
    def tenant_weights(self) -> dict[str, float]:
        return parse_weights(self.tenant_shares, "--tenant-shares")

    @property
    def default_class(self) -> str:
        """Class of requests that name none; empty without classes."""
        weights = self.class_weights
        return self.default_priority_class or min(weights, key=lambda name: weights[name], default="")

    @property
    def priority_rules(self) -> PriorityRules:
        return PriorityRules(
            is_enabled=self.enable_priority_scheduling,
            preemption_threshold=self.priority_scheduling_preemption_threshold,
            preemption_cooldown_s=self.preemption_cooldown,
            max_preemptions=self.max_preemptions,
            aging_per_s=self.priority_aging_per_second,
            class_weights=self.class_weights,
            default_class=self.default_class,
        )


def parse_weights(texts: Iterable[str], flag: str) -> dict[str, float]:
    """Parse ``NAME:WEIGHT`` strings; return weights by name, in order.

    Raises:
        ConfigError: a string is not of this form, or a name occurs twice; the message names ``flag``.
    """
    weights: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight < math.inf:
            raise ConfigError(f"{flag} must be NAME:WEIGHT with a weight above 0, not {text!r}")
        if name in weights:
            raise ConfigError(f"{flag} names {name} twice")
        weights[name] = weight
    return weights


def check_scheduling(config: SchedulingOptions) -> None:
    check_policy(config.schedule_policy)
    _check_policy_options(config)
    _check_classes(config)
    _check_priorities(config)


def _check_policy_options(config: SchedulingOptions) -> None:
    for name, policy in (("schedule_seed", "random"), ("tenant_shares", "fair")):
        if config.schedule_policy != policy:
            check_unset(config, (name,), f"has no effect without --schedule-policy {policy}; add that")
    config.tenant_weights  # noqa: B018  # raises if a weight is invalid


def _check_priorities(config: SchedulingOptions) -> None:
    function = config.priority_function
    if function is not None and not is_user_defined(function):
        raise ConfigError(f"--priority-function must be MODULE:NAME, not {function!r}")
    if not config.enable_priority_scheduling:
        names = (
            *("default_priority_value", "schedule_low_priority_values_first", "priority_aging_per_second"),
            *("priority_function", "priority_scheduling_preemption_threshold"),
            *("preemption_cooldown", "max_preemptions"),
        )
        check_unset(config, names, "has no effect without --enable-priority-scheduling; add that")
    elif config.priority_aging_per_second and config.default_priority_value is None:
        raise ConfigError(
            "--priority-aging-per-second needs --default-priority-value: without it, waiting could never lift requests "
            "without a priority above others"
        )


def _check_classes(config: SchedulingOptions) -> None:
    weights, default = config.class_weights, config.default_priority_class
    if default is not None and default not in weights:
        known = ", ".join(weights) or "none; add --priority-classes"
        raise ConfigError(f"--default-priority-class {default} is not one of the classes (which are {known})")


def check_policy(name: str) -> None:
    if name not in POLICIES and not is_user_defined(name):
        raise ConfigError(
            f"--schedule-policy {name} is unknown; use one of {', '.join(POLICIES)}, or MODULE:NAME for your own"
        )


def is_user_defined(name: str) -> bool:
    return re.fullmatch(_USER_DEFINED, name) is not None
