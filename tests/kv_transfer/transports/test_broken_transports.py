"""How long a transport that has broken is tried after others."""

import pytest

from kv_transfer.transports.broken_transports import MAX_REMEMBERED, MAX_REST_S, MIN_REST_S, BrokenTransports


@pytest.fixture
def broken() -> BrokenTransports:
    return BrokenTransports()


def break_after(broken: BrokenTransports, seconds: float, now: float) -> float:
    """Attach ``fast`` and let it break; return the instant."""
    broken.attached("peer", "fast", now)
    broken.broke("peer", now + seconds)
    return now + seconds


def rest_s(broken: BrokenTransports, now: float) -> float:
    """How long ``fast`` rests from now on, to the second."""
    return next(second for second in range(2_000) if not broken.is_resting("peer", "fast", now + second))


def test_a_transport_rests_for_the_peer_for_which_it_broke(broken: BrokenTransports) -> None:
    break_after(broken, 5.0, 0.0)
    assert broken.is_resting("peer", "fast", 5.0)
    assert not broken.is_resting("peer", "slow", 5.0)
    assert not broken.is_resting("other", "fast", 5.0)
    assert not broken.is_resting("peer", "fast", 5.0 + MIN_REST_S)


def test_an_attachment_that_was_left_has_not_broken(broken: BrokenTransports) -> None:
    broken.attached("peer", "fast", 0.0)
    broken.left("peer")
    broken.broke("peer", 1.0)
    assert not broken.is_resting("peer", "fast", 1.0)


def test_each_rest_is_twice_as_long_up_to_a_limit(broken: BrokenTransports) -> None:
    now, rests = 0.0, []
    for _ in range(7):
        now = break_after(broken, 1.0, now)
        rests.append(rest_s(broken, now))
        now += rests[-1]
    assert rests == [30, 60, 120, 240, 480, 960, 960] and MAX_REST_S == 960


def test_a_transport_that_has_worked_for_longer_than_its_last_rest_rests_shortly(broken: BrokenTransports) -> None:
    now = break_after(broken, 1.0, break_after(broken, 1.0, 0.0))
    assert rest_s(broken, now) == 60
    now = break_after(broken, 61.0, now)
    assert rest_s(broken, now) == 30


def test_a_transport_that_cannot_attach_rests_once_more_if_it_has_broken_before(broken: BrokenTransports) -> None:
    broken.could_not_attach("peer", "fast", 0.0)
    assert not broken.is_resting("peer", "fast", 0.0)
    now = break_after(broken, 1.0, 0.0) + MIN_REST_S
    broken.could_not_attach("peer", "fast", now)
    assert rest_s(broken, now) == 60


def test_a_transport_that_was_attached_last_and_cannot_attach_again_rests(broken: BrokenTransports) -> None:
    """As after a loss of the control connection, which ends an attachment without a break of its own."""
    broken.attached("peer", "fast", 0.0)
    broken.could_not_attach("peer", "fast", 1.0)
    assert rest_s(broken, 1.0) == MIN_REST_S


def test_a_transport_is_due_once_its_rest_is_over_and_another_carries_pages(broken: BrokenTransports) -> None:
    now = break_after(broken, 1.0, 0.0)
    assert broken.due("peer", ["other", "fast"], now + MIN_REST_S) == "", "nothing is attached"
    broken.attached("peer", "slow", now)
    assert broken.due("peer", ["other", "fast"], now + MIN_REST_S - 1) == ""
    assert broken.due("peer", ["other", "fast"], now + MIN_REST_S) == "fast"
    assert broken.due("peer", ["other"], now + MIN_REST_S) == ""


def test_what_is_remembered_of_peers_is_bounded(broken: BrokenTransports) -> None:
    for number in range(MAX_REMEMBERED + 10):
        broken.attached(f"peer-{number}", "fast", 0.0)
        broken.broke(f"peer-{number}", 1.0)
        broken.attached(f"peer-{number}", "slow", 1.0)
        broken.could_not_attach(f"peer-{number}", "none", 1.0)
    assert not broken.is_resting("peer-0", "fast", 1.0)
    assert broken.is_resting(f"peer-{MAX_REMEMBERED}", "fast", 1.0)
    assert len(broken._rests) == len(broken._carrying) == len(broken._failed) == MAX_REMEMBERED


def test_a_transport_that_never_attached_counts_as_failed_for_a_while(broken: BrokenTransports) -> None:
    broken.could_not_attach("peer", "fast", 0.0)
    assert broken.has_failed_lately("peer", "fast", MAX_REST_S - 1)
    assert not broken.has_failed_lately("peer", "fast", MAX_REST_S)
    assert not broken.has_failed_lately("other", "fast", 0.0)
    broken.attached("peer", "fast", 1.0)
    assert not broken.has_failed_lately("peer", "fast", 1.0)
