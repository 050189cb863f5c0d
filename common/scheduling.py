"""The options of scheduling, which the gateway and every node know alike, and which combinations cannot be."""

import re
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.options import option

#: Values of --schedule-policy; see common/policy.py.
POLICIES = ("fcfs", "lpm")
POLICIES_NOT_YET = ("dfs-weight", "lof", "random", "short-first", "hrrn", "edf", "fair", "adaptive")


@dataclass(frozen=True, slots=True)
class PriorityRules:
    """How priorities count.

    Attributes:
        is_enabled: they do at all; otherwise everybody is equal.
        preemption_threshold: a waiting request takes the place of one that runs only if its priority is higher by more.
        aging_per_s: what a second of waiting adds to a priority, in the queue; preemption looks at priorities alone,
            since two requests would otherwise take each other's place in turn.
    """

    is_enabled: bool = False
    preemption_threshold: int = 10
    aging_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """Part of every configuration."""

    schedule_policy: str = option(
        "fcfs", "Order of waiting requests: fcfs by arrival, lpm by the longest cached prefix.", metavar="fcfs|lpm"
    )
    lpm_degrade_threshold: int = option(128, "A longer queue makes lpm fall back to fcfs.", minimum=1)
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
        10,
        "A waiting request takes the place of a running one only if its priority is higher by more than this.",
        minimum=0,
    )
    abort_on_priority_when_disabled: bool = option(
        False, "Refuse requests that name a priority while --enable-priority-scheduling is off."
    )
    priority_aging_per_second: float = option(
        0.0, "What a second of waiting adds to a priority, so that nobody waits for ever.", minimum=0.0
    )

    max_skip_ahead: int = option(
        8, "Smaller requests that may pass one for which memory is short; 0 keeps the order strictly.", minimum=0
    )

    @property
    def priority_rules(self) -> PriorityRules:
        return PriorityRules(
            is_enabled=self.enable_priority_scheduling,
            preemption_threshold=self.priority_scheduling_preemption_threshold,
            aging_per_s=self.priority_aging_per_second,
        )


def check_scheduling(config: Any) -> None:
    """Raises ConfigError: names the flag."""
    check_policy(config.schedule_policy)
    if not config.enable_priority_scheduling:
        for name in ("default_priority_value", "schedule_low_priority_values_first", "priority_aging_per_second"):
            if getattr(config, name) not in (None, False, 0.0):
                flag = "--" + re.sub("_", "-", name)
                raise ConfigError(f"{flag} has no effect without --enable-priority-scheduling; add that")
    elif config.abort_on_priority_when_disabled:
        raise ConfigError("--abort-on-priority-when-disabled has no effect with --enable-priority-scheduling")
    elif config.priority_aging_per_second and config.default_priority_value is None:
        raise ConfigError(
            "--priority-aging-per-second needs --default-priority-value: requests that name none would otherwise "
            "stand so low that no waiting lifts them"
        )


def check_policy(name: str) -> None:
    """Raises ConfigError: the policy is not known."""
    if name not in POLICIES:
        state = "not available yet" if name in POLICIES_NOT_YET else "unknown"
        raise ConfigError(f"--schedule-policy {name} is {state}; use one of: {', '.join(POLICIES)}")
