"""What starts, stops and is replaced, by values worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.cluster_manager.config import ROLES, Role
from scripts.cluster_manager.decisions import Desired, Discard, Failures, Instance, Phase, Start, Stop, plan

READY, STARTING, PLACING, STOPPING, GONE = Phase.READY, Phase.STARTING, Phase.PLACING, Phase.STOPPING, Phase.GONE


def one(name: str, phase: Phase = READY, revision: int = 1, **fields: Any) -> Instance:
    role, number = name.rsplit("-", 1)
    host = "" if phase is PLACING else "host"
    values: dict[str, Any] = {"since": 0.0, "host": host, **fields}
    return Instance(name, role, int(number), revision, phase, **values)  # type: ignore[arg-type]


def desired(gateway: int = 1, prefill: int = 1, decode: int = 2, revision: int = 1, **fields: Any) -> Desired:
    return Desired({"gateway": gateway, "prefill": prefill, "decode": decode}, revision, **fields)


SETTLED = [one("gateway-0"), one("prefill-0"), one("decode-0"), one("decode-1")]


def test_an_empty_cluster_starts_everything() -> None:
    assert plan(desired(), [], 0.0) == [Start("gateway"), Start("prefill"), Start("decode"), Start("decode")]


def test_nothing_happens_while_all_is_as_desired() -> None:
    assert plan(desired(), SETTLED, 100.0) == []


def test_what_starts_already_is_not_started_twice() -> None:
    assert plan(desired(), [*SETTLED[:3], one("decode-1", PLACING)], 100.0) == []


def test_a_lost_instance_is_discarded_and_another_one_started() -> None:
    found = [*SETTLED[:3], one("decode-1", GONE)]
    assert plan(desired(), found, 100.0) == [Discard("decode-1"), Start("decode")]


def test_the_newest_instances_leave_when_fewer_are_desired() -> None:
    found = [*SETTLED, one("decode-2"), one("decode-10")]
    assert plan(desired(), found, 0.0) == [Stop("decode-10"), Stop("decode-2")]


def test_instances_that_are_not_ready_leave_first() -> None:
    assert plan(desired(decode=1), [*SETTLED[:2], one("decode-0", STARTING), one("decode-1")], 0.0) == [
        Stop("decode-0")
    ]


def test_one_that_drains_counts_no_more() -> None:
    assert plan(desired(), [*SETTLED[:3], one("decode-1", STOPPING)], 0.0) == [Start("decode")]


def test_a_silent_instance_is_replaced_and_stopped_once_there_are_enough() -> None:
    silent = one("decode-1", is_silent=True)
    assert plan(desired(), [*SETTLED[:3], silent], 0.0) == [Start("decode")]
    assert plan(desired(), [*SETTLED[:3], silent, one("decode-2", STARTING)], 0.0) == [Stop("decode-1")]


def test_a_silent_instance_that_answers_again_makes_the_newest_leave() -> None:
    assert plan(desired(), [*SETTLED, one("decode-2")], 0.0) == [Stop("decode-2")]


def test_a_role_that_failed_waits_before_it_is_started_again() -> None:
    waiting = desired(retry_at={"decode": 10.0})
    assert plan(waiting, SETTLED[:3], 9.9) == []
    assert plan(waiting, SETTLED[:3], 10.0) == [Start("decode")]


NEAR = desired(near={"prefill": "decode"})


def test_a_group_near_another_waits_until_that_one_has_a_host() -> None:
    assert plan(NEAR, [], 0.0) == [Start("gateway"), Start("decode"), Start("decode")]
    assert plan(NEAR, [one("gateway-0"), one("decode-0", PLACING), one("decode-1", PLACING)], 19.9) == []
    placed = [one("gateway-0"), one("decode-0", STARTING), one("decode-1", PLACING)]
    assert plan(NEAR, placed, 0.0) == [Start("prefill")]


def test_a_group_waits_only_so_long_for_the_group_that_it_is_near() -> None:
    placing = [one("gateway-0"), one("decode-0", PLACING), one("decode-1", PLACING, since=5.0)]
    assert plan(NEAR, placing, 24.9) == []
    assert plan(NEAR, placing, 25.0) == [Start("prefill")]


def test_a_group_does_not_wait_for_one_that_fails_or_has_no_instances() -> None:
    assert plan(replace(NEAR, retry_at={"decode": 10.0}), [one("gateway-0")], 0.0) == [Start("prefill")]
    assert plan(replace(NEAR, counts=desired(decode=0).counts), [one("gateway-0")], 0.0) == [Start("prefill")]


# ---- upgrades -------------------------------------------------------------------------------------------------------


def run_upgrade(instances: list[Instance], wanted: Desired, *, has_room: bool = True) -> list[str]:
    """What happens until nothing is left to do, if every start succeeds a second later."""
    story, now, numbers = [], 0.0, dict.fromkeys(ROLES, 100)
    for _ in range(200):
        now += 1.0
        actions = plan(wanted, instances, now)
        for action in actions:
            if isinstance(action, Start):
                name = f"{action.role}-{numbers[action.role]}"
                numbers[action.role] += 1
                instances = [*instances, one(name, PLACING, wanted.revision, since=now)]
                story.append(f"+{name}")
            elif isinstance(action, Stop):
                instances = [replace(i, phase=STOPPING) if i.name == action.name else i for i in instances]
                story.append(f"-{action.name}")
            else:
                instances = [i for i in instances if i.name != action.name]
        if not actions:
            taken = {role: sum(i.role == role and i.phase is not PLACING for i in instances) for role in ROLES}
            stepped = []
            for i in instances:
                if i.phase is PLACING and (has_room or taken[i.role] < wanted.counts[i.role]):
                    i = replace(i, phase=READY, host="host", since=now)
                elif i.phase is STOPPING:
                    i = replace(i, phase=GONE)
                stepped.append(i)
            if stepped == instances and not any(i.phase is PLACING for i in instances):
                break
            instances = stepped
        ready = {role: sum(i.role == role and i.phase is READY for i in instances) for role in ROLES}
        assert all(ready[role] >= wanted.counts[role] - (not has_room) for role in ROLES), "served by too few"
    assert all(i.revision == wanted.revision and i.phase is READY for i in instances)
    return story


def test_an_upgrade_starts_one_more_before_each_old_one_leaves() -> None:
    assert run_upgrade(SETTLED, desired(revision=2)) == [
        *("+gateway-100", "-gateway-0", "+prefill-100", "-prefill-0"),
        *("+decode-100", "-decode-1", "+decode-101", "-decode-0"),
    ]


def test_without_room_for_one_more_an_old_one_leaves_first() -> None:
    story = run_upgrade(SETTLED, desired(revision=2), has_room=False)
    assert sorted(story) == sorted(run_upgrade(SETTLED, desired(revision=2)))


def test_without_room_an_upgrade_waits_for_some_before_it_stops_an_old_one() -> None:
    placing = [*SETTLED, one("gateway-1", PLACING, 2, since=5.0)]
    assert plan(desired(revision=2), placing, 24.9) == []
    assert plan(desired(revision=2), placing, 25.0) == [Stop("gateway-0")]


def test_an_upgrade_goes_on_although_a_new_one_has_no_room() -> None:
    before = [one("gateway-1", revision=2), one("prefill-1", revision=2), one("decode-0")]
    new, newer = one("decode-2", PLACING, 2), one("decode-3", PLACING, 2, since=20.0)
    assert plan(desired(revision=2), [*before, new], 20.0) == [Start("decode")]
    assert plan(desired(revision=2), [*before, new, newer], 39.9) == []
    assert plan(desired(revision=2), [*before, new, newer], 40.0) == [Stop("decode-0")]
    assert plan(desired(revision=2), [*before, replace(new, phase=STARTING), newer], 1_000.0) == []


def test_an_upgrade_replaces_at_once_what_has_no_host() -> None:
    """It may correct what keeps that one from a host. Gateways that have no room for one more would wait for it."""
    found = [*SETTLED[:3], one("decode-1", PLACING)]
    assert plan(desired(revision=2), found, 0.0) == [Stop("decode-1"), Start("gateway"), Start("decode")]
    found = [*SETTLED[:3], one("gateway-1", PLACING, 2), one("decode-2", STARTING, 2)]
    assert plan(desired(revision=2), found, 20.0) == [Stop("gateway-0")]


def test_what_serves_stays_while_an_upgrade_waits_for_a_role_before_it() -> None:
    before = [one("gateway-1", revision=2), one("prefill-1", STARTING, revision=2)]
    for phase in (STARTING, READY):
        found = [*before, one("decode-0"), one("decode-1", phase, 2)]
        assert plan(desired(decode=1, revision=2), found, 0.0) == []
    assert plan(desired(decode=1, revision=2), [*found, one("decode-2"), one("decode-3")], 0.0) == [
        Stop("decode-3"),
        Stop("decode-2"),
    ]


def test_fewer_are_left_although_the_new_one_of_an_upgrade_is_not_ready() -> None:
    found = [one("gateway-1", revision=2), one("prefill-1", revision=2), one("decode-3", STARTING, 2)]
    found += [one(f"decode-{number}") for number in range(3)]
    assert plan(desired(decode=1, revision=2), found, 0.0) == [Stop("decode-3"), Stop("decode-2")]


def test_a_group_is_upgraded_once_those_before_it_are_ready() -> None:
    placing = [one("gateway-1", PLACING, 2), *SETTLED[1:]]
    assert plan(desired(revision=2), placing, 1_000.0) == []
    replaced = [one("gateway-0", PLACING), *SETTLED[1:]]
    assert plan(desired(revision=2), replaced, 0.0) == [Stop("gateway-0"), Start("gateway")]
    assert plan(desired(revision=2), [one("gateway-1", READY, 2), *SETTLED[1:]], 0.0) == [Start("prefill")]


def test_no_ready_one_is_stopped_for_room_that_another_group_waits_for() -> None:
    before = [one("gateway-1", revision=2), one("prefill-0"), one("prefill-1", PLACING, 2)]
    assert plan(desired(revision=2), [*before, one("decode-0"), one("decode-1")], 20.0) == [Stop("prefill-0")]
    without_room = [one("decode-0"), one("decode-1", PLACING, 2)]
    assert plan(desired(revision=2), [*before, *without_room], 20.0) == []
    before[2] = one("prefill-1", READY, 2)
    assert plan(desired(revision=2), [*before, *without_room], 20.0) == [Stop("prefill-0")]


def test_an_upgrade_that_does_not_start_leaves_the_old_ones_alone() -> None:
    failed = [*SETTLED, one("gateway-1", STARTING, 2)]
    assert plan(desired(revision=2), failed, 1_000.0) == []


def test_an_upgrade_ends_although_the_group_that_it_is_near_has_no_room() -> None:
    placing = [one("gateway-0", revision=2), one("prefill-0"), one("decode-0", PLACING, 2), one("decode-1", PLACING, 2)]
    wanted = desired(revision=2, near={"prefill": "decode"})
    assert plan(wanted, placing, 19.9) == []
    assert plan(wanted, placing, 20.0) == [Start("prefill")]


def test_an_upgrade_replaces_instances_that_never_became_ready() -> None:
    stuck = [one("gateway-0", STARTING), *SETTLED[1:]]
    assert plan(desired(revision=2), stuck, 0.0) == [Start("gateway")]
    assert plan(desired(revision=2), [*stuck, one("gateway-1", revision=2)], 0.0) == [Stop("gateway-0")]


def test_a_loss_during_an_upgrade_is_made_good_at_once() -> None:
    found = [one("gateway-0", revision=2), one("prefill-0", revision=2), one("decode-0"), one("decode-1", GONE)]
    assert plan(desired(revision=2), found, 0.0) == [Discard("decode-1"), Start("decode")]


def test_an_upgrade_goes_on_once_the_old_one_has_drained_but_makes_a_loss_good_meanwhile() -> None:
    before = [one("gateway-0", revision=2), one("prefill-0", revision=2), one("decode-2", revision=2)]
    draining, gone = one("decode-1", STOPPING), one("decode-1", GONE)
    assert plan(desired(revision=2), [*before, one("decode-0"), draining], 0.0) == []
    assert plan(desired(revision=2), [*before, one("decode-0"), gone], 0.0) == [Discard("decode-1"), Start("decode")]
    assert plan(desired(decode=3, revision=2), [*before, one("decode-0"), draining], 0.0) == [Start("decode")]


phases = st.sampled_from(list(Phase))


@given(
    st.lists(st.tuples(st.sampled_from(ROLES), phases, st.integers(1, 2), st.booleans()), max_size=12),
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3)),
    st.floats(0, 100),
)
def test_no_plan_stops_what_is_needed_or_starts_more_than_one_too_many(
    found: list[tuple[Role, Phase, int, bool]], counts: tuple[int, int, int], now: float
) -> None:
    instances = [
        replace(one(f"{role}-{number}", phase, revision), is_silent=silent)
        for number, (role, phase, revision, silent) in enumerate(found)
    ]
    wanted = desired(*counts, revision=2)
    actions = plan(wanted, instances, now)
    outdated = [i for i in instances if i.phase is PLACING and i.revision < wanted.revision]
    counted = [i for i in instances if i.is_staying and not i.is_silent and i not in outdated]
    by_name = {i.name: i for i in instances}
    stopped = [by_name[a.name] for a in actions if isinstance(a, Stop)]
    for role in ROLES:
        usable = [i for i in counted if i.role == role]
        num_started = sum(a == Start(role) for a in actions)
        num_stopped = sum(i in usable for i in stopped)
        assert not (num_started and num_stopped)
        assert num_started <= max(wanted.counts[role] + 1 - len(usable), 0)
        assert len(usable) - num_stopped >= min(len(usable), wanted.counts[role])
    assert all(i.is_staying for i in stopped)


# ---- back-off -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "delay_s"), [(1, 1.0), (2, 2.0), (4, 8.0), (9, 256.0), (10, 300.0), (5_000, 300.0)])
def test_each_failure_doubles_the_delay_up_to_five_minutes(count: int, delay_s: float) -> None:
    failures, now = Failures(), 50.0
    for _ in range(count):
        now = max(now, failures.retry_at)
        failures = failures.failed(now)
    assert failures.retry_at == now + delay_s


def test_instances_that_are_lost_with_one_host_are_one_failure() -> None:
    failures = Failures().failed(50.0)
    for now in (50.0, 50.0, 50.9):
        failures = failures.failed(now)
    assert failures.retry_at == 51.0
    assert failures.failed(51.0).retry_at == 53.0


def test_failures_are_forgotten_once_an_instance_has_been_ready_for_a_minute() -> None:
    failures = Failures().failed(10.0)
    later = one("decode-1", since=20.0)
    assert failures.seen([later], 79.9) == failures
    assert failures.seen([later], 80.0).retry_at == 0.0
    assert failures.seen([one("decode-0", since=5.0)], 1_000.0) == failures, "ready since before the failure"
