"""Both roles together, on an engine whose tokens depend on the content of every page."""

from random import Random
from typing import Any

import pytest
from support.cluster.fake_engine import expected_output
from support.cluster.local_cluster import LocalCluster, assert_all_pages_are_released, lose_gateway, prompt_of, sampling

from common.config.scheduling import PriorityRules
from common.errors import ErrorCode
from common.sampling_params import SamplingParams
from common.stage_spans import MAX_CHUNKS, StageLog
from common.wire.messages import (
    RESUMED,
    Abort,
    Closed,
    Decisions,
    Flush,
    Flushed,
    GetDecisions,
    Reprioritize,
    Resume,
    SetPaused,
)
from decode_node.request_state import TABLE as DECODE_TABLE
from decode_node.request_state import Event as DecodeEvent
from decode_node.request_state import State as DecodeState
from prefill_node.request_state import TABLE as PREFILL_TABLE
from prefill_node.request_state import Event as PrefillEvent
from prefill_node.request_state import State as PrefillState


def test_a_prompt_computed_by_one_node_is_continued_by_the_other() -> None:
    cluster = LocalCluster(chunk_tokens=16)
    answer = cluster.submit("a", prompt_of(100), sampling(20))
    cluster.run()
    assert answer.output == expected_output(prompt_of(100), 20)
    cluster.settle()
    assert_all_pages_are_released(cluster)


@pytest.mark.parametrize("latency", [0, 7])
def test_spans_cover_every_stage_from_the_queue_to_the_last_token(latency: int) -> None:
    cluster = LocalCluster(chunk_tokens=16, latency=latency)
    answer = cluster.submit("a", prompt_of(40), sampling(4))  # three chunks, at 1, 2 and 3 ms
    cluster.run()
    spans = [
        (span.stage, round(span.start_s * 1e3), round(span.duration_s * 1e3), span.amount) for span in answer.spans
    ]
    assert spans == [
        ("prefill_queue", 0, 1, 0), ("prefill", 1, 2, 40),
        ("prefill_chunk", 1, 0, 16), ("prefill_chunk", 2, 0, 16), ("prefill_chunk", 3, 0, 8),
        ("decode_queue", 0, 0, 0), ("prefill_wait", 0, 3, 0), ("transfer", 3, latency, 3),
        ("batch_join", 3 + latency, 1, 0), ("decode", 4 + latency, 2, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("num_chunks", [1, 32, 33, 64, 65, 1_000])
def test_many_chunks_become_few_spans_that_cover_them(num_chunks: int) -> None:
    log = StageLog()
    for number in range(num_chunks):
        log.add_chunk(number, number + 1.0, 16)
    queue, prefill, *chunks = log.take_prefill(-2.0, num_chunks + 0.5)
    assert queue == ("prefill_queue", -2.0, 2.0, 0)
    assert prefill == ("prefill", 0.0, num_chunks + 0.5, 16 * num_chunks)
    assert min(num_chunks, MAX_CHUNKS // 2) <= len(chunks) <= MAX_CHUNKS
    ends = [chunk.start_s + chunk.duration_s for chunk in chunks]
    assert [chunk.start_s for chunk in chunks] == [0.0, *ends[:-1]]
    assert sum(chunk.amount for chunk in chunks) == 16 * num_chunks


def test_an_aborted_request_reports_the_stage_that_it_was_in() -> None:
    cluster = LocalCluster(chunk_tokens=16)
    answer = cluster.submit("a", prompt_of(100), sampling(20))
    for _ in range(3):
        cluster.step()
    cluster.abort("a")
    cluster.settle()
    assert [span.stage for span in answer.spans if span.stage != "prefill_chunk"] == [
        "prefill_queue", "prefill", "decode_queue", "prefill_wait",
    ]  # fmt: skip
    assert sum(span.amount for span in answer.spans if span.stage == "prefill_chunk") == 48


def test_a_request_whose_last_write_is_under_way_reports_its_end_once() -> None:
    cluster = LocalCluster(chunk_tokens=16, latency=5)
    answer = cluster.submit("a", prompt_of(100), sampling(20))
    for _ in range(3):
        cluster.step()
    cluster.abort("a")
    cluster.abort("a")
    cluster.settle()
    assert [span.stage for span in answer.spans].count("prefill_queue") == 1
    assert_all_pages_are_released(cluster)


def test_a_request_that_ends_with_its_first_token_needs_no_transfer() -> None:
    cluster = LocalCluster(latency=5)
    answer = cluster.submit("a", prompt_of(40), sampling(1))
    cluster.run()
    assert answer.output == expected_output(prompt_of(40), 1)
    assert answer.finish == "length"
    cluster.settle(20)
    assert cluster.counters(cluster.decode[0])["output_tokens"] == 0
    assert [sum(node.role.stats.ends.values()) for node in cluster.members] == [1, 0]
    assert_all_pages_are_released(cluster)


def test_an_output_that_its_prefill_node_has_ended_is_counted_there_alone() -> None:
    """The gateway tells the decode node of the end, and may do so before the prefill node does."""
    cluster = LocalCluster(latency=5)
    cluster.submit("a", prompt_of(40), sampling(1))
    cluster.step()
    cluster.tell(cluster.decode[0], Abort("a", 0, "finished"))
    cluster.settle(20)
    assert sum(sum(node.role.stats.ends.values()) for node in cluster.decode) == 0
    assert_all_pages_are_released(cluster)


@pytest.mark.parametrize("num_steps", [1, 12])
def test_an_output_that_a_stop_string_has_ended_counts_as_stopped_on_its_decode_node(num_steps: int) -> None:
    cluster = LocalCluster(latency=5)
    answer = cluster.submit("a", prompt_of(40), sampling(500))
    for _ in range(num_steps):
        cluster.step()
    assert (len(answer.output) > 1) == (num_steps > 1)
    cluster.tell(cluster.decode[0], Abort("a", 0, "stopped"))
    cluster.tell(cluster.prefill[0], Abort("a", 0, "stopped"))
    cluster.settle(20)
    assert [node.role.stats.ends["abort"] for node in cluster.members] == [0, 0]
    assert cluster.decode[0].role.stats.ends["stop"] == 1
    assert cluster.decode[0].role.stats.decode.sum < 60.0
    assert_all_pages_are_released(cluster)


def test_a_stop_token_ends_the_output_on_either_node() -> None:
    output = expected_output(prompt_of(40), 5)
    for index in (0, 3):
        cluster = LocalCluster()
        answer = cluster.submit("a", prompt_of(40), sampling(50, stop_token_ids=(output[index],)))
        cluster.run()
        assert answer.output == output[: index + 1]
        assert answer.finish == "stop"
        cluster.settle()
        assert_all_pages_are_released(cluster)


def test_an_answer_carries_the_number_of_its_query() -> None:
    cluster = LocalCluster()
    for member in cluster.members:
        for question in (Flush(7), GetDecisions(5, 8)):
            cluster.tell(member, question)
        flushed, decisions = member.role.outbox.gateway[-2:]
        assert (type(flushed), flushed.number, type(decisions), decisions.number) == (Flushed, 7, Decisions, 8)


def test_a_shared_prefix_is_sent_once() -> None:
    cluster = LocalCluster(latency=4)
    shared = prompt_of(64)
    for number in range(4):
        cluster.submit(f"r{number}", (*shared, 1000 + number, 7, 7), sampling(4))
    cluster.run()
    for number in range(4):
        assert cluster.answers[f"r{number}"].output == expected_output((*shared, 1000 + number, 7, 7), 4)
    cluster.settle()
    # Four whole pages once, and one partial page each.
    assert cluster.counters(cluster.prefill[0])["pages_sent"] == 4 + 4
    assert_all_pages_are_released(cluster)


def test_requests_with_different_salts_share_nothing() -> None:
    cluster = LocalCluster()
    for salt in ("red", "blue"):
        cluster.submit(salt, prompt_of(64), sampling(4), salt=salt)
        cluster.run()
    assert cluster.counters(cluster.prefill[0])["pages_sent"] == 8
    assert cluster.answers["blue"].cached_tokens == 0


def test_more_requests_than_the_queue_holds_are_refused() -> None:
    cluster = LocalCluster(max_queued=2, max_running=1)
    answers = [cluster.submit(f"r{i}", prompt_of(20, i), sampling(3)) for i in range(6)]
    cluster.run()
    refused = [answer for answer in answers if answer.error is not None]
    assert len(refused) == 4
    assert {answer.error.code for answer in refused if answer.error} == {ErrorCode.QUEUE_FULL}
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_a_prompt_larger_than_a_pool_is_refused_by_name() -> None:
    cluster = LocalCluster(page_size=4, decode_pages=10)
    answer = cluster.submit("a", prompt_of(40), sampling(3))
    cluster.run()
    assert answer.error is not None
    assert answer.error.code is ErrorCode.POOL_TOO_SMALL
    cluster.settle()
    assert_all_pages_are_released(cluster)


@pytest.mark.parametrize("pair", [(0, 0), (None, 0)])
@pytest.mark.parametrize(("length", "max_new", "is_taken"), [(40, 8, True), (40, 9, False), (48, 1, False)])
def test_a_request_beyond_the_context_is_refused(
    pair: tuple[int | None, int], length: int, max_new: int, is_taken: bool
) -> None:
    cluster = LocalCluster(limits={"context_length": 48})
    answer = cluster.submit("a", prompt_of(length), sampling(max_new), pair=pair)
    cluster.run()
    assert (answer.error is None) == is_taken
    assert answer.error is None or answer.error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_a_recomputed_prompt_keeps_its_priority_and_its_age() -> None:
    cluster = LocalCluster(
        page_size=4, decode_pages=5, reserved_tokens=0, resume_tokens=0,
        rules=PriorityRules(is_enabled=True, preemption_threshold=0, aging_per_s=1.0),
    )  # fmt: skip
    lost = cluster.submit("lost", prompt_of(12), sampling(6), priority=5)
    cluster.run_until("lost", 2)
    arrived_at = cluster.decode[0].role._scheduler.requests["lost", 0].arrived_at
    cluster.clock.advance(1.0)
    cluster.submit("urgent", prompt_of(12, 1), sampling(4), priority=5)
    for rid, priority in (("lost", 7), ("urgent", 60)):
        cluster.tell(cluster.decode[0], Reprioritize(rid, 0, priority, "high"))
    at_prefill = cluster.prefill[0].role._scheduler.requests
    while ("lost", RESUMED) not in at_prefill:
        cluster.step()
    again = at_prefill["lost", RESUMED]
    assert (again.priority, again.priority_class) == (7, "high")
    assert again.arrived_at == pytest.approx(arrived_at, abs=0.1)  # except for the time of the message
    cluster.tell(cluster.decode[0], Reprioritize("lost", 0, 9))
    cluster.step()
    assert (again.priority, again.priority_class) == (9, "high")
    cluster.run()
    assert lost.output == expected_output(prompt_of(12), 6)


def test_a_prompt_that_its_prefill_node_computes_again_is_charged_once() -> None:
    cluster = LocalCluster(page_size=4, decode_pages=6, reserved_tokens=0, resume_tokens=0, policy="fair")
    answers = [cluster.submit(rid, prompt_of(8, seed), sampling(12)) for seed, rid in enumerate("ab")]
    cluster.run()
    assert [len(answer.output) for answer in answers] == [12, 12]
    assert cluster.counters(cluster.prefill[0])["resumes"] > 0
    assert cluster.prefill[0].role._scheduler.policy.counters.value("") == 2 * 8


def test_a_prompt_that_is_computed_again_comes_before_its_equals_on_the_prefill_node() -> None:
    cluster = LocalCluster(rules=PriorityRules(is_enabled=True))
    [prefill] = cluster.prefill
    for rid, priority in (("a", 0), ("urgent", 1), ("b", 0)):
        cluster.submit(rid, prompt_of(12), sampling(4), priority=priority)
    prefill.role.on_peer("d" * 32, Resume("lost", RESUMED, prompt_of(12), timeout_s=9.0), 0.0)
    scheduler = prefill.role._scheduler
    in_order = scheduler._ordering.sort(list(scheduler._table.waiting.values()), 0.0)
    assert [request.rid for request in in_order] == ["urgent", "lost", "a", "b"]


def test_a_resume_beyond_the_context_is_refused() -> None:
    """A regression: it broke a step and stopped the node."""
    cluster = LocalCluster(limits={"context_length": 48})
    [member], stranger = cluster.prefill, "s" * 32
    member.role.on_peer(stranger, Resume("a", 0, prompt_of(48), timeout_s=9.0), 0.0)
    [(to, closed)] = member.role.outbox.peers
    assert to == stranger
    assert isinstance(closed, Closed) and closed.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert member.role.plan(0.0) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": -1},
        {"seed": 2**64},
        {"temperature": float("nan")},
        {"top_p": -0.5},
        {"repetition_penalty": float("inf")},
        {"prompt_logprobs_from": 0, "logprobs": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_node_refuses_sampling_parameters_that_would_break_a_step(fields: dict[str, Any]) -> None:
    cluster = LocalCluster()
    answer = cluster.submit("a", prompt_of(8), SamplingParams(max_new_tokens=2, **fields))
    cluster.run()
    assert answer.error is not None and answer.error.code is ErrorCode.INVALID_REQUEST
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_an_output_that_outgrows_the_pool_fails_after_the_last_token_with_room() -> None:
    cluster = LocalCluster(page_size=4, decode_pages=10)
    answer = cluster.submit("a", prompt_of(30), sampling(50))
    cluster.run()
    assert answer.error is not None
    assert answer.error.code is ErrorCode.OUT_OF_PAGES
    assert answer.output == expected_output(prompt_of(30), 11)  # KV of 40 tokens, and one token more
    assert cluster.counters(cluster.decode[0])["retractions"] == 0, "the last runnable request was retracted"
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_a_lone_request_may_fill_the_pool_to_the_last_token() -> None:
    cluster = LocalCluster(page_size=4, decode_pages=10)
    answer = cluster.submit("a", prompt_of(39), sampling(2))
    cluster.run()
    assert answer.output == expected_output(prompt_of(39), 2)


def test_a_deadline_ends_a_request_in_every_state() -> None:
    for num_steps in range(12):
        cluster = LocalCluster(chunk_tokens=16, latency=2)
        answer = cluster.submit("a", prompt_of(64), sampling(1000), timeout_s=1.0)
        for _ in range(num_steps):
            cluster.step()
        cluster.clock.advance(10.0)
        cluster.run()
        assert answer.error is not None
        assert answer.error.code is ErrorCode.DEADLINE_EXCEEDED
        cluster.settle(20)
        assert_all_pages_are_released(cluster)


@pytest.mark.parametrize("num_steps", range(14))
def test_an_abort_returns_all_pages_in_every_state(num_steps: int) -> None:
    cluster = LocalCluster(chunk_tokens=16, latency=3)
    answer = cluster.submit("a", prompt_of(64), sampling(1000))
    for _ in range(num_steps):
        cluster.step()
    answer.finish = "aborted"
    cluster.abort("a")
    cluster.settle(20)
    assert_all_pages_are_released(cluster)


@pytest.mark.parametrize("num_steps", range(14))
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_death_of_a_node_frees_the_other_in_every_state(num_steps: int, role: str) -> None:
    cluster = LocalCluster(chunk_tokens=16, latency=3)
    cluster.submit("a", prompt_of(64), sampling(1000))
    for _ in range(num_steps):
        cluster.step()
    member = (cluster.prefill if role == "prefill" else cluster.decode)[0]
    cluster.kill(member)
    cluster.settle(20)
    assert_all_pages_are_released(cluster)
    cluster.replace(member, 256)
    answer = cluster.submit("b", prompt_of(64), sampling(5))
    cluster.run()
    assert answer.output == expected_output(prompt_of(64), 5)


def test_a_lost_gateway_ends_all_requests() -> None:
    cluster = LocalCluster(chunk_tokens=16, latency=3)
    for number in range(5):
        cluster.submit(f"r{number}", prompt_of(64, number), sampling(1000))
    for _ in range(8):
        cluster.step()
    for member in cluster.members:
        lose_gateway(member.role, cluster.clock.now())
    cluster.settle(20)
    assert_all_pages_are_released(cluster)


def test_a_full_batch_and_a_finished_transfer_do_not_deadlock() -> None:
    cluster = LocalCluster(page_size=4, decode_pages=12, max_running=1)
    first = cluster.submit("a", prompt_of(8), sampling(36))
    second = cluster.submit("b", prompt_of(8, 50), sampling(36))
    cluster.run()
    assert first.output == expected_output(prompt_of(8), 36)
    assert second.output == expected_output(prompt_of(8, 50), 36)
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_nodes_with_full_pools_do_not_deadlock() -> None:
    cluster = LocalCluster(num_prefill=2, num_decode=2, page_size=4, prefill_pages=20, decode_pages=14, max_running=3)
    random = Random(5)
    wanted = {}
    for number in range(60):
        prompt = prompt_of(random.randint(1, 40), random.randint(0, 2))
        wanted[f"r{number}"] = expected_output(prompt, max_new := random.randint(1, 14))
        pair = (random.randint(0, 1), random.randint(0, 1))
        cluster.submit(f"r{number}", prompt, sampling(max_new), pair=pair)
    cluster.run()
    for rid, answer in cluster.answers.items():
        assert answer.error is None
        assert answer.output == wanted[rid]
    assert sum(cluster.counters(member)["retractions"] for member in cluster.prefill) > 0
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_both_nodes_apply_a_new_class() -> None:
    cluster = LocalCluster(page_size=4, prefill_pages=20, decode_pages=20, max_running=2)
    cluster.submit("a", prompt_of(12), sampling(4))
    for member in cluster.members:
        member.role.on_gateway(Reprioritize("a", 0, 5, "high"), cluster.clock.now())
        member.role.on_gateway(Reprioritize("a", 0, 7), cluster.clock.now())
    [prefill], [decode] = cluster.prefill, cluster.decode
    [computed] = prefill.role._scheduler.requests.values()
    [decoded] = decode.role._scheduler.requests.values()
    assert (computed.priority, computed.priority_class) == (decoded.priority, decoded.priority_class) == (7, "high")
    cluster.run()


@pytest.mark.parametrize(
    ("table", "states", "events"),
    [(PREFILL_TABLE, PrefillState, PrefillEvent), (DECODE_TABLE, DecodeState, DecodeEvent)],
)
def test_every_state_reaches_done_and_done_is_final(table: Any, states: Any, events: Any) -> None:
    done = next(state for state in states if state.value == "done")
    assert not [event for event in events if (done, event) in table]
    for state in states:
        reached, frontier = {state}, [state]
        while frontier:
            here = frontier.pop()
            after = {table[here, event] for event in events if (here, event) in table}
            frontier += after - reached
            reached |= after
        assert done in reached, f"{state} never reaches done"


def test_a_message_may_carry_several_tokens() -> None:
    for interval, num_messages in ((1, 10), (4, 4), (100, 2)):
        cluster = LocalCluster(stream_interval=interval)
        answer = cluster.submit("a", (1, 2, 3), sampling(10))
        cluster.run()
        assert answer.output == expected_output((1, 2, 3), 10)
        assert answer.num_messages == num_messages  # the first token alone, then 9 tokens as 4, 4 and 1


def test_tokens_that_wait_to_fill_a_message_are_sent_when_their_request_is_interrupted() -> None:
    cluster = LocalCluster(stream_interval=100)
    answer = cluster.submit("a", (1, 2, 3), sampling(50))
    decode = cluster.decode[0]
    while (request := decode.role.requests().get(("a", answer.attempt))) is None or len(request.output) < 10:
        cluster.step()
    assert len(answer.output) == 1
    cluster.tell(decode, SetPaused("a", answer.attempt, is_paused=True))
    cluster.settle(3)
    assert request.slot < 0
    assert answer.output == tuple(request.output)
    cluster.tell(decode, SetPaused("a", answer.attempt, is_paused=False))
    cluster.run()
    assert answer.output == expected_output((1, 2, 3), 50)


@pytest.mark.parametrize(("latency", "num_overlapped"), [(0, 1), (20, 0)])
def test_chunked_prompts_and_overlapped_transfers_are_counted_once(latency: int, num_overlapped: int) -> None:
    cluster = LocalCluster(chunk_tokens=16, latency=latency)
    for rid, prompt, num_cut in [
        ("cut", prompt_of(40), 1),  # 16, 16 and 8 tokens
        ("whole", prompt_of(16, 1), 1),
        ("cached", prompt_of(48), 1),  # 32 tokens are cached, 16 are computed in one go
        ("short", prompt_of(3, 2), 1),
        ("cut again", prompt_of(65), 2),  # 32 tokens are cached, 16, 16 and 1 are computed
    ]:
        cluster.submit(rid, prompt, sampling(2))
        cluster.run()
        cluster.settle(30)
        counters = cluster.counters(cluster.prefill[0])
        assert counters["chunked_requests"] == num_cut, rid
        assert counters["overlapped_transfers"] == num_overlapped * num_cut, rid
