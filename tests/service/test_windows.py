"""Models whose layers all attend within a window keep the pages of the window only, and give the library's tokens."""

from pathlib import Path

import pytest
from support.cluster.local_cluster import LocalCluster, assert_all_pages_are_released
from support.cluster.window_cases import GREEDY, MAX_NEW, PAGE_SIZE, Case, make_cases, serve_all
from support.cluster.window_cases import make_cluster as make_window_cluster
from support.engine.library_models import WINDOW


@pytest.fixture(
    scope="module",
    params=[
        "MistralForCausalLM",
        pytest.param("Phi3ForCausalLM", marks=pytest.mark.slow(sample=0)),
        pytest.param("Starcoder2ForCausalLM", marks=pytest.mark.slow(sample=0)),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Case]]:
    return make_cases(tmp_path_factory.mktemp(request.param), request.param)


def make_cluster(
    folder: Path, *, num_prefill: int = 1, prefill_pages: int = 18, decode_pages: int = 18
) -> LocalCluster:
    """By default each pool has three times the window, and less than half of the longest prompt."""
    return make_window_cluster(folder, num_prefill=num_prefill, prefill_pages=prefill_pages, decode_pages=decode_pages)


@pytest.mark.parametrize("decode_pages", [18, 64])
def test_requests_longer_than_the_pools_give_the_librarys_tokens(
    model: tuple[Path, list[Case]], decode_pages: int
) -> None:
    folder, cases = model
    cluster = make_cluster(folder, decode_pages=decode_pages)
    for tag in ("cold", "again"):
        serve_all(cluster, cases, tag)
    retractions = sum(cluster.counters(node)["retractions"] for node in cluster.decode)
    assert (retractions > 0) == (decode_pages == 18)
    assert_all_pages_are_released(cluster)
    cluster.close()


def test_prompts_computed_by_decode_nodes_give_the_librarys_tokens(model: tuple[Path, list[Case]]) -> None:
    folder, cases = model
    cluster = make_cluster(folder, num_prefill=0)
    serve_all(cluster, cases, "local")
    assert_all_pages_are_released(cluster)
    cluster.close()


def test_a_prefill_node_with_room_caches_whole_prompts_and_ships_the_window(model: tuple[Path, list[Case]]) -> None:
    folder, cases = model
    cluster = make_cluster(folder, prefill_pages=128, decode_pages=64)
    prompt, _ = long = cases[-1]
    serve_all(cluster, [long], "cold")
    serve_all(cluster, [long], "cached")
    assert cluster.answers["cached0"].cached_tokens == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    sent = cluster.counters(cluster.prefill[0])["pages_sent"]
    assert sent == 2 * (-(-len(prompt) // PAGE_SIZE) - (len(prompt) - WINDOW + 1) // PAGE_SIZE)
    cluster.close()


def test_a_request_that_outgrew_its_window_moves_with_the_pages_of_the_window(model: tuple[Path, list[Case]]) -> None:
    folder, cases = model
    cluster = make_cluster(folder, decode_pages=64)
    prompt, expected = cases[4]
    answer = cluster.submit("a", prompt, GREEDY)
    cluster.run_until("a", MAX_NEW - 6)
    received = cluster.counters(cluster.decode[0])["pages_received"]
    cluster.move("a", 1)
    cluster.run()
    assert answer.error is None
    assert answer.output == expected
    cluster.settle()
    assert 0 < cluster.counters(cluster.decode[1])["pages_received"] <= received + 1
    assert cluster.counters(cluster.decode[1])["prompt_tokens_computed"] == 0
    assert_all_pages_are_released(cluster)
    cluster.close()
