"""Requests whose nodes are lost or fail: the stream gets every token once, whatever happens when."""

import pytest
from support.gateway.fake_nodes import PADDED_VOCAB
from support.gateway.played_cluster import PlayedCluster, Text, output_of, token_of

from common.errors import ErrorCode, RequestError
from common.sampling_params import SamplingParams, TokenLogprobs
from common.wire.messages import Abort, Failed, Generate, Move, Moved, Tokens
from common.wire.packed_logprobs import pack_logprobs
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream


def test_a_lost_decode_node_is_replaced_and_the_output_goes_on() -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a")
    cluster.prefill("a")
    cluster.decode("a", 5)
    first = cluster.node_of("decode", "a")
    attempt = cluster.generate(first, "a").attempt
    cluster.lose(first)
    second = cluster.generate(cluster.node_of("decode", "a"), "a")
    assert second.output == tuple(output_of(stream)[:6])
    assert second.attempt != attempt
    assert cluster.generate(cluster.node_of("prefill", "a"), "a").output == second.output
    cluster.prefill("a")
    cluster.decode("a", 20)
    assert (stream.ids, stream.finish, stream.num_attempts) == (output_of(stream), "length", 2)
    assert stream.cached_tokens == 1, "of the first attempt"
    cluster.check_idle()


def test_a_lost_prefill_node_is_replaced_and_the_decode_node_with_the_pages_stays() -> None:
    cluster = PlayedCluster(decodes=3)
    stream = cluster.come("a")
    decode = cluster.node_of("decode", "a")
    for _ in range(3):
        cluster.come(f"b{_}")  # the decode node with the pages has most to do
    cluster.lose(cluster.node_of("prefill", "a"))
    assert cluster.node_of("decode", "a") == decode
    assert cluster.generate(decode, "a").output == ()
    told = [type(message) for message, node in cluster.sent if node == decode and message.rid == "a"]
    assert told == [Generate, Abort, Generate]
    cluster.prefill("a")
    cluster.decode("a", 20)
    assert stream.ids == output_of(stream)


def test_a_lost_prefill_node_is_not_missed_once_the_decode_node_has_sent_a_token() -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a")
    prefill = cluster.node_of("prefill", "a")
    cluster.prefill("a")
    cluster.decode("a")
    cluster.lose(prefill)
    cluster.decode("a", 20)
    assert (stream.num_attempts, stream.ids) == (1, output_of(stream))
    cluster.check_idle()


def test_a_continued_request_needs_its_new_prefill_node_until_the_next_token() -> None:
    cluster = PlayedCluster(prefills=3)
    stream = cluster.come("a")
    cluster.prefill("a")
    cluster.decode("a", 5)
    cluster.lose(cluster.node_of("decode", "a"))
    cluster.lose(cluster.node_of("prefill", "a"))
    assert stream.num_attempts == 3
    cluster.prefill("a")
    cluster.decode("a", 20)
    assert stream.ids == output_of(stream)
    cluster.check_idle()


@pytest.mark.parametrize("code", [ErrorCode.NODE_LOST, ErrorCode.SHUTTING_DOWN, ErrorCode.OUT_OF_PAGES])
def test_what_a_prefill_node_says_after_a_token_of_the_decode_node_changes_nothing(code: ErrorCode) -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a")
    prefill = cluster.node_of("prefill", "a")
    cluster.prefill("a")
    cluster.decode("a")
    cluster.dispatcher.on_failed(prefill, Failed("a", stream.attempt, code, "no acknowledgement has come"))
    cluster.decode("a", 20)
    assert (stream.error, stream.num_attempts, stream.ids) == (None, 1, output_of(stream))
    cluster.check_idle()


def test_late_tokens_of_an_ended_attempt_are_refused() -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a")
    cluster.prefill("a")
    node = cluster.node_of("decode", "a")
    old = cluster.generate(node, "a")
    cluster.lose(node)
    cluster.work[node] = []  # it was only silent, and has registered again
    cluster.say(node, old, 1)
    assert len(stream.ids) == 1
    assert (Abort("a", old.attempt), node) in cluster.sent
    del cluster.work[node]
    cluster.prefill("a")
    cluster.decode("a", 20)
    assert stream.ids == output_of(stream)


def test_tokens_that_came_before_the_first_one_are_not_mixed_with_those_of_the_next_attempt() -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a")
    node = cluster.node_of("decode", "a")
    message = cluster.generate(node, "a")
    cluster.dispatcher.on_tokens(node, Tokens("a", message.attempt, 1, (249, 249)))  # as if of other weights
    cluster.lose(cluster.node_of("prefill", "a"))
    cluster.prefill("a")
    assert len(stream.ids) == 1
    cluster.decode("a", 20)
    assert stream.ids == output_of(stream)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("token", [-1, PADDED_VOCAB, 1 << 40])
def test_a_token_id_that_the_model_does_not_have_is_a_failure_of_its_node(
    role: str, token: int, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a")
    if role == "decode":
        cluster.prefill("a")
    broken = cluster.node_of(role, "a")
    known = len(stream.ids)
    cluster.dispatcher.on_tokens(broken, Tokens("a", stream.attempt, known, (5, token)))
    cluster.wait(0.0)
    name = f"{role}-{broken[len(role) + 1]}"
    assert caplog.messages == [f"node {name} sent a token id outside of the vocabulary of {PADDED_VOCAB}"]
    assert (len(stream.ids), cluster.generate(broken, "a")) == (known, None)
    cluster.wait(1.0)
    cluster.prefill("a")
    cluster.decode("a", 20)
    assert (stream.ids, stream.num_attempts) == (output_of(stream), 2)
    cluster.check_idle()


@pytest.mark.parametrize("is_early", [False, True], ids=["after the first token", "before the first token"])
def test_a_missing_token_is_a_failure_of_the_decode_node(is_early: bool, caplog: pytest.LogCaptureFixture) -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a")
    broken = cluster.node_of("decode", "a")
    if not is_early:
        cluster.prefill("a")
        cluster.decode("a", 4)
    known = max(len(stream.ids), 1)
    cluster.dispatcher.on_tokens(broken, Tokens("a", stream.attempt, known + 1, (249,)))
    if is_early:
        assert stream.num_attempts == 1, "the first token may still come"
        cluster.prefill("a")
    cluster.wait(1.0)
    assert caplog.messages == [f"node {cluster.names[broken]} sent later tokens without token {known}"]
    cluster.prefill("a")
    assert not cluster.generate(broken, "a"), "others can serve it"
    cluster.decode("a", 20)
    assert (stream.ids, stream.num_attempts) == (output_of(stream), 2)
    cluster.check_idle()


@pytest.mark.parametrize(
    ("logprobs", "wrong"),
    [
        ((b"\xc1",), "log-probabilities that cannot be read"),
        ((pack_logprobs(TokenLogprobs(-1.0, ((PADDED_VOCAB, -2.0),))),), "log-probabilities of other tokens"),
        ((pack_logprobs(TokenLogprobs(-1.0)),) * 2, "log-probabilities of other tokens"),
    ],
)
def test_wrong_log_probabilities_are_a_failure_of_their_node(
    logprobs: tuple[bytes, ...], wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a")
    broken = cluster.node_of("prefill", "a")
    cluster.dispatcher.on_tokens(broken, Tokens("a", stream.attempt, 0, (5,), logprobs=logprobs))
    cluster.wait(1.0)
    assert caplog.messages == [f"node {cluster.names[broken]} sent {wrong}"]
    cluster.prefill("a")
    cluster.decode("a", 20)
    assert (stream.ids, stream.logprobs, stream.num_attempts) == (output_of(stream), [], 2)
    cluster.check_idle()


@pytest.mark.parametrize("num_sent", [1, 3])
def test_more_tokens_than_the_request_may_have_are_a_failure_of_their_node(
    num_sent: int, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a", max_new=5)
    cluster.prefill("a")
    cluster.decode("a", 2)
    broken = cluster.node_of("decode", "a")
    cluster.dispatcher.on_tokens(broken, Tokens("a", stream.attempt, 6 - num_sent, (5,) * num_sent))
    cluster.wait(1.0)
    assert caplog.messages == [f"node {cluster.names[broken]} sent more tokens than the 5 that the output may have"]
    cluster.prefill("a")
    cluster.decode("a", 20)
    assert (stream.ids, stream.finish, stream.num_attempts) == (output_of(stream), "length", 2)
    cluster.check_idle()


@pytest.mark.parametrize(("asked_from", "num_sent"), [(None, 1), (1, 0), (1, 1), (1, 3)])
def test_log_probabilities_of_another_prompt_are_a_failure_of_their_node(
    asked_from: int | None, num_sent: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The prompt has three tokens, of which the first has no log-probability."""
    cluster = PlayedCluster()
    stream = cluster.come("a", prompt_logprobs_from=asked_from)
    broken = cluster.node_of("prefill", "a")
    wrong = (pack_logprobs(TokenLogprobs(-1.0)),) * num_sent
    cluster.dispatcher.on_tokens(broken, Tokens("a", stream.attempt, 0, (5,), prompt_logprobs=wrong))
    cluster.wait(1.0)
    assert caplog.messages == [f"node {cluster.names[broken]} sent log-probabilities of another prompt"]
    cluster.prefill("a")
    cluster.decode("a", 20)
    assert (stream.ids, len(stream.prompt_logprobs)) == (output_of(stream), 2 if asked_from else 0)
    cluster.check_idle()


def test_a_request_whose_every_attempt_has_wrong_token_ids_ends() -> None:
    cluster = PlayedCluster(decodes=3)
    stream = cluster.come("a")
    for _ in range(3):
        assert stream.error is None
        broken = cluster.node_of("decode", "a")
        cluster.dispatcher.on_tokens(broken, Tokens("a", stream.attempt, 0, (-1,)))
        cluster.wait(5.0)
    assert stream.error is not None
    assert stream.error.code is ErrorCode.NODE_LOST
    assert "sent a token id outside of the vocabulary" in stream.error.message
    assert len(cluster.pool.registry.decodes) == 3, "one request ends no nodes"
    cluster.check_idle()


def test_a_request_for_one_token_goes_to_another_prefill_node() -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a", max_new=1)
    cluster.lose(cluster.node_of("prefill", "a"))
    cluster.prefill("a")
    assert (stream.ids, stream.num_attempts) == (output_of(stream), 2)
    cluster.check_idle()


def test_a_request_for_one_token_that_crossed_the_last_word_of_its_node_goes_to_another() -> None:
    """No decode node would report that the prefill node is lost with it."""
    cluster = PlayedCluster(prefills=2)
    stream = cluster.come("a", max_new=1)
    cluster.lose(cluster.node_of("prefill", "a"), is_empty=True)
    cluster.prefill("a")
    assert (stream.ids, stream.finish) == (output_of(stream), "length")
    cluster.check_idle()


def test_one_token_that_is_left_needs_a_decode_node() -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a", max_new=5)
    cluster.prefill("a")
    cluster.decode("a", 3)
    cluster.lose(cluster.node_of("decode", "a"))
    cluster.prefill("a")
    cluster.decode("a")
    assert stream.ids == output_of(stream)
    cluster.check_idle()


def test_an_output_that_no_prefill_node_can_hold_is_continued_by_a_decode_node_alone() -> None:
    cluster = PlayedCluster(prefills=0, decodes=0)
    cluster.start("prefill", "prefill-small", num_pages=1)
    for name in ("decode-0", "decode-1"):
        cluster.start("decode", name, num_pages=64)
    stream = cluster.come("a", max_new=30)
    cluster.prefill("a")
    cluster.decode("a", 20)
    cluster.lose(cluster.node_of("decode", "a"))
    generate = cluster.generate(cluster.node_of("decode", "a"), "a")
    assert (generate.prefill, len(generate.output)) == (None, 21)
    cluster.decode("a", 30)
    assert stream.ids == output_of(stream)
    cluster.check_idle()


def take_over(cluster: PlayedCluster, *, timeout_s: float = 1e9) -> OutputStream:
    """A request of which another gateway has 20 of 30 tokens."""
    request = GenerateRequest("a", "a", (1, 2, 3), SamplingParams(max_new_tokens=30), "tiny", timeout_s=timeout_s)
    stream = OutputStream(request, 0, Text, lambda s: None, cluster.clock.now())
    stream.on_tokens(Tokens("a", 0, 0, tuple(token_of(request.prompt, i) for i in range(20))), cluster.clock.now())
    cluster.dispatcher.dispatch([stream])
    return stream


def test_an_output_of_another_gateway_goes_before_requests_without_a_token_and_is_not_evicted() -> None:
    cluster = PlayedCluster(
        prefills=1, decodes=0, max_dispatch_ahead=0, max_queued_requests=2, enable_priority_scheduling=True
    )
    decode = cluster.start("decode", "decode-0", max_running=1)
    cluster.come("first")
    waiting, stream = cluster.come("waits"), take_over(cluster)
    cluster.come("urgent", priority=1)
    assert waiting.error.code is ErrorCode.QUEUE_FULL
    cluster.finish("first")
    assert [message.rid for message in cluster.work[decode]] == ["first", "a"]
    cluster.prefill("a")
    cluster.decode("a", 30)
    cluster.finish("urgent")
    assert stream.ids == output_of(stream)
    cluster.check_idle()


def test_an_output_of_another_gateway_is_not_refused_for_its_deadline() -> None:
    cluster = PlayedCluster(prefills=1, decodes=0, max_dispatch_ahead=0)
    cluster.start("decode", "decode-0", max_running=1)
    served = [f"served{i}" for i in range(16)]
    cluster.come(*served)
    for rid in served:
        cluster.wait(1.0)
        cluster.finish(rid)
    cluster.come(*(f"waits{i}" for i in range(6)))
    with pytest.raises(RequestError, match="its deadline of 5 s is too early"):
        cluster.come("b", timeout_s=5.0)
    assert not take_over(cluster, timeout_s=5.0).is_ended


def test_an_output_of_another_gateway_that_waits_says_nothing_about_how_long_nodes_take() -> None:
    cluster = PlayedCluster(prefills=1, decodes=0, max_dispatch_ahead=0, max_queued_requests=1)
    cluster.start("decode", "decode-0", max_running=1)
    cluster.wait(1_000.0)  # for which the gateway has run
    cluster.come("first", max_new=3)
    cluster.wait(1.0)
    cluster.prefill("first")
    cluster.wait(1.0)
    cluster.decode("first")
    take_over(cluster)
    with pytest.raises(RequestError) as caught:
        cluster.come("b")
    assert caught.value.retry_after_s == 3.0  # the first one has taken 2 s, and has 1 of 3 tokens left


def test_an_output_of_another_gateway_is_continued_even_if_no_prefill_node_can_hold_it() -> None:
    cluster = PlayedCluster(prefills=0, decodes=1)
    cluster.start("prefill", "prefill-small", num_pages=1)
    stream = take_over(cluster)
    assert cluster.generate(cluster.node_of("decode", "a"), "a").prefill is None
    cluster.decode("a", 30)
    assert stream.ids == output_of(stream)
    cluster.check_idle()


def test_a_request_whose_target_comes_back_without_memory_while_it_moves_is_continued() -> None:
    """A node that has reconnected has the same incarnation, and nothing of what the router had counted for it."""
    cluster = PlayedCluster(prefills=1, decodes=2)
    stream = cluster.come("a", prompt=(1,) * 100)
    cluster.prefill("a")
    cluster.decode("a", 3)
    source = cluster.node_of("decode", "a")
    [target] = [one for one in cluster.work if cluster.names[one].startswith("decode") and one != source]
    cluster.dispatcher.set_paused("a", True)
    cluster.pool.registry.begin_drain(source)
    cluster.dispatcher.pump()
    [(move, _)] = [(message, node) for message, node in cluster.sent if isinstance(message, Move)]
    cluster.pool.router.remove_worker(target)
    cluster.dispatcher.on_worker_lost(target, cluster.names[target])
    cluster.come("b")
    cluster.dispatcher.on_moved(source, Moved("a", move.attempt, 4))
    cluster.turn()
    cluster.wait(1.0)
    for rid in "ab":
        cluster.finish(rid)
    assert stream.ids == output_of(stream)
    cluster.check_idle()


@pytest.mark.parametrize("problem", ["full", "apart"])
def test_no_target_is_sought_for_each_request_of_a_draining_node_while_no_node_can_take_any(
    problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = PlayedCluster(prefills=1, decodes=2)
    for rid in "abcd":
        cluster.come(rid)
        cluster.prefill(rid)
        cluster.decode(rid, 2)
    router, registry, source = cluster.pool.router, cluster.pool.registry, cluster.node_of("decode", "a")
    registry.begin_drain(source)
    [target] = registry.decodes
    if problem == "full":
        target.max_running = router.num_requests(target.incarnation)
    else:
        target.failed_peers = frozenset({source})
    sought: list[object] = []
    monkeypatch.setattr(router, "choose_target", lambda *_, **others: sought.append(others))
    cluster.dispatcher.pump()
    assert not sought
    target.max_running, target.failed_peers = 8, frozenset()
    cluster.dispatcher.pump()
    assert len(sought) == len(cluster.work[source]) > 1


def test_a_full_node_is_avoided_and_asked_again_after_a_pause() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1)
    stream = cluster.come("a")
    cluster.fail(cluster.node_of("decode", "a"), "a", ErrorCode.QUEUE_FULL)
    cluster.start("decode", "decode-other")
    assert not any(cluster.work.values())
    cluster.wait(0.1)
    assert cluster.names[cluster.node_of("decode", "a")] == "decode-other"
    cluster.prefill("a")
    cluster.decode("a", 20)
    assert stream.ids == output_of(stream)


@pytest.mark.parametrize("code", [ErrorCode.SHUTTING_DOWN, ErrorCode.INTERNAL])
def test_a_node_that_shuts_down_or_has_failed_gets_the_request_no_more(code: ErrorCode) -> None:
    cluster = PlayedCluster()
    cluster.come("a")
    leaving = cluster.node_of("decode", "a")
    cluster.fail(leaving, "a", code)
    assert cluster.node_of("decode", "a") != leaving
    cluster.come("b")
    assert cluster.generate(leaving, "b") is None


def test_a_request_whose_transfer_the_prefill_node_has_ended_continues_with_another_one() -> None:
    """As when the prefill node loses its gateway, which has not noticed that yet and still follows the request."""
    cluster = PlayedCluster(recovery_timeout=10.0)
    stream = cluster.come("a")
    prefill, decode = cluster.node_of("prefill", "a"), cluster.node_of("decode", "a")
    cluster.fail(decode, "a", ErrorCode.ABORTED)
    cluster.wait(0.1)
    assert cluster.node_of("decode", "a") == decode
    assert cluster.node_of("prefill", "a") != prefill
    cluster.finish("a")
    assert stream.ids == output_of(stream)
    cluster.check_idle()


def test_a_request_that_only_nodes_have_aborted_never_ends_as_aborted() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1, recovery_timeout=10.0)
    stream = cluster.come("a")
    for _ in range(8):
        if not stream.is_ended:
            cluster.fail(cluster.node_of("decode", "a"), "a", ErrorCode.ABORTED)
            cluster.wait(5.0)
    assert stream.error.code is ErrorCode.NO_ROUTE
    assert stream.error.message.startswith("failed by decode-0; no pair of nodes")
    cluster.check_idle()


def test_a_request_with_which_another_gateway_goes_on_ends_with_a_code_of_its_own() -> None:
    cluster = PlayedCluster()
    stream = cluster.come("a")
    cluster.prefill("a")
    cluster.fail(cluster.node_of("decode", "a"), "a", ErrorCode.TAKEN_OVER)
    assert (stream.error.code, stream.error.status) == (ErrorCode.TAKEN_OVER, 409)
    cluster.check_idle()


def test_nodes_are_told_whether_a_request_ends_or_continues_elsewhere() -> None:
    cluster = PlayedCluster(prefills=1)
    for rid, ends in (("continued", False), ("aborted", True)):
        cluster.come(rid)
        cluster.fail(cluster.node_of("prefill", rid), rid, ErrorCode.TRANSFER_FAILED)
        cluster.wait(0.1)
        if ends:
            cluster.sent.clear()
            cluster.dispatcher.abort(rid)
        aborts = {(message.rid, message.reason) for message, _ in cluster.sent if isinstance(message, Abort)}
        assert aborts == {(rid, rid)}
        cluster.dispatcher.abort(rid)
        cluster.sent.clear()


def test_a_request_that_goes_on_survives_the_loss_of_a_node_that_was_reported_lost_long_ago() -> None:
    cluster = PlayedCluster(recovery_timeout=60.0)
    stream = cluster.come("a")
    reported = cluster.node_of("prefill", "a")
    cluster.fail(cluster.node_of("decode", "a"), "a", ErrorCode.NODE_LOST)
    cluster.wait(1.0)
    cluster.prefill("a")
    cluster.wait(60.0)
    assert cluster.generate(reported, "a") is None
    cluster.lose(reported)
    cluster.decode("a", 20)
    assert (stream.ids, stream.error) == (output_of(stream), None)
    cluster.check_idle()


def test_a_suspect_request_that_has_got_on_does_not_end_by_a_loss_that_was_reported_before() -> None:
    cluster = PlayedCluster(prefills=3, decodes=3)
    stream = cluster.come("a")
    for i in range(2):
        cluster.prefill("a")
        cluster.lose(cluster.node_of("decode", "a"))
        cluster.start("decode", f"new-decode-{i}")
    reported = cluster.node_of("prefill", "a")
    cluster.fail(cluster.node_of("decode", "a"), "a", ErrorCode.NODE_LOST)
    cluster.wait(1.0)
    cluster.prefill("a")
    cluster.decode("a", 8)
    cluster.lose(reported)
    cluster.decode("a", 20)
    assert (stream.ids, stream.error) == (output_of(stream), None)
    cluster.check_idle()


def test_an_output_that_has_begun_continues_on_the_same_weights_only() -> None:
    cluster = PlayedCluster(recovery_timeout=10.0)
    begun, fresh = cluster.come("begun"), cluster.come("fresh", prompt=(9,))
    cluster.prefill("begun")
    for i in range(2):
        cluster.start("prefill", f"prefill-b{i}", weight_version="w2")
        cluster.start("decode", f"decode-b{i}", weight_version="w2")
    for node in [one for one in cluster.work if "-b" not in cluster.names[one]]:
        cluster.lose(node)
    cluster.prefill("fresh")
    cluster.decode("fresh", 20)
    assert fresh.ids == output_of(fresh)
    cluster.wait(10.1)
    assert begun.error.code is ErrorCode.NODE_LOST
    assert "no decode node with the weights that began the output" in begun.error.message
    cluster.check_idle()
