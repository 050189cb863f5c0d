"""Every tested architecture over HTTP, a prefill node and two decode nodes gives the tokens of its library."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.engine.library_models import LIBRARY_MODELS, make_library_model
from support.engine.reference_models import draw_prompts
from support.service.service import SMALL_MODEL, running

#: The fork server imports the library once for all nodes, which takes seconds.
MODULES = ("common.engine.models.transformers_impl.model", "common.engine.models.transformers_impl.check")
LENGTHS = [1, 17, 64, 130]
MAX_NEW = 8


def model_with_tokenizer(folder: Path, architecture: str) -> Path:
    make_library_model(folder, architecture, seed=3, vocab_size=1100)
    for path in SMALL_MODEL.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def assert_equal(answers: list[dict[str, Any]], cases: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Each prompt was asked twice."""
    for number, answer in enumerate(answers):
        prompt, expected = cases[number // 2]
        assert tuple(answer["output_ids"]) == expected, f"prompt of {len(prompt)} tokens"


@pytest.mark.slow(sample=0.02)
@pytest.mark.parametrize("architecture", LIBRARY_MODELS)
async def test_tokens_equal_those_of_the_library_cold_and_cached_on_two_decode_nodes(
    tmp_path: Path, architecture: str
) -> None:
    log = await check_cold_and_cached(tmp_path, architecture)
    assert f"transformers computes this model with its class {architecture}" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "num_window_pages", "others"),
    [
        ("Gemma3ForCausalLM", 16, {}),
        ("GptOssForCausalLM", 16, {"kv_checksum": "all"}),
        ("Olmo3ForCausalLM", 16, {"transport": "tcp"}),
        ("Gemma2ForCausalLM", 48, {"swa_full_tokens_ratio": "auto"}),  # 6 pages for an eighth of 1,024 tokens
    ],
)
async def test_tokens_equal_those_of_the_library_where_window_layers_have_pages_of_their_own(
    tmp_path: Path, architecture: str, num_window_pages: int, others: dict[str, str]
) -> None:
    log = await check_cold_and_cached(tmp_path, architecture, **{"swa_full_tokens_ratio": "0.25", **others})
    assert f"window layers have {num_window_pages} pages of their own" in log


async def check_cold_and_cached(tmp_path: Path, architecture: str, **others: Any) -> str:
    """Return the log of the service."""
    folder = model_with_tokenizer(tmp_path / "m", architecture)
    cases = draw_prompts(folder, LENGTHS, MAX_NEW, seed=8)
    options = {"model_impl": "transformers", "page_size": 16, "chunked_prefill_size": 32, "max_total_tokens": 1024}
    options |= others
    with running(tmp_path / "logs", folder, decode=2, node_options=options, modules=MODULES) as service:
        async with service.client() as client:
            for _ in ("cold", "cached"):
                answers = await asyncio.gather(
                    *(client.generate(prompt, MAX_NEW) for prompt, _ in cases for _ in range(2))
                )
                assert_equal(answers, cases)
            totals = await client.settled()
            log = service.log()
    assert all(totals[node]["output_tokens"] > 0 for node in ("decode-0", "decode-1"))
    assert totals["prefill-0"]["pages_sent"] > 0
    return log


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["OlmoForCausalLM", "Gemma2ForCausalLM", "OlmoeForCausalLM"])
async def test_tokens_equal_those_of_the_library_after_retractions_on_the_decode_node(
    tmp_path: Path, architecture: str
) -> None:
    """The pool has room for the prompts and not for their outputs; one model is plain, one has windows, one experts."""
    folder = model_with_tokenizer(tmp_path / "m", architecture)
    cases = draw_prompts(folder, [5, 17, 20, 24], 40, seed=8)
    options = {"model_impl": "transformers", "page_size": 4, "chunked_prefill_size": 32}
    only = {"decode-0": {"max_total_tokens": 160, "num_reserved_decode_tokens": 1}}
    with running(tmp_path / "logs", folder, node_options=options, only=only, modules=MODULES) as service:
        async with service.client() as client:
            answers = await asyncio.gather(*(client.generate(prompt, 40) for prompt, _ in cases for _ in range(2)))
            assert_equal(answers, cases)
            totals = await client.settled()
    assert totals["decode-0"]["retractions"] > 0
    assert totals["prefill-0"]["pages_sent"] > 0
