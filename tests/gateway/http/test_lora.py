"""LoRA adapters are models of their own names, and are loaded and unloaded on all nodes."""

import asyncio

import msgspec
import pytest
from support.gateway.fake_nodes import adapter, echo, error_of, folder, running, silent, start_request

from common.wire.messages import Adapters, LoadAdapter, UnloadAdapter
from gateway.http.routes import adapters

__all__ = ["folder"]

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL = {"lora_name": "sql", "lora_path": "sql-v1"}
ASK = {"model": "sql", "prompt": "a summer's day", "max_tokens": 4}


@pytest.fixture
async def stack(folder):
    async with running(folder) as running_stack:
        await running_stack.pair()
        yield running_stack


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


async def test_a_gateway_wants_no_adapter_any_more_that_another_one_has_unloaded(stack):
    await stack.post(LOAD, SQL)
    for node in stack.nodes:
        node.register = msgspec.structs.replace(node.register, adapters=())
        node.send(Adapters(()))
    while await names(stack) != ["tiny"]:
        await asyncio.sleep(0.01)
    late = await stack.node("decode", "decode-1")
    await late.round_trip()
    assert not any(isinstance(message, LoadAdapter) for message in late.received)


# ---- unloading -------------------------------------------------------------------------------------------------------


async def test_unloading_waits_for_requests_in_flight_while_new_ones_are_not_found(stack):
    await stack.post(LOAD, SQL)
    for node in stack.nodes:
        node.on_generate = silent
    call, rid = await start_request(stack, ASK)
    unload = asyncio.ensure_future(stack.post(UNLOAD, {"lora_name": "sql"}))
    while await names(stack) != ["tiny"]:
        await asyncio.sleep(0.01)
    assert (await stack.post("/v1/completions", ASK))[0] == 404
    assert (await stack.post(LOAD, SQL))[0] == 400
    prefill, decode = stack.nodes
    await decode.round_trip()
    assert not any(isinstance(message, UnloadAdapter) for message in decode.received)
    echo(prefill, prefill.generates[rid])
    echo(decode, decode.generates[rid])
    async with await call as answer:
        assert answer.status == 200
    status, answer = await unload
    assert status == 200
    assert [node["error"] for node in answer["nodes"]] == ["", ""]
    assert (await stack.post(LOAD, SQL))[0] == 200
    assert await names(stack) == ["tiny", "sql"]


async def test_unloading_that_takes_too_long_says_how_many_requests_are_left(stack, monkeypatch):
    monkeypatch.setattr(adapters, "UNLOAD_TIMEOUT_S", 0.05)
    await stack.post(LOAD, SQL)
    for node in stack.nodes:
        node.on_generate = silent
    call, rid = await start_request(stack, ASK)
    status, answer = await stack.post(UNLOAD, {"lora_name": "sql"})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert "1 requests still have the adapter" in answer["error"]["message"]
    await stack.post("/abort_request", {"rid": rid})
    (await call).close()
    assert (await stack.post(UNLOAD, {"lora_name": "sql"}))[0] == 200


async def test_a_request_that_reaches_a_node_after_its_adapter_has_gone_is_not_found(stack):
    await stack.post(LOAD, SQL)
    for node in stack.nodes:
        node.on_generate = silent
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
        node._change_adapter(UnloadAdapter("sql"))
    await asyncio.gather(*(node.round_trip() for node in stack.nodes))
    assert (await stack.post(LOAD, SQL))[0] == 200
    assert "sql" in await names(stack)
