"""Processes are killed, stopped and frozen under load.

Requests of lost nodes continue on others or on the replacement, every page is released, and a replacement registers.
``test_recovery.py`` compares what they answer.
"""

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest
from support.service.client import Client, Exchange, prompt_of
from support.service.service import Service, running

OPTIONS = {"chunked_prefill_size": 16, "max_running_requests": 4, "max_total_tokens": 16384}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two prefill and two decode nodes, each with few slots and small chunks, so that requests queue everywhere."""
    with running(tmp_path_factory.mktemp("pairs"), prefill=2, decode=2, node_options=OPTIONS) as service:
        yield service


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("pair"), node_options=OPTIONS) as service:
        yield service


def restart_missing(service: Service) -> Service:
    """Start the processes again that an earlier test left dead."""
    if missing := [name for name in ("gateway", *service.nodes) if name not in service.processes]:
        service.start(*missing)
        service.wait_until_ready()
    return service


@pytest.fixture
def pairs(four: Service) -> Service:
    return restart_missing(four)


@pytest.fixture
def pair(two: Service) -> Service:
    return restart_missing(two)


def begin_load(
    client: Client, seed: int, *, num_streamed: int = 250
) -> tuple[list[Exchange], list[Exchange], list[Exchange]]:
    """Begin requests that stream, that wait for a slot, and that have long prompts; more than there are slots."""
    streaming = [client.begin(prompt_of(30, seed + i), num_streamed) for i in range(4)]
    waiting = [client.begin(prompt_of(30, seed + 100 + i), 60) for i in range(12)]
    computing = [client.begin(prompt_of(2500, seed + 200 + i), 5) for i in range(4)]
    return streaming, waiting, computing


async def check_ends(exchanges: list[Exchange]) -> None:
    """Assert that every request is complete."""
    await asyncio.gather(*(exchange.end() for exchange in exchanges))
    for exchange in exchanges:
        assert (exchange.status, exchange.error, exchange.is_broken) == (200, None, False)
        assert exchange.body["meta_info"]["finish_reason"]["type"] == "length"
        assert len(exchange.ids) == exchange.body["meta_info"]["completion_tokens"]


async def start_again(service: Service, client: Client, name: str) -> None:
    async with asyncio.timeout(120):  # the gateway may be late to see that the node is gone
        while name in await client.workers():
            await asyncio.sleep(0.02)
    service.start(name)
    await asyncio.to_thread(service.wait_until_ready)
    assert (await client.workers())[name]["starts"] > 1


async def replace(service: Service, client: Client, name: str) -> None:
    """Start a node again under its old name and assert that it serves requests."""
    await start_again(service, client, name)
    await asyncio.gather(*(client.generate(prompt_of(40, 7000 + i), 4) for i in range(4)))
    assert (await client.settled())[name]["requests"] > 0


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize(("victim", "seed"), [("prefill-1", 0), ("decode-0", 500)])
async def test_a_killed_node_fails_no_request(pairs: Service, victim: str, seed: int) -> None:
    async with pairs.client() as client:
        streaming, waiting, computing = begin_load(client, seed)
        for exchange in streaming:
            await exchange.has(3)
        pairs.kill(victim)
        await check_ends([*streaming, *waiting, *computing])
        assert (await client.generate(prompt_of(50, 1), 4))["meta_info"]["completion_tokens"] == 4
        await client.settled()
        await replace(pairs, client, victim)


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-1"])
async def test_killing_an_idle_node_fails_no_later_request(pairs: Service, victim: str) -> None:
    async with pairs.client() as client:
        await asyncio.gather(*(client.generate(prompt_of(40, 50 + i), 4) for i in range(4)))
        pairs.kill(victim)
        await asyncio.gather(*(client.generate(prompt_of(40, i), 4) for i in range(4)))
        await asyncio.gather(*(client.generate(prompt_of(40, 70 + i), 4) for i in range(4)))
        await client.settled()
        await replace(pairs, client, victim)


async def test_a_killed_gateway_ends_all_requests_and_nodes_register_with_its_replacement(pairs: Service) -> None:
    async with pairs.client() as client:
        exchanges = begin_load(client, seed=4000, num_streamed=3_000)
        for exchange in exchanges[0]:
            await exchange.has(3)
        died_at = pairs.kill("gateway")
        everything = [exchange for group in exchanges for exchange in group]
        await asyncio.gather(*(exchange.end() for exchange in everything))
        for exchange in everything:
            assert exchange.error is None
            if not exchange.is_broken:  # its end was sent before the gateway died, and maybe read later
                assert len(exchange.ids) == exchange.body["meta_info"]["completion_tokens"]
        assert any(exchange.is_broken and exchange.ended_at > died_at for exchange in everything)
    pids = {name: pairs.pid(name) for name in pairs.nodes}
    pairs.start("gateway")
    await asyncio.to_thread(pairs.wait_until_ready)
    async with pairs.client() as client:
        await client.settled()
        await asyncio.gather(*(client.generate(prompt_of(40, 90 + i), 4) for i in range(4)))
        totals = await client.settled()
    assert {name: pairs.pid(name) for name in pairs.nodes} == pids
    assert all(counters["requests"] > 4 for counters in totals.values()), "a node was started again"


async def test_new_requests_and_those_in_flight_wait_for_a_replacement(pair: Service) -> None:
    async with pair.client() as client:
        await client.generate(prompt_of(30, 1), 4)
        exchange = client.begin(prompt_of(30, 2), 1000)
        await exchange.has(5)
        pair.kill("decode-0")
        while "decode-0" in await client.workers():
            await asyncio.sleep(0.02)
        new = client.begin(prompt_of(30, 3), 4)
        async with client.session.get("/ready") as answer:
            assert answer.status == 503
        async with client.session.get("/health") as answer:
            assert answer.status == 200
        await start_again(pair, client, "decode-0")
        await exchange.goes_on()
        await check_ends([new])
        await client.settled()


async def test_the_requests_of_a_node_that_is_stopped_go_on_with_its_replacement(pair: Service) -> None:
    async with pair.client() as client:
        for name in ("prefill-0", "decode-0"):
            streaming = client.begin(prompt_of(30, 2), 2_000)  # goes on, although this process may have no core
            await streaming.has(5)
            computing = client.begin(prompt_of(3000, 3), 20)
            await asyncio.sleep(0.1)
            assert not streaming.ended_at
            assert await asyncio.to_thread(pair.stop, name, signal.SIGINT) == 0  # it does not drain
            await start_again(pair, client, name)
            await streaming.goes_on()
            await check_ends([computing])
            await client.settled()


@pytest.mark.parametrize("ending", ["wakes", "dies"])
async def test_pages_stay_quarantined_until_a_frozen_prefill_node_resumes_or_dies(pair: Service, ending: str) -> None:
    async with pair.client() as client:

        async def num_quarantined() -> int:
            count: int = (await client.workers())["decode-0"]["heartbeat"]["num_quarantined_pages"]
            return count

        before = await client.settled()
        # Several, so that pages are left to send when this process sees that the first were sent.
        exchanges = [client.begin(prompt_of(3500, 1100 + i), 5) for i in range(4)]
        sent = before["prefill-0"]["pages_sent"]
        while (await client.counters())["prefill-0"]["pages_sent"] <= sent:  # the transfer has begun
            assert not exchanges[-1].ended_at
        pair.pause("prefill-0")
        try:
            await asyncio.gather(*(exchange.leave() for exchange in exchanges))
            while not (num_open := await num_quarantined()):  # those that arrived are cached
                await asyncio.sleep(0.02)
            await asyncio.sleep(1.0)
            assert await num_quarantined() >= num_open, "pages were released before the prefill node resumed"
        finally:
            if ending == "wakes":
                pair.resume("prefill-0")
            else:
                pair.kill("prefill-0")
        await client.settled()
        if ending == "dies":
            await replace(pair, client, "prefill-0")
        await client.generate(prompt_of(40, 12), 4)


async def test_a_node_without_heartbeats_is_lost_until_the_next_heartbeat_and_continues_its_request(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    options = {"node_timeout": 5.0}
    with running(tmp_path_factory.mktemp("silent"), node_options=OPTIONS, gateway_options=options) as service:
        async with service.client() as client:
            exchange = client.begin(prompt_of(30, 1), 600)
            await exchange.has(5)
            service.pause("decode-0")
            while "decode-0" in await client.workers():
                await asyncio.sleep(0.02)
            service.resume("decode-0")
            ends = time.monotonic() + 60
            while "decode-0" not in await client.workers():
                assert time.monotonic() < ends, "the node did not register again"
                await asyncio.sleep(0.02)
            await exchange.goes_on()
            await client.settled()
            await client.generate(prompt_of(30, 2), 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_kills_at_different_moments_leak_nothing(pairs: Service) -> None:
    async with pairs.client() as client:
        for number in range(8):  # each node twice
            victim = pairs.nodes[number % 4]
            exchanges = [exchange for group in begin_load(client, seed=10_000 + 1000 * number) for exchange in group]
            await asyncio.sleep(0.07 * number)
            pairs.kill(victim)
            await check_ends(exchanges)
            await client.settled()
            await replace(pairs, client, victim)


async def test_a_second_signal_during_shutdown_is_harmless(pair: Service) -> None:
    async with pair.client() as client:
        await client.settled()
    process = pair.processes["decode-0"]
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(pair.stop, "decode-0", signal.SIGINT) == 0
    async with pair.client() as client:
        while "decode-0" in await client.workers():
            await asyncio.sleep(0.02)
        await replace(pair, client, "decode-0")
