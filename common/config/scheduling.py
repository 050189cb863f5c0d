"""The options of scheduling, which the gateway and every node know alike, and which combinations cannot be."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from common.config.options import option
from common.errors import ConfigError

#: Values of --schedule-policy; see common/scheduling/policies/factory.py.
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "short-first", "hrrn", "edf", "fair", "adaptive")
PREEMPTION_THRESHOLD = 10
#: One's own: MODULE:NAME.
_OWN = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"


@dataclass(frozen=True, slots=True)
class PriorityRules:
    """How priorities count.

    Attributes:
        is_enabled: they do at all; otherwise everybody is equal.
        preemption_threshold: a waiting request takes the place of one that runs only if its priority is higher by more.
        aging_per_s: what a second of waiting adds to a priority. One that stands before another by then cannot lose
            its place to it any more, whatever their priorities.
        class_weights: by name of the class, in the order in which they were given; empty for no classes.
        default_class: of requests that name none.
    """

    is_enabled: bool = False
    preemption_threshold: int = PREEMPTION_THRESHOLD
    aging_per_s: float = 0.0
    class_weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    default_class: str = ""


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """Part of every configuration."""

    schedule_policy: str = option(
        "fcfs",
        "Order of waiting requests: fcfs by arrival, lpm by the longest cached prefix, dfs-weight by branches of the "
        "cache, lof by the longest allowed output, random, short-first by the tokens to be computed and expected, hrrn "
        "by waiting time over those to be computed, edf by deadline, fair by what each tenant was served, adaptive as "
        "measured; or MODULE:NAME, a class of one's own. With priorities on it decides among equal ones.",
        metavar="|".join(POLICIES) + "|MODULE:NAME",
    )
    lpm_degrade_threshold: int = option(128, "A longer queue makes lpm fall back to fcfs.", minimum=1)
    schedule_seed: int = option(0, "Seed of --schedule-policy random.")
    enable_priority_scheduling: bool = option(
        False, "Serve requests by their priority, and by --schedule-policy among equals."
    )
    default_priority_value: int | None = option(
        None, "Priority of requests that name none; otherwise they come after all others."
    )
    schedule_low_priority_values_first: bool = option(
        False, "Lower priority values are more urgent; otherwise higher ones are."
    )
    priority_scheduling_preemption_threshold: int = option(
        PREEMPTION_THRESHOLD,
        "A waiting request takes the place of a running one only if its priority is higher by more than this.",
        minimum=0,
    )
    abort_on_priority_when_disabled: bool = option(
        False, "Refuse requests that name a priority while --enable-priority-scheduling is off."
    )
    priority_aging_per_second: float = option(
        0.0, "What a second of waiting adds to a priority, so that nobody waits for ever.", minimum=0.0
    )
    priority_function: str | None = option(
        None,
        "A function of one's own, asked once for every request: it takes common.plugins.RequestFacts and returns a "
        "priority (higher is more urgent), or None to leave the request's own.",
        metavar="MODULE:NAME",
    )
    priority_classes: tuple[str, ...] = option(
        (),
        "Classes of requests and their weights, as in high:8,normal:3,low:1: while several have requests waiting, "
        "each is served tokens in proportion to its weight. Priorities and --schedule-policy order inside a class.",
        metavar="NAME:WEIGHT,...",
    )
    default_priority_class: str | None = option(
        None, "Class of requests that name none; otherwise the one with the least weight."
    )
    tenant_shares: tuple[str, ...] = option(
        (),
        "Tenants and their shares for --schedule-policy fair, as in search:4,batch:1; a tenant not named here has 1.",
        metavar="NAME:WEIGHT,...",
    )

    @property
    def class_weights(self) -> dict[str, float]:
        """Weights of --priority-classes by name, in their order; empty for no classes."""
        return parse_weights(self.priority_classes, "--priority-classes")

    @property
    def tenant_weights(self) -> dict[str, float]:
        """Weights of --tenant-shares by tenant."""
        return parse_weights(self.tenant_shares, "--tenant-shares")

    @property
    def default_class(self) -> str:
        """The class of requests that name none; empty without classes."""
        weights = self.class_weights
        return self.default_priority_class or min(weights, key=lambda name: weights[name], default="")

    max_skip_ahead: int = option(
        8, "Smaller requests that may pass one for which memory is short; 0 keeps the order strictly.", minimum=0
    )

    retraction_policy: Literal["auto", "shortest-output", "priority"] = option(
        "auto",
        "Who gives way when a decode node runs out of pages: shortest-output loses the least work, whatever its "
        "priority, and priority takes the least urgent; auto is priority with --enable-priority-scheduling.",
    )
    num_reserved_decode_tokens: int | None = option(
        None,
        "Room that a decode node keeps for the output of each request; otherwise what it is expected to need.",
        minimum=0,
    )
    resume_prefill_threshold: int | None = option(
        1024,
        "A retracted request that lacks more tokens than this is computed again by its prefill node, others by the "
        "decode node itself; none: all of them.",
        minimum=0,
    )

    @property
    def is_retracted_by_priority(self) -> bool:
        """Whether the least urgent gives way when pages run short."""
        return self.retraction_policy == "priority" or (
            self.retraction_policy == "auto" and self.enable_priority_scheduling
        )

    @property
    def priority_rules(self) -> PriorityRules:
        return PriorityRules(
            is_enabled=self.enable_priority_scheduling,
            preemption_threshold=self.priority_scheduling_preemption_threshold,
            aging_per_s=self.priority_aging_per_second,
            class_weights=self.class_weights,
            default_class=self.default_class,
        )


def parse_weights(texts: Iterable[str], flag: str) -> dict[str, float]:
    """``NAME:WEIGHT`` texts as weights by name, in their order.

    Raises:
        ConfigError: names the flag.
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


def check_scheduling(config: Any) -> None:
    """Raises ConfigError: names the flag."""
    check_policy(config.schedule_policy)
    _check_policy_options(config)
    _check_classes(config)
    _check_priorities(config)


def _check_policy_options(config: Any) -> None:
    """What belongs to one policy is refused with another."""
    for name, default, policy in (
        ("lpm_degrade_threshold", 128, "lpm"),
        ("schedule_seed", 0, "random"),
        ("tenant_shares", (), "fair"),
    ):
        if getattr(config, name) != default and config.schedule_policy != policy:
            raise ConfigError(f"{_flag(name)} has no effect without --schedule-policy {policy}; add that")
    config.tenant_weights  # noqa: B018  # refuses what is no weight


def _check_priorities(config: Any) -> None:
    function = config.priority_function
    if function is not None and not is_own(function):
        raise ConfigError(f"--priority-function must be MODULE:NAME, not {function!r}")
    if not config.enable_priority_scheduling:
        for name in (
            "default_priority_value",
            "schedule_low_priority_values_first",
            "priority_aging_per_second",
            "priority_function",
        ):
            if getattr(config, name) not in (None, False, 0.0):
                raise ConfigError(f"{_flag(name)} has no effect without --enable-priority-scheduling; add that")
        if config.priority_scheduling_preemption_threshold != PREEMPTION_THRESHOLD:
            flag = _flag("priority_scheduling_preemption_threshold")
            raise ConfigError(f"{flag} has no effect without --enable-priority-scheduling; add that")
        if config.retraction_policy == "priority":
            raise ConfigError("--retraction-policy priority needs --enable-priority-scheduling")
    elif config.abort_on_priority_when_disabled:
        raise ConfigError("--abort-on-priority-when-disabled has no effect with --enable-priority-scheduling")
    elif config.priority_aging_per_second:
        _check_aging(config)


def _check_aging(config: Any) -> None:
    if config.default_priority_value is None:
        raise ConfigError(
            "--priority-aging-per-second needs --default-priority-value: requests that name none would otherwise "
            "stand so low that no waiting lifts them"
        )
    if config.schedule_policy != "fcfs":
        raise ConfigError(
            "--priority-aging-per-second orders requests of equal priority by arrival, so --schedule-policy "
            f"{config.schedule_policy} would have no effect; leave out one of them"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_classes(config: Any) -> None:
    weights, default = config.class_weights, config.default_priority_class
    if default is not None and default not in weights:
        known = ", ".join(weights) or "none; add --priority-classes"
        raise ConfigError(f"--default-priority-class {default} is not one of the classes (which are {known})")


def check_policy(name: str) -> None:
    """Raises ConfigError: the policy is not known."""
    if name not in POLICIES and not is_own(name):
        raise ConfigError(
            f"--schedule-policy {name} is unknown; use one of {', '.join(POLICIES)}, or MODULE:NAME for your own"
        )


def is_own(name: str) -> bool:
    """Whether this is the MODULE:NAME of something that the user wrote."""
    return re.fullmatch(_OWN, name) is not None
