"""``bench disagg`` without its runs: the plan, pooled percentiles and the table; and the random model."""

import argparse
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.service.processes import descendants, environment
from support.waiting import until
from tokenizers import Tokenizer

from common.engine.models.config import ModelConfig
from common.errors import ConfigError
from scripts.benchmarks.services import disagg
from scripts.benchmarks.services.disagg import (
    Options,
    Point,
    Run,
    Services,
    add_options,
    minutes,
    points,
    pooled,
    table,
)
from scripts.models.random_model import QWEN3_600M, random_model, shapes


def parse(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(words)


QUICK = ("--models=small", "--arrangements=split,colocated", "--small-seconds=10", "--small-capacity-requests=300")


def report(ttft: list[float], itl: list[list[float]], **more: Any) -> dict[str, Any]:
    """The fields of a report that the table uses."""
    return {
        "samples": {"ttft": ttft, "itl": itl, "e2e": [2 * value for value in ttft]},
        "throughput": {"requests_per_s": 0.5, "output_tokens_per_s": 32.0},
        "num_measured": len(ttft), "errors": {"count": 0}, "reasons": [], **more,
    }  # fmt: skip


def run_of(arrangement: str, found: dict[str, Any]) -> Run:
    return Point("qwen3-0.6b", arrangement, 0.5, 0.5, 10.0, 0), found


def test_arrangements_take_turns_in_alternating_order() -> None:
    options = parse("--arrangements=split,colocated", "--rounds=2", "--seed=7")
    planned = list(points(options, "qwen3-0.6b", 1.0))
    assert [(point.rate, point.arrangement) for point in planned[:6]] == [
        (0.3, "split"), (0.3, "colocated"), (0.6, "colocated"), (0.6, "split"), (0.85, "split"), (0.85, "colocated"),
    ]  # fmt: skip
    assert [point.arrangement for point in planned[6:8]] == ["colocated", "split"]  # the next round continues
    assert [point.seed for point in planned] == [7] * 6 + [8] * 6


def test_vllm_serves_the_large_model_after_the_arrangements(tmp_path: Path) -> None:
    options = parse("--arrangements=split,colocated", f"--peer=vllm={tmp_path}")
    assert [point.arrangement for point in points(options, "qwen3-0.6b", 0.0)][:3] == ["split", "colocated", "vllm"]
    assert {point.arrangement for point in points(options, "small", 20.0)} == {"split", "colocated"}
    assert minutes(options) > minutes(parse("--arrangements=split,colocated"))


def test_another_peer_than_vllm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--peer llama.cpp=/tmp: give vllm=PATH \(a python with vLLM\)$"):
        disagg.run(parse("--peer=llama.cpp=/tmp"))


def test_a_benchmark_that_is_stopped_prints_the_runs_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(point: Point, folder: str, services: Services) -> dict[str, Any]:
        if point.arrangement == "colocated":
            raise KeyboardInterrupt
        return report([0.5], [[0.1, 0.1, 0.2]])

    monkeypatch.setattr(disagg, "measure", measure)
    monkeypatch.setattr(disagg, "keep_to", lambda num_cores: None)
    with pytest.raises(KeyboardInterrupt):
        disagg.run(parse(*QUICK, "--capacity=10"))
    shown = capsys.readouterr().out
    assert "3 requests/s (30% of capacity)" in shown
    assert "1 prefill + 1 decode" in shown


def test_a_run_whose_tokens_mostly_arrive_together_has_all_other_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As at a client that has no core for some time."""
    found = report([0.5], [[0.1, 0.0, 0.0, 0.0]])
    summaries = {"ttft": {"count": 1, "p50": 0.5}, "itl": {"count": 4, "p50": 0.0, "p99": 0.097}}
    loaded = SimpleNamespace(latency=summaries, throughput=found["throughput"], reasons=[], to_dict=lambda: found)
    monkeypatch.setattr(disagg, "load", lambda *_, **__: loaded)
    monkeypatch.setattr(disagg, "running_service", lambda flags: nullcontext("http://127.0.0.1:1"))
    monkeypatch.setattr(disagg, "keep_to", lambda num_cores: None)
    figures = disagg.run(parse("--models=small", "--arrangements=split", "--capacity=10", "--shares=1"))
    assert figures == {
        "small, split, 10/s, tokens/s": 32.0,
        "small, split, 10/s, ttft_p50 ms": 500.0, "small, split, 10/s, e2e_p50 ms": 1000.0,
    }  # fmt: skip
    shown = capsys.readouterr()
    assert "inter-token p50 0.0 ms, p99 97.0 ms\n" in shown.err
    assert "in flight" not in shown.out, "a given capacity was not measured"


def test_the_figures_are_those_of_all_rounds_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disagg, "measure", lambda point, *_: report([1.0 + 2 * point.seed], [[0.1, 0.1]]))
    monkeypatch.setattr(disagg, "keep_to", lambda num_cores: None)
    words = ("--models=small", "--arrangements=split", "--capacity=10", "--shares=1", "--rounds=2")
    assert disagg.run(parse(*words))["small, split, 10/s, ttft_p50 ms"] == 2000.0


def test_rates_are_shares_of_the_capacity() -> None:
    planned = list(points(parse(*QUICK), "small", 20.0))
    assert sorted({point.rate for point in planned}) == [6.0, 12.0, 17.0]
    assert {point.length_s for point in planned} == {10.0}


def test_the_defaults_take_about_an_hour() -> None:
    assert 30 < minutes(parse()) < 75
    assert minutes(parse(*QUICK)) < 5


@pytest.mark.parametrize("word", ["--models=large", "--arrangements=split,three", "--shares=most"])
def test_wrong_options_are_refused_by_name(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(word)
    assert f"argument {word.partition('=')[0]}: " in capsys.readouterr().err


def test_percentiles_are_those_of_all_rounds_together() -> None:
    cell = pooled([report([1.0, 2.0], [[0.1, 0.3], [0.5]]), report([9.0], [[]])])
    assert cell.times["ttft_p50"] == 2.0
    assert cell.times["itl_p50"] == pytest.approx(0.3)
    assert cell.count == 3


def test_the_table_shows_ratios_to_the_first_arrangement() -> None:
    first, other = report([0.5], [[0.05, 0.05]]), report([1.0], [[0.2, 0.2]])
    lines = table([run_of("split", first), run_of("colocated", other)], {})
    ratios = next(line for line in lines if "ratio to the first" in line)
    assert ratios.split("first")[1].split() == [*2 * ["2.00x"], *3 * ["4.00x"], *2 * ["2.00x"], *2 * ["1.00x"]]


def test_the_table_shows_how_far_the_slowest_tokens_are_from_the_median() -> None:
    lines = table([run_of("split", report([0.5], [[0.13, 0.1, 0.1, 0.11]]))], {})
    row = next(line for line in lines if line.startswith("1 prefill + 1 decode"))
    assert row.split()[-2:] == ["1.23", "1.10"]  # all gaps: 0.1, 0.1, 0.11, 0.13; without the first: 0.1, 0.1, 0.11


def test_capacities_stand_above_the_rows_with_their_ratio_to_the_first() -> None:
    lines = table([], {("qwen3-0.6b", "split"): 0.9, ("qwen3-0.6b", "vllm"): 0.6})
    assert [line.split()[-2:] for line in lines[-2:]] == [["decode", "0.9"], ["0.6", "1.50x"]]


def test_a_run_without_answers_has_a_row() -> None:
    lines = table([run_of("split", report([], []))], {})
    assert any(line.startswith("1 prefill + 1 decode") and " - " in line for line in lines)


def test_the_table_marks_invalid_runs() -> None:
    lines = table([run_of("split", report([0.5], [[0.1]], reasons=["the client was late"]))], {})
    assert any("invalid, the client was late" in line for line in lines)


def test_the_shape_has_as_many_parameters_as_the_model_it_is_named_after() -> None:
    total = 0
    for shape in shapes(QWEN3_600M).values():
        size = 1
        for length in shape:
            size *= length
        total += size
    assert total == 596_049_920  # Qwen/Qwen3-0.6B with its embedding counted once


@pytest.mark.slow
def test_a_random_model_is_made_once_and_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = QWEN3_600M | {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 2000,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    folder = random_model(config)
    made_at = (folder / "model.safetensors").stat().st_mtime_ns
    assert random_model(config) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made_at
    assert [path.name for path in (tmp_path / "baton").iterdir()] == [folder.name]
    loaded = ModelConfig.load(str(folder))
    assert (loaded.num_layers, loaded.vocab_size, loaded.dtype) == (2, 2000, "bfloat16")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode([1024, 1999]) == " w1024 w1999"


def test_the_process_that_writes_a_model_ends_with_the_one_that_wants_it(tmp_path: Path) -> None:
    program = "from scripts.models.random_model import random_model; random_model()"
    variables = environment() | {"XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], env=variables) as maker:
        until(lambda: any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in descendants(maker.pid)))
        writers = descendants(maker.pid)
        maker.kill()
    until(lambda: not any(os.path.exists(f"/proc/{writer}") for writer in writers))
    assert not list(tmp_path.glob("baton/*/model/model.safetensors"))  # it would have been written seconds later
