"""Nodes come and go, clients disconnect, deadlines pass: every request ends in tokens or in a typed error, and
is aborted on the nodes."""

import asyncio
import contextlib
import json
import logging
import time
from urllib.parse import urlsplit

import pytest
from support.gateway.fake_nodes import BODY, echo, error_of, events, running, silent, start_request
from support.wire.raw_peers import raw_peer

from common.errors import ErrorCode
from common.wire.messages import Abort, Pairs, PairState, Ping, PrefillNodes, Registered, Tokens, Unknown


@pytest.fixture
async def stack(folder):
    """A gateway and a pair of nodes that send no tokens unless a test makes them."""
    async with silent_pair(folder, node_timeout=600.0) as running_stack:
        yield running_stack


@contextlib.asynccontextmanager
async def silent_pair(folder, *, node_timeout, **config):
    async with running(folder, heartbeat_interval=0.1, node_timeout=node_timeout, **config) as stack:
        await stack.silent_pair()
        yield stack
        assert (await stack.get("/server_info"))[1]["num_in_flight"] == 0


async def serves(stack):
    """Whether a request succeeds, with the nodes echoing."""
    for node in stack.nodes:
        node.on_generate = echo
    return (await stack.post("/v1/completions", {"prompt": "a", "max_tokens": 2}))[0] == 200


async def until_logged(caplog, text, *, num_times=1):
    async with asyncio.timeout(60):
        while caplog.text.count(text) < num_times:
            await asyncio.sleep(0.01)


async def test_the_loss_of_a_node_is_a_warning_unless_it_has_said_that_it_leaves(folder, caplog):
    caplog.set_level(logging.INFO, "gateway.workers.control_plane")
    async with silent_pair(folder, node_timeout=600.0) as stack:
        prefill, decode = stack.nodes
        decode.leave()
        await until_logged(caplog, "takes no new requests")
        await asyncio.gather(prefill.kill(), decode.kill())
        await until_logged(caplog, "is gone", num_times=2)
    levels = {record.args[0]: record.levelname for record in caplog.records if "is gone" in record.message}
    assert levels == {"prefill": "WARNING", "decode": "INFO"}


@pytest.mark.parametrize(("present", "missing"), [("prefill", "decode"), ("decode", "prefill")])
async def test_the_role_of_which_there_is_no_node_is_named(folder, present, missing):
    async with running(folder) as stack:
        _, none = await stack.get("/ready")
        await stack.node(present)
        _, one = await stack.get("/ready")
    assert none["error"]["message"].startswith("no pair of a prefill and a decode node is registered")
    assert one["error"]["message"].startswith(f"no {missing} node is registered")


# ---- the client -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "before the first token", "streaming"])
async def test_a_disconnect_aborts_the_request_on_both_nodes(stack, when):
    prefill, decode = stack.nodes
    call, rid = await start_request(stack, {**BODY, "stream": when != "waiting"})
    if when == "streaming":
        prefill.tokens(rid, 0, (65,))
        answer = await call
        await anext(events(answer))
        answer.close()
    else:
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
    await prefill.until(lambda: rid in prefill.aborts)
    await decode.until(lambda: rid in decode.aborts)


async def test_a_disconnect_aborts_every_output_of_a_batch(stack):
    prefill, decode = stack.nodes
    call = asyncio.ensure_future(stack.client.post(stack.url + "/v1/completions", json={"prompt": ["a", "b", "c"]}))
    await decode.until(lambda: len(decode.generates) == 3)
    await prefill.until(lambda: len(prefill.generates) == 3)
    prefill.tokens(next(iter(prefill.generates)), 0, (65,), finish="length")
    await prefill.round_trip()
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    await prefill.until(lambda: len(prefill.aborts) == 2)
    await decode.until(lambda: len(decode.aborts) == 3)


@pytest.mark.parametrize("body", [{"rid": "mine"}, {"abort_all": True}])
async def test_abort_request_ends_the_request_on_both_nodes_and_at_the_client(stack, body):
    call, _ = await start_request(stack, {"text": "a", "rid": "mine"}, "/generate")
    assert await stack.post("/abort_request", {"rid": "other"}) == (200, {"aborted": 0})
    assert await stack.post("/abort_request", body) == (200, {"aborted": 1})
    assert await error_of(call) == (499, "aborted")
    for node in stack.nodes:
        await node.until(lambda node=node: node.aborts == ["mine"])


async def test_abort_request_accepts_the_id_of_a_batch(stack):
    call = asyncio.ensure_future(stack.client.post(stack.url + "/generate", json={"text": ["a", "b"], "rid": "both"}))
    await stack.nodes[0].until(lambda: len(stack.nodes[0].generates) == 2)
    assert list(stack.nodes[0].generates) == ["both-0", "both-1"]
    assert await stack.post("/abort_request", {"rid": "both"}) == (200, {"aborted": 2})
    assert (await error_of(call))[1] == "aborted"


async def test_a_deadline_ends_the_request_on_both_nodes(stack):
    call, rid = await start_request(stack, {**BODY, "deadline_ms": 200})
    assert await error_of(call) == (504, "deadline_exceeded")
    for node in stack.nodes:
        await node.until(lambda node=node: rid in node.aborts)


async def test_a_stream_that_fails_midway_ends_with_an_error_event(stack):
    prefill, decode = stack.nodes
    call, rid = await start_request(stack, {**BODY, "stream": True})
    prefill.tokens(rid, 0, (65,))
    async with await call as answer:
        assert answer.status == 200
        arriving = events(answer)
        await anext(arriving)
        decode.fail(rid, ErrorCode.OUT_OF_PAGES, "no page is left")
        (last,) = [event async for event in arriving]
    assert last["error"] == {
        "message": "no page is left",
        "type": "server_error",
        "param": None,
        "code": "out_of_pages",
    }
    await prefill.until(lambda: rid in prefill.aborts)


async def test_a_client_that_stops_reading_is_disconnected_after_its_deadline(folder, monkeypatch):
    monkeypatch.setattr("gateway.http.streaming.STALL_S", 0.2)
    async with running(folder) as stack:
        prefill, decode = await stack.silent_pair(context_length=500_000, num_pages=50_000)
        address = urlsplit(stack.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 10)
        body = json.dumps(
            {"text": "a", "stream": True, "deadline_ms": 5_000, "sampling_params": {"max_new_tokens": 450_000}}
        )
        writer.write(
            f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        rid = await prefill.only_rid()
        prefill.tokens(rid, 0, (65,))
        for i in range(20):  # each event repeats the whole text: 17 MB, more than the buffers hold
            decode.tokens(rid, 1 + 20_000 * i, (65,) * 20_000)
            await decode.round_trip()
        await decode.until(lambda: rid in decode.aborts)
        async with asyncio.timeout(60):
            while stack.gateway._http.connections:
                await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_streams_continue_while_a_long_prompt_is_tokenized(folder):
    async with running(folder) as stack:
        prefill, decode = await stack.silent_pair(context_length=4_000_000, num_pages=300_000)
        call, rid = await start_request(stack, {**BODY, "max_tokens": 1_000_000, "stream": True})
        prefill.tokens(rid, 0, (65,))
        async with await call as answer:
            arriving = events(answer)
            await anext(arriving)
            text = "Shall I compare thee to a summer's day? " * 25_000
            long = asyncio.ensure_future(stack.post("/tokenize", {"prompt": text}))
            i = 1
            while not long.done():
                decode.tokens(rid, i, (65,))
                await anext(arriving)
                i += 1
            assert (await long)[1]["count"] > 100_000
            assert i > 3
            decode.tokens(rid, i, (65,), finish="length")


# ---- loss of nodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
async def test_after_the_death_of_a_node_its_requests_go_on_with_its_replacement(stack, which):
    call, rid = await start_request(stack)
    dead, sibling = stack.nodes[which], stack.nodes[1 - which]
    await dead.kill()
    await sibling.until(lambda: rid in sibling.aborts)
    stack.nodes.remove(dead)
    new = asyncio.ensure_future(stack.post("/v1/completions", BODY))
    assert (await stack.get("/ready"))[0] == 503
    sibling.on_generate = echo
    again = stack.joining(dead.role, dead.register.name)
    await again.registered()
    assert any(isinstance(message, Registered) and message.starts == 2 for message in again.received)
    async with await call as answer:
        assert (await answer.json())["usage"]["completion_tokens"] == 9
    assert (await new)[0] == 200
    _, known = await stack.get("/v1/requests")
    assert next(one for one in known["requests"] if one["rid"] == rid)["num_attempts"] == 2
    assert await serves(stack)


async def test_messages_sent_before_a_disconnect_are_handled_first(stack):
    """A node that stops reports every request as failed and closes its connection at once; others take them."""
    calls = []
    for _ in range(8):
        calls.append(await start_request(stack))
    decode = stack.nodes[1]

    def last_words():
        for _, rid in calls:
            decode.fail(rid, ErrorCode.SHUTTING_DOWN)
        decode.leave()

    await decode.kill(last_words)
    router, monitor, *_ = stack.gateway._control._channel._mailbox.sockets
    assert router.poll(60_000) and monitor.poll(60_000)
    time.sleep(0.1)  # both the messages and the disconnect have arrived
    stack.gateway._control.on_disconnect()
    assert (await stack.get("/metrics"))[1].count('reason="shutting_down"} 8.0') == 1
    stack.nodes[0].on_generate = echo
    await stack.node("decode", "another")
    for call, _ in calls:
        async with await call as answer:
            assert answer.status == 200


async def test_the_death_of_a_prefill_node_spares_requests_in_decode(stack):
    prefill, decode = stack.nodes
    taken, taken_rid = await start_request(stack)
    prefill.tokens(taken_rid, 0, (65,))
    decode.tokens(taken_rid, 1, (66,))
    for node in stack.nodes:
        await node.round_trip()
    waiting, waiting_rid = await start_request(stack)
    prefill.tokens(waiting_rid, 0, (65,))
    await prefill.kill()
    stack.nodes.remove(prefill)
    await decode.until(lambda: waiting_rid in decode.aborts)
    await stack.node("prefill", "another")
    await decode.until(lambda: decode.generates[waiting_rid].output == (65,))
    decode.tokens(waiting_rid, 1, (66,), finish="length")
    async with await waiting as answer:
        assert (await answer.json())["usage"]["completion_tokens"] == 2
    decode.tokens(taken_rid, 2, (67,), finish="length")
    async with await taken as answer:
        assert answer.status == 200
        assert (await answer.json())["usage"]["completion_tokens"] == 3
    assert taken_rid not in decode.aborts


async def test_late_tokens_of_a_silent_node_that_registers_again_harm_nothing(folder):
    async with silent_pair(folder, node_timeout=4.0) as stack:
        call, rid = await start_request(stack)
        prefill, decode = stack.nodes
        prefill.tokens(rid, 0, (65,))
        old = decode.generates[rid].attempt
        decode.is_beating = False
        await prefill.until(lambda: rid in prefill.aborts)
        await decode.until(lambda: rid in decode.aborts)  # it may have been slow only
        decode.send(Tokens(rid, old, 1, (90, 90, 90)))
        decode.beat()
        await decode.until(lambda: any(isinstance(message, Unknown) for message in decode.received))
        decode.is_beating = True
        await decode.until(lambda: decode.generates[rid].attempt != old)
        assert decode.generates[rid].output == (65,)
        decode.send(Tokens(rid, old, 1, (90, 90, 90)))
        decode.tokens(rid, 1, (66, 67), finish="length")
        async with await call as answer:
            assert (await answer.json())["usage"]["completion_tokens"] == 3
        assert await serves(stack)


async def test_a_node_whose_heartbeat_waits_behind_many_messages_is_not_lost(stack, caplog):
    """The gateway's event loop stood still for longer than a node may be silent, and the node has sent much."""
    node, control = stack.nodes[1], stack.gateway._control
    (worker,) = [worker for worker in control.pools.workers() if worker.incarnation == node.incarnation]
    node.mailbox.send(*[Ping()] * 10_000)
    node.beat()
    worker.seen_at -= 3_600
    control._channel._mailbox.sockets[0].poll(60_000)
    time.sleep(1.5)  # the other messages arrive, and the next look for silent nodes is due
    await node.round_trip()
    assert "is gone" not in caplog.text
    assert await serves(stack)


@pytest.mark.parametrize("which", [0, 1])
async def test_the_requests_of_a_node_that_registers_again_begin_anew(stack, which):
    """The gateway has not noticed the interruption; the node has ended its requests."""
    call, rid = await start_request(stack)
    for node in stack.nodes:
        node.on_generate = echo
    node, sibling = stack.nodes[which], stack.nodes[1 - which]
    node.send(node.register)
    await sibling.until(lambda: rid in sibling.aborts)
    async with await call as answer:
        assert (await answer.json())["usage"]["completion_tokens"] == 9
    assert await serves(stack)


async def test_a_node_that_registers_again_gets_the_requests_that_waited_for_it(folder):
    """A pair could exchange no pages, until the decode node's connections broke and came back."""
    async with running(folder, heartbeat_interval=0.1, node_timeout=600.0) as stack, asyncio.timeout(60):
        prefill, decode = await stack.pair()
        decode.send(Pairs((PairState("prefill", prefill.incarnation, "shm", "", "it is out of reach"),)))
        while (await stack.get("/ready"))[0] == 200:
            await asyncio.sleep(0.01)
        call = asyncio.ensure_future(stack.post("/v1/completions", BODY))
        while not (await stack.get("/v1/workers"))[1]["num_waiting"]:
            await asyncio.sleep(0.01)
        decode.send(decode.register)
        decode.send(Pairs((PairState("prefill", prefill.incarnation, "shm", ""),)))
        assert (await call)[0] == 200


async def test_decode_nodes_are_told_the_prefill_nodes_of_their_weights(folder):
    async with running(folder) as stack:
        old = await stack.node("decode", "old")
        new = await stack.node("decode", "new", weight_version="w2")
        for name, weights in (("p0", "w1"), ("p1", "w2"), ("p2", "w1")):
            await stack.node("prefill", name, weight_version=weights)

        def told(node):
            lists = [message.nodes for message in node.received if isinstance(message, PrefillNodes)]
            return [peer.name for peer in lists[-1]]

        await old.until(lambda: told(old) == ["p0", "p2"])
        await new.until(lambda: told(new) == ["p1"])
        await stack.nodes[2].kill()
        await old.until(lambda: told(old) == ["p2"])


async def test_weights_are_replaced_under_load_and_no_output_mixes_them(folder):
    """Pairs with new weights come, then those with the old ones die, while clients keep asking."""
    tokens = {"w1": 65, "w2": 66}

    def writes(node, generate):
        token, limit, begun = tokens[node.register.weight_version], generate.sampling.max_new_tokens, generate.output
        if node.role == "prefill":
            if not begun:
                node.tokens(generate.rid, 0, (token,))
            return
        for i in range(max(len(begun), 1), limit):
            node.tokens(generate.rid, i, (token,), finish="length" if i == limit - 1 else "")

    async def ask(stack, answers, stopped):
        while not stopped:
            answers.append(await stack.post("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 9}}))

    async with running(folder) as stack:
        answers, stopped = [], []
        for role in ("prefill", "decode"):
            (await stack.node(role, f"{role}-old")).on_generate = writes
        clients = [asyncio.ensure_future(ask(stack, answers, stopped)) for _ in range(8)]
        for role in ("prefill", "decode"):
            new = stack.joining(role, f"{role}-new", weight_version="w2")
            new.on_generate = writes
            await new.registered()
        old_prefill, old_decode, _, new_decode = stack.nodes
        await new_decode.until(lambda: len(new_decode.generates) > 20)
        for node in (old_decode, old_prefill):
            node.leave()
        await new_decode.until(lambda: len(new_decode.generates) > 60)
        for node in (old_decode, old_prefill):
            await node.kill()
        await new_decode.until(lambda: len(new_decode.generates) > 100)
        stopped.append(True)
        await asyncio.gather(*clients)
        assert {status for status, _ in answers} == {200}
        outputs = {tuple(answer["output_ids"]) for _, answer in answers}
        assert outputs == {(65,) * 9, (66,) * 9}


async def test_a_leaving_node_gets_no_new_requests_and_finishes_the_others(folder):
    async with silent_pair(folder, node_timeout=600.0, recovery_timeout=0.2) as stack:
        prefill, decode = stack.nodes
        call, rid = await start_request(stack)
        decode.leave()
        while (await stack.get("/ready"))[0] == 200:
            await asyncio.sleep(0.01)
        assert (await stack.post("/v1/completions", BODY))[0] == 503
        other = await stack.node("decode", "other")
        other.on_generate = silent
        prefill.tokens(rid, 0, (65,))
        decode.tokens(rid, 1, (66,), finish="length")
        async with await call as answer:
            assert answer.status == 200
        prefill.on_generate = other.on_generate = echo
        assert (await stack.post("/v1/completions", BODY))[0] == 200
        assert len(decode.generates) == 1


async def test_a_replacement_with_the_same_name_is_accepted_while_the_old_connection_lingers(stack):
    old = stack.nodes[1]
    second = await stack.joining("decode", "decode").until_refused()
    assert "is registered already" in second.refusal
    await old.kill()
    stack.nodes.remove(old)
    third = await stack.node("decode", "decode")
    assert any(isinstance(message, Registered) and message.starts == 2 for message in third.received)
    assert await serves(stack)


async def test_a_node_of_another_model_is_refused_with_a_sentence(stack):
    other = await stack.joining("decode", "odd", context_length=100).until_refused()
    assert "context length (--context-length) of node odd is 100, that of node prefill is 512" in other.refusal
    _, answer = await stack.get("/v1/workers")
    assert [worker["name"] for worker in answer["workers"]] == ["prefill", "decode"]


async def test_tokens_of_an_unknown_request_are_answered_with_an_abort(stack):
    prefill = stack.nodes[0]
    prefill.tokens("unknown", 0, (65,))
    await prefill.until(lambda: Abort("unknown", 0) in prefill.received)


async def test_tokens_of_another_node_are_refused(stack):
    prefill, decode = stack.nodes
    stranger = await stack.node("decode", "stranger")
    call, rid = await start_request(stack)
    owner = decode if rid in decode.generates else stranger
    other = stranger if owner is decode else decode
    other.tokens(rid, 0, (66, 66), finish="length")
    await other.until(lambda: rid in other.aborts)
    prefill.tokens(rid, 0, (65,))
    owner.tokens(rid, 1, (65,), finish="length")
    async with await call as answer:
        assert (await answer.json())["usage"]["completion_tokens"] == 2


async def test_a_repeated_first_token_counts_once(stack):
    prefill, decode = stack.nodes
    call, rid = await start_request(stack)
    for _ in range(2):
        prefill.tokens(rid, 0, (65,))
    decode.tokens(rid, 1, (65,), finish="length")
    async with await call as answer:
        assert (await answer.json())["usage"]["completion_tokens"] == 2
    _, answer = await stack.get("/v1/workers")
    assert [worker["load_tokens"] for worker in answer["workers"]] == [0, 0]


async def test_garbage_on_the_control_port_is_counted_and_dropped(stack, context):
    socket, _ = raw_peer(context, stack.gateway.control_address)
    for frames in ([b""], [b"a", b"b"], [b"\xff" * 100, b"\xc1"], [b"x"] * 5, [b"\x93\x01" + b"[" * 1000, b"{}"]):
        socket.send_multipart(frames)
    while "baton_control_messages_dropped_total" not in (await stack.get("/metrics"))[1]:
        await asyncio.sleep(0.01)
    assert await serves(stack)
    socket.close(0)


async def test_requests_are_spread_over_all_nodes(folder):
    async with running(folder) as stack:
        nodes = [await stack.node(role, f"{role}{i}") for role in ("prefill", "decode") for i in range(3)]
        for node in nodes:
            node.on_generate = silent
        calls = [asyncio.ensure_future(stack.post("/v1/completions", BODY)) for _ in range(6)]
        for node in nodes:
            await node.until(lambda node=node: len(node.generates) == 2)
        assert [len(node.generates) for node in nodes] == [2] * 6
        assert await stack.post("/abort_request", {"abort_all": True}) == (200, {"aborted": 6})
        await asyncio.gather(*calls)
