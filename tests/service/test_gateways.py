"""Clients that ask again, and gateways that die: each request runs once, and its tokens are the same."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from support.service.client import Client, prompt_of, until
from support.service.service import Service, running

KEY = {"Idempotency-Key": "the-key"}
#: Longer than it takes on a busy machine until a retry comes.
ORPHAN_TIMEOUT_S = 300
PROMPT = prompt_of(40, seed=1)
NUM_TOKENS = 300
BODY: dict[str, Any] = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0},
    "stream": True,
}


@pytest.fixture
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    options = {"orphan_timeout": getattr(request, "param", ORPHAN_TIMEOUT_S)}
    at_once = {"drain_timeout": 0}
    with running(tmp_path / "logs", gateways=2, decode=2, node_options=options, gateway_options=at_once) as service:
        yield service


class Stream:
    """A streamed ``/generate`` with a key, read token by token."""

    def __init__(self, client: Client, body: dict[str, Any], headers: dict[str, str]) -> None:
        self.ids: list[int] = []
        self.is_whole = False
        self.error = ""
        self.work = asyncio.create_task(self._follow(client, body, headers))

    async def _follow(self, client: Client, body: dict[str, Any], headers: dict[str, str]) -> None:
        try:
            async with client.session.post("/generate", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        self.error = event.get("error", {}).get("code", "")
                        self.ids = event.get("output_ids", self.ids)
                    self.is_whole |= line.startswith(b"data: [DONE]")
        except aiohttp.ClientError:
            pass

    async def has(self, num_tokens: int) -> None:
        await until(lambda: len(self.ids) >= num_tokens or self.work.done(), 180.0, "no tokens arrived")
        assert len(self.ids) >= num_tokens

    async def whole(self) -> list[int]:
        await asyncio.wait_for(self.work, 300.0)
        assert self.is_whole and not self.error
        return self.ids

    async def leave(self) -> None:
        self.work.cancel()
        await asyncio.gather(self.work, return_exceptions=True)


async def output_tokens(client: Client) -> float:
    """Output tokens that all nodes have sampled."""
    return sum(counters["output_tokens"] for counters in (await client.counters()).values())


@pytest.mark.slow
async def test_a_retry_at_another_gateway_continues_what_a_killed_gateway_had(service: Service) -> None:
    async with service.client("gateway-1") as survivor:
        async with service.client() as client:
            first = Stream(client, BODY, KEY)
            await first.has(20)
            service.kill("gateway")
            await first.work
        begun = list(first.ids)
        again = await Stream(survivor, BODY, KEY).whole()
        assert again[: len(begun)] == begun
        assert len(again) == NUM_TOKENS
        await survivor.settled()
        assert await output_tokens(survivor) <= NUM_TOKENS + 2, "no token is sampled twice"
        service.start("gateway")
        service.wait_until_ready()


async def test_a_request_that_ended_after_its_gateway_was_killed_is_there_for_the_retry(service: Service) -> None:
    body = {**BODY, "sampling_params": {**BODY["sampling_params"], "max_new_tokens": 60}}
    async with service.client("gateway-1") as survivor:
        async with service.client() as client:
            first = Stream(client, body, KEY)
            await first.has(2)
            service.kill("gateway")
            await first.work
        await survivor.settled()  # the orphan has run to its end
        before = await output_tokens(survivor)
        again = await Stream(survivor, body, KEY).whole()
        assert (len(again), again[: len(first.ids)]) == (60, first.ids)
        assert await output_tokens(survivor) == before


@pytest.mark.slow
@pytest.mark.parametrize("service", [8], indirect=True)
async def test_orphans_end_and_other_requests_go_on(service: Service) -> None:
    async with service.client("gateway-1") as survivor:
        async with service.client() as client:
            long = {**BODY, "sampling_params": {**BODY["sampling_params"], "max_new_tokens": 4000}}
            streams = [Stream(client, long, {"Idempotency-Key": str(i)} if i % 2 else {}) for i in range(4)]
            other = Stream(survivor, BODY, KEY)
            for stream in (*streams, other):
                await stream.has(1)
            service.kill("gateway")
            await asyncio.gather(*(stream.work for stream in streams))
        assert len(await other.whole()) == NUM_TOKENS
        await survivor.settled(timeout_s=60.0)
        service.start("gateway")
        service.wait_until_ready()


@pytest.mark.parametrize("end", [Service.kill, Service.stop])
async def test_a_restarted_gateway_continues_the_requests_of_the_one_before(
    service: Service, end: Callable[[Service, str], Any]
) -> None:
    async with service.client() as client:
        first = Stream(client, BODY, KEY)
        await first.has(20)
        end(service, "gateway")
        await first.work
    service.start("gateway")
    service.wait_until_ready()
    async with service.client() as client:
        again = await Stream(client, BODY, KEY).whole()
        assert (len(again), again[: len(first.ids)]) == (NUM_TOKENS, first.ids)
        await client.settled()
        assert await output_tokens(client) <= NUM_TOKENS + 2, "no token is sampled twice"


async def test_a_retry_at_another_gateway_takes_the_request_from_one_that_lives(service: Service) -> None:
    num_tokens = 1_000  # enough for the retry to arrive while the first request is running, on a busy machine too
    body = {**BODY, "sampling_params": {**BODY["sampling_params"], "max_new_tokens": num_tokens}}
    async with service.client() as client, service.client("gateway-1") as other:
        first = Stream(client, body, KEY)
        await first.has(20)
        again = await Stream(other, body, KEY).whole()
        await asyncio.wait_for(first.work, 300.0)
        assert first.error == "taken_over"
        assert (len(again), again[: len(first.ids)]) == (num_tokens, first.ids)
        await client.settled()
        assert await output_tokens(client) <= num_tokens + 2


async def test_a_connection_that_breaks_costs_nothing_with_the_openai_client(service: Service) -> None:
    """The client retries by itself, through a proxy that cuts the first connection in the middle of the answer."""
    async with proxy(service.url, num_cut=1) as url, service.client() as observer:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=3, timeout=100)
        completion = await client.completions.create(
            model="m", prompt=PROMPT, max_tokens=50, temperature=1.0, extra_headers=KEY
        )
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 50
        await observer.settled()
        assert await output_tokens(observer) <= 51
        await client.close()


async def test_two_gateways_under_load_never_send_a_node_more_than_it_has_room_for(tmp_path: Path) -> None:
    room, most = 4, 0
    options: dict[str, Any] = {"gateway_options": {"max_dispatch_ahead": 0}}
    with running(
        tmp_path / "logs", gateways=2, decode=2, node_options={"max_running_requests": room}, **options
    ) as service:
        async with service.client() as client, service.client("gateway-1") as other:
            work = [
                asyncio.create_task(one.generate(prompt_of(8, seed), max_new=24))
                for seed in range(24)
                for one in (client, other)
            ]
            while not all(task.done() for task in work):
                for name, row in (await client.fresh()).items():
                    if name.startswith("decode"):
                        most = max(most, row["heartbeat"]["num_running"] + row["heartbeat"]["num_waiting"])
            for answer in await asyncio.gather(*work):
                assert len(answer["output_ids"]) == 24
            assert most <= room
            counters = await client.settled()
            assert all(counters[f"decode-{i}"]["requests"] > 0 for i in range(2))


async def test_a_gateway_sends_where_the_other_has_not(service: Service) -> None:
    long = {**BODY, "sampling_params": {**BODY["sampling_params"], "max_new_tokens": 4000}}
    async with service.client() as client, service.client("gateway-1") as other:
        first = Stream(client, long, {})
        await first.has(1)
        busy = [name for name, row in (await client.workers()).items() if row["num_requests"]]
        (decode,) = [name for name in busy if name.startswith("decode")]

        async def knows_the_load() -> bool:
            """A gateway without a share of a node prefers others, whatever their load."""
            workers = await other.workers()
            has_shares = all(row["heartbeat"]["share"] for row in workers.values())
            return has_shares and bool(workers[decode]["load_tokens"] >= 4000)

        async with asyncio.timeout(60):
            while not await knows_the_load():
                await asyncio.sleep(0.02)
        for seed in range(4):
            await other.generate(prompt_of(8, seed=seed))
        async with other.session.get("/v1/requests") as answer:
            chosen = {row["decode"] for row in (await answer.json())["requests"]}
        assert chosen == {"decode-0", "decode-1"} - {decode}
        await first.leave()
        await other.settled()
        async with asyncio.timeout(60):
            while (await other.workers())[decode]["load_tokens"]:
                await asyncio.sleep(0.02)


async def test_each_gateway_advises_nodes_for_the_load_of_both(service: Service) -> None:
    async def load(one: Client) -> dict[str, float]:
        async with one.session.get("/v1/advice") as answer:
            found: dict[str, float] = (await answer.json())["models"][0]["load"]
        return found

    async with service.client() as client, service.client("gateway-1") as other, asyncio.timeout(60):
        while not (await load(other))["output_tokens_per_s"]:  # all that it knows comes from the nodes
            await client.generate(prompt_of(8, seed=1), max_new=4)
        while not (await load(client))["requests_per_s"]:
            await asyncio.sleep(0.02)
        found = await load(other)
        # Rounded to a tenth, which is much of the rate of a slow machine.
        assert found["output_tokens_per_s"] == pytest.approx(4 * found["requests_per_s"], rel=0.05, abs=0.06)


@contextlib.asynccontextmanager
async def proxy(url: str, num_cut: int) -> AsyncIterator[str]:
    """A TCP proxy that passes on the request of each of the first connections and then closes them."""
    host, port = url.removeprefix("http://").split(":")
    cuts = iter([True] * num_cut)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(host, int(port))
        if next(cuts, False):
            ours.write(await reader.read(1 << 16))
            await ours.drain()
            await asyncio.sleep(0.1)  # the request has begun, or will: both must hold
            ours.close()
            writer.transport.abort()
            return
        await asyncio.gather(pump(reader, ours), pump(theirs, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
