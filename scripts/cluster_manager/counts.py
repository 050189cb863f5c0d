"""Works out how many instances each group should have after a command. Pure."""

from collections.abc import Mapping

from common.errors import ConfigError
from scripts.cluster_manager.config import ROLES, ClusterConfig, Role, check_counts

Counts = dict[Role, int]


def counts_of(config: ClusterConfig) -> Counts:
    return {role: config.group(role).count for role in ROLES}


def scaled(config: ClusterConfig, counts: Counts, changes: Mapping[Role, int], *, is_autoscaling: bool) -> Counts:
    """The counts after ``cluster scale``. Raises ConfigError: a cluster cannot have these."""
    if is_autoscaling and not any(config.group(role).autoscale for role in ROLES):
        raise ConfigError(
            "--autoscale needs bounds: add prefill.autoscale or decode.autoscale to the file, and upgrade"
        )
    for role, count in changes.items():
        bounds = config.group(role).autoscale
        if is_autoscaling and bounds is not None and not bounds.min <= count <= bounds.max:
            raise ConfigError(f"--{role} {count} is not within {role}.autoscale ({bounds.min} to {bounds.max})")
    after = {**counts, **changes}
    check_counts(config, after, "--{role}")
    return after


def upgraded(old: ClusterConfig, new: ClusterConfig, counts: Counts, *, is_autoscaling: bool) -> Counts:
    """The counts after ``cluster upgrade`` with another file. Raises ConfigError: a cluster cannot have these.

    What was changed by command or by advice stays, unless the file has changed, too.
    """
    after = dict(counts)
    for role in ROLES:
        bounds = new.group(role).autoscale
        if is_autoscaling and bounds is not None:
            after[role] = min(max(counts[role], bounds.min), bounds.max)
        elif new.group(role).count != old.group(role).count:
            after[role] = new.group(role).count
    check_counts(new, after, "{role}.count")
    return after
