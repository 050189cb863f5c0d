"""Processes are killed, stopped and frozen under load: what was on them ends in a typed error at once, everything else
goes on, every page comes back, and a replacement is welcome.
"""

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest
from support.service import Service, running
from support.service_client import Client, Exchange, prompt_of

AT_ONCE_S = 8.0  # with every core busy; a heartbeat that is missed tells after 30
OPTIONS = {"chunked_prefill_size": 16, "max_running_requests": 4, "max_total_tokens": 16384}
LOST = {"node_lost", "shutting_down", "transfer_failed"}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two prefill and two decode nodes, each with few slots and small chunks, so that requests queue everywhere."""
    with running(tmp_path_factory.mktemp("pairs"), prefill=2, decode=2, node_options=OPTIONS) as service:
        yield service


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("pair"), node_options=OPTIONS) as service:
        yield service


def whole(service: Service) -> Service:
    """With whatever an earlier test left dead started again."""
    if missing := [name for name in ("gateway", *service.nodes) if name not in service.processes]:
        service.start(*missing)
        service.wait_until_ready()
    return service


@pytest.fixture
def pairs(four: Service) -> Service:
    return whole(four)


@pytest.fixture
def pair(two: Service) -> Service:
    return whole(two)


def begin_load(client: Client, seed: int) -> tuple[list[Exchange], list[Exchange], list[Exchange]]:
    """Requests that stream, that wait for a slot, and that are long to compute; more than all nodes have slots for."""
    streaming = [client.begin(prompt_of(30, seed + i), 250) for i in range(4)]
    waiting = [client.begin(prompt_of(30, seed + 100 + i), 60) for i in range(12)]
    computing = [client.begin(prompt_of(2500, seed + 200 + i), 5) for i in range(4)]
    return streaming, waiting, computing


async def judge(exchanges: list[Exchange], died_at: float, client: Client) -> tuple[int, int]:
    """Every request ended well and whole, or in a typed error at once. How many did which."""
    await asyncio.gather(*(exchange.end() for exchange in exchanges))
    failed = [exchange for exchange in exchanges if exchange.error is not None]
    for exchange in failed:
        assert exchange.code == "node_lost", exchange.error
        assert exchange.ended_at - died_at < AT_ONCE_S, f"told only after {exchange.ended_at - died_at:.1f} s"
        assert exchange.status in (200, 502, 503)
    for exchange in exchanges:
        assert not exchange.is_broken
        if exchange.error is None:
            assert exchange.body["meta_info"]["finish_reason"]["type"] == "length"
    return len(exchanges) - len(failed), len(failed)


async def replace(service: Service, client: Client, name: str) -> None:
    """A new start of a node under its old name is accepted, and takes part."""
    starts = (await client.workers()).get(name, {}).get("starts")
    assert starts is None, "the dead one is still in the table"
    service.start(name)
    await asyncio.to_thread(service.wait_until_ready)
    assert (await client.workers())[name]["starts"] > 1
    await asyncio.gather(*(client.generate(prompt_of(40, 7000 + i), 4) for i in range(4)))
    assert (await client.settled())[name]["requests"] > 0


@pytest.mark.parametrize(("victim", "seed"), [("prefill-1", 0), ("decode-0", 500)])
async def test_a_killed_node_fails_only_its_own_requests(pairs: Service, victim: str, seed: int) -> None:
    async with pairs.client() as client:
        streaming, waiting, computing = begin_load(client, seed)
        for exchange in streaming:
            await exchange.has(3)
        died_at = pairs.kill(victim)
        num_well, num_failed = await judge([*streaming, *waiting, *computing], died_at, client)
        assert num_well and num_failed, (num_well, num_failed)
        assert (await client.generate(prompt_of(50, 1), 4))["meta_info"]["completion_tokens"] == 4
        await client.settled()
        await replace(pairs, client, victim)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-1"])
async def test_killing_an_idle_node_fails_no_later_request(pairs: Service, victim: str) -> None:
    async with pairs.client() as client:
        await asyncio.gather(*(client.generate(prompt_of(40, 50 + i), 4) for i in range(4)))
        pairs.kill(victim)
        answers = await asyncio.gather(
            *(client.generate(prompt_of(40, i), 4) for i in range(4)), return_exceptions=True
        )
        # One of them may have been sent out before the gateway saw the connection close.
        assert all("node_lost" in str(answer) for answer in answers if isinstance(answer, BaseException)), answers
        await asyncio.gather(*(client.generate(prompt_of(40, 70 + i), 4) for i in range(4)))
        await client.settled()
        await replace(pairs, client, victim)


async def test_a_killed_gateway_ends_all_requests_and_nodes_register_with_its_replacement(pairs: Service) -> None:
    async with pairs.client() as client:
        exchanges = begin_load(client, seed=4000)
        for exchange in exchanges[0]:
            await exchange.has(3)
        died_at = pairs.kill("gateway")
        everything = [exchange for group in exchanges for exchange in group]
        await asyncio.gather(*(exchange.end() for exchange in everything))
        for exchange in everything:
            if exchange.ended_at > died_at:
                assert exchange.is_broken
                assert exchange.ended_at - died_at < AT_ONCE_S
    pids = {name: pairs.pid(name) for name in pairs.nodes}
    pairs.start("gateway")
    await asyncio.to_thread(pairs.wait_until_ready, 30)
    async with pairs.client() as client:
        await client.settled()
        await asyncio.gather(*(client.generate(prompt_of(40, 90 + i), 4) for i in range(4)))
        totals = await client.settled()
    assert {name: pairs.pid(name) for name in pairs.nodes} == pids
    assert all(counters["requests"] > 4 for counters in totals.values()), "the nodes are the same starts"


async def test_requests_without_a_route_get_503_until_a_replacement_registers(pair: Service) -> None:
    async with pair.client() as client:
        await client.generate(prompt_of(30, 1), 4)
        exchange = client.begin(prompt_of(30, 2), 2000)
        await exchange.has(5)
        died_at = pair.kill("decode-0")
        await exchange.end()
        assert exchange.code == "node_lost"
        assert exchange.ended_at - died_at < AT_ONCE_S
        refused = await client.begin(prompt_of(30, 3), 4).end()
        assert (refused.status, refused.code) == (503, "no_route")
        assert refused.ended_at - refused.began_at < AT_ONCE_S
        async with client.session.get("/ready") as answer:
            assert answer.status == 503
        async with client.session.get("/health") as answer:
            assert answer.status == 200
        await client.settled()
        await replace(pair, client, "decode-0")


async def test_a_node_that_is_stopped_ends_its_requests_with_a_typed_error(pair: Service) -> None:
    async with pair.client() as client:
        for name in ("prefill-0", "decode-0"):
            streaming = client.begin(prompt_of(30, 2), 800)
            await streaming.has(5)
            computing = client.begin(prompt_of(3000, 3), 20)
            await asyncio.sleep(0.1)
            assert not streaming.ended_at
            stopped_at = time.monotonic()
            status, took_s = await asyncio.to_thread(pair.stop, name)
            assert status == 0
            assert took_s < AT_ONCE_S
            await asyncio.gather(streaming.end(), computing.end())
            assert computing.code in LOST
            assert computing.ended_at - stopped_at < AT_ONCE_S
            if name == "decode-0":
                assert streaming.code in LOST
            else:
                assert streaming.error is None, "its prompt had been handed over"
            await client.settled()
            await replace(pair, client, name)


@pytest.mark.parametrize("ending", ["wakes", "dies"])
async def test_pages_stay_quarantined_until_a_frozen_prefill_node_resumes_or_dies(pair: Service, ending: str) -> None:
    async with pair.client() as client:

        async def aside() -> int:
            count: int = (await client.workers())["decode-0"]["heartbeat"]["num_quarantined_pages"]
            return count

        before = await client.settled()
        exchange = client.begin(prompt_of(3500, 11), 5)
        sent = before["prefill-0"]["pages_sent"]
        while (await client.counters())["prefill-0"]["pages_sent"] <= sent:  # the transfer is under way
            assert not exchange.ended_at
        pair.pause("prefill-0")
        try:
            await exchange.leave()
            while await aside() != -(-3500 // 16):
                await asyncio.sleep(0.02)
            await asyncio.sleep(1.0)
            assert await aside() == -(-3500 // 16), "pages were given back while they might be written"
        finally:
            if ending == "wakes":
                pair.resume("prefill-0")
            else:
                pair.kill("prefill-0")
        await client.settled()
        if ending == "dies":
            await replace(pair, client, "prefill-0")
        await client.generate(prompt_of(40, 12), 4)


async def test_a_node_without_heartbeats_is_lost_until_the_next_heartbeat(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    impatient = {"heartbeat_timeout": 2.0}
    with running(tmp_path_factory.mktemp("silent"), node_options=OPTIONS, gateway_options=impatient) as service:
        async with service.client() as client:
            exchange = client.begin(prompt_of(30, 1), 3000)
            await exchange.has(5)
            paused_at = time.monotonic()
            service.pause("decode-0")
            await exchange.end()
            assert exchange.code == "node_lost"
            assert exchange.ended_at - paused_at < 2.0 + AT_ONCE_S
            service.resume("decode-0")
            ends = time.monotonic() + 20
            while "decode-0" not in await client.workers():
                assert time.monotonic() < ends, "it did not come back"
                await asyncio.sleep(0.02)
            await client.settled()
            await client.generate(prompt_of(30, 2), 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_twenty_kills_at_random_moments_leak_nothing(pairs: Service) -> None:
    async with pairs.client() as client:
        for number in range(20):
            victim = pairs.nodes[number % 4]
            exchanges = [exchange for group in begin_load(client, seed=10_000 + 1000 * number) for exchange in group]
            await asyncio.sleep(0.05 * (number % 11))
            died_at = pairs.kill(victim)
            await judge(exchanges, died_at, client)
            await client.settled()
            await replace(pairs, client, victim)


async def test_a_second_signal_during_shutdown_is_harmless(pair: Service) -> None:
    async with pair.client() as client:
        await client.settled()
    process = pair.processes["decode-0"]
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(pair.stop, "decode-0", signal.SIGINT) is not None
    assert process.returncode == 0
    async with pair.client() as client:
        while "decode-0" in await client.workers():
            await asyncio.sleep(0.02)
        await replace(pair, client, "decode-0")
