"""Every series of /metrics moves with what it counts, and no other series exist."""

import asyncio
import contextlib
import re
import sys
from collections import Counter as Totals
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import zmq
from support.gateway.fake_nodes import echo, running, silent
from support.gateway.formatted_outputs import output_of
from support.wire.raw_peers import raw_peer

from common.errors import ErrorCode
from common.stage_spans import StageSpan
from common.wire.messages import Pairs, PairState
from gateway.metrics.collectors import COUNTED_TOKENS, Metrics

LABEL = '{model="tiny"}'


@pytest.fixture
async def stack(folder):
    async with running(folder, local_prefill="auto", local_prefill_threshold=8) as running_stack:
        await running_stack.pair()
        yield running_stack


async def scrape(stack):
    """Values by series name with labels."""
    _, text = await stack.get("/metrics")
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


async def moved(stack, before):
    after = await scrape(stack)
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}


def only(changes, *prefixes):
    return {name: value for name, value in changes.items() if name.startswith(prefixes)}


async def test_an_answer_is_counted_with_tokens_latencies_and_stages(stack):
    before = await scrape(stack)
    assert (await stack.post("/v1/completions", {"prompt": [65] * 10, "max_tokens": 4, "n": 2}))[0] == 200
    changes = await moved(stack, before)
    assert only(changes, "baton_outputs", "baton_prompt", "baton_cached", "baton_output_", "baton_local") == {
        'baton_outputs_total{end="length",model="tiny"}': 2.0,
        f"baton_prompt_tokens_total{LABEL}": 20.0,
        f"baton_cached_tokens_total{LABEL}": 10.0,
        f"baton_output_tokens_total{LABEL}": 8.0,
    }
    assert changes['baton_http_answers_total{path="/v1/completions",status="200"}'] == 1.0
    for name, count in (
        ("time_to_first_token", 2),
        ("inter_token", 6),
        ("time_per_output_token", 2),
        ("request", 2),
    ):
        assert changes[f"baton_{name}_seconds_count{LABEL}"] == count
        assert changes[f'baton_{name}_seconds_bucket{{le="+Inf",model="tiny"}}'] == count
        if name in ("time_to_first_token", "request"):  # decode tokens may arrive before the first token
            assert changes[f"baton_{name}_seconds_sum{LABEL}"] > 0
    for stage, seconds in (("prefill_queue", 0.25), ("prefill", 0.5), ("decode_queue", 0.125), ("transfer", 1.0)):
        assert changes[f'baton_stage_seconds_sum{{model="tiny",stage="{stage}"}}'] == 2 * seconds
        assert changes[f'baton_stage_seconds_count{{model="tiny",stage="{stage}"}}'] == 2


def test_ended_outputs_with_long_prompts_are_counted_and_freed_at_once():
    mailbox = SimpleNamespace(dropped=Totals(), refused=Totals())
    metrics = Metrics([], mailbox, SimpleNamespace(recoveries=Totals()), starvation_bound_s=1.0)
    output = output_of([])
    output.request = msgspec.structs.replace(output.request, prompt=(1,) * COUNTED_TOKENS)
    num_references = sys.getrefcount(output)
    metrics.ended(output)
    assert sys.getrefcount(output) == num_references


async def test_local_prefills_are_counted(stack):
    before = await scrape(stack)
    await stack.post("/v1/completions", {"prompt": "abc", "max_tokens": 2, "n": 3})
    assert (await moved(stack, before))[f"baton_local_prefills_total{LABEL}"] == 3


async def test_requests_in_flight_go_up_and_down(stack):
    stack.silence()
    call = asyncio.ensure_future(stack.post("/v1/completions", {"prompt": ["abc", "d"]}))
    await stack.nodes[1].until(lambda: len(stack.nodes[1].generates) == 2)
    assert (await scrape(stack))[f"baton_requests_in_flight{LABEL}"] == 2
    await stack.post("/abort_request", {"abort_all": True})
    assert (await call)[0] == 499
    after = await scrape(stack)
    assert after[f"baton_requests_in_flight{LABEL}"] == 0
    assert after['baton_outputs_total{end="aborted",model="tiny"}'] == 2


async def test_waiting_times_and_starved_requests_are_counted_by_class(folder):
    options = {"priority_classes": ("high:8", "low:1"), "starvation_bound": 60.0, "max_dispatch_ahead": 0}
    async with running(folder, **options) as stack:
        await stack.silent_pair(max_running=1)
        calls = []
        for rid, name in (("first", "low"), ("a", "high"), ("b", "low")):
            body = {"text": "a", "rid": rid, "priority_class": name, "sampling_params": {"max_new_tokens": 1}}
            calls.append(asyncio.ensure_future(stack.post("/generate", body)))
            while (await stack.get("/server_info"))[1]["num_in_flight"] < len(calls):
                await asyncio.sleep(0.002)
        before = await scrape(stack)
        assert before['baton_requests_waiting{class="high",model="tiny"}'] == 1
        assert before['baton_requests_waiting{class="low",model="tiny"}'] == 1
        assert before['baton_schedule_policy{model="tiny",policy="fcfs"}'] == 1
        for rid in "ab":  # as if these two had come long ago
            stack.gateway._dispatcher._in_flight[rid].stream.started_at -= 100.0
        await stack.nodes[0].until(lambda: stack.nodes[0].generates)
        for node in stack.nodes:
            node.on_generate = echo
        stack.nodes[0].spans("first", StageSpan("prefill_queue", 1.0, 0.0625))
        stack.nodes[0].tokens("first", 0, (65,), finish="length")
        await asyncio.gather(*calls)
        changes = await moved(stack, before)
        for name, count, starved in (("high", 1, 1), ("low", 2, 1)):
            label = f'{{class="{name}",model="tiny"}}'
            assert changes[f"baton_waiting_seconds_count{label}"] == count
            assert changes[f"baton_starved_total{label}"] == starved
            assert changes[f"baton_requests_waiting{label}"] == -1
        assert 0.25 <= changes['baton_waiting_seconds_sum{class="low",model="tiny"}'] - 100 - 0.0625 < 60


async def test_a_request_that_is_never_sent_has_waited_all_its_time(folder):
    async with running(folder, starvation_bound=0.1, max_dispatch_ahead=0) as stack:
        await stack.silent_pair(max_running=1)
        calls = [
            asyncio.ensure_future(stack.post("/v1/completions", {"prompt": "a", "deadline_ms": 200})) for _ in range(2)
        ]
        assert {status for status, _ in await asyncio.gather(*calls)} == {504}
        after = await scrape(stack)
        assert after['baton_starved_total{class="",model="tiny"}'] == 2
        assert after['baton_waiting_seconds_sum{class="",model="tiny"}'] >= 0.39


async def test_waiting_times_by_priority_have_a_bounded_number_of_labels(folder):
    async with running(folder, enable_priority_scheduling=True) as stack:
        await stack.pair()
        for priority in (None, *range(20)):
            body = {"prompt": "a"} if priority is None else {"prompt": "a", "priority": priority}
            assert (await stack.post("/v1/completions", body))[0] == 200
        after = await scrape(stack)
        counts = {
            name: value for name, value in after.items() if name.startswith("baton_priority_waiting_seconds_count")
        }
        assert len(counts) == 18
        assert counts['baton_priority_waiting_seconds_count{model="tiny",priority="none"}'] == 1
        assert counts['baton_priority_waiting_seconds_count{model="tiny",priority="15"}'] == 1
        assert counts['baton_priority_waiting_seconds_count{model="tiny",priority="other"}'] == 4


async def test_rejections_are_counted_by_reason_without_failures_of_nodes(folder):
    async with running(folder, max_queued_requests=0) as stack:
        before = await scrape(stack)
        await stack.post("/v1/completions", {"prompt": "a"})
        await stack.pair(max_running=1)
        await stack.post("/v1/completions", b"{")
        await stack.post("/v1/completions", {"prompt": "a", "model": "unknown"})
        await stack.post("/v1/chat/completions", {"messages": []})
        await stack.post("/generate", {"text": "a" * 600})
        stack.nodes[1].on_generate = lambda node, generate: node.fail(generate.rid, ErrorCode.OUT_OF_PAGES)
        stack.nodes[0].on_generate = silent
        await stack.post("/v1/completions", {"prompt": "a"})
        stack.nodes[1].on_generate = silent
        call = asyncio.ensure_future(stack.post("/v1/completions", {"prompt": "a"}))
        await stack.nodes[1].until(lambda: len(stack.nodes[1].generates) == 2)
        await stack.post("/v1/completions", {"prompt": "a"})
        changes = await moved(stack, before)
        assert only(changes, "baton_rejections") == {
            'baton_rejections_total{model="",reason="invalid_request"}': 1.0,
            'baton_rejections_total{model="",reason="model_not_found"}': 1.0,
            'baton_rejections_total{model="tiny",reason="invalid_request"}': 1.0,
            'baton_rejections_total{model="tiny",reason="context_length_exceeded"}': 1.0,
            'baton_rejections_total{model="tiny",reason="no_route"}': 1.0,
            'baton_rejections_total{model="tiny",reason="queue_full"}': 1.0,
        }
        assert changes['baton_outputs_total{end="out_of_pages",model="tiny"}'] == 1.0
        await stack.post("/abort_request", {"abort_all": True})
        await call


@pytest.mark.parametrize("is_stream", [False, True])
async def test_disconnects_are_counted(stack, is_stream):
    stack.silence()
    body = {"prompt": "abc", "n": 2, "stream": is_stream}
    call = asyncio.ensure_future(stack.client.post(stack.url + "/v1/completions", json=body))
    decode = stack.nodes[1]
    await decode.until(lambda: len(decode.generates) == 2)
    if is_stream:
        decode.tokens(next(iter(decode.generates)), 0, (65,))
        (await call).close()
    else:
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
    await decode.until(lambda: len(decode.aborts) == 2)
    after = await scrape(stack)
    assert after[f"baton_disconnects_total{LABEL}"] == 2
    assert after['baton_outputs_total{end="aborted",model="tiny"}'] == 2


async def test_an_abort_is_no_disconnect(stack):
    stack.silence()
    call = asyncio.ensure_future(stack.post("/generate", {"text": "abc", "rid": "x"}))
    await stack.nodes[1].until(lambda: stack.nodes[1].generates)
    await stack.post("/abort_request", {"rid": "x"})
    await call
    assert (await scrape(stack))[f"baton_disconnects_total{LABEL}"] == 0


async def test_nodes_are_shown_with_their_last_heartbeat(stack):
    for node in stack.nodes:
        node.is_beating = False
    stack.nodes[0].beat(bytes_sent=1024.0, write_seconds=0.5, retractions=1.0)
    stack.nodes[1].beat(retractions=2.0, local_prefills=3.0, **{"odd name!": 1.0})
    series = {}
    while "baton_node_local_prefills_total" not in str(series) or "baton_node_bytes_sent_total" not in str(series):
        series = await scrape(stack)
    prefill, decode = (f'{{model="tiny",node="{role}",role="{role}"}}' for role in ("prefill", "decode"))
    for name, value in (
        (f"baton_node_pages{decode}", 64), (f"baton_node_free_pages{decode}", 10),
        (f"baton_node_cached_pages{prefill}", 5), (f"baton_node_quarantined_pages{prefill}", 0),
        (f"baton_node_running{decode}", 0), (f"baton_node_waiting{decode}", 0),
        (f"baton_node_bytes_sent_total{prefill}", 1024), (f"baton_node_write_seconds_total{prefill}", 0.5),
        (f"baton_node_retractions_total{prefill}", 1), (f"baton_node_retractions_total{decode}", 2),
        (f"baton_node_local_prefills_total{decode}", 3), (f"baton_node_odd_name__total{decode}", 1),
        ('baton_nodes{model="tiny",role="decode"}', 1), ('baton_nodes{model="tiny",role="prefill"}', 1),
    ):  # fmt: skip
        assert series[name] == value, name


async def test_the_transport_of_each_pair_is_shown_with_the_reason_until_the_pair_is_gone(stack):
    node = stack.nodes[0]
    state = PairState("decode", stack.nodes[1].incarnation, "tcp", 'the first that worked; shm: "no"')
    node.send(Pairs((state,)))
    labels = 'model="tiny",node="prefill",peer="decode",role="prefill",transport="tcp"'
    name = f'baton_node_pair{{{labels},why="the first that worked; shm: \\"no\\""}}'
    while name not in (series := await scrape(stack)):
        await asyncio.sleep(0.01)
    assert series[name] == 1
    rows = {worker["name"]: worker["pairs"] for worker in (await stack.get("/v1/workers"))[1]["workers"]}
    assert rows == {"prefill": [msgspec.to_builtins(state)], "decode": []}
    node.send(Pairs(()))
    while name in await scrape(stack):
        await asyncio.sleep(0.01)


async def test_a_pair_that_cannot_exchange_pages_is_shown_and_is_not_ready(stack):
    prefill, decode = stack.nodes
    failed = PairState("prefill", prefill.incarnation, "nixl", "", "no way there")
    decode.send(Pairs((failed,)))
    while (await stack.get("/ready"))[0] == 200:
        await asyncio.sleep(0.01)
    status, body = await stack.get("/ready")
    assert status == 503
    assert "that can exchange pages (no way there)" in body["error"]["message"]
    labels = 'model="tiny",node="decode",peer="prefill",role="decode",transport="nixl",why="no way there"'
    assert (await scrape(stack))[f"baton_node_pair{{{labels}}}"] == 0
    rows = {worker["name"]: worker["pairs"] for worker in (await stack.get("/v1/workers"))[1]["workers"]}
    assert rows["decode"] == [msgspec.to_builtins(failed)]
    decode.send(Pairs(()))
    while (await stack.get("/ready"))[0] != 200:
        await asyncio.sleep(0.01)


async def test_a_report_of_too_many_pairs_is_dropped(stack):
    state = PairState("decode", stack.nodes[1].incarnation, "tcp", "")
    stack.nodes[0].send(Pairs((state,) * 1_025))
    stack.nodes[0].send(Pairs((msgspec.structs.replace(state, why="x" * 513),)))
    while (await scrape(stack)).get('baton_control_messages_dropped_total{reason="malformed"}') != 2:
        await asyncio.sleep(0.01)
    assert {str(worker["pairs"]) for worker in (await stack.get("/v1/workers"))[1]["workers"]} == {"[]"}


async def test_dropped_control_messages_are_counted(stack, context):
    socket, _ = raw_peer(context, stack.gateway.control_address)
    socket.send_multipart([b"a", b"b"])
    while not only(await scrape(stack), "baton_control_messages_dropped_total{"):
        await asyncio.sleep(0.01)
    socket.close(0)


async def test_refused_control_connections_are_counted(stack, context):
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://{stack.gateway.control_address}")
    while not only(await scrape(stack), 'baton_control_connections_refused_total{reason="handshake"}'):
        await asyncio.sleep(0.01)
    stranger.close(0)


async def test_further_attempts_and_pairs_that_rest_are_counted(stack):
    before = await scrape(stack)
    decode = stack.nodes[1]
    decode.on_generate = lambda node, generate: node.fail(generate.rid, ErrorCode.TRANSFER_FAILED)
    call = asyncio.ensure_future(stack.post("/v1/completions", {"prompt": [65] * 10, "max_tokens": 4}))
    while not only(await moved(stack, before), "baton_resting_pairs"):
        await asyncio.sleep(0.01)
    _, shown = await stack.get("/v1/workers")
    for worker, peer in zip(shown["workers"], ("decode", "prefill"), strict=True):
        (pair,) = worker["failed_pairs"]
        assert (pair["peer"], pair["num_failures"] >= 3) == (peer, True)
    decode.on_generate = echo
    assert (await call)[0] == 200
    changes = await moved(stack, before)
    assert changes['baton_recoveries_total{model="tiny",reason="transfer_failed"}'] >= 3
    assert not only(changes, "baton_resting_pairs")


async def test_requests_that_are_sent_again_are_counted(stack):
    body, key = {"prompt": "abc", "max_tokens": 2}, {"Idempotency-Key": "one"}
    _, first = await stack.post("/v1/completions", body, **key)
    before = await scrape(stack)
    _, again = await stack.post("/v1/completions", body, **key)
    assert (again["id"], again["choices"]) == (first["id"], first["choices"])
    changes = await moved(stack, before)
    assert only(changes, "baton_idempotent") == {'baton_idempotent_retries_total{found="ended",model="tiny"}': 1.0}
    assert not only(changes, "baton_outputs")


async def test_the_memory_of_the_process_is_shown(stack):
    [shown] = only(await scrape(stack), "process_resident_memory_bytes").values()
    assert shown == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)


async def test_no_series_is_left_out_of_these_tests(stack):
    """A new series needs a test that it moves."""
    await stack.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})
    _, text = await stack.get("/metrics")
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert {name for name in names if not name.startswith("baton_node_")} == {
        "baton_http_answers_total", "baton_rejections_total", "baton_outputs_total", "baton_disconnects_total",
        "baton_requests_in_flight", "baton_prompt_tokens_total", "baton_cached_tokens_total",
        "baton_output_tokens_total", "baton_local_prefills_total", "baton_time_to_first_token_seconds",
        "baton_inter_token_seconds", "baton_time_per_output_token_seconds", "baton_request_seconds",
        "baton_stage_seconds", "baton_nodes", "baton_advised_nodes", "baton_control_messages_dropped_total",
        "baton_control_connections_refused_total", "baton_waiting_seconds", "baton_priority_waiting_seconds",
        "baton_starved_total", "baton_requests_waiting", "baton_schedule_policy",
        "baton_recoveries_total", "baton_resting_pairs", "baton_idempotent_retries_total",
        "process_cpu_seconds_total", "process_resident_memory_bytes", "process_virtual_memory_bytes",
        "process_open_fds", "process_max_fds", "process_start_time_seconds",
    }  # fmt: skip
