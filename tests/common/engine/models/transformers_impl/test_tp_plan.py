"""Models that transformers computes, divided among ranks as its plans say, give the tokens that it generates itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.engine_driver import Driver, check_tokens
from support.engine.library_models import LIBRARY_MODELS, WITHOUT_PLAN, make_library_model
from support.engine.lora_adapters import ALL, make_adapter, merge
from support.engine.quantized_models import quantize_model
from support.engine.rank_threads import RankThreads
from support.engine.reference_models import draw_prompts, load_reference
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM

from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.implementation import ModelSource, check_divided_model, load_config, load_model
from common.engine.models.transformers_impl import check
from common.engine.models.transformers_impl.config import TransformersConfig
from common.engine.models.transformers_impl.model import TransformersModel
from common.engine.models.transformers_impl.tp_plan import TpPlan
from common.engine.tensor_parallel.shard import Shard
from common.errors import ConfigError, UnsupportedModelError
from common.sampling_params import SamplingParams

CPU = torch.device("cpu")
LENGTHS = [1, 15, 16, 70, 130]
MAX_NEW = 8
DIVIDED = [architecture for architecture in LIBRARY_MODELS if architecture not in WITHOUT_PLAN]


def config_of(folder: Path, **options: Any) -> TransformersConfig:
    config = load_config(ModelSource(str(folder), implementation="transformers", **options))
    assert isinstance(config, TransformersConfig)
    return config


@contextmanager
def executor_of(config: TransformersConfig, num_ranks: int, **options: Any) -> Iterator[TorchExecutor]:
    check_divided_model(config, num_ranks)
    weight_dtype = options.get("weight_dtype", "auto")
    ranks = RankThreads(config, num_ranks, weight_dtype=weight_dtype) if num_ranks > 1 else None
    try:
        executor = load_executor(
            config, dtype="float32", num_slots=8, num_pages=120, page_size=16, ranks=ranks, **options
        )
        yield executor
        executor.close()
    finally:
        if ranks is not None:
            ranks.close()


def check_divided(folder: Path, num_ranks: int, lengths: list[int] = LENGTHS) -> None:
    cases = draw_prompts(folder, lengths, MAX_NEW, seed=7)
    with executor_of(config_of(folder), num_ranks) as executor:
        check_tokens(executor, cases, MAX_NEW)


@pytest.mark.slow(sample=0.1)
@pytest.mark.parametrize("architecture", DIVIDED)
def test_tokens_of_two_ranks_equal_those_of_the_library(tmp_path: Path, architecture: str) -> None:
    check_divided(make_library_model(tmp_path, architecture, seed=7), 2)


@pytest.mark.slow(sample=0.2)
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("OlmoForCausalLM", {}),  # two KV heads
        ("Qwen3ForCausalLM", {"num_key_value_heads": 1}),
        ("Olmo2ForCausalLM", {}),  # attention is whole in the plan
        ("PhiForCausalLM", {"num_key_value_heads": 4}),  # a bias on every sum
        ("Qwen2MoeForCausalLM", {}),
        ("CohereForCausalLM", {"use_qk_norm": True}),  # norms with weights for each head
    ],
)
def test_four_ranks_divide_heads_that_several_of_them_share(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    check_divided(make_library_model(tmp_path, architecture, seed=7, **overrides), 4, [1, 17, 70])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
def test_a_model_without_shared_experts_is_divided(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path, "DeepseekV3ForCausalLM", seed=7, n_shared_experts=0)
    check_divided(folder, 2, [1, 17, 70])


@pytest.mark.parametrize(
    ("kind", "architecture"), [("gptq, act-order", "GPTNeoXForCausalLM"), ("fp8 in blocks", "OlmoeForCausalLM")]
)
def test_matrices_of_a_quantized_checkpoint_are_divided_once_they_are_decoded(
    tmp_path: Path, kind: str, architecture: str
) -> None:
    plain = make_library_model(tmp_path / "plain", architecture, seed=2)
    quantized = quantize_model(plain, tmp_path / "quantized", kind)
    cases = draw_prompts(plain, [1, 17, 70], 4, seed=4)
    with executor_of(config_of(quantized), 2) as executor:
        check_tokens(executor, cases, 4)


@pytest.mark.slow(sample=0.2)
@pytest.mark.parametrize(
    ("architecture", "overrides", "num_ranks", "targets"),
    [
        ("OlmoForCausalLM", {}, 4, ALL),  # two KV heads, which ranks share
        ("Olmo2ForCausalLM", {}, 2, ALL),  # outputs of projections are gathered, and inputs divided
        ("Phi3ForCausalLM", {}, 2, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),  # gate and up in one matrix
        ("Starcoder2ForCausalLM", {}, 2, ("q_proj", "o_proj", "c_fc", "c_proj")),  # biases on sums
        ("Qwen2MoeForCausalLM", {}, 2, ("v_proj", "o_proj", "shared_expert.up_proj", "shared_expert.down_proj")),
        ("DeepseekV3ForCausalLM", {}, 2, ("q_b_proj", "kv_b_proj", "o_proj")),  # attention is whole in the plan
    ],
)
def test_adapters_on_the_parts_of_matrices_equal_the_merged_models(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], num_ranks: int, targets: tuple[str, ...]
) -> None:
    folder = make_library_model(tmp_path / "model", architecture, seed=7, **overrides)
    cases = [("", *case) for case in draw_prompts(folder, [17, 70], 4, seed=7)]
    for seed, name in enumerate(("a", "b")):
        adapter = make_adapter(tmp_path / name, folder, seed=seed, rank=4 + seed, targets=targets)
        merged = merge(tmp_path / f"merged-{name}", folder, adapter)
        cases += [(name, *case) for case in draw_prompts(merged, [17, 70], 4, seed=7)]
    with executor_of(config_of(folder), num_ranks) as executor:
        for name in ("a", "b"):
            executor.adapters[name] = executor.read_adapter(tmp_path / name, max_rank=8)
        driver = Driver(executor)
        texts = [driver.start(slot, prompt, adapter=name) for slot, (name, prompt, _) in enumerate(cases)]
        assert driver.finish(texts, 4, chunk=24) == [expected for *_, expected in cases]


@pytest.mark.parametrize(("weight_dtype", "tolerance"), [("int8", 0.1), ("int4", 0.5)])
def test_ranks_round_their_parts_of_the_matrices(tmp_path: Path, weight_dtype: str, tolerance: float) -> None:
    folder = make_library_model(tmp_path, "OlmoForCausalLM", seed=7, hidden_size=64, intermediate_size=128)
    found: list[list[float]] = []
    for num_ranks, options in ((1, {}), (1, {"weight_dtype": weight_dtype}), (2, {"weight_dtype": weight_dtype})):
        with executor_of(config_of(folder), num_ranks, **options) as executor:
            driver, params = Driver(executor), SamplingParams(temperature=0.0, logprobs=1)
            texts = [driver.start(slot, tuple(range(slot, slot + 20)), params) for slot in range(8)]
            driver.finish(texts, 1)
            found.append([text.logprobs[0].token for text in texts if text.logprobs[0] is not None])
    plain, whole, divided = found
    assert len(divided) == 8
    assert divided != plain
    assert divided == pytest.approx(whole, abs=tolerance)


def test_random_weights_are_those_of_the_whole_model(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path, "OlmoForCausalLM")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    outputs = []
    for num_ranks in (1, 2):
        with executor_of(config_of(folder, has_dummy_weights=True), num_ranks) as executor:
            text = Driver(executor).start(0, tuple(range(20)))
            text._driver.finish([text], 6)
            outputs.append(text.output)
    assert outputs[0] == outputs[1]


def test_a_rank_has_its_part_of_the_weights_and_no_projection_to_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.engine.models.transformers_impl.model.can_pack", lambda _: False)
    folder = make_library_model(tmp_path, "MixtralForCausalLM")
    config = config_of(folder)
    parts: list[TransformersModel] = []
    for rank in range(2):
        model = load_model(config, "float32", CPU, shard=Shard(rank, 2))(None)
        assert isinstance(model, TransformersModel)
        parts.append(model)
    reference = load_reference(folder).model
    for name in ("gate_up_proj", "down_proj"):
        first, second = (part._layers.get_parameter(f"layers.0.mlp.experts.{name}") for part in parts)
        whole = reference.get_parameter(f"layers.0.mlp.experts.{name}")
        if name == "down_proj":
            assert torch.equal(torch.cat([first, second], dim=2), whole)
        else:
            halves = [torch.cat(pair, dim=1) for pair in zip(first.chunk(2, 1), second.chunk(2, 1), strict=True)]
            assert torch.equal(torch.cat(halves, dim=1), whole)
        assert first.untyped_storage().nbytes() == whole.nbytes // 2, "the whole matrix is still in memory"
    assert [isinstance(part._head.lm_head, torch.nn.Identity) for part in parts] == [False, True]


@pytest.mark.parametrize(("architecture", "num_rows"), [("OlmoForCausalLM", 0), ("CohereForCausalLM", 211)])
def test_rank_1_drops_a_projection_to_the_vocabulary_that_is_not_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, num_rows: int
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(TpPlan, "check_divided", lambda _, model: loaded.append(model.lm_head.weight))
    load_model(config_of(make_library_model(tmp_path, architecture)), "float32", CPU, shard=Shard(1, 2))
    assert len(loaded[0]) == num_rows


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", WITHOUT_PLAN)
def test_a_model_without_a_plan_is_refused(tmp_path: Path, architecture: str) -> None:
    config = config_of(make_library_model(tmp_path, architecture))
    with pytest.raises(ConfigError, match=f"--tp 2: {architecture} cannot be divided: .*has no plan.*leave out --tp"):
        check_divided_model(config, 2)


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "words"),
    [
        ({}, 3, "--tp 3: attention heads 4 of .* cannot be divided by it"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "--tp 4: it must divide the 3 KV heads"),
        (
            {"intermediate_size": 81},
            2,
            r"model\.layers\.0\.mlp\.gate_proj\.weight has 81 outputs, which 2 ranks cannot divide; give a --tp that",
        ),
    ],
)
def test_numbers_that_ranks_do_not_divide_are_refused(
    tmp_path: Path, overrides: dict[str, int], num_ranks: int, words: str
) -> None:
    config = config_of(make_library_model(tmp_path, "OlmoForCausalLM", **overrides))
    with pytest.raises(ConfigError, match=words):
        check_divided_model(config, num_ranks)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"layers.*.mlp.up_proj": "sequence_parallel"}, "in the style sequence_parallel, which Baton does not know"),
        ({"layers.*.mlp": "colwise"}, r"model\.layers\.0\.mlp, which is not a plain linear layer"),
        ({"layers.*.self_attn.q_proj": "colwise"}, "--tp 2: .*cannot be served: its forward pass over pages fails"),
        (
            {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"},
            r"a rank \(2, 2, 12, 12\) .*, which is neither its part \(2, 1, 12, 12\) nor all of \(4, 2, 12, 12\)",
        ),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, str], words: str
) -> None:
    from transformers import OlmoConfig

    config = config_of(make_library_model(tmp_path, "OlmoForCausalLM"))
    monkeypatch.setattr(OlmoConfig, "base_model_tp_plan", plan)
    with pytest.raises(ConfigError, match=words):
        check_divided_model(config, 2)


def test_a_release_of_the_library_that_loads_parameters_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(make_library_model(tmp_path, "PhiForCausalLM"))
    hook = "common.engine.models.transformers_impl.tp_plan.register_module_parameter_registration_hook"
    monkeypatch.setattr(hook, lambda _: register_module_parameter_registration_hook(lambda *_: None))
    for rank in range(2):
        with pytest.raises(
            ConfigError, match=r"--tp 2: .*has loaded model\.layers\.0\.self_attn\.q_proj\.weight whole; leave out --tp"
        ):
            load_model(config, "float32", CPU, shard=Shard(rank, 2))


def test_a_bias_that_every_rank_would_add_is_refused(tmp_path: Path) -> None:
    config = config_of(make_library_model(tmp_path, "PhiForCausalLM"))
    model = AutoModelForCausalLM.from_pretrained(config.folder)
    plan = TpPlan(config, model, Shard(1, 2))
    plan.divide(model)
    plan.check_divided(model)
    model.model.layers[1].self_attn.dense.bias.data += 1
    with pytest.raises(ConfigError, match=r"has loaded model\.layers\.1\.self_attn\.dense\.bias whole"):
        plan.check_divided(model)


# ---- untested models -------------------------------------------------------------------------------------------------


def test_a_reduced_copy_of_an_untested_model_is_divided_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_library_model(tmp_path, "Olmo2ForCausalLM", seed=7)
    monkeypatch.setattr("common.engine.models.implementation.TESTED", frozenset())
    check_divided(folder, 2, [1, 17, 70])


def test_a_plan_that_gives_other_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sums what is whole on every rank."""
    from transformers import OlmoConfig

    config = replace(config_of(make_library_model(tmp_path, "OlmoForCausalLM")), architecture="Untested")
    plan = OlmoConfig.base_model_tp_plan | {"layers.*.mlp": "all_reduce"}
    monkeypatch.setattr(OlmoConfig, "base_model_tp_plan", plan)
    check_divided_model(config, 2)
    with pytest.raises(
        UnsupportedModelError,
        match=r"logits over pages of 2 ranks differ from the library's .*; --tp 2 may be the cause: leave it out",
    ):
        load_model(config, "float32", CPU, shard=Shard(0, 2))


@pytest.mark.slow
def test_an_error_of_one_rank_of_the_reduced_copy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for rank 1 meanwhile, and only knows that it is lost."""
    config = replace(config_of(make_library_model(tmp_path, "OlmoForCausalLM")), architecture="Untested")
    compute = check._over_pages

    def fail_at_rank_1(model: TransformersModel, requests: list[torch.Tensor]) -> list[torch.Tensor]:
        if model._heads.queries.start:
            raise IndexError("no such row")
        return compute(model, requests)

    monkeypatch.setattr(check, "_over_pages", fail_at_rank_1)
    monkeypatch.setattr(check, "_TIMEOUT_S", 15.0)
    words = r"its reduced copy cannot be computed \(IndexError: no such row\); --tp 2 may be the cause: leave it out"
    with pytest.raises(UnsupportedModelError, match=words):
        load_model(config, "float32", CPU, shard=Shard(0, 2))
