"""The disaggregation benchmark without its runs: what is planned, how runs are pooled, and what the table says."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.engine.model_config import ModelConfig
from common.errors import BatonError, ConfigError
from scripts.benchmarks.disagg import (
    Bench,
    Options,
    add_options,
    checked,
    earlier_runs,
    lines_of,
    minutes,
    points,
    pooled,
)
from scripts.load_tester.reporting.files import write_json
from scripts.models.random_model import QWEN3_600M, random_model, shapes


def parse(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return checked(parser.parse_args(words))


QUICK = ("--models=small", "--arrangements=split,colocated", "--small-seconds=10", "--capacity-seconds=6")


def report(ttft: list[float], itl: list[list[float]], **more: Any) -> dict[str, Any]:
    """As the harness writes one, as far as the table looks."""
    return {
        "samples": {"ttft": ttft, "itl": itl, "e2e": [2 * value for value in ttft]},
        "throughput": {"requests_per_s": 0.5, "output_tokens_per_s": 32.0},
        "num_measured": len(ttft), "errors": {"count": 0}, "reasons": [], **more,
    }  # fmt: skip


def run_of(arrangement: str, found: dict[str, Any], *, model: str = "qwen3-0.6b") -> dict[str, Any]:
    return {"point": {"model": model, "arrangement": arrangement, "rate": 0.5, "share": 0.0}, "report": found}


def test_arrangements_take_turns_and_change_their_order_from_rate_to_rate() -> None:
    options = parse("--arrangements=split,colocated", "--rounds=2", "--seed=7")
    planned = list(points(options, "qwen3-0.6b", 0.0))
    assert [(point.rate, point.arrangement) for point in planned[:6]] == [
        (0.25, "split"), (0.25, "colocated"), (0.5, "colocated"), (0.5, "split"), (0.75, "split"), (0.75, "colocated"),
    ]  # fmt: skip
    assert [point.arrangement for point in planned[6:8]] == ["colocated", "split"]  # the next round goes on so
    assert [point.seed for point in planned] == [7] * 6 + [8] * 6


def test_the_small_model_is_loaded_by_shares_of_its_capacity() -> None:
    planned = list(points(parse(*QUICK), "small", 20.0))
    assert sorted({point.rate for point in planned}) == [6.0, 12.0, 17.0]
    assert {point.length_s for point in planned} == {10.0}


def test_the_defaults_take_about_an_hour() -> None:
    assert 45 < minutes(parse()) < 75
    assert minutes(parse(*QUICK)) < 5


@pytest.mark.parametrize("word", ["--models=large", "--arrangements=split,three", "--rates=fast"])
def test_wrong_options_are_refused_by_name(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        parse(word)


def test_percentiles_are_those_of_all_rounds_together() -> None:
    cell = pooled([report([1.0, 2.0], [[0.1, 0.3], [0.5]]), report([9.0], [[]])])
    assert cell.times["ttft_p50"] == 2.0
    assert cell.times["itl_p50"] == pytest.approx(0.3)
    assert cell.count == 3


def test_the_table_says_how_many_times_better_the_first_is() -> None:
    first, other = report([0.5], [[0.05, 0.05]]), report([1.0], [[0.2, 0.2]])
    lines = lines_of(
        {"capacity": {}, "runs": [run_of("split", first), run_of("colocated", other)]}, ["split", "colocated"]
    )
    ratios = next(line for line in lines if "ratio to the first" in line)
    assert ratios.split("first")[1].split() == ["2.00x", "2.00x", "4.00x", "4.00x", "2.00x", "2.00x", "1.00x", "1.00x"]


def test_figures_from_another_machine_are_marked_as_such_and_only_where_they_belong() -> None:
    text = "\n".join(lines_of({"capacity": {}, "runs": [run_of("split", report([0.5], [[0.1]]))]}, ["split"]))
    assert "vLLM 0.32" in text
    assert "another machine" in text
    small = {"capacity": {}, "runs": [run_of("split", report([0.5], [[0.1]]), model="small")]}
    assert "vLLM" not in "\n".join(lines_of(small, ["split"]))


def test_a_run_in_which_nothing_was_answered_still_has_its_row() -> None:
    lines = lines_of({"capacity": {}, "runs": [run_of("split", report([], []))]}, ["split"])
    assert any(line.startswith("1 prefill + 1 decode") and " - " in line for line in lines)


def test_a_run_that_cannot_be_trusted_says_so_in_the_table() -> None:
    doubtful = report([0.5], [[0.1]], reasons=["the client was late"])
    lines = lines_of({"capacity": {}, "runs": [run_of("split", doubtful)]}, ["split"])
    assert any("invalid, the client was late" in line for line in lines)


def test_only_a_file_of_this_benchmark_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    fresh = earlier_runs(str(path))
    assert fresh["runs"] == []
    write_json(fresh | {"capacity": {"split": 3.5}}, str(path))
    assert earlier_runs(str(path))["capacity"] == {"split": 3.5}
    assert earlier_runs(None)["capacity"] == {}
    path.write_text(json.dumps({"schema": 1}))
    with pytest.raises(BatonError):
        earlier_runs(str(path))


class FakeReport:
    """As much of a report as a run is asked for."""

    reasons: tuple[str, ...] = ()
    throughput = {"requests_per_s": 20.0}  # noqa: RUF012
    latency = {"ttft": {"count": 0}, "itl": {"count": 0}}  # noqa: RUF012

    def to_dict(self) -> dict[str, Any]:
        return report([0.5], [[0.1]])


def test_what_was_measured_before_an_interruption_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, path = parse(*QUICK), str(tmp_path / "runs.json")
    loads: list[tuple[str, dict[str, Any]]] = []

    def load(self: Bench, place: str, arrangement: str, *times: float, **when: Any) -> FakeReport:
        loads.append((arrangement, when))
        if len(loads) == 5:
            raise KeyboardInterrupt
        return FakeReport()

    monkeypatch.setattr(Bench, "_load", load)
    with pytest.raises(KeyboardInterrupt):
        Bench(options, path, earlier_runs(path)).run()
    assert [when for _, when in loads[:2]] == [{"concurrency": 32}] * 2
    found = Bench(options, path, earlier_runs(path)).run()
    assert len(found["runs"]) == 6
    assert len(loads) == 2 + 6 + 1  # the one that was interrupted came twice
    assert loads[4] == loads[5] == ("colocated", {"rate": "12"})
    # Runs of other lengths may lie in the same file, and are not mixed in.
    others = parse(*QUICK, "--seed=9")
    assert len(Bench(others, path, earlier_runs(path)).run()["runs"]) == 6
    assert len(json.loads(Path(path).read_text())["runs"]) == 12


def test_the_shape_has_as_many_parameters_as_the_model_it_is_named_after() -> None:
    total = 0
    for shape in shapes(QWEN3_600M).values():
        size = 1
        for length in shape:
            size *= length
        total += size
    assert total == 596_049_920  # Qwen/Qwen3-0.6B with its embedding counted once


def test_a_random_model_is_made_once_can_be_loaded_and_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
