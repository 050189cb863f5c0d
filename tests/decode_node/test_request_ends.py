"""What the counts of a decode node say of requests that end there, and of attempts that end before their requests."""

from collections.abc import Iterator

import msgspec
import pytest
from support.cluster.local_cluster import LocalCluster, prompt_of, sampling

from common.errors import ErrorCode
from common.wire.messages import MAX_TEXT, Abort, Closed, EndReason, Failed, Generate, PrefillDone
from decode_node.role import DecodeRole

PROMPT = prompt_of(37)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    cluster = LocalCluster(num_prefill=2, num_decode=2, page_size=4)
    yield cluster
    cluster.close()


def role(cluster: LocalCluster, number: int = 0) -> DecodeRole:
    found = cluster.decode[number].role
    assert isinstance(found, DecodeRole)
    return found


def counts(cluster: LocalCluster, number: int = 0) -> dict[str, float]:
    """Ends by reason, and the requests that were interrupted or have failed; those that are 0 are left out."""
    one = role(cluster, number)
    counted = {**one.stats.ends, **{name: one.counters()[f"{name}_requests"] for name in ("interrupted", "failed")}}
    return {name: count for name, count in counted.items() if count}


def test_an_attempt_that_is_continued_elsewhere_is_no_abort(cluster: LocalCluster) -> None:
    cluster.submit("r", PROMPT, sampling(20))
    cluster.run_until("r", 5)
    cluster.continue_request("r", pair=(1, 1))
    cluster.run()
    assert counts(cluster, 0) == {"interrupted": 1}
    assert counts(cluster, 1) == {"length": 1}


def test_a_moved_request_is_counted_as_finished_where_it_ends(cluster: LocalCluster) -> None:
    cluster.submit("r", PROMPT, sampling(20))
    cluster.run_until("r", 5)
    cluster.move("r", 1)
    cluster.run()
    cluster.settle()
    assert counts(cluster, 0) == {"interrupted": 1}
    assert counts(cluster, 1) == {"length": 1}


def test_a_node_that_stops_counts_its_requests_as_interrupted(cluster: LocalCluster) -> None:
    cluster.submit("r", PROMPT, sampling(20))
    cluster.run_until("r", 5)
    role(cluster).stop("the node stops", cluster.clock.now())
    assert counts(cluster) == {"interrupted": 1}


@pytest.mark.parametrize(
    ("code", "expected"),
    [(ErrorCode.QUEUE_FULL, {"interrupted": 1}), (ErrorCode.POOL_TOO_SMALL, {"error": 1, "failed": 1})],
)
def test_a_request_that_the_prefill_node_ends_before_it_has_pages_is_counted(
    code: ErrorCode, expected: dict[str, int]
) -> None:
    cluster = LocalCluster(page_size=4, decode_pages=16)
    cluster.submit("first", PROMPT, sampling(20))
    cluster.step()
    cluster.submit("r", prompt_of(38), sampling(20))
    assert [request.rid for request in role(cluster)._scheduler.waiting_for(cluster.prefill[0].name)] == ["r"]
    role(cluster).on_peer(cluster.prefill[0].name, Closed("r", 0, "failed", "why", code), cluster.clock.now())
    assert list(role(cluster).requests()) == [("first", 0)]
    assert counts(cluster) == expected
    cluster.close()


def test_a_first_token_that_the_model_does_not_have_ends_the_attempt_and_gives_the_pages_back(
    cluster: LocalCluster,
) -> None:
    """The embedding of such a token would end the process."""
    cluster.submit("r", PROMPT, sampling(20))
    assert role(cluster)._scheduler.is_receiving(("r", 0))
    forged = PrefillDone("r", 0, len(PROMPT), token=1 << 40)
    role(cluster).on_peer(cluster.prefill[0].name, forged, cluster.clock.now())
    while (failed := cluster.answers["r"].error) is None:
        cluster.step()
    assert failed.message == "the prefill node sampled a token outside of the vocabulary"
    assert failed.code is ErrorCode.TRANSFER_FAILED
    cluster.run()
    role(cluster).check()


def test_a_decode_node_does_not_report_that_the_prefill_node_is_full(cluster: LocalCluster) -> None:
    """The gateway would avoid the node that reports it, and try the full one again."""
    cluster.submit("r", PROMPT, sampling(20))
    assert role(cluster)._scheduler.is_receiving(("r", 0))
    closed = Closed("r", 0, "failed", "5 requests wait on the prefill node already", ErrorCode.QUEUE_FULL)
    role(cluster).on_peer(cluster.prefill[0].name, closed, cluster.clock.now())
    assert not role(cluster).requests()
    assert not [message for message in role(cluster).outbox.gateway if isinstance(message, Failed)]
    assert counts(cluster) == {"interrupted": 1}


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_no_reason_of_a_failure_is_longer_than_the_gateway_takes(cluster: LocalCluster, kind: str) -> None:
    """A node may put words before a reason that is as long as a message may be."""
    node = getattr(cluster, kind)[0].role
    node._answer_failure(("r", 0), ErrorCode.TRANSFER_FAILED, "no pages come: " + "x" * MAX_TEXT)
    [failed] = node.outbox.gateway
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(failed), type=Failed) == failed


def test_a_prefill_node_refuses_what_only_a_decode_node_could_generate(cluster: LocalCluster) -> None:
    node = cluster.prefill[0]
    request = Generate("r", 0, tuple(PROMPT), sampling(2), prefill=None, decode=None, timeout_s=9.0)
    node.role.on_gateway(request, cluster.clock.now())
    [failed] = [message for message in node.role.outbox.gateway if isinstance(message, Failed)]
    assert failed.code is ErrorCode.INVALID_REQUEST
    assert not list(node.role.requests())


def test_a_request_without_a_decode_node_is_counted_on_its_prefill_node(cluster: LocalCluster) -> None:
    node, now = cluster.prefill[0].role, cluster.clock.now()
    for rid in ("aborted", "late"):
        node.on_gateway(Generate(rid, 0, PROMPT, sampling(1), prefill=None, decode=None, timeout_s=9.0), now)
    node.on_gateway(Abort("aborted", 0), now)
    node.tick(now + 100.0)
    assert node.stats.ends == {"stop": 0, "length": 0, "abort": 1, "error": 1}


ENDS = pytest.mark.parametrize(("reason", "counted"), [("aborted", "abort"), ("continued", "interrupted")])


@ENDS
def test_a_request_that_its_client_aborts_is_an_abort_whichever_node_hears_of_it_first(
    cluster: LocalCluster, reason: EndReason, counted: str
) -> None:
    """And one that goes on elsewhere is none."""
    cluster.submit("r", PROMPT, sampling(20))
    cluster.tell(cluster.prefill[0], Abort("r", 0, reason))
    cluster.settle()
    cluster.abort("r", reason)
    cluster.settle()
    assert counts(cluster) == {counted: 1}


@ENDS
def test_the_end_of_a_request_that_waits_for_pages_is_counted_whichever_node_hears_of_it_first(
    reason: EndReason, counted: str
) -> None:
    cluster = LocalCluster(page_size=4, decode_pages=16)
    cluster.submit("first", PROMPT, sampling(20))
    cluster.step()
    cluster.submit("r", prompt_of(38), sampling(20))
    assert [request.rid for request in role(cluster)._scheduler.waiting_for(cluster.prefill[0].name)] == ["r"]
    cluster.tell(cluster.prefill[0], Abort("r", 0, reason))
    cluster.settle(2)
    cluster.abort("r", reason)
    cluster.settle(2)
    assert counts(cluster) == {counted: 1}
    cluster.close()


@pytest.mark.parametrize("num_before", [1, 2, 5])
def test_a_stop_string_is_counted_once_and_with_a_token_at_least(cluster: LocalCluster, num_before: int) -> None:
    cluster.submit("r", PROMPT, sampling(20))
    cluster.run_until("r", num_before)
    cluster.abort("r", "stopped")
    cluster.answers["r"].finish = "stop"
    cluster.settle()
    assert counts(cluster) == {"stop": 1}
    assert role(cluster).stats.output_tokens.sum >= 1
    assert cluster.prefill[0].role.stats.ends["stop"] == 0
