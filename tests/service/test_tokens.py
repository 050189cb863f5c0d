"""Greedy tokens over HTTP equal those of ``transformers``, and decode nodes compute no prompt token.

The counters of the nodes show what was computed and transferred.
"""

import asyncio
import shutil
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.reference_models import LLAMA3_ROPE, draw_prompts, load_reference, make_model
from support.service.client import Client
from support.service.service import SMALL_MODEL, Service, running

FAMILIES: dict[str, dict[str, Any]] = {"qwen3": {}, "llama": {"rope_parameters": LLAMA3_ROPE}}
LENGTHS = [1, 15, 16, 17, 64, 65, 130, 600]
MAX_NEW = 8
WARM_UP = 1
Case = tuple[tuple[int, ...], tuple[int, ...]]

#: Model, page size and chunk size; the other cases are slow.
CHOSEN = [("qwen3", 16, 16), ("llama", 1, -1)]
#: Transports other than ``auto``, which selects shared memory here.
TRANSPORTS = {("llama", 1, -1): "gloo", ("qwen3", 64, 100): "tcp"}
#: Every page size with every chunk of at least a page; models in turn, so that each meets every size of either kind.
PAGES_AND_CHUNKS = [*product(enumerate((1, 16, 64)), enumerate((64, 100, -1))), ((0, 1), (1, 16)), ((1, 16), (1, 16))]
EVERY = [((*FAMILIES, "small")[(i + j) % 3], page, chunk) for (i, page), (j, chunk) in PAGES_AND_CHUNKS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function from a model's name to (folder, cases), which creates each model at its first use."""

    @cache
    def make(name: str) -> tuple[Path, list[Case]]:
        if name == "small":
            folder = SMALL_MODEL
        else:
            folder = tmp_path_factory.mktemp(name) / name
            make_model(folder, name, seed=3, vocab_size=1100, max_position_embeddings=2048, **FAMILIES[name])
            for path in SMALL_MODEL.glob("*token*"):
                shutil.copy(path, folder)
        cases = draw_prompts(load_reference(folder), LENGTHS, MAX_NEW, seed=8)
        firsts = {prompt[0] for prompt, _ in cases}
        assert len(firsts) == len(cases) and WARM_UP not in firsts, "with pages of one token these would share pages"
        return folder, cases

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the nodes need the cores
    yield make
    torch.set_num_threads(num_threads)


async def generate(client: Client, case: Case, **options: Any) -> dict[str, Any]:
    prompt, expected = case
    answer = await client.generate(prompt, len(expected), **options)
    assert tuple(answer["output_ids"]) == expected, f"prompt of {len(prompt)} tokens"
    assert answer["meta_info"]["prompt_tokens"] == len(prompt)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": len(expected)}
    return answer


async def completion(client: Client, case: Case) -> None:
    prompt, expected = case
    body = {
        "model": "m", "prompt": list(prompt), "max_tokens": MAX_NEW, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    status, answer = await client.post("/v1/completions", body)
    assert status == 200, answer
    assert tuple(answer["choices"][0]["token_ids"]) == expected, f"prompt of {len(prompt)} tokens"
    assert answer["usage"]["completion_tokens"] == MAX_NEW


def num_pages(case: Case, page_size: int) -> int:
    return -(-len(case[0]) // page_size)


@pytest.mark.parametrize(
    ("name", "page_size", "chunk"),
    [*CHOSEN, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in CHOSEN)],
)
async def test_greedy_tokens_equal_transformers_cold_cached_and_batched(
    models: Any, tmp_path: Path, name: str, page_size: int, chunk: int
) -> None:
    folder, cases = models(name)
    transport = TRANSPORTS.get((name, page_size, chunk), "auto")
    options = {"page_size": page_size, "chunked_prefill_size": chunk, "transport": transport}
    with running(tmp_path / "logs", folder, node_options=options) as service:
        async with service.client() as client:
            await client.generate([WARM_UP], 2)  # connects the pair
            before = await client.settled()
            for case in cases:  # cold, one by one
                assert (await generate(client, case))["meta_info"]["cached_tokens"] == 0
            totals = await client.settled()
            check_cold(before, totals, cases, page_size, chunk)
            sent = totals["prefill-0"]
            assert transport == "auto" or sent[f"bytes_by_{transport}"] == sent["bytes_sent"] > 0
            for case in cases:  # cached
                answer = await generate(client, case)
                assert answer["meta_info"]["cached_tokens"] == (len(case[0]) - 1) // page_size * page_size
            check_cached(totals, await client.settled(), cases, page_size)
            # Concurrently, each over both endpoints.
            await asyncio.gather(*(ask(client, case) for case in cases for ask in (generate, completion)))
            totals = await client.settled()
            assert totals["decode-0"]["retractions"] == 0
            assert totals["decode-0"]["resumed_tokens_computed"] == 0


Totals = dict[str, dict[str, float]]


def check_cold(before: Totals, after: Totals, cases: list[Case], page_size: int, chunk: int) -> None:
    prefill = {name: value - before["prefill-0"][name] for name, value in after["prefill-0"].items()}
    decode = {name: value - before["decode-0"][name] for name, value in after["decode-0"].items()}
    assert prefill["prompt_tokens_computed"] == sum(len(prompt) for prompt, _ in cases)
    assert prefill["pages_sent"] == sum(num_pages(case, page_size) for case in cases)
    assert decode["pages_received"] == prefill["pages_sent"]
    assert decode["pages_cached"] == 0
    assert decode["resumed_tokens_computed"] == 0, "decode computed prompt tokens"
    assert prefill["output_tokens"] == len(cases)
    assert decode["output_tokens"] == len(cases) * (MAX_NEW - 1)
    num_chunked = 0 if chunk < 0 else sum(len(prompt) > chunk for prompt, _ in cases)
    assert prefill["chunked_requests"] == num_chunked
    assert prefill["overlapped_transfers"] <= num_chunked


def check_cached(before: Totals, after: Totals, cases: list[Case], page_size: int) -> None:
    sent = after["prefill-0"]["pages_sent"] - before["prefill-0"]["pages_sent"]
    hits = after["decode-0"]["pages_cached"] - before["decode-0"]["pages_cached"]
    assert hits == sum(len(prompt) // page_size for prompt, _ in cases)
    assert sent == sum(num_pages(case, page_size) for case in cases) - hits


async def test_one_token_comes_from_the_prefill_node_alone(tmp_path: Path) -> None:
    cases = draw_prompts(load_reference(SMALL_MODEL), [3, 100, 300], 1, seed=6)
    with running(tmp_path / "logs") as service:
        async with service.client() as client:
            await client.generate([WARM_UP], 2)  # connects the pair
            before = await client.settled()
            await asyncio.gather(*(generate(client, case) for case in cases))
            after = await client.settled()
    for node, name, more in (
        ("prefill-0", "output_tokens", 3),
        ("prefill-0", "pages_sent", 0),
        ("decode-0", "requests", 0),
    ):
        assert after[node][name] - before[node][name] == more, name


async def test_pages_are_transferred_while_later_chunks_are_computed(tmp_path: Path) -> None:
    """The prompts have many chunks, so that a page arrives before the last one although a process may have no core."""
    cases = draw_prompts(load_reference(SMALL_MODEL), [3, 1200, 2400], MAX_NEW, seed=5)
    with running(tmp_path / "logs", node_options={"chunked_prefill_size": 16}) as service:
        async with service.client() as client:
            await client.generate([WARM_UP], 2)
            for case in cases:
                await generate(client, case, rid="mine")  # the id of a finished request may be reused
            totals = await client.settled()
    assert totals["prefill-0"]["chunked_requests"] == 2
    assert totals["prefill-0"]["overlapped_transfers"] == 2, "no page arrived before the last chunk had begun"
    assert totals["prefill-0"]["pages_overlapped"] > 2


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("qwen3", "cpu"),
        pytest.param("llama", "cpu", marks=pytest.mark.slow),
        pytest.param("llama", "cuda", marks=pytest.mark.cuda),
    ],
)
async def test_a_tiny_pool_retracts_requests_and_changes_no_token(
    models: Any, tmp_path: Path, name: str, device: str
) -> None:
    folder, _ = models(name)
    cases = draw_prompts(load_reference(folder), [4, 5, 6, 7, 8, 9], 40, seed=5)
    only = {"decode-0": {"max_total_tokens": 100, "num_reserved_decode_tokens": 0}}  # admits more than fits
    options = {"page_size": 4, "chunked_prefill_size": 16, "device": device}
    with running(tmp_path / "logs", folder, node_options=options, only=only) as service:
        async with service.client() as client:
            await asyncio.gather(*(generate(client, case, ignore_eos=False) for case in cases * 2))
            totals = await client.settled()
    assert totals["decode-0"]["retractions"] > 0
    assert totals["decode-0"]["resumed_tokens_computed"] > 0


@pytest.mark.parametrize(
    ("num_prefill", "num_decode"),
    [(2, 2), pytest.param(1, 3, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow)],
)
async def test_any_number_of_nodes_started_in_any_order_gives_the_same_tokens(
    models: Any, tmp_path: Path, num_prefill: int, num_decode: int
) -> None:
    folder, cases = models("qwen3")
    service = Service(tmp_path / "logs", folder, prefill=num_prefill, decode=num_decode)
    *early, late = reversed(service.nodes)  # decode nodes first; the last prefill node starts after the gateway
    try:
        for name in (*early, "gateway", late):
            service.start(name)
        service.wait_until_ready()
        async with service.client() as client:
            await asyncio.gather(*(generate(client, case) for case in cases for _ in range(2)))
            totals = await client.settled()
        assert {name for name, counters in totals.items() if counters["requests"]} == set(service.nodes)
        assert all(totals[name].get("resumed_tokens_computed", 0) == 0 for name in totals)
    finally:
        service.close()
