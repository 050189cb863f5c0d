"""Serves prompts around the window of a model of the library, and compares the answers with the library's tokens."""

from pathlib import Path
from typing import Any

from support.cluster.local_cluster import LocalCluster
from support.engine.library_models import WINDOW, make_library_model
from support.engine.reference_models import draw_prompts

from common.sampling_params import SamplingParams

PAGE_SIZE, MAX_NEW = 4, 40
GREEDY = SamplingParams(max_new_tokens=MAX_NEW, temperature=0.0)
#: A prompt, and the library's output.
Case = tuple[tuple[int, ...], tuple[int, ...]]


def make_cases(folder: Path, architecture: str) -> tuple[Path, list[Case]]:
    """A model, and prompts that are shorter and longer than its window."""
    model = make_library_model(folder, architecture, seed=3)
    lengths = [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 7 * WINDOW + 5]
    return model, draw_prompts(model, lengths, MAX_NEW, seed=5)


def make_cluster(folder: Path, **options: Any) -> LocalCluster:
    return LocalCluster(
        folder, **{"num_decode": 2, "page_size": PAGE_SIZE, "chunk_tokens": 16, "latency": 2, "reserved_tokens": 0,
                   "window": WINDOW, **options}
    )  # fmt: skip


def serve_all(cluster: LocalCluster, cases: list[Case], tag: str, **options: Any) -> None:
    submit_all(cluster, cases, tag, **options)
    check_all(cluster, cases, tag)


def submit_all(cluster: LocalCluster, cases: list[Case], tag: str, **options: Any) -> None:
    for number, (prompt, _) in enumerate(cases):
        pair = (0 if cluster.prefill else None, number % 2)
        cluster.submit(f"{tag}{number}", prompt, GREEDY, pair=pair, **options)


def check_all(cluster: LocalCluster, cases: list[Case], tag: str) -> None:
    cluster.run()
    for number, (prompt, expected) in enumerate(cases):
        answer = cluster.answers[f"{tag}{number}"]
        assert answer.error is None
        assert answer.output == expected, f"prompt of {len(prompt)} tokens"
    cluster.settle()
