"""Prefill on one node and decode on another produce the same tokens as ``transformers``."""

from pathlib import Path

import pytest
from support.cluster.local_cluster import LocalCluster
from support.engine.reference_models import FAMILIES, draw_prompts, load_reference, make_model

from common.sampling_params import SamplingParams

MAX_NEW = 12
GREEDY = SamplingParams(max_new_tokens=MAX_NEW, temperature=0.0)
PAGE_SIZES, CHUNKS = (1, 16, 64), (16, 100, None)
Case = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Case]]:
    family, overrides = FAMILIES[request.param]
    folder = make_model(tmp_path_factory.mktemp(request.param), family, seed=3, **overrides)
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 130, 333, 600]
    return folder, draw_prompts(load_reference(folder), lengths, MAX_NEW, seed=5)


def serve_all(cluster: LocalCluster, cases: list[Case], *, together: bool, tag: str = "r") -> None:
    for number, (prompt, _) in enumerate(cases):
        pair = (number % len(cluster.prefill), number % len(cluster.decode))
        cluster.submit(f"{tag}{number}", prompt, GREEDY, pair=pair)
        if not together:
            cluster.run()
    cluster.run()
    for number, (_, expected) in enumerate(cases):
        answer = cluster.answers[f"{tag}{number}"]
        assert answer.error is None
        assert answer.output == expected, f"prompt of {len(cases[number][0])} tokens"
        assert answer.finish == "length"
    cluster.settle()


@pytest.mark.slow(sample=0.05)
@pytest.mark.parametrize(
    ("page_size", "chunk_tokens", "together"),
    # Every pair of page size and chunk size; requests come together in every second, so that it meets every size, too.
    [(page_size, chunk, (i + j) % 2 == 1) for i, page_size in enumerate(PAGE_SIZES) for j, chunk in enumerate(CHUNKS)],
)
def test_greedy_tokens_equal_transformers_cold_and_cached(
    model: tuple[Path, list[Case]], page_size: int, chunk_tokens: int | None, together: bool
) -> None:
    folder, cases = model
    pages = 3000 // page_size
    cluster = LocalCluster(
        folder, page_size=page_size, chunk_tokens=chunk_tokens, prefill_pages=pages, decode_pages=pages
    )
    serve_all(cluster, cases, together=together, tag="cold")
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    num_prompt = sum(len(prompt) for prompt, _ in cases)
    counters = cluster.counters(decode)
    assert counters.get("resumed_tokens_computed", 0) == 0, "decode computed prompt tokens"
    assert cluster.counters(prefill)["prompt_tokens_computed"] == num_prompt
    assert cluster.counters(prefill)["pages_sent"] == sum(-(-len(prompt) // page_size) for prompt, _ in cases)

    serve_all(cluster, cases, together=together, tag="cached")
    sent = cluster.counters(prefill)["pages_sent"]
    hits = cluster.counters(decode)["pages_cached"]
    assert sent == 2 * sum(-(-len(prompt) // page_size) for prompt, _ in cases) - hits
    assert hits == sum(len(prompt) // page_size for prompt, _ in cases)
    cached = sum((len(prompt) - 1) // page_size * page_size for prompt, _ in cases)
    assert cluster.counters(prefill)["prompt_tokens_computed"] == 2 * num_prompt - cached
    cluster.close()


@pytest.mark.slow(sample=0.15)
@pytest.mark.parametrize("latency", [0, 3])
def test_retraction_in_a_tiny_pool_changes_no_token(model: tuple[Path, list[Case]], latency: int) -> None:
    folder, cases = model
    small = [case for case in cases if len(case[0]) <= 65]
    cluster = LocalCluster(folder, page_size=4, chunk_tokens=16, decode_pages=24, latency=latency, reserved_tokens=0)
    serve_all(cluster, small * 3, together=True)
    assert cluster.counters(cluster.decode[0])["retractions"] > 0
    assert cluster.counters(cluster.decode[0])["resumed_tokens_computed"] > 0
    cluster.close()


@pytest.mark.slow(sample=0.15)
def test_pages_are_sent_while_later_chunks_are_computed(model: tuple[Path, list[Case]]) -> None:
    folder, cases = model
    long = [case for case in cases if len(case[0]) > 100]
    cluster = LocalCluster(folder, chunk_tokens=32)
    serve_all(cluster, long, together=False)
    counters = cluster.counters(cluster.prefill[0])
    assert counters["chunked_requests"] == len(long)
    assert counters["overlapped_transfers"] == len(long)
    cluster.close()


@pytest.mark.slow(sample=0.15)
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 2), (1, 3), (3, 1)])
def test_any_number_of_nodes_gives_the_same_tokens(
    model: tuple[Path, list[Case]], num_prefill: int, num_decode: int
) -> None:
    folder, cases = model
    cluster = LocalCluster(folder, num_prefill=num_prefill, num_decode=num_decode, chunk_tokens=64, latency=2)
    serve_all(cluster, cases, together=True)
    cluster.close()


@pytest.mark.slow(sample=0.15)
@pytest.mark.parametrize("chunk_tokens", [16, None])
def test_local_prefill_gives_the_same_tokens(model: tuple[Path, list[Case]], chunk_tokens: int | None) -> None:
    folder, cases = model
    cluster = LocalCluster(folder, num_prefill=0, chunk_tokens=chunk_tokens)
    for tag in ("cold", "cached"):
        for number, (prompt, _) in enumerate(cases):
            cluster.submit(f"{tag}{number}", prompt, GREEDY, pair=(None, 0))
        cluster.run()
        for number, (_, expected) in enumerate(cases):
            assert cluster.answers[f"{tag}{number}"].output == expected
    counters = cluster.counters(cluster.decode[0])
    assert counters["local_prefills"] == 2 * len(cases)
    assert counters["pages_received"] == 0
    assert counters["prompt_tokens_cached"] > 0
    cluster.close()


@pytest.mark.slow(sample=0.15)
def test_local_and_remote_prompts_share_a_tiny_pool(model: tuple[Path, list[Case]]) -> None:
    folder, cases = model
    small = [case for case in cases if len(case[0]) <= 65] * 3
    cluster = LocalCluster(folder, page_size=4, chunk_tokens=16, decode_pages=24, latency=2, reserved_tokens=0)
    for number, (prompt, _) in enumerate(small):
        cluster.submit(f"r{number}", prompt, GREEDY, pair=(None if number % 2 else 0, 0))
    cluster.run()
    for number, (_, expected) in enumerate(small):
        assert cluster.answers[f"r{number}"].output == expected
    cluster.close()


@pytest.mark.slow(sample=0.15)
def test_without_a_radix_cache_tokens_are_the_same_and_no_page_is_kept(model: tuple[Path, list[Case]]) -> None:
    folder, cases = model
    cluster = LocalCluster(folder, chunk_tokens=64, is_cached=False)
    serve_all(cluster, cases, together=True)
    for member in cluster.members:
        assert member.role.load().num_free_pages == 256
    cluster.close()
