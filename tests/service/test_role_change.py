"""Nodes change their roles under load: no request fails, no token differs, and model and cache stay."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.service.client import Client, prompt_of
from support.service.service import Service, running

OPTIONS = {"chunked_prefill_size": 64, "max_total_tokens": 16384}
PROMPTS = [prompt_of(20 + 37 * i, 900 + i) for i in range(8)]
SEEDED = {"temperature": 0.8, "sampling_seed": 7}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("roles"), prefill=2, decode=2, node_options=OPTIONS) as service:
        yield service


async def change(client: Client, name: str, role: str, **options: Any) -> tuple[int, Any]:
    return await client.post(f"/v1/workers/{name}/role", {"role": role, **options})


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts with their options, greedy and seeded in turn."""
    return [(prompt, SEEDED if i % 2 else {}) for i, prompt in enumerate(PROMPTS)]


class Load:
    """Clients that repeat requests whose outputs are known.

    Attributes:
        num_equal: answers that were as expected; ``wrong``: all other answers.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.num_equal = 0
        self.wrong: list[Any] = []
        self.is_over = False

    async def reference(self) -> list[list[int]]:
        return [(await self._client.generate(prompt, 24, **options))["output_ids"] for prompt, options in requests()]

    async def run(self, expected: list[list[int]], first: int) -> None:
        for i in itertools.islice(itertools.cycle(range(len(PROMPTS))), first, None):
            if self.is_over:
                return
            prompt, options = requests()[i]
            try:
                output = (await self._client.generate(prompt, 24, **options))["output_ids"]
            except AssertionError as error:
                self.wrong.append(error)
                continue
            if output == expected[i]:
                self.num_equal += 1
            else:
                self.wrong.append((i, output, expected[i]))

    async def goes_on(self, count: int) -> None:
        """Wait until so many more answers were as expected."""
        until = self.num_equal + count
        while self.num_equal < until:
            assert not self.wrong, self.wrong
            await asyncio.sleep(0.02)


@asynccontextmanager
async def under_load(client: Client) -> AsyncIterator[Load]:
    load = Load(client)
    expected = await load.reference()
    tasks = [asyncio.create_task(load.run(expected, first)) for first in range(6)]
    try:
        yield load
    finally:
        load.is_over = True
        await asyncio.gather(*tasks)
    assert not load.wrong, load.wrong


@pytest.mark.slow
async def test_nodes_change_their_roles_and_back_under_load(pairs: Service) -> None:
    pids = {name: pairs.pid(name) for name in pairs.nodes}
    async with pairs.client() as client:
        async with under_load(client) as load:
            for number, (name, role) in enumerate(
                [("decode-1", "prefill"), ("decode-1", "decode"), ("prefill-0", "decode"), ("prefill-0", "prefill")]
            ):
                await load.goes_on(6)
                status, answer = await change(client, name, role, timeout_s=120)
                assert status == 200, answer
                assert (answer["name"], answer["role"]) == (name, role)
                assert answer["num_role_changes"] == number % 2 + 1
                print(f"{name} is a {role} node after {answer['seconds']} s")
                await load.goes_on(12)
                workers = await client.workers()
                assert workers[name]["role"] == role
                assert {worker["register"]["pid"] for worker in workers.values()} == set(pids.values())
                assert {worker["starts"] for worker in workers.values()} == {1}
        await client.settled()
        await asyncio.gather(*(client.generate(prompt_of(40, 70 + i), 4) for i in range(8)))
        heartbeats = await client.heartbeats()
        assert all(beat["counters"]["failed_checks"] == 0 for beat in heartbeats.values())


async def test_a_node_in_its_new_role_has_the_cache_of_the_last_one(tmp_path: Path) -> None:
    with running(tmp_path / "logs", prefill=1, decode=1, node_options=OPTIONS) as service:
        async with service.client() as client:
            prompt = prompt_of(400, 31)
            first = await client.generate(prompt, 24)
            assert first["meta_info"]["cached_tokens"] == 0
            await client.settled()
            status, answer = await change(client, "decode-0", "prefill", force=True)
            assert status == 200, answer
            status, answer = await change(client, "prefill-0", "decode")
            assert status == 200, answer
            workers = await client.workers()
            assert {name: worker["role"] for name, worker in workers.items()} == {
                "decode-0": "prefill", "prefill-0": "decode",
            }  # fmt: skip
            again = await client.generate(prompt, 24)
            assert again["output_ids"] == first["output_ids"]
            assert again["meta_info"]["cached_tokens"] >= 384, "decode-0 has received and kept the prompt"
            beats = await client.heartbeats()
            assert beats["prefill-0"]["counters"]["pages_cached"] > 0, "prefill-0 has kept what it computed"
            assert beats["prefill-0"]["gauges"]["evictable_pages"] > 0


async def test_the_last_node_of_a_role_keeps_it_unless_it_is_forced(tmp_path: Path) -> None:
    only = {"prefill-0": {"record": str(tmp_path / "recording")}}
    with running(tmp_path / "logs", prefill=2, decode=1, node_options=OPTIONS, only=only) as service:
        async with service.client() as client:
            status, answer = await change(client, "decode-0", "prefill")
            assert status == 400 and "node decode-0 is the last decode node" in answer["error"]["message"]
            status, answer = await change(client, "prefill-0", "decode")
            assert status == 400 and "--record" in answer["error"]["message"]
            status, answer = await change(client, "prefill-1", "prefill")
            assert status == 400 and "is a prefill node already" in answer["error"]["message"]
            assert (await change(client, "prefill-7", "decode"))[0] == 404
            await client.generate(PROMPTS[0], 4)


async def test_requests_that_outlive_the_timeout_go_on_elsewhere(pairs: Service) -> None:
    async with pairs.client() as client:
        exchanges = [client.begin(prompt_of(30, 500 + i), 400) for i in range(4)]
        for exchange in exchanges:
            await exchange.has(1)
        status, answer = await change(client, "decode-1", "prefill", timeout_s=0)
        assert status == 200, answer
        for exchange in exchanges:
            await exchange.end()
        assert [(exchange.code, len(exchange.ids)) for exchange in exchanges] == [("", 400)] * 4
        assert (await change(client, "decode-1", "decode"))[0] == 200
        await client.settled()
