"""A prompt for which a decode node has no room yet, in a service of real processes: it arrives while it waits."""

import asyncio
from pathlib import Path

import pytest
from support.service import running
from support.service_client import Client, prompt_of


async def received(client: Client) -> tuple[float, float]:
    """Transfers that began with part of their pages, and pages that came, both so far."""
    counters = (await client.counters())["decode-0"]
    return counters["partial_grants"], counters["pages_received"]


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
async def test_a_prompt_larger_than_what_is_free_arrives_before_there_is_room_for_all_of_it(
    tmp_path: Path, transport: str
) -> None:
    """Of 150 pages one request has 19 and will take 94 more; the other's prompt takes 60."""
    options = {"max_total_tokens": 2400, "chunked_prefill_size": 128, "transport": transport}
    with running(tmp_path / "logs", node_options=options) as service:
        async with service.client() as client:
            busy = client.begin(prompt_of(304, 1), 1500)
            await busy.has(1)
            large = client.begin(prompt_of(960, 2), 40)
            async with asyncio.timeout(60):
                while (await received(client))[1] < 19 + 30:
                    await asyncio.sleep(0.01)
            assert (await received(client))[0] == 1
            assert not busy.ended_at, "it was to be under way still"
            assert len(large.ids) <= 1, "it was not to run yet"
            await asyncio.gather(busy.end(), large.end())
            assert (await received(client))[1] == 19 + 60, "a page came twice"
            assert (await client.settled())["decode-0"]["retractions"] == 0
            status, _ = await client.post("/flush_cache", {})
            assert status == 200
            alone = await client.generate(prompt_of(960, 2), 40)
            assert tuple(alone["output_ids"]) == large.ids
            await client.settled()
