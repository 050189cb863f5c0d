"""The application: methods, headers of every answer, browsers, errors in each API's envelope, and what users add."""

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.gateway.fake_nodes import BODY, error_of, events, running, start_request

from common.config.gateway import GatewayConfig
from common.errors import ConfigError
from gateway.requests.dispatcher import Dispatcher

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
ONE = {"prompt": "a", "max_tokens": 1}


async def request(stack, method, path, **options):
    """Status, headers and bytes of an answer."""
    async with stack.client.request(method, stack.url + path, **options) as answer:
        return answer.status, answer.headers, await answer.read()


async def test_a_path_answers_its_methods_and_names_them(stack):
    for path, methods in (
        (COMPLETIONS, "POST, OPTIONS"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/models/a/b", "GET, HEAD, OPTIONS"),
        ("/", "GET, HEAD, OPTIONS"),
    ):
        status, headers, body = await request(stack, "OPTIONS", path)
        assert (status, headers["Allow"], body) == (204, methods, b"")
        status, headers, body = await request(stack, "PATCH", path)
        assert (status, headers["Allow"]) == (405, methods)
        assert methods in json.loads(body)["error"]["message"]
    status, headers, body = await request(stack, "HEAD", "/health")
    assert (status, headers["Content-Length"], body) == (200, "15", b"")
    for path in ("/nothing", "/v1/completions/", "//v1/models"):
        status, _, body = await request(stack, "GET", path)
        assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")


async def test_an_error_about_a_path_names_the_path_beside_or_without_v1(stack):
    for path, hint in (
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "did you mean /v1/messages?"),
        ("/v1/messages/count_tokens/", "did you mean /v1/messages/count_tokens?"),
        ("//v1/messages", "did you mean /v1/messages?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/reset_prefix_cache", "did you mean /flush_cache?"),
        ("/nothing", "/openapi.json lists all that do"),
    ):
        _, _, body = await request(stack, "POST", path)
        assert json.loads(body)["error"]["message"] == f"this path does not exist; {hint}"
    for path, hint in (("/health_generate", "did you mean /ready?"), ("/get_load", "did you mean /v1/live?")):
        _, _, body = await request(stack, "GET", path)
        assert json.loads(body)["error"]["message"].endswith(hint)


async def test_every_answer_has_the_clients_request_id_or_a_new_one(stack):
    seen = set()
    for method, path, body in (
        ("GET", "/health", None), ("GET", "/nothing", None), ("PUT", "/health", None), ("POST", COMPLETIONS, ONE),
        ("POST", COMPLETIONS, {**ONE, "stream": True}), ("POST", COMPLETIONS, {}), ("OPTIONS", COMPLETIONS, None),
        ("GET", "/openapi.json", None), ("HEAD", "/", None),
    ):  # fmt: skip
        _, headers, _ = await request(stack, method, path, json=body, headers={"X-Request-ID": "mine"})
        assert headers["x-request-id"] == "mine"
        _, headers, _ = await request(stack, method, path, json=body)
        seen.add(headers["x-request-id"])
    assert len(seen) == 9


async def test_errors_come_in_the_envelope_of_the_api(stack):
    for path, options, status, kind in (
        (MESSAGES, {"json": {}}, 400, "invalid_request_error"),
        (MESSAGES, {"data": "x", "headers": {"Content-Type": "text/plain"}}, 415, "invalid_request_error"),
        ("/v1/messages/count_tokens", {"data": b"{"}, 400, "invalid_request_error"),
    ):
        options = {"headers": {"Content-Type": "application/json"}, **options}
        options["headers"] = {**options["headers"], "x-request-id": "mine"}
        got, _, body = await request(stack, "POST", path, **options)
        answer = json.loads(body)
        assert (got, answer["type"], answer["error"]["type"]) == (status, "error", kind), answer
        assert answer["request_id"] == "mine"
    status, _, body = await request(stack, "GET", MESSAGES)
    assert (status, json.loads(body)["type"]) == (405, "error")


async def test_a_body_without_a_length_gets_411_where_one_is_needed(stack):
    address = urlsplit(stack.url)
    for path, status in ((COMPLETIONS, 411), ("/tokenize", 411), ("/flush_cache", 200)):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 %d " % status)
        writer.close()
        await writer.wait_closed()


async def test_a_wrong_parameter_of_a_path_function_is_named(stack):
    for limit in ("0", "1025", "x", "1.5"):
        status, _, body = await request(stack, "GET", f"/v1/workers/gateway/decisions?limit={limit}")
        assert (status, json.loads(body)["error"]["param"]) == (400, "limit")
    assert (await request(stack, "GET", "/v1/workers/gateway/decisions?limit=1024"))[0] == 200


async def test_an_unexpected_failure_is_logged_and_answered(stack, monkeypatch, caplog):
    def fail(*args, **options):
        raise LookupError("a bug")

    monkeypatch.setattr("gateway.http.generate.decode_with_extras", fail)
    monkeypatch.setattr("gateway.http.routes.tokenize.decode_with_extras", fail)
    for path in (COMPLETIONS, "/tokenize"):
        caplog.clear()
        status, headers, body = await request(stack, "POST", path, json=ONE)
        assert (status, json.loads(body)["error"]["code"]) == (500, "internal")
        assert headers["x-request-id"]
        assert caplog.text.count(f"a request for {path} failed") == caplog.text.count("Traceback") == 1


async def test_an_unexpected_failure_while_outputs_are_sent_leaves_none_in_flight(folder, monkeypatch):
    def fail(*args):
        raise LookupError("a bug")

    tenant = {"x-baton-tenant": "a"}
    async with running(folder, tenant_header=True, tenant_quotas=("a:requests=2",)) as stack:
        await stack.pair()
        with monkeypatch.context() as patched:
            patched.setattr(Dispatcher, "_place", fail)
            status, _, body = await request(stack, "POST", COMPLETIONS, json={**ONE, "n": 2}, headers=tenant)
            assert (status, json.loads(body)["error"]["code"]) == (500, "internal")
        assert stack.gateway._dispatcher.num_in_flight == 0
        assert (await request(stack, "POST", COMPLETIONS, json={**ONE, "n": 2}, headers=tenant))[0] == 200


async def test_fields_without_effect_are_named_in_a_header_or_refused(stack, folder):
    body = {**ONE, "user": "me", "metadata": {}}
    for streamed in ({}, {"stream": True}):
        _, headers, _ = await request(stack, "POST", COMPLETIONS, json={**body, **streamed})
        assert headers["x-baton-ignored"] == "user, metadata"
    assert "x-baton-ignored" not in (await request(stack, "POST", COMPLETIONS, json=ONE))[1]
    async with running(folder, strict_fields=True) as strict:
        status, _, answer = await request(strict, "POST", COMPLETIONS, json=body)
        assert (status, json.loads(answer)["error"]["param"]) == (400, "user")


async def test_at_most_sixteen_fields_without_effect_are_named(stack):
    message = {"role": "user", "content": "Hi", **{f"k{i}": 1 for i in range(16)}}
    body = {"messages": [message], "max_tokens": 1, "priority": 3}
    _, headers, _ = await request(stack, "POST", "/v1/chat/completions", json=body)
    assert headers["x-baton-ignored"].split(", ") == ["priority", *[f"messages.k{i}" for i in range(15)]]


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/tokenize"])
async def test_fields_without_effect_are_named_or_refused_where_nothing_is_generated_too(folder, path):
    body = {"messages": [{"role": "user", "content": "Hi", "id": "1"}]}
    for is_strict, status, ignored in ((False, 200, "messages.id"), (True, 400, None)):
        async with running(folder, strict_fields=is_strict) as stack:
            await stack.pair()
            answer = await request(stack, "POST", path, json=body)
            assert (answer[0], answer[1].get("x-baton-ignored")) == (status, ignored)


async def test_requests_are_refused_while_the_gateway_stops(stack):
    stack.silence()
    call, _ = await start_request(stack, {**BODY, "stream": True})
    stack.gateway._checks.begin_stop()
    for method, path, status in (
        ("POST", COMPLETIONS, 503), ("PUT", "/generate", 503), ("POST", "/tokenize", 503),
        ("GET", "/ready", 503), ("GET", "/health", 200),
    ):  # fmt: skip
        assert (await request(stack, method, path, json=ONE))[0] == status
    stack.gateway._dispatcher.shut_down()
    assert await error_of(call) == (503, "shutting_down")


# ---- browsers -------------------------------------------------------------------------------------------------------


async def test_pages_of_allowed_origins_may_call_the_api(folder):
    origin = {"Origin": "https://example.com"}
    asks = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with running(folder, allowed_origins=("https://example.com",), api_key="sesame") as stack:
        await stack.pair()
        status, headers, _ = await request(stack, "OPTIONS", COMPLETIONS, headers=asks)
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://example.com")
        assert headers["Access-Control-Allow-Headers"] == "authorization"
        for key, expected in (("sesame", 200), ("wrong", 401)):
            given = {**origin, "Authorization": f"Bearer {key}"}
            status, headers, _ = await request(stack, "POST", COMPLETIONS, json=ONE, headers=given)
            assert (status, headers["Access-Control-Allow-Origin"]) == (expected, "https://example.com")
            readable = headers["Access-Control-Expose-Headers"].split(", ")
            assert {"x-request-id", "retry-after", "traceparent", "idempotent-replayed"} <= {*readable}
        other = {**asks, "Origin": "https://example.org"}
        status, headers, _ = await request(stack, "OPTIONS", COMPLETIONS, headers=other)
        assert status == 400
        assert "Access-Control-Allow-Origin" not in headers


async def test_without_allowed_origins_no_page_may_call_the_api(stack):
    _, headers, _ = await request(stack, "POST", COMPLETIONS, json=ONE, headers={"Origin": "https://example.com"})
    assert not [name for name in headers if name.lower().startswith("access-control")]


# ---- plugins --------------------------------------------------------------------------------------------------------


@pytest.fixture
def plugins(monkeypatch):
    here = Path(__file__).parent
    for place in (here, here.parents[2] / "docs" / "examples"):
        monkeypatch.syspath_prepend(str(place))


async def test_a_plugin_adds_middleware_and_endpoints(folder, plugins):
    async with running(folder, app_plugin=("app_plugin:extend",), api_key="sesame") as stack:
        await stack.pair()
        key = {"Authorization": "Bearer sesame", "x-request-id": "mine"}
        status, headers, body = await request(stack, "GET", "/hello", headers=key)
        assert (status, headers["x-stamp"], json.loads(body)) == (200, "mine", {"request_id": "mine"})
        assert (await request(stack, "GET", "/hello"))[0] == 401
        status, headers, _ = await request(stack, "POST", COMPLETIONS, json=ONE, headers=key)
        assert (status, headers["x-stamp"]) == (200, "mine")
        async with stack.client.post(stack.url + COMPLETIONS, json={**ONE, "stream": True}, headers=key) as answer:
            assert (answer.status, answer.headers["x-stamp"]) == (200, "mine")
            assert [event async for event in events(answer)][-1] == "[DONE]"
        assert (await request(stack, "POST", COMPLETIONS, json={}, headers=key))[0] == 400
        _, _, document = await request(stack, "GET", "/openapi.json")
        assert "/hello" in json.loads(document)["paths"]
        text = (await request(stack, "GET", "/metrics"))[2].decode()
        assert 'baton_http_answers_total{path="/v1/completions",status="200"} 2.0' in text
        assert 'baton_http_answers_total{path="/hello",status="401"} 1.0' in text


async def test_a_client_that_leaves_ends_its_request_with_middleware_too(folder, plugins):
    async with running(folder, app_plugin=("app_plugin:extend",)) as stack:
        await stack.silent_pair()
        call, rid = await start_request(stack)
        call.cancel()
        await stack.nodes[0].until(lambda: rid in stack.nodes[0].aborts)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("no_such_module:extend", "--app-plugin no_such_module:extend cannot be imported: No module named"),
        ("app_plugins:missing", "--app-plugin app_plugins:missing: app_plugins has no missing"),
        ("app_plugins:not_callable", "is not a plain function"),
        ("app_plugins:not_plain", "is not a plain function"),
        ("app_plugins:broken", r"--app-plugin app_plugins:broken failed: LookupError\('nothing here'\)"),
    ],
)
async def test_a_plugin_that_cannot_be_used_is_refused_at_start(folder, plugins, spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        async with running(folder, app_plugin=(spec,)):
            pass


def test_a_plugins_name_must_have_a_module():
    with pytest.raises(ConfigError, match="--app-plugin must be MODULE:NAME, not 'extend'"):
        GatewayConfig(app_plugin=("extend",))
