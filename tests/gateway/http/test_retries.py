"""Requests that clients send again with the same key, over real connections: each runs once."""

import asyncio
import json
import logging
from itertools import count
from types import SimpleNamespace

import aiohttp
import pytest
from support.gateway.fake_nodes import PADDED_VOCAB, echo, events, running
from support.gateway.played_cluster import PlayedCluster
from support.gateway.toy_stack import answers, ids_of, toy_stack

from common.errors import ErrorCode
from common.sampling_params import SamplingParams
from common.wire.messages import Find, Generate, KeptOutput, SetPaused
from gateway.http.retries import Retries
from gateway.http.streaming import OutputEvents, TurnEnd
from gateway.requests.idempotency import KeyedRequest, identify
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.input.input_processor import InputProcessor

KEY = {"Idempotency-Key": "one"}
HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 3},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 3}},
}
COMPLETIONS = "/v1/completions"
STREAM = {"prompt": "x", "max_tokens": 9, "stream": True}


async def post(stack, path, body, **headers):
    async with stack.client.post(stack.url + path, json=body, headers=headers) as answer:
        return answer.status, answer.headers, await answer.read()


def num_generates(node):
    return sum(len(list(message.samples())) for message in node.received if isinstance(message, Generate))


def hold(stack):
    stack.silence()


async def begin_stream(stack, **headers):
    """A stream whose first token has reached the client, which then reads no more."""
    prefill = stack.nodes[0]
    call = asyncio.ensure_future(stack.client.post(stack.url + COMPLETIONS, json=STREAM, headers=headers or KEY))
    await prefill.until(lambda: prefill.generates)
    rid = list(prefill.generates)[-1]
    prefill.tokens(rid, 0, ids_of("a"))
    answer = await call
    arriving = events(answer)
    assert (await anext(arriving))["choices"][0]["text"] == "a"
    return rid, answer, arriving


async def texts(arriving):
    return [event["choices"][0]["text"] async for event in arriving if event != "[DONE]"]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_answers_a_retry_from_the_first_run(stack, monkeypatch, path, is_streamed):
    monkeypatch.setattr("time.time", map(float, count(1_000_000, 1_000)).__next__)  # much time passes between the two
    body = {**BODIES[path], "stream": is_streamed}
    first, again = [await post(stack, path, body, **KEY) for _ in range(2)]
    assert (first[0], again[0]) == (200, 200)
    assert ("idempotent-replayed" in first[1], again[1].get("idempotent-replayed")) == (False, "true")
    assert num_generates(stack.nodes[0]) == 1
    if not is_streamed:
        assert first[2] == again[2]


async def test_all_samples_of_a_request_come_back(stack):
    body = {"prompt": ["ab", "cd"], "n": 3, "max_tokens": 2, "temperature": 1.0}
    first, again = [json.loads((await post(stack, COMPLETIONS, body, **KEY))[2]) for _ in range(2)]
    assert len(first["choices"]) == 6
    assert first["choices"] == again["choices"]
    assert num_generates(stack.nodes[0]) == 6


async def test_a_retry_gets_tool_calls_with_the_same_ids(folder):
    async with toy_stack(folder) as stack:
        answers(stack, "[add|{}][find|{}]")
        tools = [{"type": "function", "function": {"name": name}} for name in ("add", "find")]
        body = {"messages": HI, "tools": tools, "n": 2}
        first, again = [json.loads((await post(stack, "/v1/chat/completions", body, **KEY))[2]) for _ in range(2)]
        assert first["choices"] == again["choices"]
        calls = [call for choice in first["choices"] for call in choice["message"]["tool_calls"]]
        assert len({call["id"] for call in calls}) == 4


async def test_a_stream_that_is_asked_for_again_starts_from_its_first_token_and_goes_on(stack):
    hold(stack)
    prefill, decode = stack.nodes
    rid, answer, _ = await begin_stream(stack)
    decode.tokens(rid, 1, ids_of("b"))
    answer.close()  # the client loses its connection
    again = await stack.client.post(stack.url + COMPLETIONS, json=STREAM, headers=KEY)
    arriving = events(again)
    shown = ""
    while shown != "ab":
        shown += (await anext(arriving))["choices"][0]["text"]
        assert "ab".startswith(shown)
    decode.tokens(rid, 2, ids_of("c"), finish="length")
    assert "".join(await texts(arriving)) == "c"
    assert (num_generates(prefill), prefill.aborts) == (1, [])


async def test_the_answer_that_a_retry_takes_over_ends(stack):
    hold(stack)
    decode = stack.nodes[1]
    rid, answer, arriving = await begin_stream(stack)
    again = asyncio.ensure_future(post(stack, COMPLETIONS, STREAM, **KEY))
    with pytest.raises(aiohttp.ClientPayloadError):
        await texts(arriving)
    answer.close()
    decode.tokens(rid, 1, ids_of("b"), finish="length")
    status, _, body = await again
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    await decode.until(lambda: num_generates(decode) == 1)


async def test_requests_that_come_at_the_same_time_run_once(stack):
    hold(stack)
    prefill, decode = stack.nodes
    calls = [asyncio.ensure_future(post(stack, COMPLETIONS, {"prompt": "x", "max_tokens": 2}, **KEY)) for _ in range(4)]
    async with asyncio.timeout(60):
        while sum(call.done() for call in calls) < 3:  # the newest has taken the answer over
            await asyncio.sleep(0.01)
    await prefill.until(lambda: prefill.generates)
    (rid,) = prefill.generates
    prefill.tokens(rid, 0, ids_of("a"))
    decode.tokens(rid, 1, ids_of("b"), finish="length")
    answers = await asyncio.gather(*calls, return_exceptions=True)
    whole = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert [status for status, _, _ in whole] == [200]
    assert num_generates(prefill) == 1


async def test_a_retry_never_makes_the_nodes_end_the_request_that_it_repeats(folder, monkeypatch):
    """It has come before the request was sent to nodes, and is processed after that."""
    process, num_processed = InputProcessor.completion, 0
    has_come, is_sent = asyncio.Event(), asyncio.Event()

    async def slow(self, *args):
        nonlocal num_processed
        num_processed += 1
        if num_processed == 1:
            await has_come.wait()
        else:
            has_come.set()
            await is_sent.wait()
        return await process(self, *args)

    monkeypatch.setattr(InputProcessor, "completion", slow)
    async with running(folder) as stack:
        prefill, decode = await stack.pair()
        hold(stack)
        body = {"prompt": "x", "max_tokens": 2}
        first, again = [asyncio.ensure_future(post(stack, COMPLETIONS, body, **KEY)) for _ in range(2)]
        await prefill.until(lambda: prefill.generates)
        is_sent.set()
        await asyncio.wait([first, again], return_when=asyncio.FIRST_COMPLETED)  # the retry has taken the answer over
        (rid,) = prefill.generates
        prefill.tokens(rid, 0, ids_of("a"))
        decode.tokens(rid, 1, ids_of("b"), finish="length")
        answers = await asyncio.gather(first, again, return_exceptions=True)
        assert [answer[0] for answer in answers if not isinstance(answer, BaseException)] == [200]
        kinds = [type(message) for message in prefill.received if isinstance(message, Find | Generate)]
        assert kinds == [Find, Generate]


async def test_nodes_are_asked_for_all_outputs_of_a_large_request(folder):
    async with running(folder, max_queued_requests=2_000) as stack:
        prefill, _ = await stack.pair()
        body = {"input_ids": [[65]] * 1_030, "rid": "many", "sampling_params": {"max_new_tokens": 1}}
        status, answer = await stack.post("/generate", body)
        assert (status, len(answer)) == (200, 1_030)
        keys = [key for message in prefill.received if isinstance(message, Find) for key in message.keys]
        assert len(set(keys)) == 1_030


@pytest.mark.parametrize(
    ("tokens", "is_taken"),
    [(ids_of("x"), True), ((65, PADDED_VOCAB), False), ((1 << 40,), False), ((65, 66, 67), False)],
    ids=["one token", "token id beyond the vocabulary", "huge token id", "an output that has not ended at its limit"],
)
async def test_an_output_that_a_node_has_kept_is_continued_only_if_the_request_can_have_it(
    stack, caplog, tokens, is_taken
):
    body = b'{"prompt": "DEF", "max_tokens": 3}'
    identity = identify(COMPLETIONS, body, "", "one", None)
    decode = stack.nodes[1]
    decode.kept = [KeptOutput(f"{identity.digest}-0", tokens)]
    headers = KEY | {"Content-Type": "application/json"}
    with caplog.at_level(logging.ERROR):
        async with stack.client.post(stack.url + COMPLETIONS, data=body, headers=headers) as answer:
            assert (answer.status, "idempotent-replayed" in answer.headers) == (200, is_taken)
            text = (await answer.json())["choices"][0]["text"]
    (generate,) = decode.generates.values()
    assert generate.output == (tokens if is_taken else ())
    assert text == ("xEF" if is_taken else "DEF")
    error = f"node {decode.register.name} has kept an output that it cannot have made"
    assert caplog.messages == ([] if is_taken else [error])


async def test_an_output_of_another_gateway_is_paused_until_its_client_has_read_what_there_is(folder):
    async with running(folder, max_unread_tokens=2) as stack:
        _, decode = await stack.silent_pair()
        body = json.dumps(STREAM).encode()
        decode.kept = [KeptOutput(f"{identify(COMPLETIONS, body, '', 'one', None).digest}-0", ids_of("abc"))]
        headers = KEY | {"Content-Type": "application/json"}
        async with stack.client.post(stack.url + COMPLETIONS, data=body, headers=headers) as answer:
            assert (await anext(events(answer)))["choices"][0]["text"] == "abc"
            await decode.until(lambda: pauses(decode) == [True, False], timeout_s=10.0)


async def test_an_output_of_another_gateway_is_continued_although_as_many_requests_as_may_be_are_in_flight(folder):
    async with running(folder, max_queued_requests=0) as stack:
        _, decode = await stack.silent_pair(max_running=1)
        await begin_stream(stack, **{"Idempotency-Key": "other"})
        body = json.dumps(STREAM).encode()
        decode.kept = [KeptOutput(f"{identify(COMPLETIONS, body, '', 'one', None).digest}-0", ids_of("abc"))]
        headers = KEY | {"Content-Type": "application/json"}
        async with stack.client.post(stack.url + COMPLETIONS, data=body, headers=headers) as answer:
            assert answer.status == 200
            assert (await anext(events(answer)))["choices"][0]["text"] == "abc"
        new = {"prompt": "y", "max_tokens": 9}
        assert (await post(stack, COMPLETIONS, new))[0] == 429


async def test_an_output_of_another_gateway_that_exceeds_a_quota_stays_with_the_nodes(folder):
    async with running(folder, tenant_header=True, tenant_quotas=("alice:requests=2",)) as stack:
        _, decode = await stack.silent_pair()
        alice = KEY | {"x-baton-tenant": "alice"}
        await begin_stream(stack, **alice)
        asked = len(finds(decode))
        body = {"prompt": "y", "max_tokens": 9, "n": 2}
        assert (await post(stack, COMPLETIONS, body, **alice | {"Idempotency-Key": "two"}))[0] == 429
        assert len(finds(decode)) == asked


async def test_an_output_that_the_nodes_have_given_up_is_continued_beyond_a_quota(folder, monkeypatch):
    async with running(folder, tenant_header=True, tenant_quotas=("alice:requests=1",)) as stack:
        _, decode = await stack.silent_pair()
        body = json.dumps(STREAM).encode()
        decode.kept = [KeptOutput(f"{identify(COMPLETIONS, body, 'alice', 'one', None).digest}-0", ids_of("abc"))]
        take_over = Retries.take_over

        async def slow(*args):
            outputs = await take_over(*args)
            stack.gateway._quotas.admit("alice", 1, 0, 0.0)  # another request has come meanwhile
            return outputs

        monkeypatch.setattr(Retries, "take_over", slow)
        headers = KEY | {"Content-Type": "application/json", "x-baton-tenant": "alice"}
        async with stack.client.post(stack.url + COMPLETIONS, data=body, headers=headers) as answer:
            assert answer.status == 200
            assert (await anext(events(answer)))["choices"][0]["text"] == "abc"


def finds(node):
    return [message for message in node.received if isinstance(message, Find)]


def pauses(node):
    return [message.is_paused for message in node.received if isinstance(message, SetPaused)]


async def test_a_node_that_has_told_of_an_output_may_go_before_the_others_have_answered():
    cluster = PlayedCluster()
    model, router, incarnation = (
        SimpleNamespace(name="tiny", pool=cluster.pool),
        cluster.pool.router,
        [*cluster.work][-1],
    )
    request = GenerateRequest("r", "r", (65, 66), SamplingParams(max_new_tokens=3), "tiny", timeout_s=9.0, key="k")

    class Control:
        async def find(self, *_):
            cluster.lose(incarnation)
            return {incarnation: (KeptOutput("k", (67,)),)}

    retries = Retries(None, None, Control(), metrics=None, clock=None, grace_s=0.0)
    assert await retries.take_over(model, [request]) == {"k": KeptOutput("k", (67,))}
    assert incarnation not in router._rows


@pytest.mark.parametrize("other", [(COMPLETIONS, {"prompt": "y"}), ("/generate", {"text": "x"})])
async def test_another_request_with_the_same_key_is_refused(stack, other):
    assert (await post(stack, COMPLETIONS, {"prompt": "x"}, **KEY))[0] == 200
    status, _, body = await post(stack, *other, **KEY)
    assert (status, json.loads(body)["error"]["code"]) == (422, "idempotency_key_reused")


async def test_keys_belong_to_a_tenant(folder):
    async with running(folder, tenant_header=True) as stack:
        await stack.pair()
        for tenant in ("one", "two"):
            status, headers, _ = await post(stack, COMPLETIONS, {"prompt": "x"}, **KEY, **{"X-Baton-Tenant": tenant})
            assert (status, "idempotent-replayed" in headers) == (200, False)
        assert (await post(stack, COMPLETIONS, {"prompt": "y"}, **KEY, **{"X-Baton-Tenant": "three"}))[0] == 200


async def test_two_keys_in_one_request_are_refused(stack):
    headers = [("Idempotency-Key", "one"), ("Idempotency-Key", "two")]
    async with stack.client.post(stack.url + COMPLETIONS, json={"prompt": "x"}, headers=headers) as answer:
        assert answer.status == 400
        assert "Idempotency-Key" in (await answer.json())["error"]["message"]


async def test_a_failed_request_runs_again(stack):
    prefill, decode = stack.nodes
    hold(stack)
    prefill.on_generate = lambda node, generate: node.fail(generate.rid, ErrorCode.OUT_OF_PAGES)
    assert (await post(stack, COMPLETIONS, {"prompt": "x"}, **KEY))[0] == 503
    prefill.on_generate = decode.on_generate = echo
    status, headers, _ = await post(stack, COMPLETIONS, {"prompt": "x"}, **KEY)
    assert (status, "idempotent-replayed" in headers) == (200, False)


async def test_a_request_whose_client_has_left_goes_on_for_the_grace_and_then_ends(folder):
    async with running(folder, retry_grace=0.2) as stack:
        prefill, _ = await stack.pair()
        hold(stack)
        rid, answer, _ = await begin_stream(stack)
        answer.close()
        await prefill.until(lambda: rid in prefill.aborts)
        _, metrics = await stack.get("/metrics")
        assert 'baton_outputs_total{end="aborted",model="tiny"} 1.0' in metrics


async def test_a_request_whose_client_has_left_ends_at_once_without_a_grace(folder):
    async with running(folder, retry_grace=0) as stack:
        prefill, _ = await stack.pair()
        hold(stack)
        rid, answer, _ = await begin_stream(stack)
        answer.close()
        await prefill.until(lambda: rid in prefill.aborts)


async def test_if_an_output_fails_in_the_grace_the_others_end_and_the_request_runs_again(folder):
    body = {"text": ["a", "b"], "rid": ["one", "two"]}
    async with running(folder, retry_grace=3_600.0) as stack:
        prefill, decode = await stack.pair()
        hold(stack)
        call = asyncio.ensure_future(post(stack, "/generate", body))
        await decode.until(lambda: len(decode.generates) == 2)
        call.cancel()
        while 'baton_disconnects_total{model="tiny"} 2.0' not in (await stack.get("/metrics"))[1]:
            await asyncio.sleep(0.01)
        decode.fail("one", ErrorCode.OUT_OF_PAGES)
        await decode.until(lambda: "two" in decode.aborts)
        prefill.on_generate = decode.on_generate = echo
        assert (await post(stack, "/generate", body))[0] == 200


async def test_a_paused_output_goes_on_when_its_client_has_left():
    paused = []
    reader = OutputEvents(TurnEnd(), lambda _, is_paused: paused.append(is_paused), only_ends=False, max_unread=1)
    request = SimpleNamespace(rid="r", sampling=SamplingParams())
    stream = SimpleNamespace(number=0, is_ended=False, num_untaken=2, request=request)
    keyed = KeyedRequest(identify(COMPLETIONS, b"{}", "", "one", None), "answer", None, reader, streams=[stream])
    keyed.wake(stream)
    assert paused == [True]
    Retries(None, None, None, metrics=None, clock=None, grace_s=60.0).leave(keyed, reader)
    assert paused == [True, False]


async def test_a_request_that_ends_in_the_grace_is_there_when_its_client_comes_back(stack):
    hold(stack)
    decode = stack.nodes[1]
    rid, answer, _ = await begin_stream(stack)
    answer.close()
    decode.tokens(rid, 1, ids_of("b"), finish="length")
    status, headers, body = await post(stack, COMPLETIONS, STREAM, **KEY)
    assert (status, headers["idempotent-replayed"]) == (200, "true")
    assert body.endswith(b"data: [DONE]\n\n")
    _, metrics = await stack.get("/metrics")
    assert "baton_idempotent_retries_total" in metrics


async def test_a_request_with_the_same_rid_and_body_attaches(stack):
    hold(stack)
    prefill, _ = stack.nodes
    body = {"text": "a", "rid": "mine", "sampling_params": {"max_new_tokens": 1}}
    first = asyncio.ensure_future(stack.post("/generate", body))
    await prefill.until(lambda: prefill.generates)
    again = asyncio.ensure_future(stack.post("/generate", body))
    with pytest.raises(aiohttp.ClientError):
        await first
    prefill.tokens("mine", 0, (65,), finish="length")
    assert (await again)[0] == 200
    assert (await stack.post("/generate", body))[1]["meta_info"]["id"] == "mine"
    assert num_generates(prefill) == 1


async def test_a_new_run_of_a_request_with_a_key_has_the_same_seed(folder):
    seeds = []
    for _ in range(2):
        async with running(folder) as stack:
            prefill, _ = await stack.pair()
            await post(stack, COMPLETIONS, {"prompt": "x"}, **KEY)
            seeds += [generate.sampling.seed for generate in prefill.generates.values()]
            await post(stack, COMPLETIONS, {"prompt": "x", "seed": 7}, **{"Idempotency-Key": "two"})
            assert list(prefill.generates.values())[-1].sampling.seed == 7
    assert seeds[0] == seeds[1]


async def test_a_new_run_keeps_the_seeds_of_the_client_and_those_beside_them(folder):
    params = [{"seed": 7, "max_new_tokens": 1}, {"max_new_tokens": 1}, {"sampling_seed": 8, "max_new_tokens": 1}]
    body, seeds = {"text": ["a", "b", "c"], "sampling_params": params}, []
    for _ in range(2):
        async with running(folder) as stack:
            prefill, _ = await stack.pair()
            await post(stack, "/generate", body, **KEY)
            seeds.append([generate.sampling.seed for generate in prefill.generates.values()])
    assert seeds[0] == seeds[1]
    assert (seeds[0][0], seeds[0][2]) == (7, 8)
