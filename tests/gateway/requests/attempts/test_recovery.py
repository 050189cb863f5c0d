"""When a request is tried again, alone, or not at all."""

import pytest

from common.errors import ErrorCode
from gateway.requests.attempts.recovery import AttemptEnd, Recovery

SEEN = AttemptEnd(ErrorCode.NODE_LOST, "node d was lost", is_seen=True, is_loss=True)
TOLD = AttemptEnd(ErrorCode.NODE_LOST, "the prefill node was lost", frozenset({"p"}), "d", reported="p", began_at=2.0)
FULL = AttemptEnd(ErrorCode.QUEUE_FULL, "5 requests wait", frozenset({"d"}))


def ended(recovery, end, *, num_output=0, now=1.0):
    return recovery.ended(end, num_output=num_output, revision="w", now=now)


def test_after_a_loss_that_the_gateway_saw_the_next_attempt_follows_at_once():
    assert ended(Recovery(SEEN, 1.0, 0), SEEN) == 0.0


def test_pauses_double_up_to_five_seconds_while_nodes_refuse():
    recovery = Recovery(FULL, 1.0, 0)
    assert [ended(recovery, FULL) for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert recovery.verdict(1.0, timeout_s=60.0) is None
    assert not recovery.is_suspect


def test_after_two_losses_in_a_row_a_request_is_suspect_and_a_third_one_alone_ends_it():
    recovery = Recovery(SEEN, 1.0, 0)
    for is_suspect in (False, True):
        ended(recovery, SEEN)
        assert recovery.is_suspect is is_suspect
        assert recovery.verdict(1.0, timeout_s=60.0) is None
    recovery.is_alone = True
    ended(recovery, AttemptEnd(ErrorCode.INTERNAL, "a step failed", is_loss=True))
    error = recovery.verdict(1.0, timeout_s=60.0)
    assert error.code is ErrorCode.NODE_LOST
    assert error.message == (
        "a step failed; 3 attempts ended like this, the last with the nodes for itself, so the request is not tried"
        " again"
    )


def test_losses_that_other_requests_shared_never_end_a_request():
    recovery = Recovery(SEEN, 1.0, 0)
    for _ in range(20):
        recovery.is_alone = False
        ended(recovery, SEEN)
        assert recovery.verdict(1.0, timeout_s=60.0) is None
    assert recovery.is_suspect


def test_a_suspect_request_survives_the_loss_of_a_node_that_was_silent_before():
    recovery = Recovery(SEEN, 1.0, 0)
    for _ in range(2):
        ended(recovery, SEEN)
    recovery.is_alone = True
    ended(recovery, SEEN._replace(is_loss=False))
    assert recovery.verdict(1.0, timeout_s=60.0) is None


@pytest.mark.parametrize(
    ("incarnation", "alive_until", "is_loss"), [("p", 2.0, True), ("p", 1.9, False), ("q", 3.0, False)]
)
def test_a_reported_loss_counts_once_the_gateway_has_lost_the_node_too(incarnation, alive_until, is_loss):
    recovery = Recovery(TOLD, 1.0, 0)
    ended(recovery, TOLD, now=2.0)
    assert recovery.num_losses == 0
    assert recovery.confirms(incarnation, alive_until) is is_loss
    assert not recovery.confirms("p", 0.0), "a loss counts once"
    assert recovery.num_losses == is_loss


@pytest.mark.parametrize(("num_output", "is_suspect"), [(7, True), (8, False)])
def test_losses_are_in_a_row_if_fewer_than_eight_tokens_came_between_them(num_output, is_suspect):
    recovery = Recovery(SEEN, 1.0, 0)
    ended(recovery, SEEN, num_output=0)
    ended(recovery, SEEN, num_output=num_output)
    assert recovery.is_suspect is is_suspect


def test_the_recovery_timeout_counts_from_the_last_token_and_not_while_the_budget_is_waited_for():
    recovery = Recovery(TOLD, 1.0, 0)
    ended(recovery, TOLD, now=1.0)
    ended(recovery, TOLD, now=5.0, num_output=1)
    recovery.waits(2.0)
    assert recovery.expired(17.0, timeout_s=10.0, lacking="decode node") is None
    error = recovery.expired(17.5, timeout_s=10.0, lacking="decode node")
    assert (error.code, error.message) == (
        ErrorCode.NODE_LOST,
        "the prefill node was lost; no decode node came within --recovery-timeout 10 s",
    )


def test_a_request_that_is_refused_for_the_whole_recovery_timeout_ends_with_the_refusal():
    recovery = Recovery(FULL, 1.0, 0)
    for now in (1.0, 61.0, 61.5):
        ended(recovery, FULL, now=now)
    error = recovery.verdict(61.5, timeout_s=60.0)
    assert error.code is ErrorCode.QUEUE_FULL
    assert error.message == "5 requests wait; no attempt came further within --recovery-timeout 60 s"


def test_only_an_output_that_has_begun_is_bound_to_its_weights():
    recovery = Recovery(SEEN, 1.0, 0)
    ended(recovery, SEEN)
    assert recovery.revision == ""
    ended(recovery, SEEN, num_output=1)
    assert recovery.revision == "w"
