"""The detached actor that keeps a cluster as it should be: it observes, has ``decisions`` decide, and performs.

One thread does this, again and again. The calls of the command line change what is desired, or read what was seen last.
When this actor is lost, Ray starts it elsewhere; it finds its state in Ray's store and its instances by their names.
"""

import contextlib
import math
import os
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from common.errors import ConfigError
from scripts.cluster_manager import state as store
from scripts.cluster_manager.autoscaling import Autoscaler
from scripts.cluster_manager.command_line import ProcessSpec, drain_timeout_s, fixed_ports
from scripts.cluster_manager.config import ROLES, ClusterConfig, Role, check
from scripts.cluster_manager.counts import counts_of, scaled, upgraded
from scripts.cluster_manager.decisions import Action, Desired, Failures, Phase, Start, Stop, plan
from scripts.cluster_manager.instances import Live, check_with_ray
from scripts.cluster_manager.placement import choices
from scripts.cluster_manager.recent_lines import RecentLines
from scripts.cluster_manager.state import NAMESPACE, ClusterState, InstanceRecord
from scripts.cluster_manager.status import Row, Status

TICK_S, ANSWER_S, RETRY_S = 0.5, 1.0, 2.0
#: Gateways without nodes count as ready once none has had nodes for so long: longer than a slow answer, or a gateway's
#: restart, takes.
UNSERVED_S = 60.0
MAX_EVENTS = 1_000


class ClusterSupervisor:
    """An actor of Ray with several threads.

    Args:
        config: a ``ClusterConfig`` as JSON, which is used only if the store has no state of this cluster.
    """

    def __init__(self, cluster: str, config: bytes, is_autoscaling: bool) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()  # of the state and of what is shown
        self._events = RecentLines(MAX_EVENTS)
        self._failures: dict[Role, Failures] = {role: Failures() for role in ROLES}
        self._reasons: dict[Role, str] = {}
        self._advised: dict[str, int] = {}
        found = store.load(cluster)
        decoded = msgspec.json.decode(config, type=ClusterConfig)
        # A restarted supervisor without a state belongs to a cluster that has gone down.
        is_down = found is None and ray.get_runtime_context().was_current_actor_reconstructed
        self._state = found or ClusterState(
            config=decoded, counts=counts_of(decoded), is_autoscaling=is_autoscaling, is_going_down=bool(is_down)
        )
        self._scalers = _scalers(self._state.config)
        self._lives = [self._live(record, Phase.STARTING) for record in self._state.instances]
        if found is not None:
            self._say("the supervisor has started again")
        elif not is_down:
            store.save(cluster, self._state)
        # The supervisor before this one may have seen a gateway with nodes.
        self._served_at = -math.inf if found is None else time.monotonic()
        self._rows: list[Row] = []
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    # ---- called by the command line ----------------------------------------------------------------------------------

    def status(self) -> bytes:
        """A ``Status`` as JSON."""
        with self._lock:
            state = self._state
            return msgspec.json.encode(
                Status(
                    name=self._cluster,
                    revision=state.revision,
                    counts=state.counts,
                    is_autoscaling=state.is_autoscaling,
                    advised=self._advised,
                    rows=self._rows,
                    failures=dict(self._reasons),
                    is_upgrading=any(record.revision < state.revision for record in state.instances),
                    host=ray.util.get_node_ip_address(),
                )
            )

    def events(self, since: int) -> tuple[int, list[str]]:
        """Lines that say what the supervisor did; see ``RecentLines.since``."""
        with self._lock:
            return self._events.since(since)

    def scale(self, counts: dict[Role, int], is_autoscaling: bool | None) -> str:
        """Change counts. Return why this cannot be; empty if it can."""
        with self._lock:
            state = self._state
            wants_auto = state.is_autoscaling if is_autoscaling is None else is_autoscaling
            try:
                after = scaled(state.config, state.counts, counts, is_autoscaling=wants_auto)
            except ConfigError as error:
                return str(error)
            self._scalers = _scalers(state.config)
            self._change(counts=after, is_autoscaling=wants_auto)
        self._say(f"scaled by command: {_in_words(self._state.counts)}")
        return ""

    def upgrade(self, config: bytes | None) -> str:
        """Replace every instance, one after the other. Return why this cannot be; empty if it can."""
        with self._lock:
            state = self._state
            new = state.config if config is None else msgspec.json.decode(config, type=ClusterConfig)
            if new.name != self._cluster:
                return f"the file is of the cluster {new.name!r}, and this one is {self._cluster!r}"
            try:
                check(new)
                check_with_ray(new)
                counts = upgraded(state.config, new, state.counts, is_autoscaling=state.is_autoscaling)
            except ConfigError as error:
                return str(error)
            self._scalers = _scalers(new)
            self._failures = {role: Failures() for role in ROLES}
            self._reasons.clear()
            is_autoscaling = state.is_autoscaling and bool(self._scalers)
            self._change(config=new, counts=counts, revision=state.revision + 1, is_autoscaling=is_autoscaling)
        self._say(f"upgrading to revision {self._state.revision}")
        return ""

    def down(self) -> None:
        """Drain everything: gateways first, then nodes."""
        with self._lock:
            self._change(is_going_down=True, is_autoscaling=False)
        self._say("going down")

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run until this process ends. After a bug, Ray starts the actor again from what is in the store."""
        try:
            for live in self._lives:
                live.recover()
            self._keep()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _keep(self) -> None:
        is_away = False
        while True:
            try:
                self._tick()
                if is_away:
                    self._say("Ray answers again")
                is_away = False
                time.sleep(TICK_S)
            except (RayError, RuntimeError, OSError) as error:  # its control service does not answer
                if not is_away:
                    self._say(f"Ray does not answer; nothing is placed until it does: {str(error)[:200]}")
                is_away = True
                time.sleep(RETRY_S)

    def _tick(self) -> None:
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        self._ask_actors()
        now = time.monotonic()
        self._place(addresses, now)
        for live in self._lives:
            live.check_stop(now)
        instances = [live.instance(now) for live in self._lives]
        for role in ROLES:
            self._failures[role] = self._failures[role].seen((i for i in instances if i.role == role), now)
        self._autoscale(now)
        for action in plan(self._desired(), instances, now):
            self._perform(action)
        self._show(addresses, now)
        if self._state.is_going_down and not self._state.instances:
            store.forget(self._cluster)
            with contextlib.suppress(ValueError):  # killed already
                ray.kill(ray.get_actor(self._cluster, namespace=NAMESPACE))  # this actor, which Ray does not restart

    def _ask_actors(self) -> None:
        """Ask every actor for a report on its process, and read the reports that arrive within ``ANSWER_S``."""
        gateways = sorted(live.report.gateway for live in self._lives if live.report and live.report.gateway)
        now = time.monotonic()
        asked = {question: live for live in self._lives if (question := live.ask(gateways, now)) is not None}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        for question in answered:
            live = asked[question]
            before = live.phase
            live.take_answer(has_serving_gateway=now - self._served_at < UNSERVED_S)
            has_nodes = live.phase is Phase.READY and live.report and live.report.is_ready
            if live.record.role == "gateway" and has_nodes and live.silent_since is None:  # its report is of now
                self._served_at = now
            if live.phase is not before:
                self._on_change(live)

    def _on_change(self, live: Live) -> None:
        role = live.record.role
        if live.phase is not Phase.GONE:
            self._say(f"{live.name} is {live.phase.value}")
        if live.record.revision < self._state.revision:
            return  # says nothing of the instances that replace it
        if live.phase is Phase.READY:
            self._reasons.pop(role, None)
        if live.phase is Phase.GONE and live.problem:
            self._failures[role] = self._failures[role].failed(time.monotonic())
            if not live.has_been_ready or (live.report and live.report.failure):
                self._reasons[role] = f"{live.name}: {live.problem}"

    def _place(self, addresses: dict[str, str], now: float) -> None:
        """Place one instance of each group at a time, since its host decides where the next one may be."""
        for role in ROLES:
            placing = (live for live in self._lives if live.record.role == role and live.phase is Phase.PLACING)
            live = next(placing, None)
            if live is None:
                continue
            live.place(self._choices(live, set(addresses), now), addresses, now)
            if live.phase is Phase.STARTING:
                self._say(f"{live.name} is on {addresses[live.host]}")
            elif live.phase is Phase.GONE:
                self._on_change(live)

    def _choices(self, live: Live, hosts: set[str], now: float) -> list[tuple[str, ...] | None]:
        """Sets of hosts to try. Hosts from which an instance does not answer may be cut off, and are not used."""
        others = [other for other in self._lives if other is not live and other.host and other.phase is not Phase.GONE]
        reachable = hosts - {other.host for other in others if other.is_silent(now)}
        role, near, ports = live.record.role, live.group.near, fixed_ports(live.spec)
        found = choices(
            live.group.placement,
            [other.host for other in others if other.record.role == role and not other.is_silent(now)],
            reachable,
            near={other.host for other in others if other.record.role == near} if near else None,
            taken={other.host for other in others if ports & fixed_ports(other.spec)},
        )
        return [None if set(choice) == hosts else choice for choice in found]

    def _autoscale(self, now: float) -> None:
        advised: dict[str, int] = {}
        for live in self._lives:
            for role, count in (live.report.advised if live.report and live.phase is Phase.READY else {}).items():
                advised[role] = max(count, advised.get(role, 0))
        with self._lock:
            self._advised = advised
            counts = dict(self._state.counts)
            if not self._state.is_autoscaling:
                return
            for role, scaler in self._scalers.items():
                if role in advised:
                    counts[role] = scaler.count(counts[role], advised[role], now)
            if counts == self._state.counts:
                return
            self._change(counts=counts)
        self._say(f"scaled by advice ({_in_words(advised)}): {_in_words(counts)}")

    def _desired(self) -> Desired:
        with self._lock:
            state = self._state
        counts = dict(state.counts)
        if state.is_going_down:
            counts["gateway"] = 0
            if not any(live.record.role == "gateway" for live in self._lives):
                counts = dict.fromkeys(ROLES, 0)
        return Desired(
            counts=counts,
            revision=state.revision,
            near={role: near for role in ROLES if (near := state.config.group(role).near)},
            retry_at={role: failures.retry_at for role, failures in self._failures.items()},
            surge_wait_s=state.config.surge_wait_s,
        )

    def _perform(self, action: Action) -> None:
        if isinstance(action, Start):
            self._start(action.role)
            return
        live = next(live for live in self._lives if live.name == action.name)
        if isinstance(action, Stop):
            live.stop()
            self._say(f"stopping {live.name}")
            self._remember(self._lives)
        else:
            live.discard()
            left = [other for other in self._lives if other is not live]
            self._remember(left)  # first: if this fails, it is discarded again
            self._lives = left
            self._say(f"{live.name} is gone" + (f": {live.problem}" if live.problem else ""))

    def _start(self, role: Role) -> None:
        with self._lock:
            state = self._state
            number = state.next_numbers[role]
            drain_s = drain_timeout_s(state.config.values(role))
            record = InstanceRecord(f"{role}-{number}", role, number, state.revision, drain_s)
            self._change(instances=(*state.instances, record), next_numbers=state.next_numbers | {role: number + 1})
        self._lives.append(self._live(record, Phase.PLACING))
        self._say(f"starting {record.name} (revision {record.revision})")

    def _live(self, record: InstanceRecord, phase: Phase) -> Live:
        config, role = self._state.config, record.role
        group = config.group(role)
        spec = ProcessSpec(
            name=record.name,
            role=role,
            values=config.values(role),
            num_threads=0 if group.gpus or role == "gateway" else int(group.cpus),
        )
        return Live(self._cluster, record, spec, group, config.lost_after_s, phase)

    # ---- state -------------------------------------------------------------------------------------------------------

    def _remember(self, lives: Sequence[Live]) -> None:
        with self._lock:
            self._change(instances=tuple(live.record for live in lives))

    def _change(self, **fields: Any) -> None:
        """Change the state, in the store first. The lock is held."""
        changed: ClusterState = msgspec.structs.replace(self._state, **fields)
        store.save(self._cluster, changed)
        self._state = changed

    def _show(self, addresses: dict[str, str], now: float) -> None:
        rows = [
            Row(
                role=live.record.role,
                name=live.name,
                host=live.report.address if live.report else addresses.get(live.host, ""),
                state=f"{live.phase.value}, silent" if live.is_silent(now) else live.phase.value,
                restarts=live.report.num_restarts if live.report else 0,
                age_s=now - live.since,
                revision=live.record.revision,
                url=live.report.url if live.report else "",
                problem=live.problem,
            )
            for live in sorted(self._lives, key=lambda live: (ROLES.index(live.record.role), live.record.number))
        ]
        with self._lock:
            self._rows = rows

    def _say(self, text: str) -> None:
        with self._lock:
            self._events.add(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}")


def _scalers(config: ClusterConfig) -> dict[Role, Autoscaler]:
    groups = {role: config.group(role) for role in ROLES}
    return {role: Autoscaler(group.autoscale, config.autoscale) for role, group in groups.items() if group.autoscale}


def _in_words(counts: Any) -> str:
    return ", ".join(f"{count} {role}" for role, count in counts.items())
