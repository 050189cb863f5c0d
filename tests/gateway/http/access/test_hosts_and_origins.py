"""Which hosts are answered, and which web pages may send requests that change something."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateway.fake_nodes import running

from common.config.gateway import GatewayConfig
from common.errors import ConfigError, RequestError
from gateway.http.access.hosts import MAX_KNOWN, AllowedHosts, allowed_hosts
from gateway.http.access.origins import AllowedOrigins

LOOPBACK = [
    "localhost",
    "localhost:8000",
    "LocalHost.",
    "127.0.0.1",
    "127.0.0.1:1",
    "[::1]",
    "[::1]:8000",
    "10.0.0.7:80",
]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "a@localhost", ""]
BROKEN = ["localhost:x", "localhost:123456", "[::1", "::1", "[evil]", "a b", "a/b", "\xe4", "localhost, evil"]


# ---- hosts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound_to", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_on_loopback_addresses_and_localhost_are_served_and_no_names(bound_to):
    hosts = allowed_hosts((), bound_to)
    for _ in range(2):
        assert [value for value in LOOPBACK if not hosts.allows(value.encode("latin-1"))] == []
        assert [value for value in FOREIGN + BROKEN if hosts.allows(value.encode("latin-1"))] == []


def test_beyond_loopback_every_name_is_served_unless_some_are_given():
    hosts = allowed_hosts((), "0.0.0.0")
    assert hosts.allows(b"evil.example:80")
    assert not hosts.allows(b"a b")
    hosts = allowed_hosts(("llm.Example.com", "*.example.org"), "0.0.0.0")
    for value in (b"llm.example.com:443", b"LLM.example.com.", b"a.b.example.org", *map(str.encode, LOOPBACK)):
        assert hosts.allows(value)
    for value in (b"example.com", b"a.llm.example.com", b"example.org", b"xexample.org"):
        assert not hosts.allows(value)


def test_few_and_short_values_are_remembered():
    hosts = AllowedHosts(("*",))
    assert hosts.allows(b"h" * 60_000)
    assert hosts._known == set()
    for number in range(MAX_KNOWN + 10):
        assert hosts.allows(b"h%d" % number)
    assert len(hosts._known) == MAX_KNOWN


@given(st.binary(max_size=40))
def test_any_bytes_are_judged_and_never_twice_differently(value):
    hosts = AllowedHosts(())
    assert hosts.allows(value) == hosts.allows(value)


@pytest.mark.parametrize("name", ["http://a", "a:80", "a b", "*a", "[::1]"])
def test_a_host_is_configured_as_a_name_without_a_port(name):
    with pytest.raises(ConfigError, match="--allowed-hosts must be a name"):
        GatewayConfig(allowed_hosts=(name,))


@pytest.mark.parametrize(
    "origin", ["example.com", "https://example.com/", "https://Example.com", "https://", "", "a, b"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(ConfigError, match="--allowed-origins must be as browsers send it"):
        GatewayConfig(allowed_origins=(origin,))


def test_an_origin_is_configured_as_browsers_send_it():
    origins = ("*", "null", "https://example.com", "http://localhost:3000", "http://[::1]:80", "chrome-extension://abc")
    assert GatewayConfig(allowed_origins=origins).allowed_origins == origins


async def test_a_name_that_another_site_has_given_to_loopback_is_refused(folder):
    async with running(folder, allowed_hosts=("llm.example.com",)) as stack:
        for host, status in (("llm.example.com:80", 200), ("localhost", 200), ("evil.example", 421), ("a b", 421)):
            for path in ("/health", "/openapi.json", "/docs", "/", "/nothing"):
                async with stack.client.get(stack.url + path, headers={"Host": host}) as answer:
                    assert answer.status == (404 if status == 200 and path == "/nothing" else status)
                    if status == 421:
                        error = (await answer.json())["error"]
                        assert error["code"] == "invalid_request"
                        assert "--allowed-hosts" in error["message"]
                        assert answer.headers["Connection"] == "close"


# ---- origins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ({}, True),
        ({"sec-fetch-site": "same-origin", "origin": "https://proxy.example"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"origin": "http://localhost:8000", "host": "localhost:8000"}, True),
        ({"origin": "http://localhost:3000", "host": "localhost:8000"}, False),
        ({"origin": "http://localhost:8000", "host": "localhost:8000", "sec-fetch-site": "cross-site"}, False),
        ({"origin": "null", "host": "localhost:8000"}, False),
        ({"origin": "", "host": ""}, True),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, False),
        ({"origin": "https://evil.example", "sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"origin": "https://good.example", "sec-fetch-site": "cross-site"}, True),
    ],
)
def test_pages_of_the_gateway_and_of_allowed_origins_may_change_something(headers, is_allowed):
    origins = AllowedOrigins(("https://good.example",))
    AllowedOrigins(("*",)).check(headers)
    if is_allowed:
        origins.check(headers)
    else:
        with pytest.raises(RequestError, match="--allowed-origins") as caught:
            origins.check(headers)
        assert caught.value.status == 403


async def test_no_foreign_page_can_change_anything(folder):
    """These are the requests that a page may send to another site without asking."""
    async with running(folder) as stack:
        prefill, _ = await stack.pair()
        page = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
        before = len(prefill.received)
        for path in ("/flush_cache", "/abort_request", "/v1/completions", "/generate", "/v1/messages"):
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None):
                headers = page if kind is None else {**page, "Content-Type": kind}
                data = json.dumps({"prompt": "a", "text": "a", "abort_all": True}).encode()
                options = {"skip_auto_headers": ["Content-Type"], "data": data, "headers": headers}
                async with stack.client.post(stack.url + path, **options) as answer:
                    assert answer.status == 403, path
        assert [
            message for message in prefill.received[before:] if type(message).__name__ in ("Flush", "Generate")
        ] == []


async def test_a_body_that_is_no_json_flushes_nothing(folder):
    async with running(folder) as stack:
        await stack.pair()
        for data, status in ((b"x", 415), (b"", 200)):
            headers = {"Content-Type": "text/plain"}
            async with stack.client.post(stack.url + "/flush_cache", data=data, headers=headers) as answer:
                assert answer.status == status
