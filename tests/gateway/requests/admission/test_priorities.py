"""Priorities, classes, tenants and quotas over real sockets; changes of requests in flight; decisions."""

import asyncio
import contextlib
import json

import pytest
from support.gateway.fake_nodes import echo, running

from common.request import LOWEST_PRIORITY
from common.wire.messages import Decision, Reprioritize
from gateway.http.access.api_keys import HASHED, digest_of

KEYS = {"k1": {"tenant": "alice"}, "k2": {"tenant": "bob"}, "k3": {}, "root": {"admin": True}}

BODY = {"prompt": "a", "max_tokens": 2}


@contextlib.asynccontextmanager
async def serving(folder, **config):
    async with running(folder, **config) as stack:
        await stack.pair()
        yield stack
        assert (await stack.get("/server_info", **config_key(config)))[1]["num_in_flight"] == 0


def config_key(config):
    return bearer(config["api_key"]) if "api_key" in config else {}


def write_key_file(path, **keys):
    """Write a file with the fields of each key; return its name."""
    path.touch(0o600)
    lines = []
    for key, fields in keys.items():
        values = {"hash": f"{HASHED}{digest_of(key).hex()}", **fields}
        lines += ["[[key]]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    path.write_text("\n".join(lines))
    return str(path)


def bearer(key, **headers):
    return {"Authorization": f"Bearer {key}", **headers}


def said(stack):
    """The last request as the nodes got it."""
    told = [list(node.generates.values())[-1] for node in stack.nodes]
    assert {(one.priority, one.priority_class, one.tenant, one.expected_output) for one in told} == {
        (told[0].priority, told[0].priority_class, told[0].tenant, told[0].expected_output)
    }
    return told[0]


async def error_of(answer):
    status, body = await answer
    return status, body["error"]["param"]


# ---- priorities and classes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
    ],
)
async def test_every_endpoint_takes_priority_and_class_and_tells_both_nodes(folder, path, body):
    options = {"enable_priority_scheduling": True, "priority_classes": ("high:8", "low:1")}
    async with serving(folder, **options) as stack:
        assert (await stack.post(path, {**body, "priority": -3, "priority_class": "high"}))[0] == 200
        assert (said(stack).priority, said(stack).priority_class) == (-3, "high")
        assert (await stack.post(path, body))[0] == 200
        assert (said(stack).priority, said(stack).priority_class) == (LOWEST_PRIORITY, "low")
        assert await error_of(stack.post(path, {**body, "priority_class": "none"})) == (400, "priority_class")
        assert await error_of(stack.post(path, {**body, "priority": "high"})) == (400, "priority")


async def test_low_values_first_are_negated_before_nodes_are_told(folder):
    options = {"schedule_low_priority_values_first": True, "default_priority_value": 4}
    async with serving(folder, enable_priority_scheduling=True, **options) as stack:
        await stack.post("/v1/completions", {**BODY, "priority": 1})
        assert said(stack).priority == -1
        await stack.post("/v1/completions", BODY)
        assert said(stack).priority == -4


async def test_a_priority_without_priority_scheduling_is_refused_if_configured(folder):
    async with serving(folder, strict_fields=True) as stack:
        assert await error_of(stack.post("/v1/completions", {**BODY, "priority": 0})) == (400, "priority")
        assert (await stack.post("/v1/completions", BODY))[0] == 200


async def test_a_priority_without_priority_scheduling_is_named_as_ignored(folder):
    async def ignored(stack, **more):
        async with stack.client.post(f"{stack.url}/v1/completions", json={**BODY, **more}) as answer:
            assert answer.status == 200
            return answer.headers.get("x-baton-ignored")

    async with serving(folder) as stack:
        assert await ignored(stack, priority=9, user="me") == "priority, user"
        assert said(stack).priority == 0
        assert await ignored(stack, priority=9, stream=True) == "priority"
        assert await ignored(stack) is None
    async with serving(folder, enable_priority_scheduling=True) as stack:
        assert await ignored(stack, priority=9) is None


# ---- tenants --------------------------------------------------------------------------------------------------------


async def test_keys_make_tenants_and_the_user_field_does_not(folder, tmp_path):
    keys = write_key_file(tmp_path / "keys", **KEYS)
    async with serving(folder, api_key="main", api_key_file=keys) as stack:
        for key, tenant in (("k1", "alice"), ("k2", "bob"), ("k3", ""), ("main", ""), ("root", "")):
            status, _ = await stack.post("/v1/completions", {**BODY, "user": "carol"}, **bearer(key))
            assert (status, said(stack).tenant) == (200, tenant)
        assert (await stack.post("/v1/completions", BODY, **bearer("k4")))[0] == 401
        assert (await stack.get("/v1/models"))[0] == 401
        assert (await stack.get("/health"))[0] == 200


async def test_the_header_names_tenants_only_if_configured(folder):
    async with serving(folder, tenant_header=True) as stack:
        assert (await stack.post("/v1/completions", BODY, **{"X-Baton-Tenant": "alice"}))[0] == 200
        assert said(stack).tenant == "alice"
    async with serving(folder) as stack:
        answer = stack.post("/v1/completions", BODY, **{"x-baton-tenant": "alice"})
        assert await error_of(answer) == (400, "x-baton-tenant")


async def test_a_tenant_can_end_and_change_only_its_own_requests(folder, tmp_path):
    keys = write_key_file(tmp_path / "keys", **KEYS)
    options = {"api_key": "main", "api_key_file": keys, "enable_priority_scheduling": True}
    async with serving(folder, **options) as stack:
        stack.silence()
        body = {"text": "a", "rid": "mine"}
        call = asyncio.ensure_future(stack.post("/generate", body, **bearer("k1")))
        await stack.nodes[1].until(lambda: stack.nodes[1].generates)
        for target in ({"rid": "mine"}, {"abort_all": True}):
            assert await stack.post("/abort_request", target, **bearer("k2")) == (200, {"aborted": 0})
        for key in ("k2", "k3", "main"):
            assert await stack.post("/abort_request", {"rid": "mine"}, **bearer(key)) == (200, {"aborted": 0})
            assert (await stack.post("/v1/requests/mine/priority", {"priority": 1}, **bearer(key)))[0] == 404
        assert (await stack.post("/abort_request", {"abort_all": True}, **bearer("k3")))[0] == 403
        assert (await stack.post("/v1/requests/mine/priority", {"priority": 1}, **bearer("k1")))[0] == 200
        assert await stack.post("/abort_request", {"abort_all": True}, **bearer("k1")) == (200, {"aborted": 1})
        assert (await call)[0] == 499


@pytest.mark.parametrize("target", [{"rid": "mine"}, {"abort_all": True}])
async def test_an_admin_can_end_and_change_the_requests_of_all(folder, tmp_path, target):
    keys = write_key_file(tmp_path / "keys", **KEYS)
    options = {"api_key": "main", "api_key_file": keys, "enable_priority_scheduling": True}
    async with serving(folder, **options) as stack:
        stack.silence()
        call = asyncio.ensure_future(stack.post("/generate", {"text": "a", "rid": "mine"}, **bearer("k1")))
        await stack.nodes[1].until(lambda: stack.nodes[1].generates)
        assert (await stack.post("/v1/requests/mine/priority", {"priority": 1}, **bearer("root")))[0] == 200
        assert await stack.post("/abort_request", target, **bearer("root")) == (200, {"aborted": 1})
        assert (await call)[0] == 499


async def test_a_revoked_key_is_refused_and_changed_limits_hold(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.http.access.api_keys.POLL_S", 0.002)
    keys = write_key_file(tmp_path / "keys", **KEYS)
    async with serving(folder, api_key="main", api_key_file=keys) as stack:
        assert (await stack.post("/v1/completions", BODY, **bearer("k1")))[0] == 200
        write_key_file(tmp_path / "keys", k2={"tenant": "bob", "tokens_per_minute": 1})
        async with asyncio.timeout(60):
            while (await stack.get("/v1/models", **bearer("k1")))[0] == 200:
                await asyncio.sleep(0.002)
        assert [(await stack.post("/v1/completions", BODY, **bearer("k2")))[0] for _ in range(2)] == [200, 429]


# ---- quotas ---------------------------------------------------------------------------------------------------------


async def test_the_requests_of_a_tenant_are_bounded_apart_from_others(folder):
    quotas = ("alice:requests=1",)
    async with serving(folder, tenant_header=True, tenant_quotas=quotas) as stack:
        stack.silence()
        alice, bob = {"x-baton-tenant": "alice"}, {"x-baton-tenant": "bob"}
        call = asyncio.ensure_future(stack.post("/v1/completions", BODY, **alice))
        await stack.nodes[1].until(lambda: stack.nodes[1].generates)
        async with stack.client.post(stack.url + "/v1/completions", json=BODY, headers=alice) as answer:
            assert (answer.status, int(answer.headers["Retry-After"]) >= 1) == (429, True)
            assert (
                "the tenant alice has 1 requests in flight, its quota is 1" in (await answer.json())["error"]["message"]
            )
        for node in stack.nodes:
            node.on_generate = echo
        assert (await stack.post("/v1/completions", BODY, **bob))[0] == 200
        assert (await stack.post("/v1/completions", BODY))[0] == 200
        (rid, *_), prefill = stack.nodes[0].generates, stack.nodes[0]
        prefill.tokens(rid, 0, (65,), finish="length")
        assert (await call)[0] == 200
        assert (await stack.post("/v1/completions", BODY, **alice))[0] == 200


async def test_tokens_per_minute_count_prompt_and_output(folder):
    async with serving(folder, tenant_header=True, tenant_quotas=("*:tokens_per_minute=60",)) as stack:
        alice = {"x-baton-tenant": "alice"}
        body = {"prompt": [65] * 20, "max_tokens": 10}
        assert (await stack.post("/v1/completions", body, **alice))[0] == 200
        assert (await stack.post("/v1/completions", {**body, "max_tokens": 50}, **alice))[0] == 200  # 30 are left
        async with stack.client.post(stack.url + "/v1/completions", json=body, headers=alice) as answer:
            assert answer.status == 429
            assert 0 < int(answer.headers["Retry-After"]) <= 41  # a debt of 40, and one token a second
        assert (await stack.post("/v1/completions", body, **{"x-baton-tenant": "bob"}))[0] == 200


async def test_the_prompt_of_a_tenant_that_has_used_its_quota_is_not_looked_at(folder):
    async with serving(folder, tenant_header=True, tenant_quotas=("alice:tokens_per_minute=2",)) as stack:
        alice = {"x-baton-tenant": "alice"}
        assert (await stack.post("/v1/completions", BODY, **alice))[0] == 200
        assert (await stack.post("/v1/completions", {**BODY, "prompt": ""}, **alice))[0] == 429
        assert (await stack.post("/v1/completions", {**BODY, "prompt": ""}))[0] == 400


async def test_a_request_refused_by_a_full_gateway_is_not_charged(folder):
    options = {"tenant_header": True, "tenant_quotas": ("alice:requests=1,tokens_per_minute=100".split(","))}
    async with running(
        folder, max_queued_requests=0, **{**options, "tenant_quotas": tuple(options["tenant_quotas"])}
    ) as stack:
        await stack.silent_pair(max_running=1)
        call = asyncio.ensure_future(stack.post("/v1/completions", BODY))
        for node in stack.nodes:
            await node.until(lambda node=node: node.generates)
        alice = {"x-baton-tenant": "alice"}
        for _ in range(3):
            status, answer = await stack.post("/v1/completions", {"prompt": [65] * 90}, **alice)
            assert (status, "in flight, the limit is 1" in answer["error"]["message"]) == (429, True)
        for node in stack.nodes:
            echo(node, next(iter(node.generates.values())))
            node.on_generate = echo
        assert (await call)[0] == 200
        assert (await stack.post("/v1/completions", {"prompt": [65] * 90}, **alice))[0] == 200


# ---- changed priorities ---------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def queued(folder, *rids, **config):
    """One request on the only row, the others waiting in this order."""
    options = {"enable_priority_scheduling": True, "max_dispatch_ahead": 0, **config}
    async with running(folder, **options) as stack:
        await stack.silent_pair(max_running=1)
        calls = []
        for rid in ("first", *rids):
            body = {"text": "a", "rid": rid, "sampling_params": {"max_new_tokens": 2}}
            calls.append(asyncio.ensure_future(stack.post("/generate", body)))
            while (await stack.get("/server_info"))[1]["num_in_flight"] < len(calls):
                await asyncio.sleep(0.002)
        for node in stack.nodes:
            await node.until(lambda node=node: node.generates)
        yield stack
        for node in stack.nodes:
            node.on_generate = echo
            echo(node, node.generates["first"])
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * len(calls)


async def test_a_waiting_request_can_be_made_more_urgent(folder):
    async with queued(folder, "a", "b", "c/d") as stack:
        assert await stack.post("/v1/requests/c%2Fd/priority", {"priority": 5}) == (200, {"changed": 1})
        assert await stack.post("/v1/requests/b/priority", {"priority": 2}) == (200, {"changed": 1})
    assert list(stack.nodes[0].generates) == ["first", "c/d", "b", "a"]
    assert said(stack).priority == LOWEST_PRIORITY
    assert stack.nodes[0].generates["c/d"].priority == 5


async def test_a_changed_priority_reaches_both_nodes(folder):
    async with queued(folder, schedule_low_priority_values_first=True) as stack:
        assert await stack.post("/v1/requests/first/priority", {"priority": 5}) == (200, {"changed": 1})
        for node in stack.nodes:
            await node.until(lambda node=node: Reprioritize("first", node.attempt("first"), -5) in node.received)


async def test_the_class_of_a_request_can_be_changed_anywhere(folder):
    async with queued(folder, "a", "b", "c", priority_classes=("high:100", "low:1")) as stack:
        assert await stack.post("/v1/requests/c/priority", {"priority_class": "high"}) == (200, {"changed": 1})
        assert await stack.post("/v1/requests/first/priority", {"priority_class": "high"}) == (200, {"changed": 1})
        for node in stack.nodes:
            told = Reprioritize("first", node.attempt("first"), LOWEST_PRIORITY, "high")
            await node.until(lambda node=node, told=told: told in node.received)
        _, answer = await stack.get("/v1/workers/gateway/decisions")
        assert "from the class low to high" in answer["decisions"][-1]["reason"]
    assert set(stack.nodes[0].generates) == {"first", "a", "b", "c"}
    assert stack.nodes[0].generates["c"].priority_class == "high"
    assert list(stack.nodes[0].generates).index("c") < 3


async def test_an_invalid_change_is_refused_with_the_field_named(folder):
    async with queued(folder, "a") as stack:
        assert (await stack.post("/v1/requests/unknown/priority", {"priority": 5}))[0] == 404
        assert (await stack.post("/v1/requests/a/colour", {"priority": 5}))[0] == 404
        assert await error_of(stack.post("/v1/requests/a/priority", {})) == (400, "priority")
        assert await error_of(stack.post("/v1/requests/a/priority", {"priority_class": "x"})) == (400, "priority_class")
        assert await error_of(stack.post("/v1/requests/a/priority", {"urgency": 5})) == (400, "urgency")
    async with serving(folder) as stack:
        assert await error_of(stack.post("/v1/requests/a/priority", {"priority": 5})) == (400, "priority")


# ---- decisions ------------------------------------------------------------------------------------------------------


async def test_decisions_of_a_node_are_found_by_name_or_incarnation(folder):
    async with serving(folder) as stack:
        decode = stack.nodes[1]
        decode.decisions = tuple(Decision(3.0 - i, f"r{i}", "admit", "in order") for i in range(3))
        for name in ("decode", decode.incarnation):
            status, answer = await stack.get(f"/v1/workers/{name}/decisions?limit=2")
            assert (status, answer["worker"]) == (200, "decode")
            assert [one["rid"] for one in answer["decisions"]] == ["r1", "r2"]
            assert answer["decisions"][1] == {"ago_s": 1.0, "rid": "r2", "action": "admit", "reason": "in order"}
        answers = await asyncio.gather(*(stack.get(f"/v1/workers/decode/decisions?limit={i}") for i in (1, 2, 3)))
        assert [len(answer["decisions"]) for _, answer in answers] == [1, 2, 3]


async def test_the_gateway_returns_its_own_decisions(folder):
    async with queued(folder, "a") as stack:
        await stack.post("/v1/requests/a/priority", {"priority": 5})
    async with queued(folder, "a", max_queued_requests=1) as stack:
        await stack.post("/generate", {"text": "a", "rid": "b"})
        _, answer = await stack.get("/v1/workers/gateway/decisions")
        assert [(one["rid"], one["action"]) for one in answer["decisions"]] == [
            ("first", "send"), ("a", "wait"), ("b", "refuse"),
        ]  # fmt: skip
        waited_s = stack.nodes[0].generates["first"].waited_s
        assert answer["decisions"][0]["reason"] == f"to prefill and decode, {waited_s:.3f} s after it came"
        assert answer["decisions"][2]["reason"] == "2 requests are in flight, the limit is 2; retry later"


async def test_a_node_that_does_not_return_decisions_gets_504(folder, monkeypatch):
    monkeypatch.setattr("gateway.http.routes.workers.ANSWER_TIMEOUT_S", 0.1)
    async with serving(folder) as stack:
        stack.nodes[0].decisions = None
        status, answer = await stack.get("/v1/workers/prefill/decisions")
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert (await stack.get("/v1/workers/unknown/decisions"))[0] == 404
        assert (await stack.get("/v1/workers/prefill/secrets"))[0] == 404
        for limit in ("0", "x", "1025", "-1"):
            assert await error_of(stack.get(f"/v1/workers/decode/decisions?limit={limit}")) == (400, "limit")


# ---- expected lengths -----------------------------------------------------------------------------------------------


async def test_nodes_are_told_the_predicted_output_length(folder):
    async with serving(folder) as stack:
        for expected in (0, 0, 0, 0, 3):
            assert (await stack.post("/v1/completions", {"prompt": "abc", "max_tokens": 3}))[0] == 200
            assert said(stack).expected_output == expected
        await stack.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})
        assert said(stack).expected_output == 2
        await stack.post("/v1/completions", {"prompt": "abc", "max_tokens": 40, "ignore_eos": True})
        assert said(stack).expected_output == 40
        await stack.post("/v1/completions", {"prompt": "abc", "max_tokens": 40, "min_tokens": 20})
        assert said(stack).expected_output == 20


# ---- priority functions ---------------------------------------------------------------------------------------------


async def test_a_users_function_decides_priorities_last(folder, tmp_path, monkeypatch):
    (tmp_path / "own_rules.py").write_text(
        "def urgency(facts):\n"
        "    if facts.tenant == 'alice':\n"
        "        return 100 - facts.num_prompt_tokens\n"
        "    return None if facts.priority is None else facts.priority + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = {"enable_priority_scheduling": True, "priority_function": "own_rules:urgency", "tenant_header": True}
    async with serving(folder, **options) as stack:
        await stack.post("/v1/completions", {"prompt": [65] * 30, "max_tokens": 2}, **{"x-baton-tenant": "alice"})
        assert said(stack).priority == 70
        await stack.post("/v1/completions", {**BODY, "priority": 5})
        assert said(stack).priority == 6
        await stack.post("/v1/completions", BODY)
        assert said(stack).priority == LOWEST_PRIORITY
        higher = {"priority": 1000}
        assert (await stack.post("/v1/requests/a/priority", higher, **{"x-baton-tenant": "alice"}))[0] == 401
        assert (await stack.post("/v1/requests/a/priority", higher))[0] == 404, "an admin may change all that there are"


async def test_failures_of_a_users_function_are_counted(folder, tmp_path, monkeypatch):
    (tmp_path / "failing_rules.py").write_text(
        "def urgency(facts):\n"
        "    return None if facts.waited_s else {1: 5, 2: 0.5}[facts.num_prompt_tokens]\n"  # asked again after 1 s
    )
    monkeypatch.syspath_prepend(tmp_path)
    series = "\nbaton_priority_function_failures_total {}.0\n"
    async with serving(folder, enable_priority_scheduling=True, priority_function="failing_rules:urgency") as stack:
        assert (await stack.post("/v1/completions", {"prompt": [65], "max_tokens": 1}))[0] == 200
        assert series.format(0) in (await stack.get("/metrics"))[1]
        for length in (2, 3):
            assert (await stack.post("/v1/completions", {"prompt": [65] * length, "max_tokens": 1}))[0] == 200
        assert series.format(2) in (await stack.get("/metrics"))[1]
