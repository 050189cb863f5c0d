"""Costs of nodes: the formula, the roofline by hand, profiles, and descriptions that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config.cli import parse
from common.errors import ConfigError
from common.step_plan import StepPlan
from scripts.load_tester.workload.plan import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.costs import Costs, StepWork
from scripts.simulator.hardware.accelerators import ACCELERATORS, Accelerator
from scripts.simulator.hardware.model_shape import KNOWN_MODELS, ModelShape, find_shape
from scripts.simulator.hardware.node_model import find_hardware, roofline
from scripts.simulator.main import simulate
from scripts.simulator.simulation import Simulation

SHAPE = ModelShape("small", 2, 8, 4, 2, 4, 16, 100)
DEVICE = Accelerator(
    "device", 1e6, 1e6, 1e9, 1e5, 1e4, 2.0, 0.5, 0.25, 0.5, step_overhead_s=0.001, all_reduce_latency_s=0.01
)
CONFIG = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "intermediate_size": 16, "vocab_size": 100, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_matrix_products_take_at_least_as_long_as_reading_the_weights() -> None:
    costs = Costs(1.0, 0.1, 0.2, 0.01, weights_s=2.0, token_s=0.001, prompt_pair_s=0.0001)
    assert costs.seconds(StepWork(0, 3, 50)) == pytest.approx(1.0 + 2.0 + 0.003 + 0.5)
    assert costs.seconds(StepWork(30, 3, 50, 200)) == pytest.approx(1.0 + 3.6 + 0.033 + 0.5 + 0.02)


def test_work_counts_the_pairs_that_causal_attention_computes() -> None:
    row = (0, 4, (7, 7, 7), False, None, None)  # three tokens after four: they attend to 5, 6 and 7 tokens
    plan = StepPlan(0, (), (), (row, (1, 9, None, True, None, None)))
    assert StepWork.of(plan) == StepWork(num_prompt=3, num_rows=1, num_context=9, num_pairs=18)


def test_roofline_by_hand() -> None:
    layers = 2 * (8 * 16 + 8 * 8 * 2 + 16 * 8 + 3 * 8 * 16)  # queries, keys and values, output, gated MLP
    assert (SHAPE.layer_weights, SHAPE.output_weights, SHAPE.kv_bytes_per_token) == (layers, 800, 2 * 2 * 2 * 4 * 2)
    assert SHAPE.weight_bytes == 2 * (layers + 2 * 800)
    one = roofline(DEVICE, SHAPE)
    assert one.step_s == pytest.approx(0.001)
    assert one.weights_s == pytest.approx(2 * (layers + 800) / 0.5e6)
    assert one.prompt_token_s == pytest.approx(2 * layers / 0.5e6)
    assert one.row_s == pytest.approx(2 * (layers + 800) / 0.5e6)
    assert one.context_token_s == pytest.approx(64 / 0.5e6)
    assert one.prompt_pair_s == pytest.approx(4 * 16 * 2 / 0.25e6)
    assert (one.token_s, one.wire_bytes_per_s) == (0.0, 1e4)


def test_tensor_parallelism_divides_work_and_adds_all_reduces() -> None:
    one, four = roofline(DEVICE, SHAPE), roofline(DEVICE, SHAPE, 4)
    assert four.step_s == pytest.approx(0.001 + 4 * 0.01)  # two in each of two layers
    assert four.weights_s == pytest.approx(one.weights_s / 4)
    assert four.prompt_token_s == pytest.approx(one.prompt_token_s / 4)
    assert four.context_token_s == pytest.approx(one.context_token_s / 2)  # only two KV heads can be divided
    assert four.token_s == pytest.approx(4 * 16 * 2 * 3 / 4 / 1e5)
    assert four.wire_bytes_per_s == 4e4


def test_the_pool_is_what_weights_leave_of_the_memory() -> None:
    node = find_hardware("h200", "llama-3.1-8b").node(1)
    shape = KNOWN_MODELS["llama-3.1-8b"]
    assert shape.weight_bytes == pytest.approx(16.06e9, rel=0.01)
    assert node.pool_tokens == int((141e9 * 0.9 - shape.weight_bytes) / 131_072)
    assert (node.num_devices, node.price_per_hour, node.kv_bytes_per_token) == (1, 3.5, 131_072)


def test_tensor_parallel_sizes_are_those_at_which_the_model_fits() -> None:
    assert find_hardware("h200", "llama-3.1-70b").tensor_parallel_sizes() == [2, 4, 8]
    assert find_hardware("cpu", "qwen3-0.6b").tensor_parallel_sizes() == [1]


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = find_shape(str(tmp_path))
    assert found.layer_weights == SHAPE.layer_weights and found.kv_bytes_per_token == SHAPE.kv_bytes_per_token
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True, "torch_dtype": "float32"}))
    tied = find_shape(str(tmp_path))
    assert tied.weight_bytes == tied.step_bytes == 4 * (SHAPE.layer_weights + 800)


@pytest.mark.parametrize(
    ("positions", "options", "max_context"),
    [
        ({}, {}, 131_072),
        ({"max_position_embeddings": 4_096}, {}, 4_096),
        ({"max_position_embeddings": 4_096}, {"context_length": 1_000}, 1_000),
        (
            {
                "max_position_embeddings": 4_096,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4_096},
            },
            {},
            16_384,
        ),
        ({"max_position_embeddings": 4_096, "rope_scaling": {"rope_type": "longrope"}}, {}, 4_096),
    ],
)
def test_the_context_is_that_of_the_folder_unless_it_is_given(
    tmp_path: Path, positions: dict[str, Any], options: dict[str, Any], max_context: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | positions))
    config = SimulateConfig(hardware="h200", model=str(tmp_path), **options)
    assert config.max_context == config.capacities["decode"].context_length == max_context


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "not a JSON object"),
        ("{", "cannot be read"),
        (json.dumps(CONFIG | {"num_experts": 8}), "num_experts is set"),
        (json.dumps(CONFIG | {"hidden_size": 0}), "hidden_size must be a whole number above 0"),
        (json.dumps(CONFIG | {"torch_dtype": "float8"}), "torch_dtype 'float8' is none of"),
    ],
)
def test_a_damaged_configuration_is_refused_by_field(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        find_shape(str(tmp_path))


def test_files_describe_accelerators_and_profiles(tmp_path: Path) -> None:
    device, profile = tmp_path / "device.json", tmp_path / "profile.json"
    device.write_text(
        '{"kind": "accelerator", "name": "x", "flops": 1e14, "memory_bandwidth": 1e12, "memory_bytes": 4e10}'
    )
    profile.write_text(
        '{"kind": "profile", "model": "m", "costs": {"step_s": 0.5}, "kv_bytes_per_token": 300, "pool_tokens": 9000}'
    )
    assert find_hardware(str(device), "llama-3.1-8b").node(1).num_devices == 1
    node = find_hardware(str(profile), None).node(1)
    assert (node.costs, node.kv_bytes_per_token, node.pool_tokens) == (Costs(step_s=0.5), 512, 9_000)
    with pytest.raises(ConfigError, match="--model has no effect with the profile"):
        find_hardware(str(profile), "llama-3.1-8b")
    with pytest.raises(ConfigError, match="--decode-tp 2 has no effect with a calibrated profile"):
        find_hardware(str(profile), None).node(2, flag="--decode-tp")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", "missing required field `kind`"),
        ('{"kind": "accelerator", "name": "x", "flops": 0, "memory_bandwidth": 1, "memory_bytes": 1}', "flops must be"),
        (
            '{"kind": "profile", "model": "m", "costs": {"stop_s": 1}, "kv_bytes_per_token": 1, "pool_tokens": 1}',
            "costs.stop_s is not a cost",
        ),
        (
            '{"kind": "profile", "model": "m", "costs": {}, "kv_bytes_per_token": 1, "pool_tokens": 1, '
            '"spread": {"decode": [1.0, -0.5]}}',
            "spread.decode must be factors of at least 0",
        ),
    ],
)
def test_a_damaged_description_is_refused_by_field(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        find_hardware(str(file), None)


def config(*words: str) -> SimulateConfig:
    return parse(SimulateConfig, words, command="simulate")


def test_hardware_sets_costs_and_pools_of_each_role() -> None:
    found = config("--hardware=h100", "--model=llama-3.1-70b", "--prefill-tp=4", "--decode-tp=8")
    four, eight = (find_hardware("h100", "llama-3.1-70b").node(tp) for tp in (4, 8))
    assert {role: one.costs for role, one in found.node_models.items()} == {
        "prefill": four.costs,
        "decode": eight.costs,
    }
    assert found.capacities["decode"].num_pages == eight.pool_tokens // 16
    assert found.costs.wire_bytes_per_s == four.costs.wire_bytes_per_s == 4 * ACCELERATORS["h100"].network_bandwidth


def test_a_lone_request_takes_as_long_as_the_roofline_says() -> None:
    found, _ = simulate(
        config("--hardware=h200", "--model=llama-3.1-8b", "--num-requests=1", "--input-len=1000", "--output-len=3")
    )
    costs = find_hardware("h200", "llama-3.1-8b").node(1).costs
    prompt = costs.seconds(StepWork(1_000, 0, 0, 500_500))
    assert found["latency_s"]["ttft"]["max"] == pytest.approx(prompt + 2 * costs.message_s)
    assert found["latency_s"]["itl"]["min"] == pytest.approx(costs.seconds(StepWork(0, 1, 1_001)))


def test_steps_of_a_roofline_that_are_taken_together_take_as_long_as_one_by_one() -> None:
    words = ["--hardware=h200", "--model=llama-3.1-70b", "--prefill-tp=4", "--decode-tp=2", "--rate=10"]
    given = config(*words, "--num-requests=30", "--input-len=500", "--output-len=uniform:5:60")
    outcomes = []
    for is_stepwise in (False, True):
        simulation = Simulation(given, make_plan(given), is_stepwise=is_stepwise)
        simulation.run()
        outcomes.append([(one.stamps_s, one.ended_at) for one in simulation.client.outcomes])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model=llama-3.1-8b"], "--model needs --hardware"),
        (["--decode-tp=2"], "--decode-tp needs --hardware"),
        (["--hardware=h200"], "--hardware h200 needs --model"),
        (["--hardware=h300", "--model=llama-3.1-8b"], "--hardware h300 is neither"),
        (["--hardware=h200", "--model=llama-9"], "--model llama-9 is neither"),
        (["--hardware=h200", "--model=llama-3.1-70b"], "--decode-tp 1: llama-3.1-70b leaves no room"),
        (["--hardware=h200", "--model=llama-3.1-8b", "--prefill-tp=3"], "--prefill-tp 3: the 32 heads"),
        (["--hardware=cpu", "--model=qwen3-0.6b", "--decode-tp=2"], "--decode-tp 2: devices of the kind cpu cannot"),
        (["--hardware=h200", "--model=llama-3.1-8b", "--row-cost=1ms"], "--row-cost has no effect with --hardware"),
    ],
)
def test_impossible_hardware_is_refused_by_flag(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(*words)
