"""Nodes that drain: running requests move with their KV pages, and a rolling restart loses nothing."""

import asyncio
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.service.client import Client, Exchange, prompt_of, until
from support.service.service import Service, running

#: So many that some are left when a node gets its signal, although this process may have no core for some time.
NUM_TOKENS = 3_500
#: Every transport that works on any machine; the prefill node of every pair writes, and so does a draining decode node.
TRANSPORTS = ("shm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tcp", "nixl", "gloo")))


async def expected_ids(client: Client, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[int, ...]]:
    """The tokens of undisturbed runs."""
    answers = await asyncio.gather(*(client.generate(prompt, num_tokens) for prompt in prompts))
    return [tuple(answer["output_ids"]) for answer in answers]


async def check_disturbed(client: Client, prompts: Sequence[Sequence[int]], streams: Sequence[Exchange]) -> None:
    """Assert that streams go on, and that their tokens so far are those of undisturbed runs."""
    await asyncio.gather(*(stream.goes_on() for stream in streams))
    wanted = await expected_ids(client, prompts, max(len(stream.ids) for stream in streams))
    assert [stream.ids for stream in streams] == [
        ids[: len(stream.ids)] for ids, stream in zip(wanted, streams, strict=True)
    ]


async def drain(client: Client, name: str, timeout_s: float = 30.0) -> dict[str, Any]:
    status, answer = await client.post(f"/v1/workers/{name}/drain", {"timeout_s": timeout_s})
    assert status == 200, answer
    return dict(answer)


async def until_ended(service: Service, name: str) -> int:
    """Wait until a process has ended by itself; return its exit status."""
    process = service.processes.pop(name)
    await until(lambda: process.poll() is not None, 180, f"{name} did not end")
    status = process.poll()
    assert status is not None
    return int(status)


async def busiest(client: Client) -> str:
    """The decode node with the most requests."""
    workers = (await client.workers()).values()
    return str(max((w for w in workers if w["role"] == "decode"), key=lambda w: w["num_requests"])["name"])


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_running_requests_move_with_their_pages_and_keep_their_tokens(tmp_path: Path, transport: str) -> None:
    options = {"transport": transport, "max_total_tokens": 16384}
    with running(tmp_path, decode=2, node_options=options) as service:
        async with service.client() as client:
            prompts = [prompt_of(300, seed) for seed in range(4)]
            before = await client.counters()
            streams = [client.begin(prompt, NUM_TOKENS) for prompt in prompts]
            await asyncio.gather(*(stream.has(5) for stream in streams))
            name = await busiest(client)
            other = "decode-1" if name == "decode-0" else "decode-0"
            service.processes[name].send_signal(signal.SIGTERM)
            assert await until_ended(service, name) == 0
            await asyncio.gather(*(stream.goes_on() for stream in streams))
            after = await client.settled()
            assert after[other]["continued_requests"] > before[other]["continued_requests"]
            sent = after["prefill-0"]["pages_sent"] - before["prefill-0"]["pages_sent"]
            assert after[other]["pages_received"] - before[other]["pages_received"] > sent / 2
            computed = after["prefill-0"]["prompt_tokens_computed"] - before["prefill-0"]["prompt_tokens_computed"]
            assert computed == sum(map(len, prompts)), "a prompt was computed again instead of travelling"
            await check_disturbed(client, prompts, streams)
            await client.settled()


async def test_a_rolling_restart_of_every_node_under_load_loses_no_request(tmp_path: Path) -> None:
    with running(tmp_path, prefill=2, decode=2) as service:
        async with service.client() as client:
            prompts = [prompt_of(40 + 30 * seed, seed) for seed in range(6)]
            wanted = await expected_ids(client, prompts, 60)
            ended: list[tuple[int, Exchange]] = []
            is_over = False

            async def ask_again(number: int) -> None:
                while not is_over:
                    stream = client.begin(prompts[number], 60)
                    await stream.end()
                    ended.append((number, stream))
                    client.forget(stream)

            clients = [asyncio.create_task(ask_again(number)) for number in range(len(prompts))]
            for name in service.nodes:
                num_before = len(ended)
                await drain(client, name)
                assert await until_ended(service, name) == 0
                service.start(name)
                await asyncio.to_thread(service.wait_until_ready)
                await until(lambda: len(ended) >= num_before + 3, 180, "no request ended")  # noqa: B023
            is_over = True
            await asyncio.gather(*clients)
            assert all(stream.ids == wanted[number] for number, stream in ended), [
                (number, stream.status, stream.error) for number, stream in ended if stream.ids != wanted[number]
            ]
            await client.settled()


@pytest.mark.slow
async def test_a_node_that_drains_says_so_and_gets_no_new_requests(tmp_path: Path) -> None:
    with running(tmp_path, decode=1) as service:
        async with service.client() as client:
            stream = client.begin(prompt_of(30, 1), 2_000)
            await stream.has(3)
            answer = await drain(client, "decode-0", 300)
            assert (answer["worker"], answer["is_draining"], answer["num_requests"]) == ("decode-0", True, 1)
            while not (worker := (await client.workers())["decode-0"])["is_draining"]:  # until the node has said so
                await asyncio.sleep(0.01)
            assert worker["num_requests"] == 1
            async with client.session.get("/ready") as ready:
                assert ready.status == 503
            await stream.end()
            assert len(stream.ids) == 2_000 and not stream.error, "the last decode node finishes what it has"
            assert await until_ended(service, "decode-0") == 0
            assert (await client.post("/v1/workers/nothing/drain", {}))[0] == 404
            assert (await client.post("/v1/workers/prefill-0/drain", {"timeout_s": -1}))[0] == 400


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
async def test_a_second_sigterm_or_sigint_stops_at_once_and_the_request_goes_on_at_the_next_node(
    tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    with running(tmp_path, decode=1) as service:
        async with service.client() as client:
            (wanted,) = await expected_ids(client, [prompt_of(30, 1)], 400)
            stream = client.begin(prompt_of(30, 1), 400)
            await stream.has(3)
            for number in signals:
                service.processes["decode-0"].send_signal(number)
                await asyncio.sleep(0.2)
            assert await until_ended(service, "decode-0") == 0
            service.start("decode-0")
            await stream.end()
            assert stream.ids == wanted


async def test_requests_that_outlast_the_drain_timeout_continue_elsewhere(tmp_path: Path) -> None:
    only = {"prefill-0": {"drain_timeout": 0.2}, "decode-0": {"drain_timeout": 0.2}}
    with running(tmp_path, decode=1, only=only) as service:
        async with service.client() as client:
            stream = client.begin(prompt_of(30, 1), NUM_TOKENS)
            await stream.has(3)
            service.processes["decode-0"].send_signal(signal.SIGTERM)
            assert await until_ended(service, "decode-0") == 0
            assert not stream.ended_at, "it was to outlast the drain"
            service.start("decode-0")
            await check_disturbed(client, [prompt_of(30, 1)], [stream])


@pytest.mark.parametrize("lost", ["source", pytest.param("target", marks=pytest.mark.slow)])
async def test_a_node_that_dies_during_moves_costs_no_request(tmp_path: Path, lost: str) -> None:
    with running(tmp_path, prefill=1, decode=3) as service:
        async with service.client() as client:
            prompts = [prompt_of(200, seed) for seed in range(6)]
            streams = [client.begin(prompt, 300) for prompt in prompts]
            await asyncio.gather(*(stream.has(5) for stream in streams))
            source = await busiest(client)
            await drain(client, source)
            victim = source if lost == "source" else next(n for n in service.nodes if n not in (source, "prefill-0"))
            service.kill(victim)
            await check_disturbed(client, prompts, streams)
            if lost == "target":
                assert await until_ended(service, source) == 0
            await client.settled()


@pytest.mark.slow
async def test_the_pause_of_a_moved_stream(tmp_path: Path) -> None:
    """Prints the longest gap between two tokens of each moved stream."""
    with running(tmp_path, decode=2) as service:
        async with service.client() as client:
            pauses: list[float] = []
            for turn in range(2):
                name, streams = "", [client.begin(prompt_of(400, 10 * turn + n), 150) for n in range(4)]
                await asyncio.gather(*(stream.has(5) for stream in streams))
                name = await busiest(client)
                await drain(client, name)
                assert await until_ended(service, name) == 0
                await asyncio.gather(*(stream.end() for stream in streams))
                for stream in streams:
                    assert len(stream.ids) == 150
                    gaps = [b - a for a, b in zip(stream.arrivals, stream.arrivals[1:], strict=False)]
                    pauses.append(max(gaps))
                service.start(name)
                await asyncio.to_thread(service.wait_until_ready)
            pauses.sort()
            print(f"\nlongest gap p50 {statistics.median(pauses):.3f} s, most {pauses[-1]:.3f} s")
