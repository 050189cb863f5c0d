"""Two gateways of one group: whatever a client asks one of them, both answer alike."""

import asyncio
import contextlib
import errno
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from support.gateway.certificates import make_certificate
from support.gateway.fake_nodes import BODY, Stack, adapter, events, running, silent

from common.errors import ConfigError, ErrorCode
from gateway import server
from gateway.siblings import forwarding
from gateway.siblings.app import CombiningApp
from gateway.siblings.connection import SiblingLost, ask, inherited_listener, listen_at
from gateway.siblings.forwarding import Siblings
from gateway.siblings.group import GatewayGroup

#: A key of each gateway, by the index of its home.
HOME_KEYS = [next(f"k{n}" for n in range(99) if GatewayGroup("", 0, 2).home("key", f"k{n}") == i) for i in range(2)]


@pytest.fixture(autouse=True)
def _is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no gateway take another one for lost because the machine is busy."""
    monkeypatch.setattr(forwarding, "RECEIPT_S", 60.0)
    monkeypatch.setattr(forwarding, "ANSWER_TIMEOUT_S", 60.0)


@contextlib.asynccontextmanager
async def siblings(folder: Path, *, has_nodes: bool = True, **config: Any) -> AsyncIterator[list[Stack]]:
    """Two gateways of one group, each with nodes of its own or none, and a port by which a test reaches it."""
    name = secrets.token_hex(8)
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for index in range(2):
            fd = socket.create_server(("127.0.0.1", 0)).detach()
            one = await stack.enter_async_context(running(folder, group=f"{name}:{index}/2", listen_fd=fd, **config))
            if has_nodes:
                await one.pair()
            found.append(one)
        yield found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def num_generated(stack: Stack) -> int:
    return len(stack.nodes[1].generates)


async def test_a_request_with_a_key_runs_once_whichever_gateway_gets_it(folder: Path) -> None:
    async with siblings(folder) as stacks:
        for home, key in enumerate(HOME_KEYS):
            answers = [await one.post("/v1/completions", BODY, **{"Idempotency-Key": key}) for one in stacks * 2]
            for _, answer in answers:
                del answer["created"]  # of the retry, which may come in the next second
            assert answers == [answers[0]] * 4
            assert answers[0][0] == 200
            assert [num_generated(one) for one in stacks] == [1, home]
            status, body = await stacks[1 - home].post(
                "/v1/completions", {**BODY, "max_tokens": 3}, **{"Idempotency-Key": key}
            )
            assert (status, body["error"]["code"]) == (422, "idempotency_key_reused")


async def test_a_request_id_stands_once_in_an_answer_that_is_passed_on(folder: Path) -> None:
    body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
    async with siblings(folder) as stacks:
        for one in stacks:
            headers = {"Idempotency-Key": HOME_KEYS[1], "x-request-id": "mine"}
            async with one.client.post(one.url + "/v1/messages", json=body, headers=headers) as answer:
                assert answer.status == 200
                assert [answer.headers.getall(name) for name in ("request-id", "x-request-id")] == [["mine"]] * 2


async def test_a_stream_passes_through_as_it_comes(folder: Path) -> None:
    async with siblings(folder) as (first, second):
        second.silence()
        body = {**BODY, "stream": True, "return_token_ids": True}
        headers = {"Idempotency-Key": HOME_KEYS[1], "x-request-id": "mine"}
        call = asyncio.ensure_future(first.client.post(first.url + "/v1/completions", json=body, headers=headers))
        await until(lambda: num_generated(second))
        (rid,) = second.nodes[1].generates
        second.nodes[0].tokens(rid, 0, (65,))
        async with await call as answer:
            assert answer.status == 200
            assert answer.headers.getall("x-request-id") == ["mine"]
            assert answer.headers.getall("date")
            arriving = events(answer)
            assert (await anext(arriving))["choices"][0]["text"]
            second.nodes[1].tokens(rid, 1, (66, 67), finish="length")
            assert [event async for event in arriving][-1] == "[DONE]"


async def test_a_client_that_leaves_ends_its_request_at_the_gateway_that_has_it(folder: Path) -> None:
    async with siblings(folder, retry_grace=0.0) as (first, second):
        second.silence()
        call = asyncio.ensure_future(
            first.client.post(first.url + "/generate", json={"text": "a", "rid": HOME_KEYS[1]})
        )
        await until(lambda: num_generated(second))
        call.cancel()
        await until(lambda: second.nodes[1].aborts)
        assert second.nodes[1].aborts == [HOME_KEYS[1]]


async def test_the_answer_of_a_lost_sibling_breaks_off_and_others_are_answered_here(folder: Path) -> None:
    async with siblings(folder) as (first, second):
        second.silence()
        headers = {"Idempotency-Key": HOME_KEYS[1]}
        body = {**BODY, "stream": True}
        call = asyncio.ensure_future(first.client.post(first.url + "/v1/completions", json=body, headers=headers))
        await until(lambda: num_generated(second))
        (rid,) = second.nodes[1].generates
        second.nodes[0].tokens(rid, 0, (65,))
        async with await call as answer:
            await anext(events(answer))
            private = second.gateway._private
            assert private is not None
            private.close_listeners()
            for connection in private.connections:
                connection.transport.abort()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        assert (await first.post("/v1/completions", BODY, **headers))[0] == 200
        assert num_generated(first) == 1


async def test_the_answer_of_a_sibling_that_hangs_breaks_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "STALL_S", 0.2)
    name = secrets.token_hex(8)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    sibling = await asyncio.start_unix_server(hang, sock=listen_at(GatewayGroup(name, 0, 2).address(1)))
    fd = socket.create_server(("127.0.0.1", 0)).detach()
    async with sibling, running(folder, group=f"{name}:0/2", listen_fd=fd) as one, asyncio.timeout(60):
        await one.pair()
        body, headers = {**BODY, "stream": True, "deadline_ms": 100}, {"Idempotency-Key": HOME_KEYS[1]}
        async with one.client.post(one.url + "/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()


async def test_a_sibling_that_hangs_in_an_error_is_passed_over_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that continues a stored response asks all gateways for it, one after the other."""
    monkeypatch.setattr(forwarding, "ANSWER_TIMEOUT_S", 0.1)
    closed: list[int] = []

    async def ask(address: str, request: bytes, *, receipt_s: float | None) -> Any:
        return SimpleNamespace(status=404, headers=[], body=asyncio.Event().wait, close=lambda: closed.append(1))

    async def send(message: Any) -> None:
        raise AssertionError(message)

    monkeypatch.setattr(forwarding, "ask", ask)
    scope = {"method": "POST", "raw_path": b"/v1/responses", "query_string": b"", "headers": [], "state": {}}
    scope["state"]["request_id"] = "r"
    request = forwarding.ClientRequest(scope, b"{}", send)
    group = Siblings(GatewayGroup("g", 0, 3), request_timeout_s=60.0)
    async with asyncio.timeout(60):
        assert not await group.pass_to_holder(ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND, request)
    assert closed == [1, 1]
    assert caplog.messages == ["a sibling gateway has not ended its answer: it took longer than 0.1 s"] * 2


async def test_an_abort_reaches_the_gateway_that_has_the_request(folder: Path) -> None:
    async with siblings(folder) as stacks:
        first, second = stacks
        for node in (*first.nodes, *second.nodes):
            node.on_generate = silent
        calls = [asyncio.ensure_future(one.client.post(one.url + "/v1/completions", json=BODY)) for one in stacks]
        await until(lambda: num_generated(first) and num_generated(second))
        (rid,) = second.nodes[1].generates
        assert await first.post("/abort_request", {"rid": rid}) == (200, {"aborted": 1})
        assert await first.post("/abort_request", {"rid": rid}) == (200, {"aborted": 0})
        assert await second.post("/abort_request", {"abort_all": True}) == (200, {"aborted": 1})
        assert [(await call).status for call in calls] == [499, 499]


async def test_priorities_and_timelines_are_found_wherever_a_request_is(folder: Path) -> None:
    async with siblings(folder, enable_priority_scheduling=True) as stacks:
        first, second = stacks
        second.silence()
        call = asyncio.ensure_future(second.client.post(second.url + "/v1/completions", json=BODY))
        await until(lambda: num_generated(second))
        (rid,) = second.nodes[1].generates
        for one in stacks:
            assert await one.post(f"/v1/requests/{rid}/priority", {"priority": 5}) == (200, {"changed": 1})
            status, timeline = await one.get(f"/v1/requests/{rid}/timeline")
            assert (status, timeline["rid"], timeline["status"]) == (200, rid, "running")
            assert (await one.get("/v1/requests/other/timeline"))[0] == 404
            _, listed = await one.get("/v1/requests?limit=1")
            assert [row["rid"] for row in listed["requests"]] == [rid]
            _, info = await one.get("/server_info")
            assert info["num_in_flight"] == 1
            _, workers = await one.get("/v1/workers")
            assert workers["num_in_flight"] == 1
        await first.post("/abort_request", {"rid": rid})
        (await call).close()


async def test_a_response_is_continued_read_and_deleted_at_any_gateway(folder: Path) -> None:
    async with siblings(folder) as stacks:
        first, second = stacks
        _, answer = await first.post("/v1/responses", {"input": "a", "max_output_tokens": 3})
        further = {"input": "b", "previous_response_id": answer["id"], "max_output_tokens": 3}
        status, continued = await second.post("/v1/responses", further)
        assert (status, continued["previous_response_id"]) == (200, answer["id"])
        assert num_generated(first) == 2
        status, third = await second.post("/v1/responses", {**further, "previous_response_id": continued["id"]})
        assert status == 200
        events_ = await second.stream("/v1/responses", {**further, "previous_response_id": third["id"]})
        assert events_[-1]["type"] == "response.incomplete"
        counts = [await one.post("/v1/responses/input_tokens", {"input": "b", "previous_response_id": answer["id"]})
                  for one in stacks]  # fmt: skip
        assert counts[0] == counts[1]
        assert counts[0][0] == 200
        for one in stacks:
            assert (await one.get(f"/v1/responses/{answer['id']}"))[1] == answer
            assert (await one.get(f"/v1/responses/{answer['id']}/input_items"))[0] == 200
        async with second.client.delete(f"{second.url}/v1/responses/{answer['id']}") as deleted:
            assert (await deleted.json())["deleted"]
        for one in stacks:
            assert (await one.get(f"/v1/responses/{answer['id']}"))[0] == 404
            status, error = await one.post("/v1/responses", further)
            assert (status, error["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_quota_holds_for_all_gateways_together(folder: Path) -> None:
    async with siblings(folder, tenant_header=True, tenant_quotas=("*:requests=2",)) as stacks:
        for one in stacks:
            one.silence()
        calls = [
            asyncio.ensure_future(
                one.client.post(one.url + "/v1/completions", json=BODY, headers={"x-baton-tenant": "a"})
            )
            for one in stacks
        ]
        await until(lambda: sum(map(num_generated, stacks)) == 2)
        for one in stacks:
            assert (await one.post("/v1/completions", BODY, **{"x-baton-tenant": "a"}))[0] == 429
        for one in stacks:
            await one.post("/abort_request", {"abort_all": True}, **{"x-baton-tenant": "a"})
        for call in calls:
            (await call).close()


async def test_metrics_of_one_port_show_all_gateways_and_each_node_once(folder: Path) -> None:
    async with siblings(folder) as stacks:
        for one in stacks:
            assert (await one.post("/v1/completions", BODY))[0] == 200
        _, page = await stacks[1].get("/metrics")
        lines = page.splitlines()
        for index in range(2):
            assert f'baton_outputs_total{{gateway="{index}",end="length",model="tiny"}} 1.0' in lines
        assert lines.count('baton_nodes{model="tiny",role="decode"} 1.0') == 1
        _, live = await stacks[0].get("/v1/live")
        assert live["models"][0]["name"] == "tiny"


async def test_an_unexpected_error_of_a_combined_answer_reaches_the_client_and_the_log() -> None:
    sent: list[Any] = []

    async def fail(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        raise KeyError("workers")

    async def send(message: Any) -> None:
        sent.append(message)

    app = CombiningApp(fail, Siblings(GatewayGroup("g", 0, 2), request_timeout_s=60.0))
    with pytest.raises(KeyError):
        await app({"type": "http", "method": "GET", "path": "/v1/workers"}, asyncio.Event().wait, send)
    assert [(message.get("status"), message.get("body")) for message in sent] == [(500, None), (None, b"{}")]


async def test_no_client_can_claim_to_be_a_sibling(folder: Path) -> None:
    async with siblings(folder) as (first, second):
        headers = {"Idempotency-Key": HOME_KEYS[1], forwarding.HEADER.decode(): "question"}
        assert (await first.post("/v1/completions", BODY, **headers))[0] == 200
        assert (num_generated(first), num_generated(second)) == (0, 1)


async def test_requests_of_a_gateway_that_hangs_are_answered_by_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "RECEIPT_S", 0.2)
    async with siblings(folder) as (first, second):
        private = second.gateway._private
        assert private is not None
        private.close_listeners()
        assert second.gateway._group is not None
        await until(lambda: not is_listening(second.gateway._group))
        with listen_at(second.gateway._group.address(1)):  # it takes connections, as the kernel does for a stopped one
            assert (await first.post("/v1/completions", BODY, **{"Idempotency-Key": HOME_KEYS[1]}))[0] == 200
        assert (num_generated(first), num_generated(second)) == (1, 0)


@pytest.mark.parametrize("model", ["tiny", "sql"])
async def test_requests_of_a_gateway_that_no_node_has_reached_are_answered_by_another(folder: Path, model: str) -> None:
    async with siblings(folder, has_nodes=False) as (first, _):
        await first.pair(adapters=(adapter("sql", "sql-v1"),))
        headers = {"Idempotency-Key": HOME_KEYS[1]}
        assert (await first.post("/v1/completions", {**BODY, "model": model}, **headers))[0] == 200


def is_listening(group: GatewayGroup) -> bool:
    return f"@{group.address(group.index)[1:]}" in Path("/proc/net/unix").read_text()


async def test_a_group_serves_tls_over_ipv6(folder: Path, tmp_path: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    made = make_certificate(tmp_path)
    fd = socket.create_server(("::1", 0), family=socket.AF_INET6).detach()
    async with running(folder, group=f"{secrets.token_hex(8)}:0/1", listen_fd=fd, **made.options) as stack:
        await stack.pair()
        assert stack.url.startswith("https://[::1]:")
        context = made.client_context
        context.check_hostname = False
        async with stack.client.get(stack.url + "/ready", ssl=context) as answer:
            assert answer.status == 200


async def test_a_gateway_that_no_node_has_reached_takes_clients_after_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ACCEPT_WITHIN_S", 0.2)
    fd = socket.create_server(("127.0.0.1", 0)).detach()
    async with running(folder, listen_fd=fd) as stack:
        assert (await stack.get("/ready"))[0] == 503


async def test_a_gateway_that_stops_before_it_takes_clients_lets_go_of_the_socket(folder: Path) -> None:
    async with running(folder, listen_fd=socket.create_server(("127.0.0.1", 0)).detach()) as stack:
        listener = stack.gateway._listener
    assert listener is not None
    assert listener.fileno() < 0


async def test_a_group_takes_each_limit_that_one_gateway_takes(folder: Path) -> None:
    async with siblings(folder) as (first, _):
        assert await first.get("/v1/requests?limit=1.0") == (200, {"requests": []})
        assert await first.get("/v1/requests?limit=1&x=%C3%A9") == (200, {"requests": []})


async def test_a_sibling_needs_the_key_of_the_client(folder: Path) -> None:
    async with siblings(folder, api_key="k" * 32) as (first, second):
        assert (await first.get("/v1/requests"))[0] == 401
        headers = {"Authorization": "Bearer " + "k" * 32}
        assert (await first.get("/v1/requests", **headers)) == (200, {"requests": []})
        assert second.gateway._group is not None
        answer = await ask(second.gateway._group.address(1), b"GET /v1/requests HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (answer.status, b"authentication" in await answer.body()) == (401, True)
        answer.close()


async def test_two_gateways_cannot_have_the_same_place_in_a_group(folder: Path) -> None:
    group = f"{secrets.token_hex(8)}:0/2"
    async with running(folder, group=group, listen_fd=socket.create_server(("127.0.0.1", 0)).detach()):
        with pytest.raises(ConfigError, match="--group: the address"):
            async with running(folder, group=group, listen_fd=socket.create_server(("127.0.0.1", 0)).detach()):
                pass


async def test_nothing_listens_at_the_address_of_a_stopped_sibling(folder: Path) -> None:
    async with siblings(folder) as (_, second):
        group = second.gateway._group
        assert group is not None
    with pytest.raises(SiblingLost):
        await ask(group.address(1), b"GET / HTTP/1.1\r\n\r\n")


async def test_a_sibling_cannot_be_reached_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as without_descriptors:
        without_descriptors.setattr(socket, "socket", refuse)
        with pytest.raises(SiblingLost, match="Too many open files"):
            await ask(GatewayGroup("0011223344", 0, 2).address(1), b"GET / HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize("text", ["x:0/2", "0011223344:0/2x", "0011223344:2/2"])
def test_a_place_that_no_gateway_can_have_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--group"):
        GatewayGroup.parse(text)


def test_a_descriptor_that_is_no_listening_socket_is_refused() -> None:
    with socket.socket() as idle, pytest.raises(ConfigError, match="not a listening TCP socket"):
        inherited_listener(socket.socket(fileno=socket.dup(idle.fileno())).detach())
    local = listen_at(GatewayGroup(secrets.token_hex(8), 0, 1).address(0))
    with pytest.raises(ConfigError, match="not a listening TCP socket"):
        inherited_listener(local.detach())
    with open("/dev/null") as file, pytest.raises(ConfigError, match="is not a socket"):
        inherited_listener(file.fileno())


def test_every_gateway_has_a_part_of_the_tenants() -> None:
    group = GatewayGroup("0011223344", 2, 4)
    assert group.others == [3, 0, 1]
    homes = [group.home("tenant", f"tenant-{n}") for n in range(400)]
    assert all(60 < homes.count(index) < 140 for index in range(4))
    assert GatewayGroup.parse(str(group)) == group
