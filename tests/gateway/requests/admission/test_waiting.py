"""The gateway's queue over real sockets: requests wait in order, and all ends of a request apply to waiting ones."""

import asyncio
import contextlib

import pytest
from support.gateway.fake_nodes import echo, running, silent

from gateway.requests.input.generate_request import client_rid


@contextlib.asynccontextmanager
async def full(folder, *, lookahead=0, nodes=None, **config):
    """A gateway whose only pair has one row, taken by a request that does not end by itself."""
    values = {"enable_priority_scheduling": True, "max_dispatch_ahead": lookahead, "heartbeat_interval": 0.1, **config}
    async with running(folder, **values) as stack:
        await stack.silent_pair(max_running=1, **(nodes or {}))
        first = await sent(stack, "first")
        for node in stack.nodes:
            await node.until(lambda node=node: node.generates)
        yield stack, first
        _, info = await stack.get("/server_info")
        assert info["num_in_flight"] == 0
        _, answer = await stack.get("/v1/workers")
        assert {worker["load_tokens"] for worker in answer["workers"]} <= {0}


async def sent(stack, rid, **fields):
    """Send a request and return once it is in the gateway; the result is its pending answer."""
    _, info = await stack.get("/server_info")
    headers = {"x-baton-tenant": fields.pop("tenant")} if "tenant" in fields else {}
    post = stack.client.post(stack.url + "/generate", json=body_of(rid, **fields), headers=headers)
    call = asyncio.ensure_future(post)
    async with asyncio.timeout(60):
        while (await stack.get("/server_info"))[1]["num_in_flight"] == info["num_in_flight"] and not call.done():
            await asyncio.sleep(0.002)
    return call


def body_of(rid, max_new=2, **fields):
    return {
        "text": "a",
        "rid": rid,
        "sampling_params": {"max_new_tokens": max_new, **fields.pop("sampling", {})},
        **fields,
    }


def finish(stack, rid="first"):
    """Make the nodes end a request that at least one of them has received."""
    pair = stack.nodes[:2]
    generate = next(node.generates[rid] for node in pair if rid in node.generates)
    for node in pair:
        echo(node, generate)


async def result(call):
    async with await call as answer:
        body = await answer.json()
        return answer.status, body["error"]["code"] if "error" in body else [one["output_ids"] for one in as_list(body)]


def as_list(body):
    return body if isinstance(body, list) else [body]


def order_at(node):
    return [client_rid(rid) for rid in node.generates]


async def let_all_go(stack, *calls):
    """Make the nodes answer by themselves."""
    for node in stack.nodes:
        node.on_generate = echo
    finish(stack)
    return [status for status, _ in await asyncio.gather(*map(result, calls))]


# ---- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priorities", "order"),
    [((1, 2), ["first", "b", "a"]), ((2, 1), ["first", "a", "b"]), ((2, 2), ["first", "a", "b"])],
)
async def test_reversed_priorities_reverse_the_order_of_service(folder, priorities, order):
    async with full(folder) as (stack, first):
        calls = [await sent(stack, rid, priority=priority) for rid, priority in zip("ab", priorities, strict=True)]
        assert order_at(stack.nodes[0]) == ["first"]
        _, shown = await stack.get("/v1/workers")
        assert (shown["num_in_flight"], shown["num_waiting"]) == (3, 2)
        assert await let_all_go(stack, first, *calls) == [200] * 3
        for node in stack.nodes:
            assert order_at(node) == order


async def test_max_dispatch_ahead_requests_are_sent_beyond_the_running_ones(folder):
    async with full(folder, lookahead=2) as (stack, first):
        calls = [await sent(stack, rid) for rid in "abc"]
        await stack.nodes[1].until(lambda: len(stack.nodes[1].generates) == 3)
        await stack.nodes[1].round_trip()
        assert order_at(stack.nodes[1]) == ["first", "a", "b"]
        finish(stack)
        await stack.nodes[1].until(lambda: "c" in stack.nodes[1].generates)
        for rid in "abc":
            finish(stack, rid)
        assert [status for status, _ in [await result(call) for call in (first, *calls)]] == [200] * 4


async def test_a_new_request_does_not_pass_waiting_ones_though_there_is_room(folder):
    async with full(folder) as (stack, first):
        waiting = await sent(stack, "a")
        second = await stack.node("decode", "second", max_running=1)
        second.on_generate = silent
        await stack.nodes[0].until(lambda: "a" in stack.nodes[0].generates)  # it was sent as soon as a row was free
        await second.until(lambda: second.generates)
        assert order_at(second) == ["a"]
        last = await sent(stack, "b")
        assert order_at(stack.nodes[0]) == ["first", "a"]
        echo(stack.nodes[0], stack.nodes[0].generates["a"])
        echo(second, second.generates["a"])
        assert (await result(waiting))[0] == 200
        await second.until(lambda: "b" in second.generates)
        for node in (stack.nodes[0], second):
            echo(node, second.generates["b"])
        finish(stack)
        assert [(await result(call))[0] for call in (first, last)] == [200, 200]


async def test_nodes_are_told_the_waiting_time_and_priority(folder):
    async with full(folder) as (stack, first):
        call = await sent(stack, "a", priority=7, deadline_ms=60_000)
        await asyncio.sleep(0.1)
        assert await let_all_go(stack, first, call) == [200, 200]
        generate = stack.nodes[1].generates["a"]
        assert generate.priority == 7
        assert generate.waited_s >= 0.1
        assert generate.timeout_s == pytest.approx(60.0 - generate.waited_s)


async def test_outputs_of_one_request_wait_separately(folder):
    async with full(folder) as (stack, first):
        call = await sent(stack, "many", text=["a", "b"], sampling={"n": 2})
        stack.nodes[0].on_generate = silent
        for name in ("second", "third"):
            (await stack.node("decode", name, max_running=2)).on_generate = silent
        await stack.nodes[0].until(lambda: len(stack.nodes[0].generates) == 5)
        for node in stack.nodes:
            for rid in node.generates:
                if rid != "first":
                    echo(node, node.generates[rid])
        assert await let_all_go(stack, first, call) == [200, 200]
        hosts = {rid: node.register.name for node in stack.nodes[1:] for rid in node.generates}
        assert [rid for rid in stack.nodes[0].generates if rid != "first"] == [
            f"many-{i}-{j}" for i in "01" for j in "01"
        ]
        for prompt in "01":
            assert hosts[f"many-{prompt}-0"] == hosts[f"many-{prompt}-1"]


async def test_tenants_take_turns(folder):
    options = {"enable_priority_scheduling": False, "schedule_policy": "fair", "tenant_header": True}
    async with full(folder, **options) as (stack, first):
        rids = [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b")]
        calls = [await sent(stack, rid, tenant=tenant) for rid, tenant in rids]
        assert await let_all_go(stack, first, *calls) == [200] * 6
        assert order_at(stack.nodes[0])[1:] == ["a1", "b1", "a2", "b2", "a3"]


# ---- ends -----------------------------------------------------------------------------------------------------------


async def test_a_waiting_request_can_be_aborted(folder):
    async with full(folder) as (stack, first):
        calls = [await sent(stack, rid) for rid in "ab"]
        assert await stack.post("/abort_request", {"rid": "a"}) == (200, {"aborted": 1})
        assert await result(calls[0]) == (499, "aborted")
        assert await let_all_go(stack, first, calls[1]) == [200, 200]
        for node in stack.nodes:
            assert order_at(node) == ["first", "b"]
            assert node.aborts == []


async def test_a_waiting_request_ends_at_its_deadline(folder):
    async with full(folder) as (stack, first):
        call = await sent(stack, "a", deadline_ms=150)
        assert await result(call) == (504, "deadline_exceeded")
        assert await let_all_go(stack, first) == [200]
        assert order_at(stack.nodes[0]) == ["first"]


async def test_a_waiting_request_ends_when_its_client_disconnects(folder):
    async with full(folder, retry_grace=0) as (stack, first):
        call = await sent(stack, "a")
        call.cancel()
        while (await stack.get("/server_info"))[1]["num_in_flight"] > 1:
            await asyncio.sleep(0.005)
        assert await let_all_go(stack, first) == [200]
        assert order_at(stack.nodes[0]) == ["first"]


async def test_a_stop_ends_waiting_requests(folder):
    async with full(folder) as (stack, first):
        call = await sent(stack, "a")
        stack.gateway._dispatcher.shut_down()
        assert [(await result(one))[1] for one in (first, call)] == ["shutting_down"] * 2


# ---- a full queue ---------------------------------------------------------------------------------------------------


async def test_the_queue_is_bounded_and_refusals_carry_retry_after(folder):
    async with full(folder, max_queued_requests=2) as (stack, first):
        calls = [await sent(stack, rid) for rid in "ab"]
        async with await (await sent(stack, "c")) as answer:
            assert answer.status == 429
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert await let_all_go(stack, first, *calls) == [200] * 3


async def test_a_full_queue_evicts_the_least_urgent_request(folder):
    async with full(folder, max_queued_requests=2) as (stack, first):
        calls = {rid: await sent(stack, rid, priority=priority) for rid, priority in (("a", 3), ("b", 1))}
        assert await result(await asyncio.wait_for(sent(stack, "c", priority=1), 60)) == (429, "queue_full")
        calls["d"] = urgent(stack, "d", priority=2)
        async with await calls.pop("b") as answer:
            assert (answer.status, int(answer.headers["Retry-After"]) >= 1) == (429, True)
            assert "a more urgent request has taken its place" in (await answer.json())["error"]["message"]
        assert await let_all_go(stack, first, *calls.values()) == [200] * 3
        assert order_at(stack.nodes[0]) == ["first", "a", "d"]


async def test_a_request_at_the_nodes_without_a_token_can_be_evicted(folder):
    async with full(folder, lookahead=64, max_queued_requests=2) as (stack, first):
        prefill, decode = stack.nodes
        calls = {rid: await sent(stack, rid, priority=priority) for rid, priority in (("a", 3), ("b", 1))}
        await decode.until(lambda: len(decode.generates) == 3)
        for rid in ("first", "b"):
            prefill.tokens(rid, 0, (65,))  # a request with a token is not evicted
        await prefill.round_trip()
        assert await result(await asyncio.wait_for(sent(stack, "c", priority=2), 60)) == (429, "queue_full")
        calls["d"] = urgent(stack, "d", priority=4)
        async with await calls.pop("a") as answer:
            assert (answer.status, int(answer.headers["Retry-After"]) >= 1) == (429, True)
        for node in stack.nodes:
            await node.until(lambda node=node: "d" in node.generates)
            assert node.aborts == ["a"]
        for rid in "bd":
            finish(stack, rid)
        assert await let_all_go(stack, first, *calls.values()) == [200] * 3


def urgent(stack, rid, **fields):
    """Send a request that evicts another; return once the other has ended."""
    return asyncio.ensure_future(stack.client.post(stack.url + "/generate", json=body_of(rid, **fields)))


# ---- loss of nodes --------------------------------------------------------------------------------------------------


async def until_gone(stack, node):
    """Wait until the gateway has noticed that a node is gone; before, it refuses another one of the same name."""
    async with asyncio.timeout(60):
        while node.register.name in {row["name"] for row in (await stack.get("/v1/workers"))[1]["workers"]}:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("which", [0, 1])
async def test_waiting_requests_survive_the_loss_of_a_node(folder, which):
    async with full(folder) as (stack, first):
        call = await sent(stack, "a")
        lost = stack.nodes[which]
        await lost.kill()
        stack.nodes.remove(lost)
        for node in stack.nodes:
            node.on_generate = echo
        await until_gone(stack, lost)
        assert not call.done()
        new = await stack.node(lost.role, lost.register.name, max_running=1)
        assert await result(first) == (200, [[64, 64]])
        assert await result(call) == (200, [[64, 64]])
        assert order_at(new) == ["first", "a"], "a request that was lost comes first"


async def test_waiting_requests_end_in_no_route_without_a_replacement(folder):
    async with full(folder, recovery_timeout=0.3) as (stack, first):
        call = await sent(stack, "a", deadline_ms=30_000)
        await stack.nodes[1].kill()
        del stack.nodes[1]
        assert (await result(first))[1] == "node_lost"
        assert await result(call) == (503, "no_route")


async def test_a_request_whose_only_large_pool_is_lost_lets_others_pass(folder):
    async with full(folder, recovery_timeout=1.5, nodes={"num_pages": 8}) as (stack, first):
        large = await stack.node("decode", "large", max_running=1)
        large.on_generate = silent
        second = await sent(stack, "second", max_new=200)
        waiting = await sent(stack, "third", max_new=200)
        await large.kill()
        stack.nodes.remove(large)
        small = await sent(stack, "small")
        assert await let_all_go(stack, first, small) == [200, 200]
        assert (await result(second))[1] == "node_lost"
        assert await result(waiting) == (503, "no_route")
