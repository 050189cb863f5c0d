"""``simulate --experiment``: every case can be simulated, a small one runs, and the table says what was found."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.cli import parse
from common.errors import ConfigError
from scripts.load_tester.workload.plan import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.experiments import command
from scripts.simulator.experiments.cases import DISTSERVE, EXPERIMENTS, Case, Experiment, Variant, colocated, separate
from scripts.simulator.experiments.run import Measured, case_config, lines_of
from scripts.simulator.main import main
from scripts.simulator.planning.evaluation import deployed
from scripts.simulator.planning.windows import windows_of


def config(*words: str) -> SimulateConfig:
    return parse(SimulateConfig, words, command="simulate")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_variant_has_a_valid_configuration_and_as_many_devices(name: str) -> None:
    given = config(f"--experiment={name}")
    for case in EXPERIMENTS[name].cases:
        assert sum(variant.is_baseline for variant in case.variants) == 1
        assert len({variant.deployment.num_devices for variant in case.variants}) == 1
        for variant in case.variants:
            found = deployed(case_config(given, case, variant), variant.deployment)
            assert found.slos and found.node_models
            assert found.prefill == variant.deployment.num_prefill
            windows = windows_of(found, num_windows=3, num_requests=30)
            assert make_plan(windows[0]).num_requests == 10


def test_a_trace_replaces_the_drawn_load(tmp_path: Path) -> None:
    case = EXPERIMENTS["mooncake"].cases[0]
    found = case_config(config("--experiment=mooncake", f"--trace={tmp_path / 'x'}"), case, case.variants[0])
    assert found.prefix_len == 0
    assert found.disable_radix_cache


SMALL = Experiment(
    "distserve",
    "A claim.",
    (
        Case(
            "small",
            {"input_len": "400", "output_len": "4", "slo_ttft": "60ms"},
            20.0,
            (Variant("pool", colocated(2, -1), is_baseline=True), Variant("separate", separate(1, 1))),
        ),
    ),
)


def test_the_command_prints_and_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.EXPERIMENTS, "distserve", SMALL)  # type: ignore[misc]
    written = tmp_path / "found.json"
    words = ["--plan-windows=3", "--plan-requests=18", "--plan-processes=1", f"--json={written}", "--no-progress"]
    assert main(["--experiment=distserve", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("A claim.")
    assert "best separate against best colocated" in shown
    rows = json.loads(written.read_text())["measured"]
    assert [row["variant"] for row in rows] == ["pool", "separate"]
    assert all(row["requests_per_s_per_device"] > 1.0 for row in rows)


def test_rates_are_shown_against_the_baseline() -> None:
    case = DISTSERVE.cases[0]
    rates = dict(zip([variant.name for variant in case.variants], (2.0, 4.0, 1.0, 3.0, 6.0, 0.0), strict=True))
    lines = lines_of(
        replace(DISTSERVE, cases=(case,)), [Measured(case, variant, rates[variant.name]) for variant in case.variants]
    )
    assert lines[-1] == "  best separate against best colocated: 1.50 times the requests"
    assert [line.split()[-1] for line in lines[3:-1]] == ["1.00", "2.00", "0.50", "1.50", "3.00", "0.00"]


def test_a_rate_that_requests_are_too_few_to_find_is_not_shown_as_the_highest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.EXPERIMENTS, "distserve", SMALL)  # type: ignore[misc]
    words = ["--plan-windows=3", "--plan-requests=3", "--plan-processes=1", "--no-progress"]
    assert main(["--experiment=distserve", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-3:] for line in lines[3:5]] == [["over", "1.39e+03", "-"]] * 2
    assert lines[5] == "  requests are too few to find the highest rate: raise --plan-requests"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--experiment=distserve", "--prefill=2"], "--prefill has no effect with --experiment"),
        (["--experiment=distserve", "--slo-ttft=1s"], "--slo-ttft has no effect with --experiment"),
        (["--experiment=distserve", "--plan", "--slo-ttft=1s"], "--experiment has no effect with --plan"),
    ],
)
def test_options_without_effect_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(*words)
