"""A whole service over each transport: exact tokens, and all pages by that transport alone."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine.reference_models import draw_prompts, load_reference
from support.service.client import Client, prompt_of
from support.service.service import SMALL_MODEL, Service, running

NUM_NEW = 12


@pytest.fixture(scope="module")
def case() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt of 12 whole pages and 11 tokens, and its greedy tokens by ``transformers``."""
    return draw_prompts(load_reference(SMALL_MODEL), [203], NUM_NEW, seed=11)[0]


ON_A_GPU = "auto on a GPU"


@pytest.fixture(
    params=[
        pytest.param("auto", marks=pytest.mark.slow),
        "nixl",
        "tcp",
        *(pytest.param(name, marks=pytest.mark.cuda) for name in ("cuda-ipc", ON_A_GPU)),
    ]
)
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """Both nodes are on the same GPU, or all on the CPU."""
    is_on_gpu = request.param in ("cuda-ipc", ON_A_GPU)
    options: dict[str, Any] = {"transport": request.param.split()[0], "device": "cuda" if is_on_gpu else "cpu"}
    if request.param == "tcp":
        options["cluster_key"] = "the key of this cluster"
    gateway_options = {"heartbeat_interval": 2.0}  # so few that control bytes stay far below a page
    with running(tmp_path, node_options=options, gateway_options=gateway_options) as service:
        yield service


async def pairs(client: Client, name: str, count: int = 1) -> list[dict[str, Any]]:
    for _ in range(2400):
        found: list[dict[str, Any]] = (await client.workers())[name]["pairs"]
        if len(found) >= count:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"{name} reports no pair")


async def test_pages_travel_only_by_the_transport_of_the_pair(
    service: Service, case: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    prompt, expected = case
    asked = service._node_options["transport"]
    best = "cuda-ipc" if service._node_options["device"] == "cuda" else "shm"
    transport, why = (best, "the first that worked") if asked == "auto" else (asked, "it was asked for")
    async with service.client() as client:
        await client.generate([1], 2)  # the pair attaches, which may take many heartbeats on a busy machine
        before = await client.settled()
        answer = await client.generate(prompt, NUM_NEW)
        after = await client.settled()
        workers = await client.workers()
        assert {worker["register"]["pid"] for worker in workers.values()} == {
            service.pid("prefill-0"), service.pid("decode-0"),
        }  # fmt: skip
        assert len({service.pid("prefill-0"), service.pid("decode-0"), service.pid("gateway"), os.getpid()}) == 4
        reported = {name: await pairs(client, name) for name in ("prefill-0", "decode-0")}
    assert tuple(answer["output_ids"]) == expected
    assert answer["meta_info"]["timings"].keys() == {
        "prefill_queue_s", "prefill_s", "decode_queue_s", "prompt_wait_s", "transfer_s", "join_s",
    }  # fmt: skip

    def increase(node: str, name: str) -> float:
        return after[node].get(name, 0.0) - before[node].get(name, 0.0)

    shape = workers["prefill-0"]["register"]["layout"]
    page_bytes = 2 * shape["num_layers"] * shape["num_kv_heads"] * shape["page_size"] * shape["head_dim"] * 4
    assert increase("prefill-0", f"bytes_by_{transport}") == 13 * page_bytes
    others = [name for name in after["prefill-0"] if name.startswith("bytes_by_") and name != f"bytes_by_{transport}"]
    assert not any(increase("prefill-0", name) for name in others)
    control_bytes = increase("prefill-0", "control_bytes_sent") + increase("decode-0", "control_bytes_sent")
    assert 0 < control_bytes < page_bytes / 2, "pages travel by the control plane"
    for name, peer in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
        assert reported[name] == [
            {
                "peer": peer,
                "incarnation": workers[peer]["incarnation"],
                "transport": transport,
                "why": why,
                "problem": "",
            }
        ]


async def test_several_decode_nodes_attach_to_one_prefill_node_at_once(tmp_path: Path) -> None:
    """Over NIXL, to the prefill node and to its replacement, to which all of them connect at the same time."""
    with running(tmp_path, decode=3, node_options={"transport": "nixl"}) as service:
        async with service.client() as client:
            for number in range(2):
                if number:
                    service.kill("prefill-0")
                    service.start("prefill-0")
                    service.wait_until_ready()
                answers = await asyncio.gather(*(client.generate(prompt_of(40, seed), 4) for seed in range(12)))
                assert [len(answer["output_ids"]) for answer in answers] == [4] * 12
                found = await pairs(client, "prefill-0", 3)
                assert sorted(pair["peer"] for pair in found) == ["decode-0", "decode-1", "decode-2"]
                assert [pair["problem"] for pair in found] == ["", "", ""]
