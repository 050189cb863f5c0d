"""The sets of hosts that are tried, in order."""

import pytest

from scripts.cluster_manager.placement import choices

HOSTS = ("a", "b", "c")


@pytest.mark.parametrize(
    ("placement", "used", "expected"),
    [
        ("spread", [], [("a", "b", "c")]),
        ("spread", ["a"], [("b", "c"), ("a", "b", "c")]),
        ("spread", ["a", "b", "b", "c"], [("a", "c"), ("a", "b", "c")]),
        ("pack", [], [("a", "b", "c")]),
        ("pack", ["b", "b"], [("b",), ("a", "b", "c")]),
        ("pack", ["lost"], [("a", "b", "c")]),
        ("strict-pack", [], [("a", "b", "c")]),
        ("strict-pack", ["c"], [("c",)]),
        ("strict-spread", ["a", "c"], [("b",)]),
        ("strict-spread", ["a", "b", "c"], []),
    ],
)
def test_hosts_follow_the_placement(placement, used, expected) -> None:
    assert choices(placement, used, HOSTS) == expected


def test_hosts_of_the_other_group_come_first_and_the_placement_holds_among_them() -> None:
    assert choices("spread", ["a"], HOSTS, near={"a", "b"}) == [("b",), ("a", "b"), ("b", "c"), ("a", "b", "c")]


def test_without_a_host_of_the_other_group_all_others_will_do() -> None:
    assert choices("spread", [], HOSTS, near=set()) == [("a", "b", "c")]


def test_hosts_where_a_port_is_taken_are_not_used() -> None:
    assert choices("pack", ["a"], HOSTS, taken={"a"}) == [("b", "c")]
    assert choices("spread", [], HOSTS, taken=HOSTS) == []
