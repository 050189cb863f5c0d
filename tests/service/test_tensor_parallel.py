"""Nodes with several ranks give the tokens of nodes with one, whatever the other node has, also when ranks are lost."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.engine.library_models import make_library_model
from support.engine.lora_adapters import make_adapter, merge
from support.engine.reference_models import draw_prompts
from support.service.client import Exchange
from support.service.service import SMALL_MODEL, Service

#: Ranks import torch when they start, on a machine that runs other tests.
START_TIMEOUT_S = 300.0
LENGTHS = [1, 16, 33, 100]
MAX_NEW = 12
NUM_LONG = 80

Prompts = list[tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Prompts and the greedy tokens of transformers."""
    return draw_prompts(SMALL_MODEL, LENGTHS, MAX_NEW, seed=5)


def serve(logs: Path, ranks: dict[str, int], model: Path = SMALL_MODEL, **options: Any) -> Service:
    """A service of these nodes, with so many ranks each."""
    service = Service(
        logs,
        model,
        prefill=sum(name.startswith("prefill") for name in ranks),
        decode=sum(name.startswith("decode") for name in ranks),
        node_options={"chunked_prefill_size": 64, **options},
        only={name: {"tp": count} for name, count in ranks.items()},
    )
    service.start()
    service.wait_until_ready(START_TIMEOUT_S)
    return service


def ranks_of(service: Service, name: str) -> list[int]:
    """Process ids of the other ranks of a node."""
    found: list[int] = []
    for task in Path(f"/proc/{service.pid(name)}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += map(int, (task / "children").read_text().split())
    return found


async def until_gone(pids: list[int]) -> None:
    for _ in range(6000):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"processes {pids} are left of a node")


async def check_answers(service: Service, prompts: Prompts) -> None:
    """Assert that the answers are those of transformers, one by one and then from the cache, all at once."""
    async with service.client() as client:
        for prompt, expected in prompts:
            assert (await client.generate(prompt, MAX_NEW))["output_ids"] == list(expected)
        again = await asyncio.gather(*(client.generate(prompt, MAX_NEW) for prompt, _ in prompts))
        assert [answer["output_ids"] for answer in again] == [list(expected) for _, expected in prompts]
        totals = await client.settled()
    assert sum(counters.get("pages_received", 0) for counters in totals.values()) > 0
    assert sum(counters.get("checksum_mismatches", 0) for counters in totals.values()) == 0


async def check_outputs(exchanges: list[Exchange], expected: Sequence[Sequence[int]]) -> None:
    """Wait until the requests have ended, and assert that their tokens are these."""
    await asyncio.gather(*(exchange.end() for exchange in exchanges))
    for exchange in exchanges:
        assert (exchange.status, exchange.error, exchange.is_broken) == (200, None, False)
    assert [list(exchange.ids) for exchange in exchanges] == [list(tokens) for tokens in expected]


async def kill_rank(service: Service, name: str) -> None:
    """Kill the other rank of a node, and wait until the node has ended and says why."""
    [rank] = ranks_of(service, name)
    process = service.processes.pop(name)
    os.kill(rank, signal.SIGKILL)
    assert await asyncio.to_thread(process.wait, 120) == 1
    [log] = service.logs.glob(f"*-{name}.log")
    assert "ERROR" in log.read_text()
    assert "tensor-parallel rank" in log.read_text()


@pytest.mark.parametrize(
    ("prefill", "decode", "options"),
    [
        (1, 2, {}),
        pytest.param(2, 1, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"transport": "tcp", "kv_checksum": "all"}, marks=pytest.mark.slow),
    ],
)
async def test_greedy_tokens_do_not_depend_on_the_ranks_of_either_node(
    tmp_path: Path, prompts: Prompts, prefill: int, decode: int, options: dict[str, Any]
) -> None:
    service = serve(tmp_path / "logs", {"prefill-0": prefill, "decode-0": decode}, **options)
    try:
        await check_answers(service, prompts)
        left = ranks_of(service, "prefill-0") + ranks_of(service, "decode-0")
        assert len(left) == prefill - 1 + decode - 1
        assert [service.stop(name) for name in ("prefill-0", "decode-0")] == [0, 0]
        await until_gone(left)
    finally:
        service.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "prefill", "decode"),
    [
        ("Gemma2ForCausalLM", 1, 2),
        ("DeepseekV3ForCausalLM", 2, 4),  # attention is whole in the plan; experts
        ("MistralForCausalLM", 2, 2),  # the pages of its windows only
    ],
)
async def test_a_model_that_transformers_computes_is_divided_as_well(
    tmp_path: Path, architecture: str, prefill: int, decode: int
) -> None:
    await check_divided(tmp_path, architecture, prefill=prefill, decode=decode)


@pytest.mark.slow
async def test_window_layers_with_pages_of_their_own_are_divided_as_well(tmp_path: Path) -> None:
    await check_divided(tmp_path, "Gemma2ForCausalLM", prefill=1, decode=2, swa_full_tokens_ratio=0.25)


async def check_divided(tmp_path: Path, architecture: str, *, prefill: int, decode: int, **others: Any) -> None:
    folder = make_library_model(tmp_path / "m", architecture, seed=3, vocab_size=1100)
    for path in SMALL_MODEL.glob("*token*"):
        shutil.copy(path, folder)
    prompts = draw_prompts(folder, LENGTHS, MAX_NEW, seed=8)
    ranks = {"prefill-0": prefill, "decode-0": decode}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 10.0}))  # every rank gets the override
    overrides = json.dumps({"rms_norm_eps": config["rms_norm_eps"]})
    options = {"model_impl": "transformers", "page_size": 16, "max_total_tokens": 1024, "hf_overrides": overrides}
    options |= others
    service = serve(tmp_path / "logs", ranks, folder, **options)
    try:
        await check_answers(service, prompts)
        assert f"transformers computes this model with its class {architecture}" in service.log()
    finally:
        service.close()


@pytest.mark.slow
async def test_adapters_of_nodes_with_ranks_equal_the_merged_models(tmp_path: Path, prompts: Prompts) -> None:
    """One adapter is given at start, and one is loaded while the nodes serve; it is unloaded again."""
    adapters = {name: make_adapter(tmp_path / name, SMALL_MODEL, seed=seed) for seed, name in enumerate(("one", "two"))}
    known = {"m": prompts}
    for name, folder in adapters.items():
        known[name] = draw_prompts(merge(tmp_path / f"merged-{name}", SMALL_MODEL, folder), LENGTHS, MAX_NEW, seed=5)
    service = serve(
        tmp_path / "logs", {"prefill-0": 2, "decode-0": 2}, lora=f"one={adapters['one']}", lora_dir=tmp_path
    )
    try:
        async with service.client() as client:
            status, answer = await client.post("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": "two"})
            assert (status, [node["error"] for node in answer["nodes"]]) == (200, ["", ""])
            asked = [(name, *case) for name, cases in known.items() for case in cases]
            no_end = {"ignore_eos": False, "min_new_tokens": MAX_NEW}  # as the reference
            generated = (client.generate(prompt, MAX_NEW, model=name, **no_end) for name, prompt, _ in asked)
            answers = await asyncio.gather(*generated)
            assert [tuple(answer["output_ids"]) for answer in answers] == [expected for *_, expected in asked]
            assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "two"}))[0] == 200
            prompt, expected = known["one"][-1]
            assert (await client.generate(prompt, MAX_NEW, model="one", **no_end))["output_ids"] == list(expected)
            await client.settled()
    finally:
        service.close()


@pytest.mark.slow
async def test_a_lost_rank_ends_its_node_and_fails_no_request(tmp_path: Path, prompts: Prompts) -> None:
    """A rank is killed while it computes, and one of an idle node. Then a node is killed, and another one drains."""
    service = serve(tmp_path / "logs", {"prefill-0": 2, "prefill-1": 1, "decode-0": 2, "decode-1": 1})
    try:
        async with service.client() as client:
            exchanges = [client.begin(prompt, MAX_NEW) for prompt, _ in prompts]
            await asyncio.gather(*(exchange.has(1) for exchange in exchanges))
            await kill_rank(service, "decode-0")
            await check_outputs(exchanges, [expected for _, expected in prompts])
            await client.settled()
            await kill_rank(service, "prefill-0")
            exchanges = [client.begin(prompt, MAX_NEW) for prompt, _ in prompts]
            await check_outputs(exchanges, [expected for _, expected in prompts])

            long = [(await client.generate(prompt, NUM_LONG))["output_ids"] for prompt, _ in prompts]
            service.start("prefill-0", "decode-0")
            await asyncio.to_thread(service.wait_until_ready, START_TIMEOUT_S)
            left = ranks_of(service, "prefill-0") + ranks_of(service, "decode-0")
            assert len(left) == 2
            exchanges = [client.begin(prompt, NUM_LONG) for prompt, _ in prompts]
            await asyncio.gather(*(exchange.has(1) for exchange in exchanges))
            service.kill("prefill-0")
            assert await asyncio.to_thread(service.stop, "decode-0") == 0
            await check_outputs(exchanges, long)
            await until_gone(left)
            await client.settled()
    finally:
        service.close()
