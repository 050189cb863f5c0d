"""Node processes with different weights serve one name, each output with one of them."""

import asyncio
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.service.client import Client, prompt_of
from support.service.service import SMALL_MODEL, Service, running


def fine_tune(folder: Path, *, num_bytes: int = 1) -> Path:
    """Copy the small model and flip one bit of each of its last weights."""
    shutil.copytree(SMALL_MODEL, folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for number in range(num_bytes):
        content[-2 - 2 * number] ^= 1
    weights.write_bytes(content)
    return folder


async def test_nodes_with_different_weights_are_never_paired(tmp_path: Path) -> None:
    only: dict[str, Any] = {"decode-1": {"model": fine_tune(tmp_path / "tuned")}}
    with running(tmp_path / "logs", decode=2, only=only) as service:
        async with service.client() as client:
            rows = await client.workers()
            assert rows["decode-0"]["revision"] == rows["prefill-0"]["revision"] != rows["decode-1"]["revision"]
            for seed in range(6):
                await client.generate(prompt_of(30, seed), 4)
            counters = await client.settled()
            assert (counters["decode-0"]["requests"], counters["decode-1"]["requests"]) == (6, 0)


async def ask(client: Client, number: int, answers: list[tuple[int, tuple[int, ...]]], stopped: list[bool]) -> None:
    while not stopped:
        exchange = await client.begin(prompt_of(40, number % 8), 40).end()
        assert (exchange.status, exchange.error, exchange.is_broken) == (200, None, False)
        answers.append((number % 8, exchange.ids))
        client.forget(exchange)


@pytest.mark.slow
async def test_new_weights_replace_the_old_ones_under_load(tmp_path: Path) -> None:
    """Every answer is wholly that of the old or of the new weights, and none is an error."""
    tuned = {"model": fine_tune(tmp_path / "tuned", num_bytes=100_000)}
    only: dict[str, Any] = {"prefill-1": tuned, "decode-1": tuned}
    service = Service(tmp_path / "logs", prefill=2, decode=2, only=only)
    try:
        service.start("gateway", "prefill-0", "decode-0")
        service.wait_until_ready()
        async with service.client() as client:
            old = [tuple((await client.generate(prompt_of(40, i), 40))["output_ids"]) for i in range(8)]
            answers: list[tuple[int, tuple[int, ...]]] = []
            stopped: list[bool] = []
            load = [asyncio.ensure_future(ask(client, i, answers, stopped)) for i in range(8)]
            service.start("prefill-1", "decode-1")
            await asyncio.to_thread(service.wait_until_ready)
            for name in ("decode-0", "prefill-0"):
                assert await asyncio.to_thread(service.stop, name) == 0
            num_answers = len(answers)
            async with asyncio.timeout(120):
                while len(answers) < num_answers + 16:
                    assert not any(task.done() for task in load)
                    await asyncio.sleep(0.02)
            stopped.append(True)
            await asyncio.gather(*load)
            new = [tuple((await client.generate(prompt_of(40, i), 40))["output_ids"]) for i in range(8)]
            assert old != new
            assert all(ids in (old[i], new[i]) for i, ids in answers)
    finally:
        service.close()


def test_nodes_with_the_same_weight_version_are_accepted(tmp_path: Path) -> None:
    only: dict[str, Any] = {"decode-0": {"model": fine_tune(tmp_path / "tuned")}}
    with running(tmp_path / "logs", only=only, node_options={"weight_version": "v1"}) as service:
        with urllib.request.urlopen(f"http://127.0.0.1:{service.port}/v1/workers", timeout=60) as answer:
            workers = json.load(answer)["workers"]
        assert [worker["register"]["weight_version"] for worker in workers] == ["v1", "v1"]
