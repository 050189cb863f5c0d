"""A node leaves its role and comes back in the other one: what the gateway asks, refuses, and answers."""

import asyncio

import msgspec
import pytest
from support.gateway.fake_nodes import BODY, events, running

from common.wire.messages import ChangeRole, Deregister, Done, Drain, PrefillNodes


@pytest.fixture
async def stack(folder):
    """A gateway with two prefill and two decode nodes."""
    async with running(folder, heartbeat_interval=0.1, node_timeout=600.0) as stack:
        for role in ("prefill", "decode"):
            for i in range(2):
                await stack.node(role, f"{role}-{i}")
        yield stack


def ask(stack, name, role, **options):
    return asyncio.ensure_future(stack.post(f"/v1/workers/{name}/role", {"role": role, **options}))


async def ordered(node):
    """The order that a node has received."""
    await node.until(lambda: any(isinstance(message, ChangeRole) for message in node.received))
    return next(message for message in node.received if isinstance(message, ChangeRole))


async def accept(node):
    order = await ordered(node)
    node.send(Done(number=order.number))
    return order


async def come_back(stack, node, role, *, is_seen_to_go=False, **changes):
    """What a node does once it is empty: it says so, its connections close, and it registers with others.

    The gateway may hear of the new connection first, or of the end of the old one.
    """
    node.send(Deregister(is_empty=True))
    await node.round_trip()
    stack.nodes.remove(node)
    if is_seen_to_go:
        await node.kill()
        while node.register.name in await rows(stack):
            await asyncio.sleep(0.01)
    back = stack.joining(role, node.register.name, **{"previous": node.incarnation, "num_role_changes": 1, **changes})
    await back.registered()
    await node.kill()
    return back


async def rows(stack):
    return {row["name"]: row for row in (await stack.get("/v1/workers"))[1]["workers"]}


async def test_the_answer_comes_when_the_node_is_back_in_its_new_role(stack):
    node = stack.nodes[3]
    call = ask(stack, "decode-1", "prefill", timeout_s=7)
    assert (await accept(node)).timeout_s == 7
    assert (await rows(stack))["decode-1"]["is_draining"]
    assert not call.done()
    back = await come_back(stack, node, "prefill")
    status, answer = await call
    assert (status, answer["name"], answer["role"]) == (200, "decode-1", "prefill")
    assert (answer["incarnation"], answer["num_role_changes"]) == (back.incarnation, 1)
    row = (await rows(stack))["decode-1"]
    assert (row["role"], row["starts"], row["num_role_changes"], row["is_draining"]) == ("prefill", 1, 1, False)
    assert 'baton_nodes{model="tiny",role="prefill"} 3.0' in (await stack.get("/metrics"))[1]


async def test_other_decode_nodes_hear_of_a_decode_node_whose_requests_will_move(stack):
    other, node = stack.nodes[2:]

    def sources():
        lists = [message.nodes for message in other.received if isinstance(message, PrefillNodes)]
        return [peer.name for peer in lists[-1]]

    call = ask(stack, "decode-1", "prefill")
    await accept(node)
    node.send(Deregister())
    await other.until(lambda: "decode-1" in sources())
    call.cancel()


async def test_no_request_is_sent_to_a_node_after_the_order(stack):
    node = stack.nodes[3]
    call = ask(stack, "decode-1", "prefill")
    await ordered(node)
    assert {(await stack.post("/v1/completions", BODY))[0] for _ in range(4)} == {200}
    assert not node.generates
    node.send(Done(number=(await ordered(node)).number))
    await come_back(stack, node, "prefill")
    assert (await call)[0] == 200


async def test_a_prefill_node_that_is_empty_ends_no_request_when_it_changes(stack):
    """All pages of the request are at the decode node, which has not sent a token yet."""
    stack.silence()
    prefill, other, decode, _ = stack.nodes
    call = asyncio.ensure_future(stack.client.post(stack.url + "/v1/completions", json={**BODY, "stream": True}))
    while not any(node.generates for node in stack.nodes[:2]) or not any(node.generates for node in stack.nodes[2:]):
        await asyncio.sleep(0.01)
    prefill = prefill if prefill.generates else other
    decode = next(node for node in stack.nodes[2:] if node.generates)
    [rid] = prefill.generates
    change = ask(stack, prefill.register.name, "decode")
    await accept(prefill)
    prefill.tokens(rid, 0, (65,))
    await come_back(stack, prefill, "decode")
    assert (await change)[0] == 200
    for i in range(1, 9):
        decode.tokens(rid, i, (65,), finish="length" if i == 8 else "")
    answer = await call
    assert [event async for event in events(answer)][-1] == "[DONE]"


@pytest.mark.parametrize("is_seen_to_go", [False, True])
async def test_the_cache_of_a_node_is_known_in_its_new_role(stack, is_seen_to_go):
    prompt = "Shall I compare thee to a summer's day? " * 6
    body = {"prompt": prompt, "max_tokens": 2}
    assert (await stack.post("/v1/completions", body))[0] == 200
    decode = next(node for node in stack.nodes[2:] if node.generates)
    first = next(node for node in stack.nodes[:2] if node.generates)
    change = ask(stack, decode.register.name, "prefill")
    await accept(decode)
    back = await come_back(stack, decode, "prefill", is_seen_to_go=is_seen_to_go)
    assert (await change)[0] == 200
    await first.kill()
    stack.nodes.remove(first)
    while first.register.name in await rows(stack):
        await asyncio.sleep(0.01)
    assert (await stack.post("/v1/completions", body))[0] == 200
    assert back.generates, "of the two prefill nodes that are left, one has the prompt"


@pytest.mark.parametrize(
    ("name", "body", "status", "sentence"),
    [
        ("decode-1", {"role": "decode"}, 400, "node decode-1 is a decode node already"),
        ("decode-9", {"role": "prefill"}, 404, "no node has the name or the incarnation 'decode-9'"),
        ("decode-1", {"role": "gateway"}, 400, "role"),
        ("decode-1", {"role": "prefill", "timeout_s": -1}, 400, "timeout_s"),
        ("decode-1", {"role": "prefill", "when": "now"}, 400, "when"),
    ],
)
async def test_an_impossible_change_is_refused_with_a_sentence(stack, name, body, status, sentence):
    assert (await stack.post(f"/v1/workers/{name}/role", body))[0] == status
    assert sentence in (await stack.post(f"/v1/workers/{name}/role", body))[1]["error"]["message"]
    assert not any(isinstance(message, ChangeRole) for node in stack.nodes for message in node.received)


async def test_a_node_that_cannot_change_says_why_when_it_registers(stack):
    await stack.node("decode", "decode-2", fixed_role="node decode-2 records what it does (--record)")
    status, answer = await stack.post("/v1/workers/decode-2/role", {"role": "prefill"})
    assert (status, answer["error"]["message"]) == (400, "node decode-2 records what it does (--record)")


async def test_a_node_without_a_common_transport_in_its_new_role_keeps_it(folder):
    async with running(folder, heartbeat_interval=0.1, node_timeout=600.0) as stack:
        await stack.node("prefill", "p", transports=("tcp", "shm"))
        await stack.node("decode", "d0", transports=("tcp",))
        await stack.node("decode", "d1", transports=("shm",))
        status, answer = await stack.post("/v1/workers/d1/role", {"role": "prefill"})
        assert status == 400
        assert "have no transport in common" in answer["error"]["message"]


async def test_requests_that_came_meanwhile_go_to_a_node_that_keeps_its_role(folder):
    async with running(folder, heartbeat_interval=0.1, node_timeout=600.0) as stack, asyncio.timeout(60):
        _, decode = await stack.pair()
        change = ask(stack, "decode", "prefill", force=True)
        order = await ordered(decode)
        call = asyncio.ensure_future(stack.post("/v1/completions", BODY))
        while not (await stack.get("/v1/workers"))[1]["num_waiting"]:
            await asyncio.sleep(0.01)
        decode.send(Done("node decode is changing its role already", order.number))
        assert (await change)[0] == 400
        assert (await call)[0] == 200


async def test_the_last_node_of_its_role_changes_only_if_it_is_forced(folder):
    async with running(folder, heartbeat_interval=0.1, node_timeout=600.0) as stack:
        _, decode = await stack.pair()
        status, answer = await stack.post("/v1/workers/decode/role", {"role": "prefill"})
        assert status == 400
        assert "node decode is the last decode node" in answer["error"]["message"]
        call = ask(stack, "decode", "prefill", force=True)
        await accept(decode)
        await come_back(stack, decode, "prefill")
        assert (await call)[0] == 200
        assert (await stack.get("/ready"))[0] == 503


async def test_the_last_node_of_its_role_in_a_revision_changes_only_if_it_is_forced(stack):
    await stack.node("prefill", "new-p", weight_version="w2")
    assert (await rows(stack))["new-p"]["role"] == "prefill"
    alone = ask(stack, "new-p", "decode")  # no decode node depends on it
    await accept(stack.nodes[-1])
    await come_back(stack, stack.nodes[-1], "decode", weight_version="w2")
    assert (await alone)[0] == 200
    await stack.node("prefill", "new-p2", weight_version="w2")
    status, answer = await stack.post("/v1/workers/new-p2/role", {"role": "decode"})
    assert status == 400
    assert "node new-p2 is the last prefill node of its revision" in answer["error"]["message"]
    forced = ask(stack, "new-p2", "decode", force=True)
    await accept(stack.nodes[-1])
    await come_back(stack, stack.nodes[-1], "decode", weight_version="w2")
    assert (await forced)[0] == 200


async def test_a_node_that_refuses_stays_in_rotation(stack):
    node = stack.nodes[3]
    call = ask(stack, "decode-1", "prefill")
    order = await ordered(node)
    node.send(Done("not now", order.number))
    status, answer = await call
    assert (status, answer["error"]["message"]) == (400, "not now")
    assert not (await rows(stack))["decode-1"]["is_draining"]


async def test_a_second_order_is_refused_while_the_first_is_carried_out(stack):
    node = stack.nodes[3]
    call = ask(stack, "decode-1", "prefill")
    await accept(node)
    status, answer = await stack.post("/v1/workers/decode-1/role", {"role": "prefill"})
    assert (status, answer["error"]["message"]) == (400, "node decode-1 is changing its role already")
    await come_back(stack, node, "prefill")
    assert (await call)[0] == 200


async def test_a_node_that_keeps_its_role_is_reported_and_serves_on(stack):
    node = stack.nodes[3]
    call = ask(stack, "decode-1", "prefill")
    await accept(node)
    node.send(node.register)  # as it does when it cannot leave its role
    status, answer = await call
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert "node decode-1 is still a decode node" in answer["error"]["message"]
    assert not (await rows(stack))["decode-1"]["is_draining"]


async def test_a_node_that_is_told_to_stop_while_it_changes_its_role_is_not_waited_for(stack):
    node = stack.nodes[3]
    call = ask(stack, "decode-1", "prefill")
    await accept(node)
    drain = asyncio.ensure_future(stack.post("/v1/workers/decode-1/drain", {}))
    await node.until(lambda: any(isinstance(message, Drain) for message in node.received))
    (drained,) = [message for message in node.received if isinstance(message, Drain)]
    node.send(Done(number=drained.number))
    assert (await drain)[0] == 200
    status, answer = await call
    assert status == 400
    assert answer["error"]["message"] == "node decode-1 drains and stops, and does not become a prefill node"


async def test_a_node_that_is_heard_again_before_it_leaves_its_role_gets_no_requests(stack):
    node = stack.nodes[3]
    call = ask(stack, "decode-1", "prefill")
    await accept(node)
    node.send(msgspec.structs.replace(node.register, is_draining=True))  # its connection broke and came up again
    await node.round_trip()
    assert (await rows(stack))["decode-1"]["is_draining"]
    assert not call.done()
    await come_back(stack, node, "prefill")
    status, answer = await call
    assert (status, answer["role"]) == (200, "prefill")


async def test_a_node_that_drains_already_gets_no_requests_after_it_has_refused_an_order(stack):
    node = stack.nodes[3]
    call = ask(stack, "decode-1", "prefill")
    order = await ordered(node)
    node.leave()  # it was stopped, or another gateway has asked, before the order came
    node.send(Done("node decode-1 is draining or changing its role already", order.number))
    assert (await call)[0] == 400
    assert (await rows(stack))["decode-1"]["is_draining"]
