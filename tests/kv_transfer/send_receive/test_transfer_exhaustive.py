"""Every interleaving of all events of transfers between two nodes, for scopes small enough to finish.

No page is written after it went to another use, none leaks, and every run ends with nothing held. ``two_nodes`` lists
the checks after each step; ``state_explorer`` searches. A scope bounds the number of faults in one run; the order of
everything else (grants, computed pages, writes, arrivals, messages of the two directions, notices) is free. States
that differ in the names of two requests of the same size count as one.
"""

import logging
from collections.abc import Iterator
from typing import ClassVar

import pytest
from support.exploration.state_explorer import Exploration, explore, fingerprint
from support.exploration.two_nodes import TwoNodes
from support.exploration.two_nodes_parts import CONNECTION_FAULTS, FAULTS, NODE_FAULTS, PAGE_FAULTS, Scope
from support.exploration.two_nodes_state import state_of

DAMAGE = (*FAULTS, "corrupt")


@pytest.fixture(autouse=True)
def _quiet() -> object:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def walk(scope: Scope, num_states: int) -> Exploration:
    """Explore a scope. Fail if the search finds fewer states than the about ``num_states`` that are known."""
    found = explore(TwoNodes(scope), 3 * num_states)
    print(f"\n{scope}: {found}")
    assert found.num_states > 0.9 * num_states, f"the search found only {found.num_states} states"
    return found


@pytest.mark.slow
def test_two_requests_for_one_page_with_a_fault_of_a_page_or_a_node() -> None:
    """The page of one request is granted to the other. The state count was measured."""
    walk(Scope(sizes=(1, 1), num_pages=1, faults=(*PAGE_FAULTS[:2], *NODE_FAULTS), num_faults=1), 4_700)


def test_a_request_of_two_pages_with_any_single_fault() -> None:
    walk(Scope(sizes=(2,), num_faults=1), 1_700)


@pytest.mark.slow
def test_a_request_of_three_pages_with_any_single_fault() -> None:
    walk(Scope(sizes=(3,), num_faults=1), 9_500)


@pytest.mark.slow
def test_a_page_that_is_damaged_every_time() -> None:
    """The page is resent a few times, then the transfer ends in an error."""
    walk(Scope(sizes=(2,), num_faults=6, faults=("corrupt",), has_checksums=True), 2_300)


class Noting(TwoNodes):
    """Notes the name of every state. ``may_exchange`` is false to ignore that requests may exchange their names."""

    names: ClassVar[set[bytes]] = set()
    may_exchange = True

    def states(self) -> Iterator[bytes]:
        Noting.names.add(fingerprint(super().states()))
        return super().states() if Noting.may_exchange else iter([state_of(self)])


def test_exchanging_the_names_of_two_requests_leads_to_no_other_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is enough to go on from one of two states that differ in these names alone."""
    scope, found, names = Scope(sizes=(1, 1), num_pages=1, num_faults=0), [], []
    for may_exchange in (True, False):
        monkeypatch.setattr(Noting, "may_exchange", may_exchange)
        monkeypatch.setattr(Noting, "names", set())
        found.append(explore(Noting(scope), 10_000).num_states)
        names.append(Noting.names)
    assert found[1] == 2 * found[0] - 1  # all but the first one
    assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("scope", "num_states"),
    [
        (Scope(sizes=(2, 2), num_faults=1), 23_600),
        (Scope(sizes=(2, 2), first=1, num_pages=2, num_faults=1), 14_000),
        (Scope(sizes=(2,), num_faults=2, can_recall=False), 19_400),  # as with NIXL: negotiation waits for the detach
        (Scope(sizes=(2,), num_faults=2, faults=DAMAGE, has_checksums=True), 21_700),
        (Scope(sizes=(1, 1), num_pages=1, faults=CONNECTION_FAULTS, num_faults=2), 46_400),
    ],
    ids=[
        "two requests of two pages",
        "some pages here already",
        "writes that go on",
        "damaged",
        "connections",
    ],
)
def test_larger_scopes(scope: Scope, num_states: int) -> None:
    walk(scope, num_states)
