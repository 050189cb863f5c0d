"""Two nodes with KV pages in FP8 or int8 give the tokens of one engine that computes each request alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine.engine_driver import Driver
from support.service.client import prompt_of
from support.service.service import SMALL_MODEL, running

from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig

MAX_NEW = 40
PROMPTS = [prompt_of(length, length) for length in (1, 33, 70, 100, 130, 150)]


@pytest.fixture(scope="module", params=["fp8_e4m3", pytest.param("int8", marks=pytest.mark.slow)])
def page_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(page_dtype: str) -> Iterator[list[list[int]]]:
    import torch

    num_threads = torch.get_num_threads()
    executor = load_executor(
        ModelConfig.load(str(SMALL_MODEL)),
        dtype="float32",
        kv_cache_dtype=page_dtype,
        num_slots=1,
        num_pages=200,
        page_size=16,
        num_threads=1,
    )
    driver = Driver(executor)
    outputs = []
    for prompt in PROMPTS:
        text = driver.start(0, prompt)
        driver.finish([text], MAX_NEW)
        outputs.append(text.output)
    executor.close()
    yield outputs
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_tokens_are_the_same_after_transfers_chunks_and_retractions(
    tmp_path: Path, page_dtype: str, expected: list[list[int]], num_ranks: int
) -> None:
    """Pages have unequal sizes, so that slices with their scales travel; all requests do not fit the decode node."""
    options = {"kv_cache_dtype": page_dtype, "transport": "tcp", "chunked_prefill_size": 64, "kv_checksum": "all"}
    only = {
        "prefill-0": {"page_size": 16},
        "decode-0": {"page_size": 8, "max_total_tokens": 448, "num_reserved_decode_tokens": 1, "tp": num_ranks},
    }
    with running(tmp_path, node_options=options, only=only) as service:
        async with service.client() as client:
            answers = await asyncio.gather(*(client.generate(prompt, MAX_NEW) for prompt in PROMPTS))
            totals = await client.settled()
            layout = (await client.workers())["decode-0"]["register"]["layout"]
        logs = "".join(path.read_text() for path in service.logs.glob("*decode-0.log"))
    assert [answer["output_ids"] for answer in answers] == expected
    assert layout["dtype"] == page_dtype
    per_token = layout["num_layers"] * 2 * layout["num_kv_heads"] * (layout["head_dim"] + 1)
    assert f"{page_dtype} with {per_token} bytes for each" in logs
    assert totals["decode-0"]["retractions"] > 0
    assert totals["decode-0"]["pages_verified"] >= totals["decode-0"]["pages_received"] > 0
    assert totals["decode-0"]["checksum_mismatches"] == 0
