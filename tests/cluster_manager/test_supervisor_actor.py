"""The supervisor of a cluster, on a Ray in memory: what it starts, remembers and says."""

import traceback
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from support.service.fake_ray import HEALTHY, FakeCluster, fake_cluster, group

from common.errors import ConfigError
from scripts.cluster_manager.config import Bounds, ClusterConfig
from scripts.cluster_manager.instances import check_with_ray
from scripts.cluster_manager.status import Status
from scripts.cluster_manager.supervisor_actor import ClusterSupervisor


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    return fake_cluster(monkeypatch)


def status(supervisor: ClusterSupervisor) -> Status:
    return msgspec.json.decode(supervisor.status(), type=Status)


def states(supervisor: ClusterSupervisor) -> dict[str, str]:
    return {row.name: row.state for row in status(supervisor).rows}


def creation_error(text: str) -> ActorDiedError:
    """What a call of an actor raises if its constructor has raised a ModuleNotFoundError."""
    try:
        raise ModuleNotFoundError(text)
    except ModuleNotFoundError as cause:
        error = RayTaskError("ProcessActor.__init__", traceback.format_exc(), cause, actor_id="a" * 32)
    return ActorDiedError(error)


READY = {"gateway-0": "ready", "prefill-0": "ready", "decode-0": "ready", "decode-1": "ready"}
NO_NODES = msgspec.structs.replace(HEALTHY, is_ready=False)


def test_a_cluster_becomes_ready(cluster: FakeCluster) -> None:
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    assert states(supervisor) == READY
    assert status(supervisor).failures == {}


def test_a_gateway_without_nodes_is_ready_once_none_has_had_nodes_for_a_minute(cluster: FakeCluster) -> None:
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    cluster.ray.actors["baton/gateway-0"].answer = NO_NODES
    cluster.run(supervisor, 118)
    assert states(supervisor) == {**READY, "gateway-0": "starting"}
    cluster.run(supervisor, 4)
    assert states(supervisor) == READY


def test_a_gateway_without_nodes_is_ready_although_a_silent_one_had_nodes(cluster: FakeCluster) -> None:
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    cluster.ray.silent = {"baton/gateway-0"}
    cluster.ray.hosts = {"b": "10.0.0.2", **cluster.ray.hosts}  # the first one is used
    cluster.ray.first_answers["gateway"] = NO_NODES
    cluster.run(supervisor, 122)
    assert states(supervisor)["gateway-1"] == "ready"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_upgrade_keeps_the_gateway_that_has_nodes(cluster: FakeCluster, is_restarted: bool) -> None:
    """Also when that one is slow to answer, or when another supervisor has not heard of its nodes yet."""
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    cluster.ray.first_answers["gateway"] = NO_NODES
    assert supervisor.upgrade(None) == ""
    cluster.run(supervisor)
    waiting = {**READY, "gateway-1": "starting"}
    assert states(supervisor) == waiting
    if is_restarted:
        supervisor = cluster.supervisor()
    else:
        cluster.ray.actors["baton/gateway-0"].answer = msgspec.structs.replace(NO_NODES, is_healthy=False)
        cluster.run(supervisor)
        cluster.ray.actors["baton/gateway-0"].answer = HEALTHY
    cluster.run(supervisor)
    assert states(supervisor) == waiting


def test_an_upgrade_goes_on_although_the_gateway_that_had_nodes_cannot_be_reached(cluster: FakeCluster) -> None:
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    cluster.ray.first_answers["gateway"] = NO_NODES
    assert supervisor.upgrade(None) == ""
    cluster.run(supervisor)
    cluster.ray.actors["baton/gateway-0"].answer = ActorUnavailableError("cut off", None)
    cluster.run(supervisor, 122)
    assert states(supervisor)["gateway-1"] == "ready"


# ---- mistakes that only Ray sees ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"labels": {"accelerator": "in(a,b"}}, r"decode\.labels: .*in\(a,b"),
        ({"labels": {"-": "a"}}, r"decode\.labels: "),
        ({"resources": {"tpu": 0.00001}}, r"decode: Ray refuses what a process reserves: "),
    ],
)
def test_what_ray_would_refuse_is_refused_before_anything_starts(fields: dict[str, Any], words: str) -> None:
    config = ClusterConfig(gateway=group(), prefill=group(), decode=group())
    check_with_ray(config)
    with pytest.raises(ConfigError, match=words):
        check_with_ray(msgspec.structs.replace(config, decode=group(**fields)))


def test_an_upgrade_that_ray_would_refuse_changes_nothing(cluster: FakeCluster) -> None:
    supervisor = cluster.supervisor()
    wrong = msgspec.structs.replace(cluster.config, decode=group(2, labels={"accelerator": "in(a,b"}))
    assert "decode.labels" in supervisor.upgrade(msgspec.json.encode(wrong))
    assert status(supervisor).revision == 1


def test_an_instance_that_ray_refuses_is_gone_with_the_reason_and_tried_again_later(cluster: FakeCluster) -> None:
    cluster.ray.refusal = "no such label"
    supervisor = cluster.supervisor()
    cluster.run(supervisor, 2)
    assert "Ray refuses it: no such label" in status(supervisor).failures["gateway"]
    cluster.ray.refusal = ""
    cluster.run(supervisor, 20)
    assert sorted(states(supervisor).values()) == ["ready"] * 4
    assert status(supervisor).failures == {}


def test_the_status_says_why_an_actor_cannot_start(cluster: FakeCluster) -> None:
    cluster.ray.first_answers["decode"] = creation_error("No module named 'msgspec'")
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    assert status(supervisor).failures["decode"].endswith(": lost: ModuleNotFoundError: No module named 'msgspec'")


def test_the_status_says_why_an_instance_was_lost_before_it_was_ready(cluster: FakeCluster) -> None:
    cluster.ray.first_answers["decode"] = ActorDiedError()
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    assert "The actor died unexpectedly" in status(supervisor).failures["decode"]
    cluster.ray.first_answers["decode"] = HEALTHY
    cluster.run(supervisor, 20)
    assert status(supervisor).failures == {}


def test_the_loss_of_an_instance_that_was_ready_is_no_reason_to_give_up(cluster: FakeCluster) -> None:
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    cluster.ray.actors["baton/decode-0"].answer = ActorDiedError()
    cluster.run(supervisor, 2)
    assert status(supervisor).failures == {}


# ---- hosts ----------------------------------------------------------------------------------------------------------


def test_two_processes_with_one_fixed_port_never_share_a_host(cluster: FakeCluster) -> None:
    """Of one group, or of two."""
    supervisor = cluster.supervisor(
        gateway=group(options={"port": 9000}),
        prefill=group(options={"http-port": 9000}),
        decode=group(2, options={"http-port": 9001}),
    )
    cluster.run(supervisor, 30)
    placing = {row.name: row.problem for row in status(supervisor).rows if row.state == "placing"}
    assert placing == {"prefill-0": "no host may be used", "decode-1": "no host may be used"}


# ---- upgrades -------------------------------------------------------------------------------------------------------


def test_instances_drain_as_long_as_they_were_started_with(cluster: FakeCluster) -> None:
    """Also when another supervisor, which knows the new configuration alone, stops them."""
    first = cluster.supervisor(decode=group(2, options={"drain-timeout": 100}))
    cluster.run(first)
    for name in ("baton/decode-0", "baton/decode-1"):
        cluster.ray.actors[name].ends_at_once = False
    changed = msgspec.structs.replace(cluster.config, decode=group(2, options={"drain-timeout": 1}))
    assert first.upgrade(msgspec.json.encode(changed)) == ""
    second = cluster.supervisor()
    cluster.run(second, 100)
    assert [name for name, state in states(second).items() if state == "stopping"] == ["decode-1"]
    assert "baton/decode-1" not in cluster.ray.killed


def test_an_instance_that_does_not_drain_in_time_is_killed_and_that_is_said(cluster: FakeCluster) -> None:
    supervisor = cluster.supervisor(decode=group(2, options={"drain-timeout": 1}))
    cluster.run(supervisor)
    cluster.ray.actors["baton/decode-1"].ends_at_once = False
    assert supervisor.scale({"decode": 1}, None) == ""
    cluster.run(supervisor, 30)
    assert cluster.ray.killed == ["baton/decode-1"]
    _, lines = supervisor.events(-1)
    assert lines[0].endswith("decode-1 is gone: it did not stop within its drain-timeout of 1 s, and was killed")


def test_an_upgrade_keeps_counts_and_ends_autoscaling_without_bounds(cluster: FakeCluster) -> None:
    supervisor = cluster.supervisor(decode=group(2, autoscale=Bounds(1, 4)))
    assert supervisor.scale({"decode": 3}, True) == ""
    assert supervisor.upgrade(None) == ""
    assert (status(supervisor).counts["decode"], status(supervisor).is_autoscaling) == (3, True)
    assert supervisor.upgrade(msgspec.json.encode(cluster.config)) == ""
    assert (status(supervisor).counts["decode"], status(supervisor).is_autoscaling) == (3, False)


@pytest.mark.parametrize("is_new_one_wrong", [False, True])
def test_an_upgrade_fails_by_the_new_instances_alone(cluster: FakeCluster, is_new_one_wrong: bool) -> None:
    """Not by an old one that ends meanwhile, for the reason that the upgrade mends; nor is it mended by an old one."""
    wrong = msgspec.structs.replace(HEALTHY, is_healthy=False, is_ready=False, has_ended=True, failure="a wrong option")
    starting = msgspec.structs.replace(HEALTHY, is_healthy=False, is_ready=False)
    cluster.ray.first_answers["prefill"] = starting
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    cluster.ray.first_answers["prefill"] = wrong if is_new_one_wrong else HEALTHY
    assert supervisor.upgrade(None) == ""
    if is_new_one_wrong:
        cluster.run(supervisor, 20)
        cluster.ray.actors["baton/prefill-0"].answer = HEALTHY
        cluster.run(supervisor, 1)
        assert "a wrong option" in status(supervisor).failures["prefill"]
    else:
        cluster.ray.actors["baton/prefill-0"].answer = wrong
        cluster.run(supervisor, 1)
        assert status(supervisor).failures == {}


def test_scaling_to_no_decode_node_is_refused(cluster: FakeCluster) -> None:
    supervisor = cluster.supervisor()
    assert supervisor.scale({"decode": 0}, None) == "--decode must be at least 1"
    assert status(supervisor).counts["decode"] == 2


# ---- the end --------------------------------------------------------------------------------------------------------


def test_a_cluster_that_is_down_is_forgotten_and_its_supervisor_ends_for_good(cluster: FakeCluster) -> None:
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    supervisor.down()
    cluster.run(supervisor)
    assert cluster.ray.states == {}
    assert sorted(set(cluster.ray.killed)) == [
        "baton", "baton/decode-0", "baton/decode-1", "baton/gateway-0", "baton/prefill-0"
    ]  # fmt: skip


def test_a_supervisor_that_is_restarted_after_the_end_starts_nothing(cluster: FakeCluster) -> None:
    cluster.ray.has_restarted = True
    cluster.run(cluster.supervisor(), 1)
    assert cluster.ray.states == {}
    assert cluster.ray.killed == ["baton"]


def test_a_supervisor_that_is_restarted_before_the_end_finds_everything_again(cluster: FakeCluster) -> None:
    cluster.run(cluster.supervisor())
    cluster.ray.has_restarted = True
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    assert states(supervisor) == READY
    assert cluster.ray.killed == []


def test_a_cluster_goes_down_although_its_store_was_away_for_a_moment(cluster: FakeCluster) -> None:
    supervisor = cluster.supervisor()
    cluster.run(supervisor)
    supervisor.down()
    cluster.ray.fails_to_save = lambda state: not state.instances
    with pytest.raises(RuntimeError, match="the store is away"):
        cluster.run(supervisor)
    cluster.ray.fails_to_save = lambda _: False
    cluster.run(supervisor)
    assert cluster.ray.states == {}
    assert cluster.ray.killed[-1] == "baton"
