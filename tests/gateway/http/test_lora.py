"""LoRA adapters are models of their own names, and are loaded and unloaded on all nodes."""

import asyncio
import time

import aiohttp
import pytest
from support.gateway.fake_nodes import adapter, echo, error_of, running, silent, start_request

from common.wire.messages import AdapterUnused, LoadAdapter, UnloadAdapter
from gateway.http.routes import adapters
from gateway.workers import adapter_changes

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL = {"lora_name": "sql", "lora_path": "sql-v1"}
#: The number of a change that is made after those of a test.
LATER = 1 << 60
ASK = {"model": "sql", "prompt": "a summer's day", "max_tokens": 4}


async def names(stack):
    return [model["id"] for model in (await stack.get("/v1/models"))[1]["data"]]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_changing_adapters_needs_the_admin_key(folder, path):
    async with running(folder, api_key="user", admin_api_key="admin") as stack:
        for headers, status in ({}, 401), ({"Authorization": "Bearer user"}, 403):
            assert (await stack.post(path, SQL if path == LOAD else {"lora_name": "sql"}, **headers))[0] == status
        answered, _ = await stack.post(LOAD, SQL, Authorization="Bearer admin")
        assert answered == 503


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_name": "sql"}, "lora_path"),
        ({"lora_path": "sql"}, "lora_name"),
        ({**SQL, "lora_name": "a b"}, "lora_name"),
        ({**SQL, "lora_name": "sql\n"}, "lora_name"),
        ({**SQL, "lora_name": "a@b"}, "lora_name"),
        ({**SQL, "lora_name": "tiny"}, "lora_name"),
        ({**SQL, "lora_name": "x" * 200}, "lora_name"),
        ({**SQL, "lora_path": ""}, "lora_path"),
        ({**SQL, "load_inplace": True}, "load_inplace"),
    ],
)
async def test_wrong_bodies_are_refused_by_their_field(stack, body, field):
    status, answer = await stack.post(LOAD, body)
    assert status == 400
    assert field in answer["error"]["message"]
    assert not any(isinstance(message, LoadAdapter) for node in stack.nodes for message in node.received)


async def test_an_unknown_base_model_and_an_unknown_adapter_are_not_found(stack):
    status, answer = await stack.post(LOAD, {**SQL, "base_model_name": "other"})
    assert (status, answer["error"]["param"]) == (404, "base_model_name")
    status, answer = await stack.post(UNLOAD, {"lora_name": "sql"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = await stack.post("/v1/completions", ASK)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_if_every_node_refuses_the_answer_is_an_error_that_names_them(stack):
    for node in stack.nodes:
        node.adapter_error = "no such folder"
    status, answer = await stack.post(LOAD, SQL)
    assert status == 400
    assert answer["error"]["message"] == "prefill: no such folder; decode: no such folder"
    assert await names(stack) == ["tiny"]


async def test_a_node_that_cannot_load_is_told_in_the_answer_and_the_adapter_is_not_served(stack):
    stack.nodes[1].adapter_error = "too large"
    status, answer = await stack.post(LOAD, SQL)
    assert status == 200
    assert [(node["name"], node["error"]) for node in answer["nodes"]] == [("prefill", ""), ("decode", "too large")]
    assert await names(stack) == ["tiny"]
    status, answer = await stack.post("/v1/completions", ASK)
    assert (status, answer["error"]["code"]) == (503, "no_route")
    assert "it is on prefill" in answer["error"]["message"]


async def test_nodes_whose_adapters_differ_in_content_do_not_serve_it_together(folder):
    async with running(folder) as stack:
        await stack.node("prefill", adapters=(adapter("sql", "old"),))
        await stack.node("decode", adapters=(adapter("sql", "new"),))
        assert await names(stack) == ["tiny"]
        status, answer = await stack.post("/v1/completions", ASK)
        assert (status, answer["error"]["code"]) == (503, "no_route")
        third = await stack.node("decode", "decode-1", adapters=(adapter("sql", "old"),))
        assert await names(stack) == ["tiny", "sql"]
        for _ in range(4):
            assert (await stack.post("/v1/completions", ASK))[0] == 200
        assert len(third.generates) == 4


# ---- what is served --------------------------------------------------------------------------------------------------


async def test_an_adapter_is_listed_below_its_model_and_answers_by_its_own_name(stack):
    assert (await stack.post(LOAD, SQL))[0] == 200
    _, listed = await stack.get("/v1/models")
    assert [(one["id"], one["root"], one["parent"]) for one in listed["data"]] == [
        ("tiny", "tiny", None), ("sql", "tiny", "tiny"),
    ]  # fmt: skip
    assert (await stack.get("/v1/models/sql"))[1]["parent"] == "tiny"
    status, answer = await stack.post("/v1/completions", ASK)
    assert (status, answer["model"]) == (200, "sql")
    chat = {"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert (await stack.post("/v1/chat/completions", chat))[1]["model"] == "sql"
    for node in stack.nodes:
        assert {generate.adapter for generate in node.generates.values()} == {adapter("sql", "sql-v1").id}


async def test_no_other_request_shares_the_cache_of_an_adapter_whatever_salt_it_has(stack):
    await stack.post(LOAD, SQL)
    await stack.post(LOAD, {"lora_name": "sql-2", "lora_path": "sql-v1"})
    prefill = stack.nodes[0]
    names = ["tiny", "sql", "sql-2"]
    roots: dict[str, tuple[str, str]] = {}
    salts = ["", "x", f"\0{adapter('sql', 'sql-v1').id}\0", f"\0{adapter('sql', 'sql-v1').id}\0x", "\0\0"]
    for name in names:
        for salt in salts:
            known = set(prefill.generates)
            await stack.post("/v1/completions", {**ASK, "model": name, "cache_salt": salt})
            (rid,) = set(prefill.generates) - known
            roots[prefill.generates[rid].cache_salt] = name, salt
    assert len(roots) == len(names) * len(salts)


async def test_a_node_that_comes_later_loads_what_the_others_have(stack):
    await stack.post(LOAD, SQL)
    late = await stack.node("decode", "decode-1")
    await late.until(lambda: any(isinstance(message, LoadAdapter) for message in late.received))
    await late.round_trip()
    stack.nodes[1].is_beating = False
    await stack.nodes[1].kill()
    await asyncio.sleep(0)
    assert (await stack.post("/v1/completions", ASK))[0] == 200


async def test_a_node_that_comes_back_with_an_unloaded_adapter_drops_it(stack):
    await stack.post(LOAD, SQL)
    await stack.post(UNLOAD, {"lora_name": "sql"})
    late = await stack.node("decode", "decode-1", adapters=(adapter("sql", "sql-v1"),))
    await late.until(lambda: any(isinstance(message, UnloadAdapter) for message in late.received))
    await late.round_trip()
    assert late.register.adapters == ()
    assert await names(stack) == ["tiny"]


async def told(node, kind):
    """The messages of a kind that a node has received, without their numbers."""
    await node.round_trip()
    return [(message.name, message.change) for message in node.received if isinstance(message, kind)]


async def test_a_gateway_that_starts_has_nodes_load_what_others_have_had_loaded_before_it_came(folder):
    old = adapter("sql", "sql-v1", path="sql-v1", change=3)
    async with running(folder) as stack:
        lacking = await stack.node("decode", adapters=(adapter("given", "x"),))
        await stack.node("prefill", adapters=(old, adapter("given", "x")))
        assert await told(lacking, LoadAdapter) == [("sql", 3)]
        await lacking.round_trip()
        assert await names(stack) == ["tiny", "given", "sql"]
        late = await stack.node("decode", "decode-1", adapters=(adapter("given", "x"),))
        assert await told(late, LoadAdapter) == [("sql", 3)]
        assert (await stack.post("/v1/completions", ASK))[0] == 200
        assert (await stack.post(UNLOAD, {"lora_name": "sql"}))[0] == 200
        ((name, number),) = await told(late, UnloadAdapter)
        assert name == "sql"
        assert number > 3, "a later change has a higher number"


@pytest.mark.parametrize("is_stale_first", [False, True])
async def test_a_gateway_that_starts_learns_what_was_unloaded_from_any_node(folder, is_stale_first):
    stale = {"adapters": (adapter("sql", "sql-v1", path="sql-v1", change=3),)}
    nodes = [("prefill", stale), ("decode", {"unloaded": {"sql": 4}})]
    async with running(folder) as stack:
        for role, fields in nodes if is_stale_first else reversed(nodes):
            await stack.node(role, **fields)
        by_role = {node.role: node for node in stack.nodes}
        await by_role["decode"].round_trip()
        assert await told(by_role["prefill"], UnloadAdapter) == [("sql", 4)]
        await by_role["prefill"].round_trip()
        assert by_role["prefill"].register.adapters == ()
        assert await names(stack) == ["tiny"]


@pytest.mark.parametrize("is_unload_first", [False, True])
async def test_of_a_load_and_an_unload_with_one_number_the_unload_counts_in_either_order(folder, is_unload_first):
    loaded = {"adapters": (adapter("sql", "sql-v1", path="sql-v1", change=3),)}
    nodes = [("prefill", loaded), ("decode", {"unloaded": {"sql": 3}})]
    async with running(folder) as stack:
        for role, fields in reversed(nodes) if is_unload_first else nodes:
            await stack.node(role, **fields)
        by_role = {node.role: node for node in stack.nodes}
        await by_role["decode"].round_trip()
        assert await told(by_role["prefill"], UnloadAdapter) == [("sql", 3)]
        assert await told(by_role["decode"], LoadAdapter) == []
        assert await names(stack) == ["tiny"]


async def test_a_change_has_a_higher_number_than_an_earlier_one_of_which_only_another_gateway_knows(stack):
    earlier = time.time() * 1_000
    assert (await stack.post(LOAD, SQL))[0] == 200
    assert min(one.change for node in stack.nodes for one in node.register.adapters) >= int(earlier)


async def test_a_gateway_whose_clock_is_minutes_behind_undoes_what_another_one_has_done(folder):
    ahead = int((time.time() + 600) * 1_000)  # the number that a gateway whose clock is ten minutes ahead has given
    async with running(folder) as stack:
        for role in ("prefill", "decode"):
            await stack.node(role, adapters=(adapter("sql", "sql-v1", path="sql-v1", change=ahead),))
        assert (await stack.post(UNLOAD, {"lora_name": "sql"}))[0] == 200
        assert [await told(node, UnloadAdapter) for node in stack.nodes] == [[("sql", ahead + 1)]] * 2
        assert await names(stack) == ["tiny"]
        assert (await stack.post(LOAD, SQL))[0] == 200
        assert await names(stack) == ["tiny", "sql"]


async def test_the_oldest_of_very_many_unloaded_names_is_forgotten(folder, monkeypatch):
    monkeypatch.setattr(adapter_changes, "MAX_UNLOADED", 2)
    async with running(folder) as stack:
        node = await stack.node("prefill", unloaded={"a": 1, "b": 2})
        for number in (3, 4):
            node._change_adapter(UnloadAdapter("c", number))
            await node.round_trip()
        registry = stack.gateway._models["tiny"].pool.registry
        assert [name for name in "abc" if registry.is_withdrawn(name)] == ["b", "c"]


async def test_an_adapter_that_was_loaded_again_is_not_unloaded_by_a_node_that_missed_it(folder):
    async with running(folder) as stack:
        behind = await stack.node("prefill", unloaded={"sql": 4})
        ahead = await stack.node("decode", adapters=(adapter("sql", "sql-v2", path="sql-v2", change=5),))
        assert await told(behind, LoadAdapter) == [("sql", 5)]
        await behind.round_trip()
        assert await told(ahead, UnloadAdapter) == []
        assert await names(stack) == ["tiny", "sql"]


async def test_a_node_that_missed_that_an_adapter_was_replaced_drops_it_before_it_loads_the_other(folder):
    old, new = adapter("sql", "sql-v1"), adapter("sql", "sql-v2", path="sql-v2", change=7)
    async with running(folder) as stack:
        await stack.node("prefill", adapters=(new,))
        behind = await stack.node("decode", adapters=(old,))
        await behind.until(lambda: new in behind.register.adapters)
        changes = [message for message in behind.received if isinstance(message, LoadAdapter | UnloadAdapter)]
        assert changes == [UnloadAdapter("sql", 6), LoadAdapter("sql", "sql-v2", 7)]
        await behind.round_trip()
        assert (await stack.post("/v1/completions", ASK))[0] == 200
        assert {generate.adapter for generate in behind.generates.values()} == {new.id}


async def test_nodes_follow_one_that_has_loaded_another_version_than_they_have(folder):
    old, new = adapter("sql", "sql-v1", path="sql-v1", change=5), adapter("sql", "sql-v2", path="sql-v2", change=7)
    async with running(folder) as stack:
        behind = await stack.node("prefill", adapters=(old,))
        lacking = await stack.node("decode")
        lacking.set_adapters(new)
        await behind.until(lambda: new in behind.register.adapters)
        assert await told(behind, UnloadAdapter) == [("sql", 6)]


async def test_a_gateway_wants_no_adapter_any_more_that_another_one_has_unloaded(stack):
    await stack.post(LOAD, SQL)
    for node in stack.nodes:
        node._change_adapter(UnloadAdapter("sql", LATER))
    while await names(stack) != ["tiny"]:
        await asyncio.sleep(0.01)
    late = await stack.node("decode", "decode-1")
    assert await told(late, LoadAdapter) == []


async def test_a_node_that_was_reading_an_adapter_when_the_others_unloaded_it_is_asked_again(folder):
    async with running(folder) as stack:
        await stack.node("prefill", unloaded={"sql": 4})
        reading = await stack.node("decode")
        reading.set_adapters(adapter("sql", "sql-v1", path="sql-v1", change=3))
        assert await told(reading, UnloadAdapter) == [("sql", 4)]
        await reading.round_trip()
        assert reading.register.adapters == ()


async def test_a_node_that_refuses_a_change_is_not_asked_again_and_again(folder):
    async with running(folder) as stack:
        await stack.node("prefill", unloaded={"sql": 4})
        stubborn = await stack.node("decode")
        stubborn.adapter_error = "no"
        stubborn.set_adapters(adapter("sql", "sql-v1", path="sql-v1", change=3))
        for _ in range(3):
            assert await told(stubborn, UnloadAdapter) == [("sql", 4)]


async def test_requests_for_an_adapter_wait_for_nodes_that_load_it_after_all_have_been_lost(folder):
    async with running(folder) as stack:
        await stack.pair()
        await stack.post(LOAD, SQL)
        for node in stack.nodes:
            await node.kill()
            await lost(stack, node)
        call = asyncio.ensure_future(stack.post("/v1/completions", ASK))
        while not (await stack.get("/server_info"))[1]["num_in_flight"]:
            assert not call.done(), await call
            await asyncio.sleep(0.01)
        for role in "prefill", "decode":
            await stack.node(role, f"{role}-1")
        assert (await call)[0] == 200
        assert {request.adapter for request in stack.nodes[-1].generates.values()} == {adapter("sql", "sql-v1").id}


async def lost(stack, node):
    while any(row["name"] == node.register.name for row in (await stack.get("/v1/workers"))[1]["workers"]):
        await asyncio.sleep(0.01)


async def test_a_model_whose_nodes_are_lost_does_not_hide_an_adapter_of_another_model(folder):
    async with running(folder, also_serve=(f"b={folder}",), recovery_timeout=0.1) as stack:
        for node in await stack.pair(adapters=(adapter("sql", "old"),)):
            await node.kill()
            await lost(stack, node)
        later = adapter("sql", "new")
        nodes = await stack.pair(model="b", adapters=(later,))
        assert await names(stack) == ["tiny", "b", "sql"]
        assert (await stack.get("/v1/models/sql"))[1]["parent"] == "b"
        assert (await stack.post("/v1/completions", ASK))[0] == 200
        assert {generate.adapter for generate in nodes[1].generates.values()} == {later.id}
        _, answer = await stack.post(UNLOAD, {"lora_name": "sql"})
        assert [row["name"] for row in answer["nodes"]] == ["prefill", "decode"]


async def test_before_nodes_have_come_any_name_may_be_that_of_an_adapter(folder):
    async with running(folder) as stack:

        async def refusals():
            answers = await stack.post("/v1/completions", ASK), await stack.get("/v1/models/sql")
            return [(status, answer["error"]["code"]) for status, answer in answers]

        assert await refusals() == [(503, "no_route")] * 2
        await stack.pair()
        assert await refusals() == [(404, "model_not_found")] * 2


async def test_a_retry_with_a_key_gets_its_outputs_after_the_adapter_has_been_withdrawn(stack):
    await stack.post(LOAD, SQL)
    stack.silence()
    key = {"Idempotency-Key": "one"}
    first = asyncio.ensure_future(stack.client.post(stack.url + "/v1/completions", json=ASK, headers=key))
    await asyncio.gather(*(node.until(lambda node=node: node.generates) for node in stack.nodes))
    unload = asyncio.ensure_future(stack.post(UNLOAD, {"lora_name": "sql"}))
    while await names(stack) != ["tiny"]:
        await asyncio.sleep(0.01)
    retry = asyncio.ensure_future(stack.post("/v1/completions", ASK, **key))
    with pytest.raises(aiohttp.ServerDisconnectedError):  # the retry has taken the outputs over
        await first
    for node in stack.nodes:
        for generate in list(node.generates.values()):
            echo(node, generate)
    status, answer = await retry
    assert (status, answer["model"]) == (200, "sql")
    assert (await unload)[0] == 200
    assert await stack.post("/v1/completions", ASK, **key) == (200, answer)
    assert (await stack.post("/v1/completions", ASK))[0] == 404


# ---- unloading at another gateway ------------------------------------------------------------------------------------


async def test_a_withdrawn_adapter_gets_no_new_requests_and_is_said_to_be_unused_at_once(stack):
    await stack.post(LOAD, SQL)
    for node in stack.nodes:
        node.set_adapters(adapter("sql", "sql-v1", path="sql-v1", change=LATER, is_withdrawn=True))
        await node.until(lambda node=node: AdapterUnused(adapter("sql", "sql-v1").id) in node.received)
    assert (await stack.post("/v1/completions", ASK))[0] == 404
    assert await names(stack) == ["tiny"]


async def test_requests_that_wait_for_room_are_served_before_the_adapter_is_unused(folder):
    loaded = adapter("sql", "sql-v1", path="sql-v1", change=1)
    withdrawn = adapter("sql", "sql-v1", path="sql-v1", change=2, is_withdrawn=True)
    async with running(folder, max_dispatch_ahead=0) as stack:
        nodes = await stack.pair(max_running=1, adapters=(loaded,))
        for node in nodes:
            node.on_generate = silent
        calls = [asyncio.ensure_future(stack.post("/v1/completions", ASK)) for _ in range(4)]
        while (await stack.get("/server_info"))[1]["num_in_flight"] < len(calls):
            await asyncio.sleep(0.01)
        await nodes[1].round_trip()
        assert len(nodes[1].generates) < len(calls), "some wait at the gateway"
        for node in nodes:
            node.set_adapters(withdrawn)
            await node.round_trip()
            assert AdapterUnused(withdrawn.id) not in node.received
        for node in nodes:
            node.on_generate = echo
        for node in nodes:
            for generate in list(node.generates.values()):
                echo(node, generate)
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * len(calls)
        for node in nodes:
            await node.until(lambda node=node: AdapterUnused(withdrawn.id) in node.received)


# ---- unloading -------------------------------------------------------------------------------------------------------


async def test_unloading_waits_for_requests_in_flight_while_new_ones_are_not_found(stack):
    await stack.post(LOAD, SQL)
    stack.silence()
    call, rid = await start_request(stack, ASK)
    unload = asyncio.ensure_future(stack.post(UNLOAD, {"lora_name": "sql"}))
    while await names(stack) != ["tiny"]:
        await asyncio.sleep(0.01)
    assert (await stack.post("/v1/completions", ASK))[0] == 404
    assert (await stack.post(LOAD, SQL))[0] == 400
    prefill, decode = stack.nodes
    await decode.round_trip()
    assert not any(isinstance(message, AdapterUnused) for message in decode.received)
    echo(prefill, prefill.generates[rid])
    echo(decode, decode.generates[rid])
    async with await call as answer:
        assert answer.status == 200
    status, answer = await unload
    assert status == 200
    assert [node["error"] for node in answer["nodes"]] == ["", ""]
    assert (await stack.post(LOAD, SQL))[0] == 200
    assert await names(stack) == ["tiny", "sql"]


async def test_an_adapter_is_unloaded_at_nodes_that_come_after_all_have_been_lost(stack):
    await stack.post(LOAD, SQL)
    for node in stack.nodes:
        await node.kill()
        await lost(stack, node)
    assert await stack.post(UNLOAD, {"lora_name": "sql"}) == (200, {"lora_name": "sql", "nodes": []})
    assert await names(stack) == ["tiny"]
    assert (await stack.post("/v1/completions", ASK))[0] == 404
    assert (await stack.post(UNLOAD, {"lora_name": "sql"}))[0] == 404
    assert (await stack.post(LOAD, SQL))[0] == 503
    lacking = await stack.node("prefill", "prefill-1")
    having = await stack.node("decode", "decode-1", adapters=(adapter("sql", "sql-v1"),))
    await having.until(lambda: "sql" in having.register.unloaded)
    assert await told(lacking, LoadAdapter) == []


async def test_unloading_that_takes_too_long_says_how_many_requests_are_left(stack, monkeypatch):
    monkeypatch.setattr(adapters, "UNLOAD_TIMEOUT_S", 0.05)
    await stack.post(LOAD, SQL)
    stack.silence()
    call, rid = await start_request(stack, ASK)
    status, answer = await stack.post(UNLOAD, {"lora_name": "sql"})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert "requests still have the adapter sql after 0.05 s, 1 of them at this gateway" in answer["error"]["message"]
    await stack.post("/abort_request", {"rid": rid})
    (await call).close()
    monkeypatch.setattr(adapters, "UNLOAD_TIMEOUT_S", 60.0)
    assert (await stack.post(UNLOAD, {"lora_name": "sql"}))[0] == 200


async def test_a_request_that_reaches_a_node_after_its_adapter_has_gone_is_not_found(stack):
    await stack.post(LOAD, SQL)
    stack.silence()
    call, rid = await start_request(stack, ASK)
    stack.nodes[0].fail(rid, "model_not_found", "the node does not have the adapter any more")
    assert await error_of(call) == (404, "model_not_found")


async def test_nodes_that_answer_too_late_are_a_time_out(stack, monkeypatch):
    monkeypatch.setattr(adapters, "LOAD_TIMEOUT_S", 0.05)
    for node in stack.nodes:
        node.adapter_error = None
    status, answer = await stack.post(LOAD, SQL)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert "no node has loaded the adapter sql" in answer["error"]["message"]


async def test_an_adapter_can_be_loaded_again_after_its_unloading_took_too_long(stack, monkeypatch):
    assert (await stack.post(LOAD, SQL))[0] == 200
    monkeypatch.setattr(adapters, "UNLOAD_TIMEOUT_S", 0.05)
    for node in stack.nodes:
        node.adapter_error = None  # requests of another gateway still have the adapter
    assert (await stack.post(UNLOAD, {"lora_name": "sql"}))[0] == 504
    for node in stack.nodes:
        node.adapter_error = ""
        node._change_adapter(UnloadAdapter("sql", LATER))
        await node.until(lambda node=node: any(isinstance(message, AdapterUnused) for message in node.received))
    await asyncio.gather(*(node.round_trip() for node in stack.nodes))
    assert (await stack.post(LOAD, SQL))[0] == 200
    assert "sql" in await names(stack)
