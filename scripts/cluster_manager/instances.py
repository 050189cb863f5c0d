"""One instance in Ray: its placement group, its actor, and what it has reported."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
    validate_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from common.errors import ConfigError
from scripts.cluster_manager.command_line import ProcessSpec
from scripts.cluster_manager.config import ROLES, ClusterConfig, Group
from scripts.cluster_manager.decisions import Instance, Phase
from scripts.cluster_manager.process_actor import ProcessActor, Report
from scripts.cluster_manager.state import NAMESPACE, InstanceRecord

#: Seconds in which Ray may find room on one set of hosts, and on the last set, after which the first is tried again.
CHOICE_S, ROUND_S = 5.0, 60.0
#: Seconds in which an actor must answer for the first time: Ray starts a Python process for it.
FIRST_ANSWER_S = 120.0
NODE_ID = "ray.io/node-id"


def check_with_ray(config: ClusterConfig) -> None:
    """Raises ConfigError: Ray would refuse the labels or the amounts of a group."""
    for role in ROLES:
        group = config.group(role)
        try:
            validate_placement_group([group.bundle], bundle_label_selector=[group.labels])
        except ValueError as error:
            raise ConfigError(f"{role}.labels: {_brief(error)}") from None
        try:
            _actor_class(group)
        except ValueError as error:
            raise ConfigError(f"{role}: Ray refuses what a process reserves: {_brief(error)}") from None


def _actor_class(group: Group, **where: Any) -> Any:
    """The class of the actors of a group, with what each takes of its placement group."""
    return ray.remote(ProcessActor).options(
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=group.cpus,
        num_gpus=group.gpus,
        memory=int(group.memory_gb * 1e9) or None,
        resources=group.resources or None,
        max_restarts=0,
        max_concurrency=32,
        **where,
    )


@dataclass(slots=True)
class Live:
    """An instance, from its record until it is discarded. Every call may wait for Ray.

    Attributes:
        spec, group: what it runs and what it reserves.
        silent_since: the instant of the first question since its last answer; None once all are answered.
        problem: why it is not placed, or has failed; empty otherwise.
        has_been_ready: at any time.
    """

    cluster: str
    record: InstanceRecord
    spec: ProcessSpec
    group: Group
    lost_after_s: float
    phase: Phase
    since: float = field(default_factory=time.monotonic)
    host: str = ""
    report: Report | None = None
    silent_since: float | None = None
    problem: str = ""
    has_been_ready: bool = False
    _choices: list[tuple[str, ...] | None] = field(default_factory=list)
    _tried: int = 0
    _tried_at: float = 0.0
    _placement: PlacementGroup | None = None
    _actor: Any = None
    _question: Any = None
    _stop_before: float = 0.0

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def full_name(self) -> str:
        """The name of its actor and of its placement group."""
        return f"{self.cluster}/{self.name}"

    def instance(self, now: float) -> Instance:
        """The instance as decisions see it."""
        record = self.record
        return Instance(
            record.name,
            record.role,
            record.number,
            record.revision,
            self.phase,
            self.since,
            self.host,
            is_silent=self.is_silent(now),
        )

    def is_silent(self, now: float) -> bool:
        limit_s = self.lost_after_s if self.report else max(self.lost_after_s, FIRST_ANSWER_S)
        return self.silent_since is not None and now - self.silent_since > limit_s

    def enter(self, phase: Phase, problem: str = "") -> None:
        if phase is not self.phase:
            self.phase, self.since = phase, time.monotonic()
            self.has_been_ready |= phase is Phase.READY
        self.problem = problem

    # ---- placing -----------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Find again what an earlier supervisor has started; it is gone if it had no actor yet."""
        with contextlib.suppress(ValueError):
            self._placement = get_placement_group(self.full_name)
        try:
            self._actor = ray.get_actor(self.full_name, namespace=NAMESPACE)
        except ValueError:
            self.enter(Phase.GONE, "the supervisor was lost before it was placed")
            return
        if self._placement is not None:
            self.host = _host_of(self._placement)
        if self.record.is_stopping:
            self.stop()
        else:
            self.enter(Phase.STARTING)

    def place(self, choices: list[tuple[str, ...] | None], addresses: Mapping[str, str], now: float) -> None:
        """Go on with placing. The instance is gone if Ray refuses it.

        Args:
            choices: sets of hosts to try in turn, by their ids; None stands for all.
            addresses: of the hosts that live.
        """
        try:
            self._place(choices, addresses, now)
        except ValueError as error:
            self.enter(Phase.GONE, f"Ray refuses it: {_brief(error)}")

    def _place(self, choices: list[tuple[str, ...] | None], addresses: Mapping[str, str], now: float) -> None:
        if self._placement is not None and _is_created(self._placement):
            self.host = _host_of(self._placement)
            is_allowed = any(hosts is None or self.host in hosts for hosts in choices)
            if self.host in addresses and is_allowed:
                self._start_actor(addresses[self.host])
                return
            self._begin_again()  # it was lost, or another process has taken it meanwhile
        if choices != self._choices:
            self._choices = choices
            self._begin_again()
        if not choices:
            self.problem = "no host may be used"
            return
        is_last = self._tried == len(choices) - 1
        if self._placement is not None and now - self._tried_at > (ROUND_S if is_last else CHOICE_S):
            tried = self._tried
            self._begin_again()
            self._tried = (tried + 1) % len(choices)
        if self._placement is None:
            self._reserve(choices[self._tried], now)
        elif is_last and now - self._tried_at > CHOICE_S:
            self.problem = f"no host has room for {_in_words(self.group)}"

    def _begin_again(self) -> None:
        self.host, self._tried = "", 0
        self._release()

    def _reserve(self, hosts: tuple[str, ...] | None, now: float) -> None:
        selector = dict(self.group.labels)
        if hosts is not None:
            selector[NODE_ID] = f"in({','.join(hosts)})"
        self._placement = placement_group(
            [self.group.bundle],
            strategy="STRICT_PACK",
            name=self.full_name,
            lifetime="detached",
            bundle_label_selector=[selector] if selector else None,
        )
        self._tried_at = now

    def _start_actor(self, address: str) -> None:
        assert self._placement is not None
        actor_class = _actor_class(
            self.group,
            name=self.full_name,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, 0),
        )
        self._actor = actor_class.remote(msgspec.json.encode(self.spec), address)
        self.enter(Phase.STARTING)

    # ---- its actor ---------------------------------------------------------------------------------------------------

    def ask(self, gateways: Sequence[str], now: float) -> Any:
        """The pending call of the actor's ``report``, made now if none is pending; None without an actor."""
        if self._actor is None or self.phase is Phase.GONE:
            return None
        if self._question is None:
            self._question = self._actor.report.remote(gateways)
            if self.silent_since is None:
                self.silent_since = now
        return self._question

    def take_answer(self, *, has_serving_gateway: bool) -> None:
        """Read the result of the pending call, which has arrived.

        A gateway without nodes counts as ready if none has had nodes lately. Otherwise it does not: it would refuse
        requests that the others serve.
        """
        question, self._question = self._question, None
        try:
            self.report = msgspec.json.decode(ray.get(question), type=Report)
        except ActorUnavailableError:
            return  # it is asked again
        except RayError as error:
            self.enter(Phase.GONE, "" if self.phase is Phase.STOPPING else f"lost: {_brief(error)}")
            return
        self.silent_since = None
        if self.report.has_ended:
            self.enter(Phase.GONE, self.report.failure)
        elif self.phase in (Phase.STARTING, Phase.READY):
            is_idle = self.record.role == "gateway" and self.report.is_healthy and not has_serving_gateway
            self.enter(Phase.READY if self.report.is_ready or is_idle else Phase.STARTING)

    def stop(self) -> None:
        """Drain it. One that does not end in time, or cannot be reached, is gone then."""
        self._stop_before = time.monotonic() + self.record.drain_timeout_s + 10.0
        self.record = msgspec.structs.replace(self.record, is_stopping=True)
        if self._actor is None:
            self.enter(Phase.GONE)
            return
        self.enter(Phase.STOPPING)
        self._actor.stop.remote()

    def check_stop(self, now: float) -> None:
        if self.phase is Phase.STOPPING and now > self._stop_before:
            drain_s = self.record.drain_timeout_s
            self.enter(Phase.GONE, f"it did not stop within its drain-timeout of {drain_s:g} s, and was killed")

    def discard(self) -> None:
        """End its actor, and with it its process, and free what it has reserved."""
        if self._actor is not None:
            with contextlib.suppress(RayError):
                ray.kill(self._actor)
        self._release()

    def _release(self) -> None:
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None


def _is_created(placement: PlacementGroup) -> bool:
    return bool(placement_group_table(placement).get("state") == "CREATED")


def _host_of(placement: PlacementGroup) -> str:
    hosts = placement_group_table(placement).get("bundles_to_node_id") or {}
    return str(next(iter(hosts.values()), ""))


def _in_words(group: Group) -> str:
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in group.bundle.items())
    labels = "".join(f", {name}={value}" for name, value in group.labels.items())
    return amounts + labels


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    is_traceback = isinstance(error, RayActorError) and error.actor_init_failed
    return lines[-1 if is_traceback else 0][:200]
