"""Penalties and prompt log-probabilities equal those of ``transformers`` in float32.

The cases cover chunks, caches, transfers, local prefill and retraction, which the reference does not have.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.cluster.local_cluster import Answer, LocalCluster
from support.engine.reference_models import draw_prompts, load_reference, make_model, prompt_logprobs

from common.sampling_params import SamplingParams, TokenLogprobs

MAX_NEW = 12
LENGTHS = [1, 2, 15, 16, 17, 64, 65, 130, 300]
PENALTIES = SamplingParams(
    max_new_tokens=MAX_NEW,
    temperature=0.0,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((5, 3.0), (80, -100.0)),
)
Case = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=6)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(scope="module")
def penalised(reference: Any) -> list[Case]:
    return draw_prompts(reference, LENGTHS, MAX_NEW, seed=1, params=PENALTIES)


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("chunk_tokens", [16, None])
@pytest.mark.parametrize("is_local", [False, True])
def test_penalised_tokens_equal_transformers_cold_and_cached(
    folder: Path, penalised: list[Case], chunk_tokens: int | None, is_local: bool
) -> None:
    cluster = LocalCluster(folder, chunk_tokens=chunk_tokens)
    for tag in ("cold", "cached"):
        answers = [
            cluster.submit(f"{tag}{number}", prompt, PENALTIES, pair=(None if is_local else 0, 0))
            for number, (prompt, _) in enumerate(penalised)
        ]
        cluster.run()
        assert [answer.output for answer in answers] == [expected for _, expected in penalised]
    cluster.close()


@pytest.mark.parametrize("is_local", [False, True])
def test_penalised_tokens_survive_retractions(folder: Path, penalised: list[Case], is_local: bool) -> None:
    small = [case for case in penalised if len(case[0]) <= 65] * 3
    cluster = LocalCluster(folder, page_size=4, chunk_tokens=16, decode_pages=24, latency=2, reserved_tokens=0)
    answers = [
        cluster.submit(f"r{number}", prompt, PENALTIES, pair=(None if is_local and number % 2 else 0, 0))
        for number, (prompt, _) in enumerate(small)
    ]
    cluster.run()
    assert [answer.output for answer in answers] == [expected for _, expected in small]
    assert is_local or cluster.counters(cluster.decode[0])["retractions"] > 0
    cluster.close()


# ---- prompt log-probabilities ---------------------------------------------------------------------------------------


def with_prompt_logprobs(first: int, num_top: int | None = 3) -> SamplingParams:
    return SamplingParams(max_new_tokens=3, temperature=0.0, logprobs=num_top, prompt_logprobs_from=first)


def check_logprobs(
    found: tuple[TokenLogprobs, ...], expected: torch.Tensor, prompt: tuple[int, ...], first: int, num_top: int
) -> None:
    """Compare with ``expected``, the result of ``prompt_logprobs``."""
    first = max(first, 1)
    assert len(found) == max(0, len(prompt) - first)
    for position, logprobs in enumerate(found, first):
        row = expected[position - 1]
        assert abs(logprobs.token - row[prompt[position]].item()) < 1e-4
        best = row.topk(num_top)
        assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert all(abs(row[token].item() - value) < 1e-4 for token, value in logprobs.top)


@pytest.mark.slow(sample=0.2)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk_tokens", [16, 100, None])
@pytest.mark.parametrize("is_local", [False, True])
def test_prompt_logprobs_equal_transformers_cold_and_cached(
    folder: Path, reference: Any, penalised: list[Case], page_size: int, chunk_tokens: int | None, is_local: bool
) -> None:
    """From several start positions; a cached prefix is used only up to the start."""
    num_pages = 3000 // page_size
    cluster = LocalCluster(
        folder, page_size=page_size, chunk_tokens=chunk_tokens, prefill_pages=num_pages, decode_pages=num_pages
    )
    pair = (None if is_local else 0, 0)
    prompts = [prompt for prompt, _ in penalised]
    expected = [prompt_logprobs(reference, prompt) for prompt in prompts]
    for tag in ("cold", "cached"):
        answers: list[tuple[Answer, int, int]] = []
        for number, prompt in enumerate(prompts):
            for first in {1, 16, 17, 40, len(prompt) - 1, len(prompt)} - {0}:
                answers.append(
                    (
                        cluster.submit(f"{tag}{number}-{first}", prompt, with_prompt_logprobs(first), pair=pair),
                        number,
                        first,
                    )
                )
        cluster.run()
        for answer, number, first in answers:
            assert answer.error is None
            check_logprobs(answer.prompt_logprobs, expected[number], prompts[number], first, 3)
            assert len(answer.output) == 3
            if tag == "cached":
                assert answer.cached_tokens == max(0, min(len(prompts[number]), first) - 1) // page_size * page_size
    cluster.close()


def test_prompt_logprobs_have_as_many_alternatives_as_requested(folder: Path, penalised: list[Case]) -> None:
    cluster = LocalCluster(folder)
    prompt = penalised[4][0]
    answers = [cluster.submit(f"r{count}", prompt, with_prompt_logprobs(1, count)) for count in (None, 0, 5)]
    without = cluster.submit("none", prompt, SamplingParams(max_new_tokens=3, logprobs=2))
    cluster.run()
    assert [len(answer.prompt_logprobs) for answer in answers] == [len(prompt) - 1] * 3
    assert [len(answer.prompt_logprobs[0].top) for answer in answers] == [0, 0, 5]
    assert without.prompt_logprobs == ()
    cluster.close()


def test_prompt_logprobs_are_sent_once_after_retractions_on_prefill_nodes(folder: Path, reference: Any) -> None:
    """All pools are full, so granted prompts take pages from prompts without a grant, computed or not."""
    cluster = LocalCluster(
        folder,
        num_prefill=2,
        num_decode=2,
        page_size=4,
        chunk_tokens=8,
        prefill_pages=20,
        decode_pages=14,
        max_running=3,
    )
    random = Random(5)
    answers = []
    for number in range(60):
        prompt = tuple(random.randrange(200) for _ in range(random.randint(1, 40)))
        pair = (random.randint(0, 1), random.randint(0, 1))
        first = random.randint(1, 9)
        answers.append((cluster.submit(f"r{number}", prompt, with_prompt_logprobs(first), pair=pair), prompt, first))
    cluster.run()
    for answer, prompt, first in answers:
        check_logprobs(answer.prompt_logprobs, prompt_logprobs(reference, prompt), prompt, first, 3)
    assert sum(cluster.counters(member)["retractions"] for member in cluster.prefill) > 0
    cluster.close()
