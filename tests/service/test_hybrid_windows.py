"""Models with window layers among others keep window pages of the window only, and give the library's tokens."""

from pathlib import Path

import pytest
from support.cluster.local_cluster import LocalCluster, assert_all_pages_are_released
from support.engine.library_models import WINDOW, make_library_model
from support.engine.reference_models import draw_prompts

from common.sampling_params import SamplingParams

PAGE_SIZE, CHUNK, MAX_NEW = 4, 16, 40
Case = tuple[tuple[int, ...], tuple[int, ...]]
#: Window pages that a request holds at most: while it is computed in chunks, and while it is decoded.
COMPUTING, DECODING = 12, 7


@pytest.fixture(
    scope="module",
    params=[
        "Gemma3ForCausalLM",
        pytest.param("GptOssForCausalLM", marks=pytest.mark.slow(sample=0)),
        pytest.param("Olmo3ForCausalLM", marks=pytest.mark.slow(sample=0)),
        pytest.param("Gemma2ForCausalLM", marks=pytest.mark.slow(sample=0)),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Case]]:
    folder = make_library_model(tmp_path_factory.mktemp(request.param), request.param, seed=3)
    lengths = [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 7 * WINDOW + 5]
    return folder, draw_prompts(folder, lengths, MAX_NEW, seed=5)


def make_cluster(folder: Path, *, num_prefill: int = 1, decode_pages: int = 128) -> LocalCluster:
    return LocalCluster(
        folder,
        num_prefill=num_prefill,
        num_decode=2,
        page_size=PAGE_SIZE,
        chunk_tokens=CHUNK,
        prefill_pages=256,
        decode_pages=decode_pages,
        latency=2,
        conservativeness=0,
        window=WINDOW,
        window_pages=(4 * COMPUTING, COMPUTING + 2 * DECODING),
    )


def serve_all(cluster: LocalCluster, cases: list[Case], tag: str) -> None:
    sampling = SamplingParams(max_new_tokens=MAX_NEW, temperature=0.0)
    for number, (prompt, _) in enumerate(cases):
        cluster.submit(f"{tag}{number}", prompt, sampling, pair=(0 if cluster.prefill else None, number % 2))
    cluster.run()
    for number, (prompt, expected) in enumerate(cases):
        answer = cluster.answers[f"{tag}{number}"]
        assert answer.error is None
        assert answer.output == expected, f"prompt of {len(prompt)} tokens"
    cluster.settle()


def test_tokens_are_the_librarys_cold_and_cached(model: tuple[Path, list[Case]]) -> None:
    folder, cases = model
    cluster = make_cluster(folder)
    for tag in ("cold", "again"):
        serve_all(cluster, cases, tag)
    assert cluster.counters(cluster.prefill[0])["prompt_tokens_cached"] > 0
    assert_all_pages_are_released(cluster)
    cluster.close()


def test_tokens_are_the_librarys_after_retractions(model: tuple[Path, list[Case]]) -> None:
    folder, cases = model
    cluster = make_cluster(folder, decode_pages=58)
    serve_all(cluster, cases, "retracted")
    assert sum(cluster.counters(node)["retractions"] for node in cluster.decode) > 0
    assert_all_pages_are_released(cluster)
    cluster.close()


def test_prompts_computed_by_decode_nodes_give_the_librarys_tokens(model: tuple[Path, list[Case]]) -> None:
    folder, cases = model
    cluster = make_cluster(folder, num_prefill=0)
    serve_all(cluster, cases, "local")
    assert_all_pages_are_released(cluster)
    cluster.close()


def test_decode_nodes_are_sent_window_pages_of_the_window_only(model: tuple[Path, list[Case]]) -> None:
    folder, cases = model
    cluster = make_cluster(folder)
    prompt, expected = cases[-1]
    answer = cluster.submit("long", prompt, SamplingParams(max_new_tokens=MAX_NEW, temperature=0.0))
    cluster.run()
    assert answer.output == expected
    windows = cluster.decode[0].allocator.windows
    assert windows is not None
    groups, num_pages = windows.groups, -(-len(prompt) // PAGE_SIZE)
    num_windowed = num_pages - (len(prompt) - WINDOW + 1) // PAGE_SIZE
    assert num_windowed == 7 < num_pages
    sent = cluster.counters(cluster.prefill[0])["pages_sent"]
    assert sent == num_pages * groups.full_units + num_windowed * groups.window_units
    cluster.close()
