"""Ray in memory, for the supervisor of a cluster: it places at once, and its actors report what a test says."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from scripts.cluster_manager import instances, supervisor_actor
from scripts.cluster_manager.config import ClusterConfig, Group
from scripts.cluster_manager.process_actor import Report
from scripts.cluster_manager.state import ClusterState
from scripts.cluster_manager.supervisor_actor import ClusterSupervisor

HEALTHY = Report(is_healthy=True, is_ready=True, has_ended=False, address="10.0.0.1", url="http://x", num_restarts=0)


@dataclass(eq=False)
class FakeActor:
    """The actor of a process.

    Attributes:
        answer: what it reports, or raises.
        ends_at_once: when it is asked to stop.
    """

    name: str
    answer: Report | Exception = HEALTHY
    ends_at_once: bool = True

    def __post_init__(self) -> None:
        self.report = SimpleNamespace(remote=lambda gateways: (self, object()))
        self.stop = SimpleNamespace(remote=self._stop)

    def _stop(self) -> None:
        if isinstance(self.answer, Report) and self.ends_at_once:
            self.answer = msgspec.structs.replace(self.answer, is_ready=False, has_ended=True)


@dataclass
class FakeRay:
    """Attributes:
    hosts: addresses by the ids of hosts.
    actors: of processes, by their names; a test may change what they answer.
    first_answers: of actors that start later, by role.
    silent: names of actors that do not answer.
    killed: names of actors that were killed.
    states: what the store has, by the name of the cluster.
    refusal: why Ray refuses to place anything; empty if it places.
    has_restarted: the supervisor is not the first one of its cluster.
    fails_to_save: whether the store is away when it should keep a state.
    """

    hosts: dict[str, str] = field(default_factory=lambda: {"a": "10.0.0.1"})
    actors: dict[str, FakeActor] = field(default_factory=dict)
    first_answers: dict[str, Report | Exception] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    killed: list[str] = field(default_factory=list)
    states: dict[str, ClusterState] = field(default_factory=dict)
    refusal: str = ""
    has_restarted: bool = False
    fails_to_save: Callable[[ClusterState], bool] = lambda _: False

    # ---- as ray ------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": host, "NodeManagerAddress": at, "Alive": True} for host, at in self.hosts.items()]

    def wait(self, questions: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        answered = [question for question in questions if question[0].name not in self.silent]
        return answered, [question for question in questions if question not in answered]

    def get(self, question: tuple[FakeActor, object]) -> bytes:
        actor, _ = question
        if isinstance(actor.answer, Exception):
            raise actor.answer
        return msgspec.json.encode(actor.answer)

    def get_actor(self, name: str, namespace: str) -> FakeActor:
        if name not in self.actors:
            raise ValueError(f"no actor {name}")
        return self.actors[name]

    def kill(self, actor: FakeActor) -> None:
        self.killed.append(actor.name)
        self.actors.pop(actor.name, None)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(was_current_actor_reconstructed=self.has_restarted)

    @property
    def util(self) -> Any:
        return SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")

    # ---- placement groups and actors ---------------------------------------------------------------------------------

    def placement_group(self, bundles: list[dict[str, float]], **options: Any) -> str:
        if self.refusal:
            raise ValueError(self.refusal)
        return str(options["name"])

    def get_placement_group(self, name: str) -> str:
        if name not in self.actors:
            raise ValueError(f"no placement group {name}")
        return name

    def placement_group_table(self, placement: str) -> dict[str, Any]:
        return {"state": "CREATED", "bundles_to_node_id": {0: next(iter(self.hosts))}}

    def actor_class(self, group: Group, *, name: str = "", **_: Any) -> Any:
        def start(spec: bytes, address: str) -> FakeActor:
            role = msgspec.json.decode(spec)["role"]
            self.actors[name] = FakeActor(name, self.first_answers.get(role, HEALTHY))
            return self.actors[name]

        return SimpleNamespace(remote=start)

    # ---- the store ---------------------------------------------------------------------------------------------------

    def save(self, cluster: str, state: ClusterState) -> None:
        if self.fails_to_save(state):
            raise RuntimeError("the store is away")
        self.states[cluster] = state

    def forget(self, cluster: str) -> None:
        self.states.pop(cluster, None)


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = time.monotonic()  # which fields of Live have for their default

    def monotonic(self) -> float:
        return self.now

    def strftime(self, *_: Any) -> str:
        return "now"

    def gmtime(self) -> None:
        return None


@dataclass
class FakeCluster:
    """Supervisors on a fake Ray, which act only when a test lets them."""

    ray: FakeRay
    clock: Clock
    config: ClusterConfig

    def supervisor(self, **fields: Any) -> ClusterSupervisor:
        """The first supervisor, or the next one, which finds what the one before it has stored."""
        config = msgspec.structs.replace(self.config, **fields)
        self.ray.actors.setdefault(config.name, FakeActor(config.name))
        made = ClusterSupervisor(config.name, msgspec.json.encode(config), False)
        for live in made._lives:
            live.recover()
        return made

    def run(self, supervisor: ClusterSupervisor, num_ticks: int = 10) -> None:
        """Let it act, twice a second."""
        for _ in range(num_ticks):
            self.clock.now += 0.5
            supervisor._tick()


def group(count: int = 1, **fields: Any) -> Group:
    return Group(count=count, **fields)


def fake_cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    ray, clock = FakeRay(), Clock()
    monkeypatch.setattr(supervisor_actor, "ray", ray)
    monkeypatch.setattr(supervisor_actor, "time", clock)
    monkeypatch.setattr(instances, "time", clock)
    monkeypatch.setattr(instances, "ray", ray)
    monkeypatch.setattr(instances, "_actor_class", ray.actor_class)
    monkeypatch.setattr(instances, "PlacementGroupSchedulingStrategy", lambda *_: None)
    for name in ("placement_group", "get_placement_group", "placement_group_table"):
        monkeypatch.setattr(instances, name, getattr(ray, name))
    monkeypatch.setattr(instances, "remove_placement_group", lambda _: None)
    monkeypatch.setattr(supervisor_actor.store, "load", ray.states.get)
    monkeypatch.setattr(supervisor_actor.store, "save", ray.save)
    monkeypatch.setattr(supervisor_actor.store, "forget", ray.forget)
    monkeypatch.setattr(ClusterSupervisor, "_run", lambda self: None)  # its thread; tests call _tick
    return FakeCluster(ray, clock, ClusterConfig(gateway=group(options={"port": 0}), prefill=group(), decode=group(2)))
