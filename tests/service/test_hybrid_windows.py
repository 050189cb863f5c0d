"""Models with window layers among others keep window pages of the window only, and give the library's tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.cluster.local_cluster import LocalCluster, assert_all_pages_are_released
from support.cluster.window_cases import (
    GREEDY,
    MAX_NEW,
    PAGE_SIZE,
    Case,
    check_all,
    make_cases,
    serve_all,
    submit_all,
)
from support.cluster.window_cases import make_cluster as make_window_cluster
from support.engine.library_models import WINDOW
from support.engine.lora_adapters import make_adapter, merge
from support.engine.reference_models import draw_prompts, generate, load_reference

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
    return make_cases(tmp_path_factory.mktemp(request.param), request.param)


def make_cluster(folder: Path, *, num_prefill: int = 1, decode_pages: int = 128, **options: Any) -> LocalCluster:
    window_pages = (4 * COMPUTING, COMPUTING + 2 * DECODING)
    return make_window_cluster(
        folder,
        num_prefill=num_prefill,
        prefill_pages=256,
        decode_pages=decode_pages,
        window_pages=window_pages,
        **options,
    )


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
    answer = cluster.submit("long", prompt, GREEDY)
    cluster.run()
    assert answer.output == expected
    window_pages = cluster.decode[0].allocator.window_pages
    assert window_pages is not None
    groups, num_pages = window_pages.groups, -(-len(prompt) // PAGE_SIZE)
    num_windowed = num_pages - (len(prompt) - WINDOW + 1) // PAGE_SIZE
    assert num_windowed == 7 < num_pages
    sent = cluster.counters(cluster.prefill[0])["pages_sent"]
    assert sent == num_pages * groups.full_slabs + num_windowed * groups.window_slabs
    cluster.close()


@pytest.mark.slow
def test_requests_with_different_salts_share_no_page_of_either_pool(model: tuple[Path, list[Case]]) -> None:
    folder, cases = model
    cluster = make_cluster(folder)
    for salt in ("", "red", "blue"):
        before = cluster.counters(cluster.prefill[0])["prompt_tokens_cached"]
        serve_all(cluster, cases, f"{salt} cold ", salt=salt)
        assert cluster.counters(cluster.prefill[0])["prompt_tokens_cached"] == before
    for salt in ("blue", "", "red"):
        submit_all(cluster, cases, f"{salt} together ", salt=salt)
    for salt in ("", "red", "blue"):
        check_all(cluster, cases, f"{salt} together ")
    assert cluster.counters(cluster.prefill[0])["prompt_tokens_cached"] > 0
    assert_all_pages_are_released(cluster)
    cluster.close()


@pytest.fixture(scope="module")
def with_adapters(
    model: tuple[Path, list[Case]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Path], dict[str, list[Case]]]:
    """Two adapters by name; the prompts with the tokens of the model, as "", and of the models merged with each."""
    folder, cases = model
    made = tmp_path_factory.mktemp("adapters")
    adapters, of_adapter = {}, {"": cases}
    for seed, name in enumerate(("a", "b")):
        targets = ("q_proj", "k_proj", "v_proj", "o_proj")  # not the experts
        adapters[name] = make_adapter(made / name, folder, seed=seed, targets=targets)
        merged = load_reference(merge(made / f"merged-{name}", folder, adapters[name]))
        expected = [(prompt, generate(merged, prompt, MAX_NEW)) for prompt, _ in cases]
        of_adapter[name] = [(prompt, output) for prompt, output in expected if output is not None]
        assert len(of_adapter[name]) > 2
    assert len({dict(some)[cases[-1][0]] for some in of_adapter.values() if cases[-1][0] in dict(some)}) > 1
    return adapters, of_adapter


@pytest.mark.slow
@pytest.mark.parametrize("num_prefill", [0, 1])
def test_requests_with_adapters_give_the_tokens_of_the_merged_models(
    model: tuple[Path, list[Case]],
    with_adapters: tuple[dict[str, Path], dict[str, list[Case]]],
    num_prefill: int,
) -> None:
    """The same prompts for the model and for two adapters, at once and in a pool that some are retracted from."""
    folder, _ = model
    adapters, of_adapter = with_adapters
    limits = {"reserved_tokens": 1}  # of each output, so that the pool is too small for all
    cluster = make_cluster(folder, num_prefill=num_prefill, decode_pages=58, adapters=adapters, limits=limits)
    for tag in ("cold", "again"):
        for name, some in of_adapter.items():
            submit_all(cluster, some, f"{tag} {name} ", adapter=name, salt=name)
        for name, some in of_adapter.items():
            check_all(cluster, some, f"{tag} {name} ")
    assert sum(cluster.counters(node)["retractions"] for node in cluster.decode) > 0
    assert_all_pages_are_released(cluster)
    cluster.close()


@pytest.mark.slow
def test_windows_that_an_override_changes_give_the_tokens_of_the_library(
    model: tuple[Path, list[Case]], tmp_path: Path
) -> None:
    """A shorter window, in other layers than config.json says."""
    folder, cases = model
    window = 10
    overrides = {
        "sliding_window": window,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    config = json.loads((folder / "config.json").read_text())
    assert config.keys() >= overrides.keys()
    (changed / "config.json").write_text(json.dumps({**config, **overrides}))
    expected = draw_prompts(changed, [len(prompt) for prompt, _ in cases], MAX_NEW, seed=6)
    cluster = make_cluster(folder, window=window, overrides=overrides)
    for tag in ("cold", "again"):
        serve_all(cluster, expected, tag)
    window_pages = cluster.decode[0].allocator.window_pages
    assert window_pages is not None
    assert (window_pages.groups.window, window_pages.groups.full) == (window, (0,))
    assert_all_pages_are_released(cluster)
    cluster.close()
