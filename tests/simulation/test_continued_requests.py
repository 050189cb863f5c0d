"""An attempt that continues the output of an earlier one yields the tokens of an undisturbed run, and nothing twice."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cluster.fake_engine import VOCAB_SIZE, expected_output
from support.cluster.local_cluster import Answer, LocalCluster, assert_all_pages_are_released, prompt_of, sampling
from support.examples import examples

from common.errors import ErrorCode
from common.sampling_params import SamplingParams
from common.wire.messages import FromGateway, Generate, PrefillDone, Resume, Sample, Tokens

PAIRS = ((1, 1), (0, 0), (1, 0), (0, 1), (None, 1), (None, 0))
NUM_TOKENS = 40


def stop_after(cluster: LocalCluster, rid: str, num_tokens: int) -> Answer:
    """Step until the client has so many tokens; later ones never reach it."""
    answer = cluster.answers[rid]
    for _ in range(1_000):
        if len(answer.tokens) >= num_tokens:
            break
        cluster.step()
    answer.tokens = dict(sorted(answer.tokens.items())[:num_tokens])
    answer.num_messages = 0
    answer.spans.clear()
    return answer


def cluster_of(**others: Any) -> LocalCluster:
    return LocalCluster(num_prefill=2, num_decode=2, chunk_tokens=16, latency=2, **others)


def assert_exact(cluster: LocalCluster, answer: Answer, prompt: tuple[int, ...]) -> None:
    cluster.run()
    assert answer.error is None
    assert answer.output == expected_output(prompt, NUM_TOKENS)
    cluster.settle(20)
    assert_all_pages_are_released(cluster)


@pytest.mark.slow(sample=0.15)
@pytest.mark.parametrize("num_earlier", [1, 2, 15, 16, 17, NUM_TOKENS - 1])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_request_continues_at_any_pair_after_any_number_of_tokens(
    pair: tuple[int | None, int], num_earlier: int, is_cached: bool
) -> None:
    for length in (1, 31, 32, 33):
        cluster = cluster_of(is_cached=is_cached)
        cluster.submit("a", prompt_of(length), sampling(NUM_TOKENS))
        answer = stop_after(cluster, "a", num_earlier)
        cluster.continue_request("a", pair=pair)
        assert_exact(cluster, answer, prompt_of(length))
        assert answer.num_messages == NUM_TOKENS - num_earlier, "a token came twice, or from the prefill node"


@pytest.mark.parametrize("first", [(0, 0), (None, 0)])
@pytest.mark.parametrize("page_sizes", [(4, 4), (4, 16), (16, 4)])
def test_a_request_continues_many_times(first: tuple[int | None, int], page_sizes: tuple[int, int]) -> None:
    cluster = cluster_of(page_size=page_sizes[0], decode_page_size=page_sizes[1], stream_interval=3)
    cluster.submit("a", prompt_of(50), sampling(NUM_TOKENS), pair=first)
    for number in range(1, 13):
        answer = stop_after(cluster, "a", 3 * number)
        cluster.continue_request("a", pair=PAIRS[number % len(PAIRS)])
    assert_exact(cluster, answer, prompt_of(50))


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cuts=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(PAIRS)), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    page_sizes=st.sampled_from([(4, 4), (4, 8), (6, 2), (1, 4)]),
    is_cached=st.booleans(),
    resume_tokens=st.sampled_from([None, 0, 6]),
    decode_tokens=st.sampled_from([80, 400]),
    num_outstanding=st.sampled_from([1, 2]),
)
def test_requests_that_are_cut_anywhere_and_retracted_yield_the_tokens_of_an_undisturbed_run(
    cuts: list[tuple[int, tuple[int | None, int]]],
    lengths: list[int],
    page_sizes: tuple[int, int],
    is_cached: bool,
    resume_tokens: int | None,
    decode_tokens: int,
    num_outstanding: int,
) -> None:
    """A cut comes at any step: while a prompt is queued, computed or in transfer, or after any number of tokens."""
    cluster = cluster_of(
        page_size=page_sizes[0],
        decode_page_size=page_sizes[1],
        is_cached=is_cached,
        decode_pages=decode_tokens // page_sizes[1],
        resume_tokens=resume_tokens,
        reserved_tokens=0,
        max_running=3,
        num_outstanding=num_outstanding,
    )
    prompts = {f"r{number}": prompt_of(length, number) for number, length in enumerate(lengths)}
    for rid, prompt in prompts.items():
        cluster.submit(rid, prompt, sampling(NUM_TOKENS))
    for num_steps, pair in cuts:
        for _ in range(num_steps):
            cluster.step()
        for rid, answer in cluster.answers.items():
            if not answer.is_over:
                cluster.continue_request(rid, pair=pair)
    for rid, prompt in prompts.items():
        assert_exact(cluster, cluster.answers[rid], prompt)


def test_a_continued_request_that_is_retracted_before_its_first_step_is_computed_again() -> None:
    cluster = cluster_of(page_size=4, decode_pages=24, resume_tokens=0, reserved_tokens=0, max_running=2)
    prompts = {rid: prompt_of(40, number) for number, rid in enumerate(("a", "b"))}
    for rid, prompt in prompts.items():
        cluster.submit(rid, prompt, sampling(NUM_TOKENS))
        stop_after(cluster, rid, 4)
        cluster.continue_request(rid, pair=(1, 1))
    for rid, prompt in prompts.items():
        assert_exact(cluster, cluster.answers[rid], prompt)
    assert cluster.counters(cluster.decode[1])["retractions"] > 0
    assert cluster.counters(cluster.decode[1])["resumed_remotely"] > 0


def test_the_prefill_node_of_a_continued_request_computes_all_but_the_last_token() -> None:
    cluster = cluster_of()
    cluster.submit("a", prompt_of(32), sampling(NUM_TOKENS))
    answer = stop_after(cluster, "a", 9)
    cluster.continue_request("a", pair=(1, 1))
    prefill = cluster.prefill[1]
    cluster.plan(prefill)
    assert prefill.role._scheduler.requests["a", 1].prompt == (*prompt_of(32), *answer.output[:-1])
    assert_exact(cluster, answer, prompt_of(32))
    assert cluster.counters(prefill)["prompt_tokens_computed"] == 32 + 8


def test_a_continued_request_asks_for_no_resume_of_its_first_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(resume_tokens=0)
    cluster.submit("a", prompt_of(32), sampling(NUM_TOKENS))
    answer = stop_after(cluster, "a", 9)
    heard = []
    for member in cluster.members:
        on_peer = member.role.on_peer
        monkeypatch.setattr(
            member.role,
            "on_peer",
            lambda peer, message, now, on_peer=on_peer: (heard.append(message), on_peer(peer, message, now)),
        )
    cluster.continue_request("a", pair=(1, 1))
    assert_exact(cluster, answer, prompt_of(32))
    assert not any(isinstance(message, Resume) for message in heard)
    assert [message.length for message in heard if isinstance(message, PrefillDone)] == [32 + 8]


def test_the_nodes_count_a_continued_request_as_none_of_their_first_tokens() -> None:
    cluster = cluster_of()
    cluster.submit("a", prompt_of(32), sampling(NUM_TOKENS))
    answer = stop_after(cluster, "a", 10)
    cluster.continue_request("a", pair=(1, 1))
    stop_after(cluster, "a", 20)
    cluster.continue_request("a", pair=(None, 0))
    assert_exact(cluster, answer, prompt_of(32))
    stats = [member.role.stats for member in (*cluster.prefill, *cluster.decode)]
    assert [sum(one.time_to_first_token.counts) for one in stats] == [1, 0, 0, 0]
    assert sum(one.ends["length"] for one in stats) == 1
    second = cluster.counters(cluster.prefill[1])
    assert (second["requests"], second["resumes"], second["prompt_tokens"], second["output_tokens"]) == (0, 1, 0, 0)
    first, last = cluster.counters(cluster.decode[0]), cluster.counters(cluster.decode[1])
    assert (first["requests"], first["continued_requests"], first["local_prefills"]) == (2, 1, 0)
    assert (last["requests"], last["continued_requests"]) == (1, 1)


@pytest.mark.parametrize(
    ("pair", "stages"),
    [
        ((1, 1), ["decode_queue", "prefill_wait", "transfer", "batch_join", "decode"]),
        ((None, 1), ["prefill_queue", "prefill", "prefill_chunk", "prefill_chunk", "prefill_chunk", "decode"]),
    ],
)
def test_the_spans_of_a_continued_request_are_those_of_its_decode_node(
    pair: tuple[int | None, int], stages: list[str]
) -> None:
    cluster = cluster_of()
    cluster.submit("a", prompt_of(32), sampling(NUM_TOKENS))
    answer = stop_after(cluster, "a", 10)
    cluster.continue_request("a", pair=pair)
    assert_exact(cluster, answer, prompt_of(32))
    assert [span.stage for span in answer.spans] == stages
    assert answer.spans[-1].amount == NUM_TOKENS - 10


def test_prompt_logprobs_come_with_the_first_attempt_alone() -> None:
    """The fake engine has none: a row that asks for them would break the step."""
    cluster = cluster_of()
    params = sampling(NUM_TOKENS, prompt_logprobs_from=1, logprobs=0)
    for number, pair in enumerate(((1, 1), (None, 1))):
        answer = cluster.submit(
            f"r{number}", prompt_of(32), params, pair=pair, output=expected_output(prompt_of(32), 3)
        )
        answer.tokens = dict(enumerate(expected_output(prompt_of(32), 3)))
        assert_exact(cluster, answer, prompt_of(32))
        assert not answer.prompt_logprobs


OUTPUT = expected_output(prompt_of(8), 3)


@pytest.mark.parametrize("pair", [(0, 0), (None, 0)])
@pytest.mark.parametrize(
    ("output", "fields"),
    [
        ((VOCAB_SIZE,), {}),
        (OUTPUT, {"max_new_tokens": 3}),
        (OUTPUT, {"stop_token_ids": (OUTPUT[-1],)}),
    ],
    ids=["outside of the vocabulary", "as long as it may become", "ended by a stop token"],
)
def test_an_output_that_cannot_be_continued_is_refused(
    pair: tuple[int | None, int], output: tuple[int, ...], fields: dict[str, Any]
) -> None:
    cluster = LocalCluster()
    params = SamplingParams(**{"max_new_tokens": 9, "temperature": 0.0, **fields})
    answer = cluster.submit("a", prompt_of(8), params, pair=pair, output=output)
    cluster.run()
    assert answer.error is not None and answer.error.code is ErrorCode.INVALID_REQUEST
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_a_prefill_node_alone_continues_nothing() -> None:
    cluster = LocalCluster()
    [prefill] = cluster.prefill
    prefill.role.on_gateway(Generate("a", 0, prompt_of(8), sampling(9), None, None, 9.0, output=OUTPUT), 0.0)
    [failed] = prefill.role.outbox.gateway
    assert failed.code is ErrorCode.INVALID_REQUEST


def test_a_message_with_an_output_and_several_samples_is_no_message() -> None:
    message = Generate("a", 0, prompt_of(8), sampling(9), None, None, 9.0, others=(Sample("b", 0, 1),))
    fields = {**msgspec.to_builtins(message), "output": [1]}
    with pytest.raises(msgspec.ValidationError, match="has no other samples"):
        msgspec.convert(fields, FromGateway)


def test_the_gateway_hears_why_a_prefill_node_cannot_compute_a_continued_request() -> None:
    cluster = LocalCluster(page_size=4, prefill_pages=10)
    answer = cluster.submit("a", prompt_of(30), sampling(60), output=expected_output(prompt_of(30), 20))
    cluster.run()
    assert answer.error is not None and answer.error.code is ErrorCode.POOL_TOO_SMALL
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_the_gateway_hears_that_the_decode_node_of_a_continued_request_is_gone() -> None:
    cluster = cluster_of()
    cluster.submit("a", prompt_of(64), sampling(NUM_TOKENS), output=expected_output(prompt_of(64), 5))
    for _ in range(4):
        cluster.step()
    [prefill, _], [decode, _] = cluster.prefill, cluster.decode
    prefill.role.peer_lost(decode.name, cluster.clock.now())
    [failed] = [message for message in prefill.role.outbox.gateway if not isinstance(message, Tokens)]
    assert (failed.rid, failed.code) == ("a", ErrorCode.NODE_LOST)


def test_a_continued_request_finds_the_pages_of_its_earlier_attempt() -> None:
    """At its old decode node nothing travels; at another one all pages do."""
    cluster = cluster_of()
    [prefill, _] = cluster.prefill
    cluster.submit("a", prompt_of(64), sampling(NUM_TOKENS))
    stop_after(cluster, "a", 17)
    sent = cluster.counters(prefill)["pages_sent"]
    answer = cluster.continue_request("a", pair=(0, 0))
    stop_after(cluster, "a", 20)
    assert cluster.counters(prefill)["pages_sent"] == sent, "80 tokens are 5 whole pages, which are all cached"
    cluster.continue_request("a", pair=(0, 1))
    assert_exact(cluster, answer, prompt_of(64))
    assert cluster.counters(prefill)["pages_sent"] == sent + 6


@pytest.mark.parametrize("num_steps", range(1, 12))
@pytest.mark.parametrize("is_cached", [True, False])
def test_pages_that_had_arrived_before_the_prefill_node_was_lost_do_not_travel_again(
    num_steps: int, is_cached: bool
) -> None:
    cluster = cluster_of(is_cached=is_cached)
    [first, second], [decode, _] = cluster.prefill, cluster.decode
    answer = cluster.submit("a", prompt_of(100), sampling(NUM_TOKENS))
    for _ in range(num_steps):
        cluster.step()
    num_arrived = cluster.counters(decode)["pages_received"]
    is_complete = cluster.counters(decode)["transfers"] == 1
    cluster.kill(first)
    cluster.settle(2)
    answer.error = None
    if answer.is_over:
        return
    cluster.continue_request("a", pair=(1, 0))
    assert_exact(cluster, answer, prompt_of(100))
    if not is_complete:
        num_sent = cluster.counters(second)["pages_sent"]
        assert cluster.counters(decode)["pages_kept"] == num_arrived
        assert num_sent == 7 - (num_arrived if is_cached else 0), "six full pages and one that is not full"


def test_pages_that_had_arrived_before_an_abort_serve_another_request() -> None:
    cluster = cluster_of()
    cluster.submit("a", prompt_of(100), sampling(NUM_TOKENS))
    while cluster.counters(cluster.decode[0])["pages_received"] < 3:
        cluster.step()
    num_arrived = cluster.counters(cluster.decode[0])["pages_received"]
    cluster.answers["a"].finish = "aborted"
    cluster.abort("a")
    cluster.settle()
    sent = cluster.counters(cluster.prefill[0])["pages_sent"]
    answer = cluster.submit("b", prompt_of(100), sampling(NUM_TOKENS))
    assert_exact(cluster, answer, prompt_of(100))
    assert cluster.counters(cluster.prefill[0])["pages_sent"] == sent + 7 - num_arrived
