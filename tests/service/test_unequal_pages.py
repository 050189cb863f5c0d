"""Nodes with different page sizes produce the tokens of nodes with equal ones, over HTTP and real processes."""

import asyncio
from pathlib import Path

import pytest
from support.service.client import prompt_of
from support.service.service import Service

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 100, 260)
Answers = list[list[int]]


async def serve(logs: Path, source_size: int, target_size: int, transport: str) -> Answers:
    """Return the outputs of prompts sent one by one and then all at once. Only one node asks for checksums."""
    only = {"prefill-0": {"page_size": source_size}, "decode-0": {"page_size": target_size}}
    only["prefill-0" if source_size < target_size else "decode-0"]["kv_checksum"] = "all"
    service = Service(logs, node_options={"chunked_prefill_size": 64, "transport": transport}, only=only)
    prompts = [prompt_of(length, length) for length in LENGTHS]
    prompts.append(prompts[-2] + prompt_of(20, 7))  # the decode node has cached its first pages
    try:
        service.start("gateway", "prefill-0", "decode-0")
        service.wait_until_ready()
        async with service.client() as client:
            cold = [(await client.generate(prompt, 12))["output_ids"] for prompt in prompts]
            warm = [a["output_ids"] for a in await asyncio.gather(*(client.generate(p, 12) for p in prompts))]
            totals = await client.settled()
            async with client.session.get("/metrics") as answer:
                metrics = await answer.text()
    finally:
        service.close()
    assert totals["decode-0"]["resumed_tokens_computed"] == 0
    assert totals["decode-0"]["pages_received"] > 0
    assert totals["decode-0"]["pages_cached"] > 0
    assert totals["decode-0"]["bytes_saved_by_cache"] > 0
    assert 'baton_node_bytes_saved_by_cache_total{model="m",node="decode-0",role="decode"}' in metrics
    assert totals["decode-0"]["pages_verified"] >= totals["decode-0"]["pages_received"]
    assert totals["decode-0"]["checksum_mismatches"] == totals["prefill-0"]["pages_resent"] == 0
    assert 'baton_node_checksum_mismatches_total{model="m",node="decode-0",role="decode"} 0.0' in metrics
    assert totals["prefill-0"][f"bytes_by_{transport}"] == totals["prefill-0"]["bytes_sent"] > 0
    return cold + warm


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return asyncio.run(serve(tmp_path_factory.mktemp("equal") / "logs", 16, 16, "shm"))


@pytest.mark.parametrize(
    ("source_size", "target_size", "transport"),
    [
        (16, 32, "tcp"),
        pytest.param(32, 16, "shm", marks=pytest.mark.slow),
        pytest.param(64, 4, "tcp", marks=pytest.mark.slow),
        pytest.param(4, 64, "shm", marks=pytest.mark.slow),
        pytest.param(16, 32, "nixl", marks=pytest.mark.slow),
        pytest.param(32, 16, "nixl", marks=pytest.mark.slow),
    ],
)
async def test_greedy_tokens_do_not_depend_on_either_nodes_page_size(
    tmp_path: Path, expected: Answers, source_size: int, target_size: int, transport: str
) -> None:
    assert await serve(tmp_path / "logs", source_size, target_size, transport) == expected
