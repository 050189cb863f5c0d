"""Decides which instances of a cluster start and stop. Pure.

An *instance* is one process, gateway or node, at one place. It is never moved: one that is lost is discarded, and
another one is started, under a name of its own. So a host that was only cut off can come back without two nodes of one
name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from scripts.cluster_manager.config import ROLES, Role

FIRST_DELAY_S, LAST_DELAY_S, STEADY_S = 1.0, 300.0, 60.0


class Phase(Enum):
    PLACING = "placing"  # Ray looks for a host
    STARTING = "starting"  # the process loads, or waits for a gateway
    READY = "ready"
    STOPPING = "stopping"  # it drains
    GONE = "gone"  # stopped, lost, or failed for good


@dataclass(frozen=True, slots=True)
class Instance:
    """One process of the cluster.

    Attributes:
        number: of the instances of this role, in the order of their starts.
        since: the instant at which the phase began.
        host: Ray's id of its host; empty while it has none.
        is_silent: it has not answered for ``lost_after_s``.
    """

    name: str
    role: Role
    number: int
    revision: int
    phase: Phase
    since: float
    host: str = ""
    is_silent: bool = False

    @property
    def is_staying(self) -> bool:
        return self.phase in (Phase.PLACING, Phase.STARTING, Phase.READY)


@dataclass(frozen=True, slots=True)
class Desired:
    """The cluster as it should be.

    Attributes:
        revision: of the configuration; an upgrade raises it.
        near: groups that are placed on the hosts of another group, by role.
        retry_at: instants before which no instance of a role is started, because some have failed.
        surge_wait_s: how long an upgrade, or a group near another, waits until that one has room.
    """

    counts: Mapping[Role, int]
    revision: int
    near: Mapping[Role, Role] = field(default_factory=dict)
    retry_at: Mapping[Role, float] = field(default_factory=dict)
    surge_wait_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Start:
    role: Role


@dataclass(frozen=True, slots=True)
class Stop:
    """Drain an instance, and stop it."""

    name: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Release what is left of an instance that is gone."""

    name: str


Action = Start | Stop | Discard


def plan(desired: Desired, instances: Sequence[Instance], now: float) -> list[Action]:
    """The actions that are due. It may be called at any time, and repeats nothing that is under way."""
    actions: list[Action] = [Discard(found.name) for found in instances if found.phase is Phase.GONE]
    # One without a host serves nothing, and may wait for what the upgrade corrects, such as its labels.
    outdated = [found for found in instances if found.phase is Phase.PLACING and found.revision < desired.revision]
    actions += [Stop(found.name) for found in outdated]
    staying = [found for found in instances if found.is_staying and found not in outdated]
    upgraded = _role_to_upgrade(desired, staying)
    for role in ROLES:
        mine = [found for found in staying if found.role == role]
        if role == upgraded:
            is_draining = any(found.phase is Phase.STOPPING for found in instances)
            actions += _upgrade_step(desired, mine, staying, is_draining=is_draining, now=now)
        else:
            actions += _fill_or_shrink(desired, role, mine, staying, now)
    return actions


def _role_to_upgrade(desired: Desired, staying: Sequence[Instance]) -> Role | None:
    """The first role that has instances of an older revision, once all of the roles before it are ready."""
    for role in ROLES:
        mine = [found for found in staying if found.role == role and not found.is_silent]
        if desired.counts[role] > 0 and any(found.revision < desired.revision for found in mine):
            return role
        if len(mine) < desired.counts[role] or any(found.phase is not Phase.READY for found in mine):
            return None
    return None


def _lacks_room(desired: Desired, found: Instance, now: float) -> bool:
    """Whether an instance has waited for room as long as an upgrade waits."""
    return found.phase is Phase.PLACING and now - found.since >= desired.surge_wait_s


def _fill_or_shrink(
    desired: Desired, role: Role, mine: Sequence[Instance], staying: Sequence[Instance], now: float
) -> list[Action]:
    count = desired.counts[role]
    num_missing = count - sum(not found.is_silent for found in mine)
    if num_missing > 0 and _may_start(desired, role, staying, now):
        return [Start(role)] * num_missing
    if len({found.revision < desired.revision for found in mine}) == 2:
        count += 1  # its upgrade goes on once the roles before it are ready again
    return [Stop(found.name) for found in _victims(desired, mine)[: max(0, len(mine) - count)]]


def _may_start(desired: Desired, role: Role, staying: Sequence[Instance], now: float) -> bool:
    if now < desired.retry_at.get(role, 0.0):
        return False
    near = desired.near.get(role)
    return near is None or not _is_awaited(desired, near, staying, now)


def _is_awaited(desired: Desired, near: Role, staying: Sequence[Instance], now: float) -> bool:
    """Whether instances that should be near a group wait, since that group will soon have a host.

    They do not wait for one that fails, or for which there has been no room for ``surge_wait_s``.
    """
    others = [found for found in staying if found.role == near]
    if not others:
        return desired.counts[near] > 0 and now >= desired.retry_at.get(near, 0.0)
    has_host = any(found.host for found in others)
    return not has_host and any(now - found.since < desired.surge_wait_s for found in others)


def _victims(desired: Desired, mine: Sequence[Instance]) -> list[Instance]:
    """Instances in the order in which they are stopped: those that serve least first, then the newest."""
    return sorted(
        mine,
        key=lambda found: (
            not found.is_silent,
            found.phase is Phase.READY,
            found.revision >= desired.revision,
            -found.number,
        ),
    )


def _upgrade_step(
    desired: Desired, mine: Sequence[Instance], staying: Sequence[Instance], *, is_draining: bool, now: float
) -> list[Action]:
    """One step of a rolling upgrade of a group: one more of the new revision, and when it is ready, one old fewer.

    Where there is no room for one more, an old one is stopped first; but no ready one while another group waits for
    room, since that group might get it.
    """
    role, count = mine[0].role, desired.counts[mine[0].role]
    usable = [found for found in mine if not found.is_silent]
    if not count <= len(usable) <= count + 1:
        return _fill_or_shrink(desired, role, mine, staying, now)
    if is_draining:
        return []
    old = [found for found in _victims(desired, mine) if found.revision < desired.revision]
    pending = [found for found in usable if found not in old and found.phase is not Phase.READY]
    if not all(_lacks_room(desired, found, now) for found in pending):
        return []
    if len(usable) > count:
        others_wait = any(found.phase is Phase.PLACING and found.role != role for found in staying)
        return [] if pending and others_wait and old[0].phase is Phase.READY else [Stop(old[0].name)]
    return [Start(role)] if _may_start(desired, role, staying, now) else []


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of a role in a row.

    Attributes:
        count: since an instance of the role was last ready for ``STEADY_S``.
    """

    count: int = 0
    failed_at: float = 0.0

    def failed(self, now: float) -> "Failures":
        """Count a failure. Those that come before another start was possible, as when a host is lost, are one."""
        return Failures(self.count + 1, now) if now >= self.retry_at else self

    def seen(self, instances: Iterable[Instance], now: float) -> "Failures":
        """Forget the failures once an instance has been ready long enough, and has become so after the last one."""
        is_steady = any(
            found.phase is Phase.READY and now - found.since >= STEADY_S and found.since > self.failed_at
            for found in instances
        )
        return replace(self, count=0) if is_steady else self

    @property
    def retry_at(self) -> float:
        """The instant from which an instance of the role may start again."""
        if not self.count:
            return 0.0
        return self.failed_at + min(FIRST_DELAY_S * 2.0 ** (min(self.count, 20) - 1), LAST_DELAY_S)
