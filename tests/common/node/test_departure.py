"""How a node leaves its role: which step follows from what it still has."""

from common.node.departure import FENCE_WAIT_S, Departure, DepartureStep, Remainder

BUSY = Remainder(is_idle=False, num_quarantined_pages=0, is_registered=True, has_acknowledged=True)
IDLE = Remainder(is_idle=True, num_quarantined_pages=0, is_registered=True, has_acknowledged=False)
ACKNOWLEDGED = Remainder(is_idle=True, num_quarantined_pages=0, is_registered=True, has_acknowledged=True)


def steps(departure, *events):
    return [departure.next_step(left, now) for left, now in events]


def test_an_idle_node_leaves_once_its_gateways_have_acknowledged_that():
    departure = Departure("decode", until=30.0)
    assert steps(departure, (BUSY, 1.0), (ACKNOWLEDGED, 2.0), (IDLE, 3.0), (ACKNOWLEDGED, 4.0)) == [
        DepartureStep.WAIT,
        DepartureStep.SAY_EMPTY,
        DepartureStep.WAIT,
        DepartureStep.LEAVE,
    ]


def test_a_request_that_was_under_way_takes_the_word_back():
    departure = Departure(None, until=30.0)
    assert steps(departure, (IDLE, 1.0), (BUSY, 2.0), (BUSY, 3.0), (IDLE, 4.0)) == [
        DepartureStep.SAY_EMPTY,
        DepartureStep.SAY_DRAINING,
        DepartureStep.WAIT,
        DepartureStep.SAY_EMPTY,
    ]


def test_a_gateway_that_registers_the_node_anew_is_told_again():
    departure = Departure("prefill", until=30.0)
    assert departure.next_step(IDLE, 1.0) is DepartureStep.SAY_EMPTY
    departure.registered()
    assert departure.next_step(ACKNOWLEDGED, 2.0) is DepartureStep.SAY_EMPTY


def test_a_node_that_stops_does_so_at_the_end_of_its_time_or_without_a_gateway():
    assert Departure(None, until=30.0).next_step(BUSY, 30.0) is DepartureStep.LEAVE
    alone = Remainder(is_idle=False, num_quarantined_pages=0, is_registered=False, has_acknowledged=True)
    assert Departure(None, until=30.0).next_step(alone, 1.0) is DepartureStep.LEAVE
    assert Departure("decode", until=30.0).next_step(alone, 1.0) is DepartureStep.WAIT


def test_a_node_that_changes_its_role_ends_what_is_left_and_keeps_its_role_if_that_does_not_help():
    departure = Departure("decode", until=30.0)
    assert steps(departure, (BUSY, 29.0), (BUSY, 30.0), (BUSY, 31.0), (BUSY, 30.0 + FENCE_WAIT_S)) == [
        DepartureStep.WAIT,
        DepartureStep.END_REQUESTS,
        DepartureStep.END_REQUESTS,
        DepartureStep.STAY,
    ]


def test_a_node_keeps_its_role_if_a_gateway_never_acknowledges_that_it_is_empty():
    departure = Departure("decode", until=30.0)
    assert steps(departure, (IDLE, 1.0), (IDLE, 39.0), (IDLE, 30.0 + FENCE_WAIT_S)) == [
        DepartureStep.SAY_EMPTY,
        DepartureStep.WAIT,
        DepartureStep.STAY,
    ]


def test_only_a_change_of_role_waits_for_pages_that_a_peer_may_still_write():
    left = Remainder(is_idle=True, num_quarantined_pages=3, is_registered=True, has_acknowledged=True)
    assert Departure("decode", until=30.0).next_step(left, 1.0) is DepartureStep.WAIT
    assert Departure(None, until=30.0).next_step(left, 1.0) is DepartureStep.SAY_EMPTY
