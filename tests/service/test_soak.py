"""Random load: prompts that share prefixes, small pools, disconnects and killed nodes.

Every complete response has exactly the tokens of the reference, so a page written late or read stale would show.
The slow tests run longer, and watch memory over 6,000 requests.
"""

import asyncio
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.engine.devices import DEVICES
from support.engine.reference_models import draw_prompts, generate, load_reference, make_model
from support.service.client import Client, prompt_of
from support.service.processes import resident_bytes
from support.service.service import SMALL_MODEL, Service, running

from scripts.chaos_harness.process_resources import num_descriptors

MAX_NEW = 24
Case = tuple[tuple[int, ...], tuple[int, ...]]
SMALL_NODES = {"page_size": 4, "chunked_prefill_size": 16, "max_running_requests": 8}
POOLS = {
    "prefill-0": {"max_total_tokens": 400},
    "prefill-1": {"max_total_tokens": 400},
    "decode-0": {"max_total_tokens": 320, "num_reserved_decode_tokens": 1},  # admits more than fits
    "decode-1": {"max_total_tokens": 320, "num_reserved_decode_tokens": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Case]]]:
    """A random model and prompts of which many share a prefix."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = make_model(tmp_path_factory.mktemp("soak") / "m", "qwen3", seed=4, vocab_size=1024)
    for path in SMALL_MODEL.glob("*token*"):
        shutil.copy(path, folder)
    reference = load_reference(folder)
    cases = draw_prompts(reference, [3, 30, 90, 150], MAX_NEW, seed=6)
    drawn = random.Random(2)
    while len(cases) < 20:
        base = drawn.choice(cases)[0]
        prompt = (*base[: drawn.randrange(1, len(base) + 1)], *drawn.sample(range(1000), drawn.randrange(0, 40)))[:160]
        if expected := generate(reference, prompt, MAX_NEW):
            cases.append((prompt, expected))
    yield folder, cases
    torch.set_num_threads(num_threads)


class RandomClients:
    """Clients that send random requests and disconnect from a quarter of them."""

    def __init__(self, client: Client, cases: list[Case], seed: int) -> None:
        self._client = client
        self._cases = cases
        self._random = random.Random(seed)
        self.num_complete = self.num_left = self.num_failed = 0

    async def work(self, num_clients: int, num_requests: int) -> None:
        await asyncio.gather(*(self._one(num_requests) for _ in range(num_clients)))

    async def _one(self, num_requests: int) -> None:
        for _ in range(num_requests):
            prompt, expected = self._random.choice(self._cases)
            exchange = self._client.begin(prompt, MAX_NEW, ignore_eos=False, cache_salt=self._random.choice("ab"))
            if self._random.random() < 0.25:
                await asyncio.sleep(self._random.expovariate(10))
                self.num_left += not exchange.ended_at
                await exchange.leave()
            await exchange.end() if exchange.work and not exchange.work.done() else None
            if exchange.error is not None:
                assert exchange.code in ("node_lost", "no_route", "transfer_failed", "shutting_down"), exchange.error
                self.num_failed += 1
                await asyncio.sleep(0.05)
            elif exchange.body and len(exchange.ids) == MAX_NEW:
                self.num_complete += 1
            assert exchange.ids == expected[: len(exchange.ids)], f"wrong tokens for a prompt of {len(prompt)}"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
async def test_tokens_stay_exact_under_disconnects_and_small_pools(
    model: tuple[Path, list[Case]], tmp_path: Path, device: str
) -> None:
    folder, cases = model
    options = {"node_options": {**SMALL_NODES, "device": device}, "only": POOLS}
    with running(tmp_path / "logs", folder, prefill=2, decode=2, **options) as service:
        async with service.client() as client:
            clients = RandomClients(client, cases, seed=1)
            await asyncio.wait_for(clients.work(num_clients=24, num_requests=10), 400)
            totals = await client.settled()
    assert clients.num_failed == 0
    assert clients.num_complete > 120
    assert clients.num_left > 10
    assert sum(totals[name]["retractions"] for name in ("decode-0", "decode-1")) > 0


#: Each sets one resource to its minimum.
EXTREMES = {
    "one slot": {"max_running_requests": 1},
    "one page": {"max_total_tokens": 192, "page_size": 192, "chunked_prefill_size": -1},
    "one request's pool": {"max_total_tokens": 184, "page_size": 4},
    "whole prompts": {"chunked_prefill_size": -1, "max_prefill_tokens": 1, "max_total_tokens": 400},
    "one prompt at a time": {"max_prefill_tokens": 1, "chunked_prefill_size": 16, "page_size": 1},
    "no cache": {"disable_radix_cache": True, "max_total_tokens": 250, "page_size": 2},
}


@pytest.mark.parametrize(
    "name", [name if name == "one request's pool" else pytest.param(name, marks=pytest.mark.slow) for name in EXTREMES]
)
async def test_requests_finish_exactly_at_the_minimum_of_each_resource(
    model: tuple[Path, list[Case]], tmp_path: Path, name: str
) -> None:
    folder, cases = model
    options = {**EXTREMES[name], "num_reserved_decode_tokens": 1}
    with running(tmp_path / "logs", folder, node_options=options) as service:
        async with service.client() as client:
            clients = RandomClients(client, cases, seed=3)
            await asyncio.wait_for(clients.work(num_clients=12, num_requests=6), 400)
            await client.settled()
    assert clients.num_failed == 0
    assert clients.num_complete > 40


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
async def test_tokens_stay_exact_while_nodes_are_killed(
    model: tuple[Path, list[Case]], tmp_path: Path, seed: int
) -> None:
    folder, cases = model
    options = {"node_options": SMALL_NODES, "only": POOLS}
    with running(tmp_path / "logs", folder, prefill=2, decode=2, **options) as service:
        async with service.client() as client:
            clients = RandomClients(client, cases, seed)
            work = asyncio.create_task(clients.work(num_clients=16, num_requests=100))
            drawn = random.Random(seed)
            while not work.done():
                victim = drawn.choice(service.nodes)
                if drawn.random() < 0.3:
                    service.pause(victim)
                    await asyncio.sleep(drawn.random())
                    service.resume(victim)
                else:
                    service.kill(victim)
                    await asyncio.sleep(drawn.random())
                    service.start(victim)
                    await asyncio.to_thread(service.wait_until_ready)
                await asyncio.sleep(drawn.random())
            await work
            await client.settled()
            assert clients.num_complete > 333


def figures(service: Service) -> dict[str, tuple[float, int]]:
    """Return the resident memory in MB and the number of open descriptors of every process."""
    return {
        name: (resident_bytes(process.pid) / 1e6, num_descriptors(process.pid))
        for name, process in service.processes.items()
    }


def growth_per_step(sizes: Sequence[float]) -> float:
    """What a leak adds from one size to the next, as it grows steadily.

    One jump moves the second figure and not the first, sizes that go up and down move the first and not the second.
    """
    steps = [later - earlier for earlier, later in pairwise(sizes)]
    whole = statistics.median(sizes[-3:]) - statistics.median(sizes[:3])
    return min(statistics.median(steps), whole / (len(sizes) - 3))


def test_a_leak_is_told_from_a_jump_and_from_waves() -> None:
    assert growth_per_step([290 + 2 * step for step in range(9)]) == 2
    assert growth_per_step([290, 290, 290, 290, 290, 350, 350, 350, 350]) == 0
    assert growth_per_step([293.1, 295.6, 297.3, 293.4, 297.6, 294.0, 296.5, 297.9, 295.3]) < 0.2


#: glibc gives the buffers of a thread heaps of this size. One more may be needed at any time; a leak grows steadily.
ALLOCATOR_HEAP_MB = 67


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_memory_and_descriptors_do_not_grow_over_6000_requests(tmp_path: Path) -> None:
    """6,000 requests; of twenty, two disconnect and one is aborted."""
    with running(tmp_path / "logs") as service:
        async with service.client() as client:
            numbers = iter(range(1_000_000))

            async def ask(until: int) -> None:
                while (number := next(numbers)) < until:
                    rid = f"soak-{number}"
                    exchange = client.begin(prompt_of(20 + number % 200, number % 700), 4 + number % 12, rid=rid)
                    if number % 10 == 0:
                        await asyncio.sleep(0.02)
                        await exchange.leave()
                    elif number % 20 == 5:
                        await asyncio.sleep(0.01)
                        status, _ = await client.post("/abort_request", {"rid": rid})
                        assert status == 200
                        await exchange.end()
                        assert exchange.error is None or exchange.code == "aborted", exchange.error
                    else:
                        await exchange.end()
                        assert exchange.error is None, exchange.error
                    client.forget(exchange)

            async def ask_until(number: int) -> float:
                began = time.monotonic()
                await asyncio.gather(*(ask(number) for _ in range(16)))
                await client.settled()
                return time.monotonic() - began

            rows = []
            for number in range(2_000, 6_001, 500):
                took_s = await ask_until(number)
                rows.append(figures(service))
                print(f"up to {number} requests, {took_s:.0f} s: {rows[-1]}")
            for name in service.processes:
                sizes, descriptors = zip(*(row[name] for row in rows), strict=True)
                growth = growth_per_step(sizes)
                assert growth < 1, f"{name} grows by {growth:.1f} MB in 500 requests: {sizes}"
                assert sizes[-1] - sizes[0] < ALLOCATOR_HEAP_MB, (
                    f"{name} grew from {sizes[0]:.0f} to {sizes[-1]:.0f} MB"
                )
                assert descriptors[-1] <= descriptors[0] + 4, (
                    f"{name} had {descriptors[0]} descriptors, now {descriptors[-1]}"
                )
