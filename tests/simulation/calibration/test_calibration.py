"""``simulate --calibrate``: the fit finds the costs behind samples, and the command measures a live server."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.load.records import record

from common.config.cli import parse
from common.errors import ConfigError
from scripts.benchmarks.harness.mock_server import mock_server
from scripts.load_tester.client.server_info import ServerInfo
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.workload.plan import Plan
from scripts.load_tester.workload.planned_request import UNIQUE, PlannedRequest, segment_key
from scripts.simulator.calibration import drive
from scripts.simulator.calibration.drive import (
    Driver,
    ServiceSize,
    designed_rows,
    prompt_lengths,
    refuse_other_pairs,
    refuse_several,
    service_size,
)
from scripts.simulator.calibration.fit import (
    TooFewSamples,
    fit_beside_decode,
    fit_costs,
    grouped_fit,
    non_negative_fit,
)
from scripts.simulator.calibration.samples import HandoffSample, PromptSample, Samples, StepSample, StreamedRequest
from scripts.simulator.config import SimulateConfig
from scripts.simulator.costs import Costs, StepWork
from scripts.simulator.hardware.node_model import Profile, find_hardware
from scripts.simulator.main import main
from scripts.simulator.simulation import Simulation

KV_BYTES = 131_072


def simulated(words: Sequence[str], lengths: Sequence[int], num_output: int) -> list[StreamedRequest]:
    """Run requests of these lengths through a simulated service, in a closed loop."""
    return simulated_sizes(words, [(length, num_output) for length in lengths])


def simulated_sizes(words: Sequence[str], sizes: Sequence[tuple[int, int]]) -> list[StreamedRequest]:
    """Run requests with these numbers of prompt and output tokens through a simulated service, in a closed loop."""
    config = parse(SimulateConfig, [*words, f"--num-requests={len(sizes)}"], command="simulate")
    requests = [
        PlannedRequest(index, 0.0, ((segment_key(UNIQUE, index), num_input),), num_output)
        for index, (num_input, num_output) in enumerate(sizes)
    ]
    simulation = Simulation(config, Plan([[one] for one in requests], len(requests), False, None, [], {}))
    simulation.run()
    return [
        StreamedRequest(one.planned.num_input, one.due_at, one.stamps_s, one.timings)
        for one in simulation.client.outcomes
    ]


def test_the_fit_finds_the_costs_of_a_simulated_service() -> None:
    words = ["--step-cost=8ms", "--prompt-token-cost=90us", "--row-cost=300us", "--context-token-cost=0.2us",
             "--message-cost=2ms", "--wire-latency=3ms", "--wire-bandwidth=5e8"]  # fmt: skip
    samples = Samples()
    samples.add_alone(simulated([*words, "--concurrency=1"], [16, 64, 256, 1_024, 4_096] * 3, 8))
    for batch in (2, 8, 16):
        samples.add_together(simulated([*words, f"--concurrency={batch}"], [64, 300, 900] * batch, 40))
    fit = fit_costs(samples, KV_BYTES)
    costs = fit.costs
    assert costs.step_s == pytest.approx(8e-3, rel=0.05)
    assert costs.row_s == pytest.approx(300e-6, rel=0.1)
    assert costs.context_token_s == pytest.approx(0.2e-6, rel=0.25)
    assert costs.prompt_token_s == pytest.approx(90e-6, rel=0.05)
    assert costs.message_s == pytest.approx(2e-3, rel=0.1)
    assert costs.wire_bytes_per_s == pytest.approx(5e8, rel=0.1)
    assert costs.wire_s == pytest.approx(3e-3, abs=3e-3)
    assert fit.errors["steps"] < 0.02 and fit.errors["prompts"] < 0.02
    assert fit.samples["prompts"] == 15


def test_the_fit_finds_the_costs_beside_another_node(tmp_path: Path) -> None:
    costs = {"step_s": 6e-3, "row_s": 400e-6, "prompt_token_s": 350e-6, "message_s": 1e-3, "wire_s": 2e-3}
    beside = {"step_s": 7e-3, "row_s": 600e-6, "prompt_token_s": 400e-6}
    profile = Profile("m", costs, KV_BYTES, 100_000, beside=beside)
    file = tmp_path / "profile.json"
    file.write_bytes(msgspec.json.encode(profile))
    words = [f"--hardware={file}", "--cores=2", "--chunked-prefill-size=512"]
    samples = Samples()
    samples.add_alone(simulated([*words, "--concurrency=1"], [16, 64, 256, 1_024] * 3, 8))
    samples.add_together(simulated([*words, "--concurrency=4"], [16] * 12, 40))
    for batch in (1, 4, 8):
        found = simulated_sizes(
            [*words, f"--concurrency={batch + 2}"], [(16, 400)] * batch + [(64, 2), (256, 2), (512, 2)] * 8
        )
        samples.add_beside(found[:batch], found[batch:])
    fit = fit_costs(samples, KV_BYTES)
    assert fit.beside is not None
    assert fit.beside.step_s == pytest.approx(7e-3, rel=0.05)
    assert fit.beside.row_s == pytest.approx(600e-6, rel=0.1)
    assert fit.beside.prompt_token_s == pytest.approx(400e-6, rel=0.05)
    assert fit.costs.prompt_token_s == pytest.approx(350e-6, rel=0.05)


def test_the_fit_finds_the_costs_beside_another_decode_node(tmp_path: Path) -> None:
    costs = {"step_s": 6e-3, "row_s": 400e-6, "prompt_token_s": 350e-6}
    beside = {"step_s": 7e-3, "row_s": 600e-6, "prompt_token_s": 400e-6}
    decode = {"step_s": 9e-3, "row_s": 700e-6}
    file = tmp_path / "profile.json"
    file.write_bytes(msgspec.json.encode(Profile("m", costs, KV_BYTES, 100_000, beside=beside, beside_decode=decode)))
    samples = Samples()
    for batch in (1, 4, 8):
        words = [f"--hardware={file}", "--cores=2", "--decode=2", f"--concurrency={2 * batch}"]
        samples.add_on_two_nodes(simulated(words, [16] * 4 * batch, 100))
    found, error = fit_beside_decode(samples)
    assert found.step_s == pytest.approx(9e-3, rel=0.05)
    assert found.row_s == pytest.approx(700e-6, rel=0.1)
    assert error < 0.05


@pytest.mark.slow
def test_the_driver_measures_two_decode_nodes(tmp_path: Path) -> None:
    costs = {"step_s": 6e-3, "row_s": 400e-6, "prompt_token_s": 350e-6}
    beside_decode = {"step_s": 9e-3, "row_s": 700e-6}
    file = tmp_path / "profile.json"
    profile = Profile("m", costs, KV_BYTES, 100_000, beside=costs, beside_decode=beside_decode)
    file.write_bytes(msgspec.json.encode(profile))

    class SimulatedDriver(Driver):
        def _send(self, rows: Iterable[dict[str, int]], *, concurrency: int, **limits: object) -> list[StreamedRequest]:
            words = [f"--hardware={file}", "--cores=2", "--decode=2", f"--concurrency={concurrency}"]
            sent = itertools.islice(rows, concurrency + 16)
            return simulated_sizes(words, [(row["input_length"], row["output_length"]) for row in sent])

    size = ServiceSize("m", 4_096, 1, 2, 100_000)
    driver = SimulatedDriver(LoadtestConfig(), ServerInfo("m", 4_096, "baton", {}), size, lambda words: None)
    driver.measure_decode_nodes(3.0)
    found, _ = fit_beside_decode(driver.samples)
    assert found.step_s == pytest.approx(9e-3, rel=0.05)
    assert found.row_s == pytest.approx(700e-6, rel=0.1)


def test_each_of_two_decode_nodes_computes_half_of_the_rows_while_all_are_in_flight() -> None:
    first, second = StreamedRequest(100, 0.0, [1.0, 2.0, 3.0, 4.0]), StreamedRequest(50, 0.0, [1.0, 2.0, 3.0])
    samples = Samples()
    samples.add_on_two_nodes([first, second])
    # At 3.0, in the middle of the first's later gaps, the second has ended. At 2.5, of its own, both have 2 tokens.
    assert samples.steps_beside_decode == [StepSample(1, (102 + 52) // 2, (1.0,))]
    with pytest.raises(TooFewSamples, match="1 decode steps beside another decode node"):
        fit_beside_decode(samples)


def test_only_what_both_nodes_computed_at_once_counts_as_beside() -> None:
    output = StreamedRequest(10, 0.0, [1.0, 2.0, 3.0, 4.0])
    early = StreamedRequest(20, 0.5, [1.5, 1.6], {"prefill_s": 0.4})  # sent before the output began
    during = StreamedRequest(30, 1.2, [2.6, 2.7], {"prefill_s": 0.9, "prefill_queue_s": 0.3})
    samples = Samples()
    samples.add_beside([output], [early, during])
    assert samples.prompts_beside == [PromptSample(30, pytest.approx(1.1), 0.9)]
    assert samples.steps_beside == []  # the middle of its gaps, at 3.0, is past the last prompt
    samples.add_beside([output], [during, StreamedRequest(20, 2.7, [3.5], {"prefill_s": 0.4})])
    assert samples.steps_beside == [StepSample(1, 13, (1.0, 1.0))]


def test_prompts_that_a_node_computed_together_do_not_count() -> None:
    output = StreamedRequest(10, 0.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    first, second = (StreamedRequest(20, 1.2, [stamp], {"prefill_s": stamp - 1.2}) for stamp in (2.2, 2.6))
    third = StreamedRequest(30, 2.5, [3.6], {"prefill_s": 1.05, "prefill_queue_s": 0.05})
    samples = Samples()
    samples.add_beside([output], [first, second, third])
    assert [one.num_input for one in samples.prompts_beside] == [30]


def test_rows_and_context_are_those_in_the_middle_of_a_span() -> None:
    first = StreamedRequest(100, 0.0, [1.0, 2.0, 3.0, 4.0])
    second = StreamedRequest(50, 0.0, [1.2, 3.1, 3.9])  # joins at 3.1 - 0.8 = 2.3
    samples = Samples()
    samples.add_together([first, second, StreamedRequest(70, 0.0, [0.5])])
    # In the middle of the first's two later gaps, at 3.0, they have 3 tokens and 1; of the second's, at 3.5, 3 and 2.
    assert samples.steps == [StepSample(2, 103 + 51, (1.0, 1.0)), StepSample(2, 103 + 52, pytest.approx((0.8,)))]


def test_requests_alone_give_prompts_handoffs_and_steps() -> None:
    samples = Samples()
    samples.add_alone([StreamedRequest(10, 1.0, [1.5, 1.8, 2.0], {"prefill_s": 0.4}), StreamedRequest(20, 2.0, [2.1])])
    assert samples.prompts == [PromptSample(10, 0.5, 0.4), PromptSample(20, pytest.approx(0.1), None)]
    assert samples.handoffs == [HandoffSample(10, pytest.approx(0.3))]
    assert samples.steps == [StepSample(1, 11, pytest.approx((0.2,)))]


def test_columns_of_very_different_sizes_are_fitted_together() -> None:
    columns = np.array([[1.0, 0.0, 1e-20], [1.0, 1e20, 0.0], [1.0, 2e20, 3e-20], [1.0, 0.0, 0.0]])
    wanted = [2.0, 3e-20, 4e20]
    assert non_negative_fit(columns, columns @ wanted) == pytest.approx(wanted, rel=1e-9, abs=0.0)


MILLIONTHS = st.integers(-3_000_000, 3_000_000).map(lambda number: number / 1e6)


@given(
    st.lists(st.lists(MILLIONTHS, min_size=3, max_size=3), min_size=6, max_size=6),
    st.lists(MILLIONTHS, min_size=6, max_size=6),
)
@settings(max_examples=50, deadline=None)
def test_no_non_negative_coefficients_near_the_fit_are_better(rows: list[list[float]], values: list[float]) -> None:
    columns, wanted = np.array(rows), np.array(values)
    found = non_negative_fit(columns, wanted)
    assert (found >= 0).all()
    error = np.square(columns @ found - wanted).sum()
    for place in range(3):
        for change in (-0.01, 0.01):
            other = found.copy()
            other[place] = max(0.0, other[place] + change)
            assert error <= np.square(columns @ other - wanted).sum() + 1e-6


def test_outliers_do_not_move_the_fit() -> None:
    lengths = np.repeat(np.arange(1.0, 21.0), 5)
    values = 2.0 + 0.5 * lengths
    values[::5] *= 30.0
    values[1::5] /= 30.0
    values[10:15] = 1e-5  # a whole group
    columns = np.stack([np.ones(100), lengths], axis=1)
    found, error = grouped_fit(columns, values + 1.0, lengths.tolist(), offset=1.0)
    assert found == pytest.approx([2.0, 0.5], rel=0.01)
    assert error < 0.01


def test_few_rows_take_as_long_as_some_more_if_reading_the_weights_takes_the_time() -> None:
    costs = Costs(step_s=1e-3, weights_s=4e-3, row_s=0.5e-3, context_token_s=0.0)
    samples = Samples(prompts=[PromptSample(length, 0.1, 1e-3 + 1e-4 * length) for length in (50, 100, 200)] * 3)
    for num_rows in (1, 2, 4, 8, 16, 32):
        seconds = costs.seconds(StepWork(0, num_rows, 0))
        samples.steps += [StepSample(num_rows, 20 * num_rows, (0.9 * seconds, 1.1 * seconds))] * 10
    found = fit_costs(samples, KV_BYTES).costs
    for num_rows in (1, 3, 8, 12, 32):
        work = StepWork(0, num_rows, 20 * num_rows)
        assert found.seconds(work) == pytest.approx(costs.seconds(work), rel=0.01)


def test_short_prompts_take_as_long_as_longer_ones_if_reading_the_weights_takes_the_time() -> None:
    """Up to 160 tokens, a prompt takes 9 ms."""
    costs = Costs(step_s=1e-3, weights_s=8e-3, row_s=0.5e-3, prompt_token_s=50e-6, prompt_pair_s=1e-9)
    lengths = (16, 39, 95, 232, 565, 1378)
    works = {length: StepWork(length, 0, 0, length * (length + 1) // 2) for length in lengths}
    samples = Samples(prompts=[PromptSample(length, 0.1, costs.seconds(works[length])) for length in lengths] * 3)
    for num_rows in (1, 2, 4, 8, 16, 32):
        seconds = costs.seconds(StepWork(0, num_rows, 20 * num_rows))
        samples.steps += [StepSample(num_rows, 20 * num_rows, (seconds,))] * 10
    fit = fit_costs(samples, KV_BYTES)
    for work in works.values():
        assert fit.costs.seconds(work) == pytest.approx(costs.seconds(work), rel=0.01)
    assert fit.errors["prompts"] < 0.01


def test_tokens_that_are_read_together_do_not_spoil_the_fit() -> None:
    prompts = [PromptSample(length, 0.1, 0.01 + 1e-4 * length) for length in (50, 100, 200) * 4]
    steps = [StepSample(1, 20, (0.01, 0.01))] * 40 + [StepSample(1, 20, (0.0,))]
    costs = fit_costs(Samples(prompts=prompts, steps=steps), KV_BYTES).costs
    assert costs.seconds(StepWork(0, 1, 20)) == pytest.approx(0.01)


def test_the_spread_of_steps_beside_others_is_that_of_single_ones() -> None:
    steps = [StepSample(rows, 20, (0.008 + 0.001 * rows,) * 5 + (0.016 + 0.002 * rows,)) for rows in (1, 4) * 20]
    prompts = [PromptSample(length, 0.1, 0.01 + 1e-4 * length) for length in (50, 100, 200) * 4]
    late = PromptSample(100, 0.1, 9.0)
    samples = Samples(prompts=prompts, steps=steps, prompts_beside=[*prompts, late], steps_beside=steps)
    fit = fit_costs(samples, KV_BYTES)
    usual, double = 6 / 7, 12 / 7  # of the mean of six gaps
    assert fit.spread["decode"] == pytest.approx((*[usual] * 33, (usual + 2 * double) / 3, *[double] * 6), rel=0.05)
    assert fit.spread["prefill"] == pytest.approx((*[1.0] * 12, 4.0), rel=0.01)  # no more than four usual ones


def test_the_simulated_spread_is_the_one_that_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    costs = {"step_s": 6e-3, "row_s": 400e-6, "prompt_token_s": 350e-6}
    factors = (0.8, 0.9, 1.0, 1.7)
    profile = Profile("m", costs, KV_BYTES, 100_000, beside=costs, spread={"decode": factors})
    file.write_bytes(msgspec.json.encode(profile))
    [request] = simulated([f"--hardware={file}", "--cores=2", "--concurrency=1"], [16], 400)
    gaps_s = np.diff(request.stamps_s)[1:] / 6.4e-3
    found = [float((abs(gaps_s - factor) < 0.05).mean()) for factor in factors]
    assert sum(found) == pytest.approx(1.0)
    assert found == pytest.approx([0.25] * 4, abs=0.08)


def test_too_few_samples_are_refused_with_their_number() -> None:
    samples = Samples(prompts=[PromptSample(10, 0.1, None)] * 9)
    with pytest.raises(TooFewSamples, match="9 prompts of 1 lengths"):
        fit_costs(samples, KV_BYTES)
    samples.prompts += [PromptSample(20, 0.1, None), PromptSample(30, 0.1, None)]
    with pytest.raises(TooFewSamples, match="0 decode steps"):
        fit_costs(samples, KV_BYTES)


@pytest.mark.parametrize("num_tokens", [2, 8])
def test_a_service_whose_tokens_come_all_at_once_gives_too_few_samples(num_tokens: int) -> None:
    class BufferedDriver(Driver):
        def _send(self, rows: Iterable[dict[str, int]], **load: object) -> list[StreamedRequest]:
            return [StreamedRequest(16, 0.0, [1.0] * num_tokens, {"prefill_s": 0.1})] * 16

    server = ServerInfo("m", 4_096, "baton", {})
    driver = BufferedDriver(LoadtestConfig(), server, ServiceSize("m", 512), lambda words: None)
    with pytest.raises(TooFewSamples, match="0 decode steps of at most 1 output "):
        driver.measure_round(10.0)


def test_each_token_of_an_event_with_several_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = record(1.0, 1.5, 2.0, counts=[1, 2, 1], num_output=4)
    report = SimpleNamespace(was_stopped=False, all_failed=False, records=[answer])
    monkeypatch.setattr(drive, "run_load", lambda *_, **__: report)
    driver = Driver(LoadtestConfig(), ServerInfo("m", 4_096, "baton", {}), ServiceSize("m", 512), lambda words: None)
    [found] = driver._send([], concurrency=1, seconds=1.0)
    assert found.stamps_s == [1.0, 1.5, 1.5, 2.0]


def register(role: str, **fields: object) -> dict[str, object]:
    layout = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "page_size": 16, "dtype": "bfloat16"}
    found = {"role": role, "layout": layout, "num_pages": 100, "max_running": 8, "context_length": 512, **fields}
    return {"register": found}


def test_the_size_of_a_service_is_read_from_its_nodes() -> None:
    server = ServerInfo("m", 1_000, "baton", {})
    size = service_size(server, {"workers": [register("prefill"), register("decode", num_pages=50)]})
    assert size == ServiceSize("m", 512, 1, 1, 800, 2 * 4 * 16 * 2, 8, 1)
    assert service_size(server, {}).pool_tokens == 0
    with pytest.raises(ConfigError, match="/v1/workers has an unknown form"):
        service_size(server, {"workers": [{"register": {"role": "decode"}}]})


def test_the_scales_of_quantized_pages_count_as_kv() -> None:
    """In int8 each key and each value of a head is eight bytes and a scale of one byte."""
    nodes = [register(role) for role in ("prefill", "decode")]
    for node in nodes:
        node["register"]["layout"]["dtype"] = "int8"  # type: ignore[index]
    assert service_size(ServerInfo("m", 1_000, "baton", {}), {"workers": nodes}).kv_bytes_per_token == 2 * 4 * 2 * 9


def test_a_service_whose_nodes_have_different_numbers_of_devices_is_refused() -> None:
    server = ServerInfo("m", 1_000, "baton", {})
    alike = [register("prefill", num_ranks=2), register("decode", num_ranks=2)]
    assert service_size(server, {"workers": alike}).num_devices == 2
    with pytest.raises(ConfigError, match=r"have 1 and 2 devices.*same --tp"):
        service_size(server, {"workers": [register("prefill", num_ranks=2), register("decode")]})


def test_the_designed_load_covers_lengths_up_to_half_of_the_context() -> None:
    lengths = prompt_lengths(ServiceSize("m", 4_096))
    assert (lengths[0], lengths[-1], len(lengths)) == (16, 2_048, 8)
    rows = [row["input_length"] for row, _ in zip(designed_rows(lengths, 4), range(32), strict=False)]
    assert rows[:8] == lengths
    assert sorted(rows[8:16]) == lengths != rows[8:16]


@pytest.mark.slow
def test_the_command_calibrates_a_live_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    with mock_server(tmp_path, "--ttft", "0.02", "--itl", "0.004") as server:
        words = [f"--calibrate={server.url}", "--calibrate-seconds=2", f"--json={profile}", "--price-per-hour=2"]
        assert main([*words, "--no-progress"]) == 0
    assert "a decode step" in capsys.readouterr().out
    found = Profile(**{name: value for name, value in json.loads(profile.read_text()).items() if name != "kind"})
    assert min(found.samples.values()) >= 6
    assert found.price_per_hour == 2.0
    assert find_hardware(str(profile), None).node(1).costs.step_s == found.costs["step_s"]


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(0, "--calibrate http://127.0.0.1:9: nothing answers"), (401, "set BATON_SIMULATE_API_KEY (HTTP 401)")],
)
def test_a_service_that_does_not_answer_is_named_by_the_flags_of_simulate(
    status: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if status:
        monkeypatch.setattr("scripts.load_tester.client.server_info.get", lambda *_: (status, b"{}"))
    assert main(["--calibrate=http://127.0.0.1:9", f"--json={tmp_path / 'profile.json'}"]) == 2
    said = capsys.readouterr().err
    assert sentence in said and "--url" not in said


def test_a_service_with_several_nodes_of_a_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs one prefill and one decode node, and the service has 2 and 1"):
        refuse_several(ServiceSize("m", 512, 2, 1))
    with pytest.raises(ConfigError, match="needs one prefill and two decode nodes, and the service has 1 and 1"):
        refuse_other_pairs(ServiceSize("m", 512, 1, 1))
    with pytest.raises(ConfigError, match="nodes that it does not name"):
        refuse_other_pairs(ServiceSize("m", 512))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--calibrate=http://127.0.0.1:1"], "--calibrate needs --json FILE"),
        (["--calibrate=nowhere", "--json=x"], "--calibrate"),
        (["--calibrate-seconds=5"], "--calibrate-seconds needs --calibrate"),
        (
            ["--calibrate=http://127.0.0.1:1", "--json=x", "--hardware=h200", "--model=llama-3.1-8b"],
            "--calibrate adds to a profile, which --hardware h200 is not",
        ),
        (["--calibrate=http://127.0.0.1:1", "--json=x", "--cores=2"], "--cores has no effect with --calibrate"),
    ],
)
def test_options_without_effect_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(SimulateConfig, words, command="simulate")
