"""Streams, text, stop strings, seeds, log-probabilities, usage and disconnects over a whole service."""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from support.service.client import Client, Exchange, prompt_of, until
from support.service.service import Service, running

OPTIONS = {"chunked_prefill_size": 16, "max_running_requests": 8, "max_total_tokens": 16384}
VERSE = "ROMEO:\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("streams"), node_options=OPTIONS) as service:
        yield service


async def events(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every event of a stream except ``[DONE]``."""
    async with client.session.post(path, json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = (await answer.read()).split(b"\n\n")
    assert lines[-2:] == [b"data: [DONE]", b""]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-2]]


# ---- tokens as they are generated ------------------------------------------------------------------------------------


async def test_tokens_arrive_one_by_one(service: Service) -> None:
    async with service.client() as client:
        await client.generate(VERSE, 4)
        await check_stream(client.begin(VERSE, 3000))


async def test_concurrent_streams_each_deliver_tokens_as_they_are_generated(service: Service) -> None:
    async with service.client() as client:
        await asyncio.gather(*(check_stream(client.begin(prompt_of(20, i), 2000)) for i in range(6)))


async def check_stream(exchange: Exchange) -> None:
    """Read until events of a few tokens each are the rule. A process that lacks a core makes some carry many."""

    def is_so() -> bool:
        num_tokens = len(exchange.arrivals)
        return num_tokens >= 120 and len(exchange.reads) > 2 and len(exchange.texts) > num_tokens / 30

    await until(lambda: is_so() or bool(exchange.ended_at), 180.0, "no tokens arrived")
    assert is_so(), f"{len(exchange.arrivals)} tokens, {len(exchange.texts)} events, {len(exchange.reads)} pieces"
    await exchange.leave()


# ---- text -----------------------------------------------------------------------------------------------------------


async def test_the_events_of_a_stream_concatenate_to_the_non_streamed_text(service: Service) -> None:
    body = {"model": "m", "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    messages = [{"role": "user", "content": "Speak, Größe 🙂!"}]
    async with service.client() as client:
        _, whole = await client.post("/v1/completions", {**body, "prompt": VERSE})
        pieces = await events(client, "/v1/completions", {**body, "prompt": VERSE})
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
        assert [piece["choices"][0]["finish_reason"] for piece in pieces][-2:] == [None, "length"]

        _, whole = await client.post("/v1/chat/completions", {**body, "messages": messages})
        pieces = await events(client, "/v1/chat/completions", {**body, "messages": messages})
        text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
        assert text == whole["choices"][0]["message"]["content"]
        assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"

        exchange = await client.begin(VERSE, 80).end()
        assert all(
            later.startswith(earlier) for earlier, later in zip(exchange.texts, exchange.texts[1:], strict=False)
        )
        _, answer = await client.post("/detokenize", {"tokens": list(exchange.ids)})
        assert exchange.texts[-1] == answer["text"]


async def test_no_part_of_a_stop_string_is_ever_shown(service: Service) -> None:
    body = {"model": "m", "prompt": VERSE, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    async with service.client() as client:
        _, whole = await client.post("/v1/completions", body)
        text = whole["choices"][0]["text"]
        for start, length in ((30, 2), (41, 5), (60, 12), (77, 1)):
            stop = text[start : start + length]
            expected = text[: text.find(stop)]
            pieces = await events(client, "/v1/completions", {**body, "stop": [stop, "never generated"]})
            shown = ""
            for piece in pieces:
                shown += piece["choices"][0]["text"]
                assert expected.startswith(shown), f"{shown!r} shows a part of the stop string {stop!r}"
            assert shown == expected
            assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
            _, whole = await client.post("/v1/completions", {**body, "stop": stop})
            assert whole["choices"][0]["text"] == expected
            assert whole["choices"][0]["stop_reason"] == stop
        await client.settled()


async def test_a_stop_token_ends_the_output_and_is_not_shown(service: Service) -> None:
    async with service.client() as client:
        whole = await client.generate(VERSE, 40)
        ids = whole["output_ids"]
        for place in (0, 1, 25):
            answer = await client.generate(VERSE, 40, stop_token_ids=[ids[place]])
            first = ids.index(ids[place])
            assert answer["output_ids"] == ids[: first + 1]
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[place]}
            assert whole["text"].startswith(answer["text"])
        await client.settled()


# ---- seeds, log-probabilities, usage --------------------------------------------------------------------------------


async def test_the_same_seed_gives_the_same_tokens_alone_and_batched(service: Service) -> None:
    sampling = {"temperature": 1.3, "top_p": 0.98, "top_k": 0}
    async with service.client() as client:

        async def draw(seed: int) -> list[int]:
            answer = await client.generate(VERSE, 40, **sampling, seed=seed)
            ids: list[int] = answer["output_ids"]
            return ids

        alone = {seed: await draw(seed) for seed in (1, 2, 3)}
        assert len({tuple(ids) for ids in alone.values()}) == 3
        batched = await asyncio.gather(*(draw(seed) for seed in (3, 1, 2, 1, *range(10, 20))))
        assert batched[:4] == [alone[3], alone[1], alone[2], alone[1]]
        unseeded = await asyncio.gather(*(client.generate(VERSE, 40, **sampling) for _ in range(3)))
        assert len({tuple(answer["output_ids"]) for answer in unseeded}) == 3


async def test_every_token_of_both_nodes_has_log_probabilities(service: Service) -> None:
    async with service.client() as client:
        answer = await client.generate(VERSE, 12, return_logprob=True, top_logprobs_num=3)
        chosen, tops = (answer["meta_info"][f"output_{kind}_logprobs"] for kind in ("token", "top"))
        assert [token for _, token, _ in chosen] == answer["output_ids"]
        for (logprob, token, _), top in zip(chosen, tops, strict=True):
            assert -50 < logprob <= 0
            assert len(top) == 3
            assert top[0][:2] == [logprob, token], "greedy sampling takes the most likely token"
            assert sum(math.exp(entry[0]) for entry in top) <= 1.0001
        body = {"model": "m", "prompt": VERSE, "max_tokens": 12, "temperature": 0, "logprobs": 2, "ignore_eos": True}
        _, answer = await client.post("/v1/completions", body)
        found = answer["choices"][0]["logprobs"]
        assert found["token_logprobs"] == pytest.approx([logprob for logprob, _, _ in chosen], abs=1e-5)
        assert "".join(found["tokens"]) == answer["choices"][0]["text"]
        body = {
            "model": "m", "messages": [{"role": "user", "content": "Hark"}], "max_tokens": 6, "logprobs": True,
            "top_logprobs": 2, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        _, answer = await client.post("/v1/chat/completions", body)
        assert [len(entry["top_logprobs"]) for entry in answer["choices"][0]["logprobs"]["content"]] == [2] * 6


async def test_usage_reports_cached_tokens_of_a_repeated_prompt(service: Service) -> None:
    body = {
        "model": "m", "prompt": prompt_of(100, 77), "max_tokens": 5, "temperature": 0, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with service.client() as client:
        for cached in (0, 96):
            usage = (await events(client, "/v1/completions", body))[-1]["usage"]
            assert usage["prompt_tokens"] == 100
            assert usage["completion_tokens"] == 5
            assert usage["total_tokens"] == 105
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        salted = await client.generate(prompt_of(100, 77), 5, cache_salt="another tenant")
        assert salted["meta_info"]["cached_tokens"] == 0


# ---- disconnects ----------------------------------------------------------------------------------------------------


async def test_a_disconnect_ends_the_request_on_both_nodes_in_every_stage(service: Service) -> None:
    async with service.client() as client:
        await client.generate(VERSE, 2)
        before = await client.settled()
        streaming = [client.begin(prompt_of(30, 500 + i), 1500) for i in range(8)]  # every slot of the decode node
        for exchange in streaming:
            await exchange.has(3)
        waiting = [client.begin(prompt_of(30, 520 + i), 1500) for i in range(4)]
        computing = [client.begin(prompt_of(3000, 530 + i), 900) for i in range(16)]  # some wait for the prefill node
        await asyncio.sleep(0.1)
        await asyncio.gather(*(exchange.leave() for exchange in [*streaming, *waiting, *computing]))
        after = await client.settled()
        made = after["decode-0"]["output_tokens"] - before["decode-0"]["output_tokens"]
        assert made < 8 * 1500, "the decode node finished requests without a client"
        computed = after["prefill-0"]["prompt_tokens_computed"] - before["prefill-0"]["prompt_tokens_computed"]
        assert computed < 12 * 30 + 16 * 3000, "the prefill node finished prompts without a client"
        async with client.session.get("/server_info") as answer:
            assert (await answer.json())["num_in_flight"] == 0


async def test_a_disconnect_during_a_non_streamed_request_ends_it(service: Service) -> None:
    async with service.client() as client:
        before = await client.settled()
        works = [asyncio.create_task(client.generate(prompt_of(30, 600 + i), 3000)) for i in range(3)]
        while (await client.counters())["decode-0"]["output_tokens"] < before["decode-0"]["output_tokens"] + 30:
            pass
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        after = await client.settled()
        assert after["decode-0"]["output_tokens"] - before["decode-0"]["output_tokens"] < 3 * 2999


async def test_a_request_can_be_aborted_by_its_id(service: Service) -> None:
    async with service.client() as client:
        exchange = client.begin(VERSE, 3000, rid="mine")
        await exchange.has(3)
        assert await client.post("/abort_request", {"rid": "mine"}) == (200, {"aborted": 1})
        await exchange.end()
        assert exchange.code == "aborted"
        assert await client.post("/abort_request", {"rid": "mine"}) == (200, {"aborted": 0})
        await client.settled()


async def test_a_request_ends_at_its_own_deadline_with_a_typed_error(service: Service) -> None:
    async with service.client() as client:
        exchange = await client.begin(VERSE, 3000, deadline_ms=300).end()
        assert exchange.code == "deadline_exceeded"
        late = await client.begin(prompt_of(3500, 9), 5, deadline_ms=5).end()
        assert (late.status, late.code) == (504, "deadline_exceeded")
        await client.settled()
