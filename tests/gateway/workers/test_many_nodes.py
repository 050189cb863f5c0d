"""What grows with the number of nodes: registrations, announcements, lists, metrics, and requests by node."""

from collections import Counter
from types import SimpleNamespace

import pytest
from support.gateway.fake_nodes import make_register, running, silent

from common.wire.messages import Heartbeat, Pairs, PairState, PrefillNodes
from gateway.metrics.collectors import MAX_NODES, Metrics
from gateway.requests.in_flight import InFlightTable
from gateway.workers.registry import Registry


def beat(share):
    return Heartbeat(0, 0, 0, 0, 0, {}, share=share)


def test_a_share_that_changes_changes_the_limits_and_leaves_the_nodes_as_they_are():
    registry = Registry(num_token_ids=320)
    registry.register("p", make_register("prefill", "p"), 0.0)
    for number in range(3):
        registry.register(f"d{number}", make_register("decode", f"d{number}", share=0), 0.0)
    nodes = registry.prefills, registry.decodes
    assert registry.limits.max_running == 0
    assert registry.on_heartbeat("d1", beat(5), 1.0)
    assert registry.on_heartbeat("d2", beat(2), 1.0)
    assert not registry.on_heartbeat("d1", beat(4), 1.0)
    assert registry.limits.max_running == registry.accepted.max_running == 6
    assert (registry.prefills, registry.decodes) == nodes
    assert registry.decodes is nodes[1], "the router keeps its arrays"


def test_nodes_with_an_adapter_are_found_once_for_all_its_requests():
    registry = Registry(num_token_ids=320)
    registry.register("p", make_register("prefill", "p"), 0.0)
    registry.register("d", make_register("decode", "d"), 0.0)
    found = registry.able("law@1")
    assert found == ((), ())
    assert registry.able("law@1") is found
    registry.register("d2", make_register("decode", "d2"), 0.0)
    assert registry.able("law@1") is not found


@pytest.mark.parametrize("number", [0, 7, 49])
def test_a_node_is_compared_with_all_that_differ_from_one_another(number):
    registry = Registry(num_token_ids=320)
    for other in range(50):
        changes = {"transports": ("tcp",)} if other == number else {}
        registry.register(f"d{other}", make_register("decode", f"d{other}", **changes), 0.0)
    refused = registry.register("p", make_register("prefill", "p", transports=("shm",)), 0.0)
    assert f"nodes p and d{number} have no transport in common" in refused.reason
    refused = registry.register("e", make_register("decode", "d20"), 0.0)
    assert "a node named d20 is registered already" in refused.reason


async def test_prefill_nodes_that_come_together_are_announced_together(folder):
    async with running(folder) as stack:
        decode = await stack.node("decode")
        for node in [stack.joining("prefill", name=f"p{number}") for number in range(8)]:
            await node.registered()

        def lists():
            return [message.nodes for message in decode.received if isinstance(message, PrefillNodes)]

        await decode.until(lambda: lists() and len(lists()[-1]) == 8)
        assert len(lists()) < 8
        later = await stack.node("decode", name="d2")
        await later.until(lambda: any(isinstance(message, PrefillNodes) for message in later.received))
        (message,) = [message for message in later.received if isinstance(message, PrefillNodes)]
        assert sorted(peer.name for peer in message.nodes) == [f"p{number}" for number in range(8)]


async def test_prefill_nodes_beyond_what_a_message_holds_are_not_announced(folder, monkeypatch):
    monkeypatch.setattr("gateway.workers.control_plane.MAX_PREFILL_NODES", 2)
    async with running(folder) as stack:
        for number in range(3):
            await stack.node("prefill", name=f"p{number}")
        decode = await stack.node("decode")
        await decode.until(lambda: any(isinstance(message, PrefillNodes) for message in decode.received))
        for message in decode.received:
            if isinstance(message, PrefillNodes):
                assert [peer.name for peer in message.nodes] == ["p0", "p1"]


async def test_nodes_are_listed_in_one_order_whichever_came_first(folder):
    async with running(folder) as stack:
        for name in ("d1", "p1", "d0", "p0"):
            await stack.node("prefill" if name[0] == "p" else "decode", name)
        listed = [(await stack.get(f"/v1/workers?limit=1&offset={i}"))[1]["workers"][0]["name"] for i in range(4)]
        assert listed == ["p0", "p1", "d0", "d1"]


async def test_the_list_of_nodes_comes_in_parts_and_leaves_out_pairs_that_work_if_there_are_very_many(
    folder, monkeypatch
):
    async with running(folder) as stack:
        prefill, decode = await stack.pair()
        broken = PairState("p9", "9" * 32, "tcp", "", "no route")
        decode.send(Pairs((PairState("prefill", prefill.incarnation, "shm", "same machine"), broken)))
        await decode.round_trip()
        answer = (await stack.get("/v1/workers"))[1]
        rows = answer["workers"]
        assert (answer["num_workers"], [row["num_pairs"] for row in rows]) == (2, [0, 2])
        assert len(rows[1]["pairs"]) == 2
        answer = (await stack.get("/v1/workers?limit=1&offset=1"))[1]
        assert (answer["num_workers"], answer["workers"][0]["incarnation"]) == (2, decode.incarnation)
        assert (await stack.get("/v1/workers?limit=0"))[0] == 400
        monkeypatch.setattr("gateway.http.routes.workers.MAX_PAIRS", 1)
        rows = (await stack.get("/v1/workers"))[1]["workers"]
        assert (rows[1]["num_pairs"], [pair["problem"] for pair in rows[1]["pairs"]]) == (2, ["no route"])


async def test_requests_are_counted_at_their_nodes_until_they_end(folder):
    async with running(folder) as stack:
        _, decode = await stack.pair()
        decode.on_generate = silent

        async def counts():
            return [row["num_requests"] for row in (await stack.get("/v1/workers"))[1]["workers"]]

        async with stack.client.post(
            stack.url + "/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 4, "stream": True}
        ):
            await decode.until(lambda: len(decode.generates) == 2)
            assert await counts() == [2, 2]
        await decode.until(lambda: len(decode.aborts) == 2)
        assert await counts() == [0, 0]


def in_flight(rid, adapter=""):
    request = SimpleNamespace(rid=rid, model="m", adapter=adapter)
    return SimpleNamespace(nodes=(), stream=SimpleNamespace(request=request))


def test_a_table_counts_the_requests_of_an_adapter_and_forgets_adapters_without_requests():
    table = InFlightTable()
    for rid, adapter in ("a", "law@1"), ("b", "law@1"), ("c", "sql@1"), ("d", ""):
        table[rid] = in_flight(rid, adapter)
        if adapter:
            table.count_adapter(table[rid].stream.request)
    assert [table.num_with("m", adapter) for adapter in ("law@1", "sql@1", "law@2")] == [2, 1, 0]
    assert table.num_with("other", "law@1") == 0
    for rid in "acd":
        del table[rid]
    assert table._num_with == {("m", "law@1"): 1}


def test_a_table_forgets_nodes_without_requests():
    table = InFlightTable()
    flights = [in_flight(rid) for rid in "ab"]
    for flight in flights:
        table[flight.stream.request.rid] = flight
        table.place(flight, ("p", "d"))
    table.place(flights[0], ("p", "e"))
    assert [table.at(name) for name in "pde"] == [[flights[1], flights[0]], [flights[1]], [flights[0]]]
    del table["a"]
    table.place(flights[1], ())
    assert (table.num_at("p"), table._at) == (0, {})


def test_the_gateway_shows_no_series_of_nodes_if_there_are_very_many():
    registry = Registry(num_token_ids=320)
    mailbox = SimpleNamespace(dropped={}, refused={})
    advisor = SimpleNamespace(advice=SimpleNamespace(roles=()))
    queue = SimpleNamespace(
        class_names=[""], order=SimpleNamespace(rules=SimpleNamespace(is_enabled=False)), policy="fcfs", requests=list
    )
    pool = SimpleNamespace(
        model="tiny", registry=registry, advisor=advisor, queue=queue, admission=SimpleNamespace(num_in_flight=0)
    )
    dispatcher = SimpleNamespace(recoveries=Counter())
    metrics = Metrics([pool], mailbox, dispatcher, starvation_bound_s=1.0)
    for number in range(MAX_NODES):
        registry.register(f"d{number}", make_register("decode", f"d{number}"), 0.0)
    assert metrics.text().count(b"\nbaton_node_pages{") == MAX_NODES
    registry.register("more", make_register("decode", "more"), 0.0)
    text = metrics.text()
    assert b"\nbaton_node_pages{" not in text
    assert f'baton_nodes{{model="tiny",role="decode"}} {MAX_NODES + 1}.0'.encode() in text
