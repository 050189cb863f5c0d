"""Which gateway a node answers about a request, and which requests outlive their gateway."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import ErrorCode
from common.node.gateways.request_owners import MAX_KEPT, RequestOwners
from common.request import Request
from common.sampling_params import SamplingParams
from common.wire.messages import Failed, Generate, OtherLoad, Sample, Spans, Tokens

TIMEOUT_S = 10.0
A, B = "a" * 32, "b" * 32


class Node:
    """The requests of a node, and their owners."""

    def __init__(self):
        self.owners = RequestOwners(TIMEOUT_S)
        self.requests = {}

    def take(self, gateway, rid, key="", *, others=(), is_whole=True, **sampling):
        params = SamplingParams(max_new_tokens=8, **sampling)
        generate = Generate(rid, 1, (1, 2), params, None, None, 60.0, key=key, others=others)
        for sample in generate.samples():
            self.requests[sample.rid, 1] = Request(sample.rid, 1, (1, 2), params)
        self.owners.add(generate, gateway, self.requests, is_whole=is_whole)
        return self.requests[rid, 1]

    def owner(self, rid):
        return self.owners.owner(Spans(rid, 1, ()))

    def found(self, digest):
        found = self.owners.find(digest)
        return None if found is None else (found[1].output, found[1].finish)

    def sweep(self, now):
        self.owners.check()
        return self.owners.sweep(self.requests, now)


def finish(node, rid):
    node.owners.owner(Tokens(rid, 1, 1, (5,), finish="length"))
    del node.requests[rid, 1]


def test_a_message_goes_to_the_gateway_that_sent_the_request():
    node = Node()
    node.take(A, "x", others=(Sample("x2", 1, 0),))
    node.take(B, "y")
    assert [node.owner(rid) for rid in ("x", "x2", "y", "unknown")] == [A, A, B, ""]


def test_a_gateway_is_told_what_the_requests_of_the_others_cost():
    node = Node()
    node.take(A, "x", others=(Sample("x2", 1, 0),))
    node.take(B, "y").num_computed = 2
    assert node.owners.load_of_others(A, node.requests) == OtherLoad(0, 10)
    assert node.owners.load_of_others(B, node.requests) == OtherLoad(4, 20)
    assert node.owners.load_of_others(B, node.requests, most_held_tokens=6) == OtherLoad(4, 12)
    node.requests["x", 1].expected_output = 3
    finish(node, "x2")
    assert node.owners.load_of_others(B, node.requests) == OtherLoad(2, 5)
    assert node.owners.load_of_others("c" * 32, node.requests) == OtherLoad(2, 15)


def test_a_move_that_fails_is_reported_to_the_gateway_of_the_request_under_its_next_attempt():
    node = Node()
    node.take(A, "x", key="k")
    node.take(B, "y")
    failed = Failed("y", 2, ErrorCode.TRANSFER_FAILED, "the other decode node did not ask for the pages")
    assert node.owners.owner(failed) == B


def test_a_request_is_forgotten_once_it_is_no_longer_on_the_node():
    node = Node()
    node.take(A, "x")
    assert node.sweep(0.0) == []
    assert len(node.owners) == 1
    node.requests.clear()
    node.sweep(1.0)
    assert len(node.owners) == 0


def test_a_lost_gateway_ends_its_requests_without_a_key_and_no_others():
    node = Node()
    node.take(A, "plain")
    node.take(A, "keyed", "k")
    node.take(B, "other")
    assert node.owners.lose(A, 0.0) == [("plain", 1)]
    assert node.owners.num_orphans == 1
    assert [node.owner(rid) for rid in ("plain", "keyed", "other")] == ["", A, B]


def test_an_orphan_ends_after_the_timeout():
    node = Node()
    node.take(A, "x", "k")
    node.owners.lose(A, 5.0)
    assert node.sweep(14.9) == []
    assert node.sweep(15.0) == [("x", 1)]
    assert node.found("k") is None
    assert node.owners.num_orphans == 0


def test_the_output_so_far_is_found_by_its_key():
    node = Node()
    node.take(A, "x", "k").output.extend([7, 8])
    assert node.found("k") == ((7, 8), "")
    assert node.found("other") is None


def test_an_output_is_kept_for_the_timeout_after_its_end():
    node = Node()
    node.take(A, "x", "k").output.extend([7, 8])
    finish(node, "x")
    assert node.sweep(1.0) == []
    assert node.owners.lose(A, 2.0) == []
    assert node.found("k") == ((7, 8), "length")
    node.sweep(10.9)
    assert node.found("k") is not None
    node.sweep(11.0)
    assert node.found("k") is None
    assert len(node.owners) == 0


def test_an_output_that_failed_or_was_aborted_is_not_found():
    node = Node()
    for rid in ("failed", "aborted"):
        node.take(A, rid, rid)
    assert node.owners.owner(Failed("failed", 1, ErrorCode.INTERNAL, "x")) == A
    node.owners.drop_output(("aborted", 1))
    assert node.found("failed") is None
    assert node.found("aborted") is None
    assert node.owner("aborted") == A, "its spans may follow"


def test_outputs_with_log_probabilities_and_those_of_prefill_nodes_cannot_be_continued():
    node = Node()
    node.take(A, "x", "k", logprobs=1).output.append(7)
    node.take(A, "y", "l", prompt_logprobs_from=1).output.append(7)
    node.take(A, "z", "m", is_whole=False).output.append(7)
    assert [node.found(key) for key in "klm"] == [((), "")] * 3


def test_a_gateway_that_registers_the_node_anew_gets_its_requests_ended():
    node = Node()
    node.take(A, "x", "k")
    node.take(A, "done", "l").output.append(7)
    finish(node, "done")
    node.take(B, "y", "m")
    node.sweep(0.0)
    node.owners.lose(A, 1.0)
    assert node.owners.reclaim(A) == [("x", 1)]
    assert node.found("l") == ((7,), "length")
    assert node.owner("y") == B


def test_the_latest_attempt_is_found():
    node = Node()
    node.take(A, "x", "k").output.append(7)
    node.take(B, "y", "k").output.extend([7, 8])
    assert node.found("k") == ((7, 8), "")
    node.owners.end(("x", 1))
    assert node.found("k") == ((7, 8), "")


def test_only_so_many_ended_outputs_are_kept():
    node = Node()
    for number in range(MAX_KEPT + 2):
        node.take(A, f"r{number}", f"k{number}")
    node.requests.clear()
    node.sweep(0.0)
    assert len(node.owners) == MAX_KEPT
    assert node.found("k1") is None
    assert node.found("k2") is not None


class OwnersMachine(RuleBasedStateMachine):
    """Whatever comes, ends and goes: orphans end in time, and nothing is left once all is over."""

    def __init__(self):
        super().__init__()
        self.node = Node()
        self.now = 0.0
        self.number = 0
        self.lost = set()

    @rule(gateway=st.sampled_from([A, B]), key=st.sampled_from(["", "k", "l"]))
    def take(self, gateway, key):
        if gateway in self.lost:  # it registers the node before it sends requests
            self.reclaim(gateway)
        self.number += 1
        self.node.take(gateway, f"r{self.number}", key)

    @rule(gateway=st.sampled_from([A, B]))
    def lose(self, gateway):
        self.lost.add(gateway)
        self.drop(self.node.owners.lose(gateway, self.now))

    @rule(gateway=st.sampled_from([A, B]))
    def reclaim(self, gateway):
        self.lost.discard(gateway)
        self.drop(self.node.owners.reclaim(gateway))

    @rule(index=st.integers(0, 5))
    def finish(self, index):
        if index < len(self.node.requests):
            finish(self.node, list(self.node.requests)[index][0])

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds):
        self.now += seconds
        self.drop(self.node.sweep(self.now))

    def drop(self, keys):
        for key in keys:
            self.node.requests.pop(key, None)

    @invariant()
    def every_request_on_the_node_has_an_owner(self):
        self.node.owners.check()
        assert all(self.node.owner(rid) for rid, _ in self.node.requests)

    def teardown(self):
        for gateway in (A, B):
            self.drop(self.node.owners.lose(gateway, self.now))
        after = self.now + TIMEOUT_S + 1.0  # a second later: `now + TIMEOUT_S` may round down to less than the timeout
        self.drop(self.node.sweep(after))
        assert self.node.requests == {}
        self.node.sweep(after + TIMEOUT_S)
        self.node.sweep(after + 2 * TIMEOUT_S + 1.0)
        assert len(self.node.owners) == 0


TestOwnersMachine = OwnersMachine.TestCase
TestOwnersMachine.settings = settings(max_examples=60, stateful_step_count=30)
