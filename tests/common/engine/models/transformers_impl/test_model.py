"""Models that transformers computes over Baton's pages give the tokens that it generates itself."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.engine_driver import Driver, check_tokens
from support.engine.library_models import LIBRARY_MODELS, WINDOW, make_library_model
from support.engine.lora_adapters import make_adapter, merge
from support.engine.reference_models import VOCAB_SIZE, draw_prompts, load_reference, prompt_logprobs
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from common.config.shared import SMALL_MODEL
from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.implementation import ModelSource, load_config
from common.engine.models.transformers_impl import check as transformers_check
from common.engine.models.transformers_impl.config import TESTED, TransformersConfig, load_library_config
from common.engine.models.transformers_impl.experts import PackedExperts, can_pack
from common.engine.models.transformers_impl.model import PackedLinear, TransformersModel, widen_logits
from common.errors import ConfigError, UnsupportedModelError
from common.sampling_params import SamplingParams

LENGTHS = [1, 15, 16, 70, 130]
MAX_NEW = 8
PAGE_SIZE = 16
ON_A_GPU = [
    "CohereForCausalLM",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2MoeForCausalLM",
]


def load(folder: Path, attention: str = "auto", **options: Any) -> TorchExecutor:
    return load_executor(
        load_config(ModelSource(str(folder), implementation="transformers")),
        page_size=PAGE_SIZE,
        attention=attention,
        **{"device": "cpu", "dtype": "float32", "num_slots": 8, "num_pages": 120, **options},
    )


@pytest.mark.slow(sample=0.1)
@pytest.mark.parametrize("architecture", LIBRARY_MODELS)
def test_tokens_equal_those_of_the_library_cold_chunked_cached_and_retracted(tmp_path: Path, architecture: str) -> None:
    folder = make_library_model(tmp_path, architecture, seed=7)
    cases = draw_prompts(folder, LENGTHS, MAX_NEW, seed=7)
    executor = load(folder)
    check_tokens(executor, cases, MAX_NEW)
    executor.close()


@pytest.mark.cuda
@pytest.mark.parametrize("architecture", ON_A_GPU)
def test_tokens_on_a_gpu_equal_those_of_the_library(tmp_path: Path, architecture: str) -> None:
    folder = make_library_model(tmp_path, architecture, seed=7)
    executor = load(folder, device="cuda")
    check_tokens(executor, draw_prompts(folder, LENGTHS, MAX_NEW, seed=7), MAX_NEW)
    executor.close()


def test_the_tested_architectures_are_those_of_these_tests() -> None:
    assert set(LIBRARY_MODELS) == TESTED
    assert len(TESTED) >= 30


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize("attention", ["reference", "torch", "triton"])
@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"])
def test_windows_soft_caps_sinks_and_unequal_heads_do_not_depend_on_the_backend(
    tmp_path: Path, architecture: str, attention: str
) -> None:
    folder = make_library_model(tmp_path, architecture, seed=7)
    lengths, max_new = ([3, 40], 2) if attention == "triton" else ([3, 60], 4)  # Triton's interpreter is slow
    cases = draw_prompts(folder, lengths, max_new, seed=7)
    driver = Driver(load(folder, attention))
    texts = [driver.start(slot, prompt) for slot, (prompt, _) in enumerate(cases)]
    assert driver.finish(texts, max_new, chunk=32) == [expected for _, expected in cases]
    driver.executor.close()


def test_logprobs_of_prompts_and_outputs_are_those_of_the_library(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path, "Gemma2ForCausalLM", seed=7)
    ((prompt, expected),) = draw_prompts(folder, [40], 3, seed=7)
    driver = Driver(load(folder))
    text = driver.start(0, prompt, SamplingParams(temperature=0.0, logprobs=1))
    driver.finish([text], 3, chunk=16)
    found = torch.tensor([one.token for one in text.logprobs if one is not None])
    model = load_reference(folder)
    wanted = prompt_logprobs(model, prompt + expected)[len(prompt) - 1 :]
    torch.testing.assert_close(found, wanted.gather(1, torch.tensor(expected)[:, None])[:, 0], atol=1e-4, rtol=1e-4)
    driver.executor.close()


@pytest.mark.slow(sample=0.1)
@pytest.mark.parametrize("architecture", LIBRARY_MODELS)
def test_logits_on_a_gpu_have_32_bits_in_a_model_of_16(tmp_path: Path, architecture: str) -> None:
    """On the device ``meta``, which computes nothing."""
    config = load_library_config(make_library_model(tmp_path, architecture), {}, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        hidden = torch.empty(3, model.get_input_embeddings().weight.shape[1], dtype=torch.bfloat16)
    widen_logits(model)
    assert model.get_output_embeddings()(hidden).dtype == torch.float32


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_on_a_gpu_are_not_rounded_to_16_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_library_model(tmp_path, "Phi3ForCausalLM", seed=7)
    executor = load(folder, device="cuda", dtype=str(dtype).removeprefix("torch."))
    weight = load_file(folder / "model.safetensors")["lm_head.weight"].to(dtype)
    hidden = torch.randn(3, weight.shape[1]).to(dtype)
    logits = executor.model.logits(hidden.cuda())
    torch.testing.assert_close(logits.cpu(), hidden.float() @ weight.float().T, atol=1e-4, rtol=1e-5)
    executor.close()


def test_linear_layers_are_packed_and_no_plain_weight_stays(tmp_path: Path) -> None:
    executor = load(make_library_model(tmp_path, "OlmoForCausalLM"))
    assert isinstance(executor.model, TransformersModel)
    layers = list(executor.model._layers.modules())
    assert sum(isinstance(layer, PackedLinear) for layer in layers) == 2 * 7
    assert not any(type(layer) is torch.nn.Linear for layer in layers)
    executor.close()


@pytest.mark.parametrize("architecture", [name for name, about in LIBRARY_MODELS.items() if "experts" in str(about)])
def test_experts_are_packed_and_no_plain_weight_stays(tmp_path: Path, architecture: str) -> None:
    executor = load(make_library_model(tmp_path, architecture))
    assert isinstance(executor.model, TransformersModel)
    layers = list(executor.model._layers.modules())
    assert any(isinstance(layer, PackedExperts) for layer in layers)
    assert not any("_proj" in name for name, _ in executor.model._layers.named_parameters())
    executor.close()


def test_experts_with_an_activation_of_their_own_are_left_to_the_library() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    class Others(GptOssExperts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up[..., ::2].relu()

    config = GptOssConfig(num_local_experts=2, hidden_size=16, intermediate_size=16)
    assert can_pack(GptOssExperts(config))
    assert not can_pack(Others(config))


@pytest.mark.slow(sample=0.34)
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"weight_dtype": "int8"}, {"kv_cache_dtype": "fp8"}])
@pytest.mark.parametrize("architecture", ["Olmo2ForCausalLM", "GptOssForCausalLM", "Qwen2MoeForCausalLM"])
def test_other_formats_of_numbers_give_nearly_the_same_logits(
    tmp_path: Path, architecture: str, options: dict[str, Any]
) -> None:
    folder = make_library_model(tmp_path, architecture, hidden_size=64, intermediate_size=128)
    logits = []
    for some in ({}, options):
        executor = load(folder, **some)
        text = Driver(executor).start(0, tuple(range(20)), SamplingParams(temperature=0.0, logprobs=1))
        text._driver.finish([text], 1)
        logits.append(text.logprobs[0])
        executor.close()
    plain, rounded = logits
    assert plain is not None and rounded is not None
    assert plain != rounded
    assert plain.token == pytest.approx(rounded.token, abs=0.7)


MLP = ("gate_proj", "up_proj", "down_proj")
#: Matrices of an architecture that adapters change: merged ones, those of GPT-2 that are stored [in, out], and others.
ADAPTED: dict[str, tuple[str, ...]] = {
    "OlmoForCausalLM": ("q_proj", "v_proj", "down_proj"),
    "Gemma2ForCausalLM": ("q_proj", "k_proj", "v_proj", "o_proj", *MLP),
    "Phi3ForCausalLM": ("qkv_proj", "gate_up_proj"),
    "GPTNeoXForCausalLM": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "Starcoder2ForCausalLM": ("o_proj", "c_fc", "c_proj"),
    "GPT2LMHeadModel": ("c_attn", "c_fc", "c_proj"),
    "OlmoeForCausalLM": ("q_proj", "k_proj", *MLP),
    "Qwen2MoeForCausalLM": ("v_proj", "o_proj", *(f"shared_expert.{name}" for name in MLP)),
    "DeepseekV3ForCausalLM": ("q_a_proj", "kv_b_proj", *(f"shared_experts.{name}" for name in MLP)),
}


@pytest.mark.slow(sample=0.34)
@pytest.mark.parametrize("architecture", ADAPTED)
def test_requests_of_the_model_and_of_two_adapters_in_one_batch_equal_the_merged_models(
    tmp_path: Path, architecture: str
) -> None:
    folder = make_library_model(tmp_path / "model", architecture, seed=7)
    cases = [("", *case) for case in draw_prompts(folder, LENGTHS, MAX_NEW, seed=7)]
    config: dict[str, Any] = {"targets": ADAPTED[architecture], "fan_in_fan_out": architecture == "GPT2LMHeadModel"}
    if architecture == "Qwen2MoeForCausalLM":
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for seed, name in enumerate(("a", "b")):
        adapter = make_adapter(tmp_path / name, folder, seed=seed, rank=4 + seed, **config)
        merged = merge(tmp_path / f"merged-{name}", folder, adapter)
        cases += [(name, *case) for case in draw_prompts(merged, LENGTHS, MAX_NEW, seed=7)]
    assert len({expected for _, prompt, expected in cases if len(prompt) == LENGTHS[-1]}) == 3
    executor = load(folder, num_slots=16, num_pages=200)
    for name in ("a", "b"):
        executor.adapters[name] = executor.read_adapter(tmp_path / name, max_rank=8)
    for chunk in (0, 24):
        driver = Driver(executor)
        texts = [driver.start(slot, prompt, adapter=name) for slot, (name, prompt, _) in enumerate(cases)]
        assert driver.finish(texts, MAX_NEW, chunk=chunk) == [expected for *_, expected in cases]
    alone = Driver(executor)
    text = alone.start(0, cases[-1][1], adapter="b")
    assert alone.finish([text], MAX_NEW) == [cases[-1][2]], "all tokens of a step have the adapter"
    executor.close()


def test_an_adapter_that_does_not_fit_is_refused_with_the_names_of_the_matrices(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path / "model", "OlmoForCausalLM")
    name = "base_model.model.lm_head.lora_A.weight"
    adapter = make_adapter(tmp_path / "a", folder, targets=("q_proj",), tensors={name: torch.zeros(8, 48)})
    executor = load(folder)
    with pytest.raises(ConfigError, match=r"lm_head\.lora_A.* changes nothing .* model\.layers\.N\.mlp\.down_proj"):
        executor.read_adapter(adapter, max_rank=8)
    executor.close()


def test_adapters_of_gpt_oss_experts_equal_the_merged_model(tmp_path: Path) -> None:
    """Their parameters are ``[experts, in, out]``, and gate and up alternate in them."""
    folder = make_library_model(tmp_path / "model", "GptOssForCausalLM", seed=7)
    adapter = make_adapter(tmp_path / "a", folder, rank=4, alpha=12, targets=("q_proj",))
    merged = merge(tmp_path / "merged", folder, adapter)
    weights, pairs = (load_file(merged / "model.safetensors"), load_file(adapter / "adapter_model.safetensors"))
    for layer in range(3):
        for name, place in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
            weight = weights[f"model.layers.{layer}.mlp.experts.{name}"]
            num_experts, inputs, outputs = weight.shape
            a, b = torch.randn(4 * num_experts, inputs) * inputs**-0.5, torch.randn(outputs, 4 * num_experts) * 0.2
            for side, tensor in (("A", a), ("B", b)):
                pairs[f"base_model.model.model.layers.{layer}.mlp.experts{place}.lora_{side}.weight"] = tensor
            by_expert = b.view(outputs, 4, num_experts), a.view(num_experts, 4, inputs)
            weight += 3 * torch.einsum("ore,eri->eio", *by_expert)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    save_file(pairs, adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_parameters"] = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    cases = [(name, *case) for name, model in (("", folder), ("a", merged)) for case in draw_prompts(model, LENGTHS, 4)]
    executor = load(folder, num_slots=16, num_pages=200)
    executor.adapters["a"] = executor.read_adapter(adapter, max_rank=8)
    driver = Driver(executor)
    texts = [driver.start(slot, prompt, adapter=name) for slot, (name, prompt, _) in enumerate(cases)]
    assert driver.finish(texts, 4, chunk=24) == [expected for *_, expected in cases]
    executor.close()


def test_a_router_that_an_adapter_would_change_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path / "model", "OlmoeForCausalLM")
    executor = load(folder)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.gate\.lora_A.* changes nothing"):
        executor.read_adapter(make_adapter(tmp_path / "a", folder, targets=("q_proj", "gate")), max_rank=8)
    executor.close()


def test_grammars_are_compiled_for_the_tokenizer_of_another_folder(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path, "OlmoForCausalLM", vocab_size=1100, eos_token_id=1)
    config = load_config(ModelSource(str(folder)))
    executor = load_executor(
        replace(config, tokenizer_folder=Path(SMALL_MODEL)), num_slots=1, num_pages=4, page_size=PAGE_SIZE
    )
    text = Driver(executor).start(0, [5, 6, 7], SamplingParams(temperature=0.0, grammar='start: "aaaaaaaaaaaa"'))
    text._driver.finish([text], 3)
    tokenizer = Tokenizer.from_file(f"{SMALL_MODEL}/tokenizer.json")
    assert set(tokenizer.decode(text.output)) == {"a"}
    executor.close()


# ---- which implementation --------------------------------------------------------------------------------------------


def test_auto_takes_the_native_decoder_where_it_can_and_says_when_it_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_library_model(tmp_path / "a", "Qwen3ForCausalLM")
    windows = make_library_model(tmp_path / "b", "MistralForCausalLM")
    assert load_config(ModelSource(str(plain))).implementation == "native"
    with caplog.at_level(logging.INFO):
        assert load_config(ModelSource(str(windows))).implementation == "transformers"
    assert "the native implementation refuses this model" in caplog.text
    assert "sliding windows are not supported" in caplog.text
    with pytest.raises(UnsupportedModelError, match="sliding windows"):
        load_config(ModelSource(str(windows), implementation="native"))


def test_both_implementations_are_different_models_to_other_nodes(tmp_path: Path) -> None:
    folder = str(make_library_model(tmp_path, "Qwen3ForCausalLM"))
    native = load_config(ModelSource(folder, implementation="native"))
    library = load_config(ModelSource(folder, implementation="transformers"))
    assert native.digest != library.digest
    assert native.layout(16, "auto") == library.layout(16, "auto")
    assert (native.context_length, native.vocab_size) == (library.context_length, library.vocab_size)


@pytest.mark.slow
def test_a_node_with_a_native_model_does_not_import_the_library(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path, "Qwen3ForCausalLM")
    code = (
        "import sys; from common.engine.models.implementation import ModelSource, load_config;"
        f"load_config(ModelSource({str(folder)!r})); sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_library_model(tmp_path, "OlmoForCausalLM")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"OlmoForCausalLM is not supported.*needs the extra transformers; "):
        load_config(ModelSource(str(folder)))


def test_overrides_change_the_configuration_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    folder = str(make_library_model(tmp_path, "OlmoForCausalLM"))
    plain = load_config(ModelSource(folder))
    longer = load_config(ModelSource(folder, overrides={"max_position_embeddings": 2048}))
    assert (plain.context_length, longer.context_length) == (1024, 2048)
    assert plain.digest != longer.digest
    with pytest.raises(ConfigError, match="--hf-overrides: num_layerz is not a key"):
        load_config(ModelSource(folder, overrides={"num_layerz": 2}))


def test_keys_that_the_library_derives_from_an_overridden_one_change_with_it(tmp_path: Path) -> None:
    qwen = str(make_library_model(tmp_path / "qwen", "Qwen2ForCausalLM", max_window_layers=1))
    stored = json.loads(Path(qwen, "config.json").read_text())
    del stored["layer_types"]  # as older versions of the library write it
    Path(qwen, "config.json").write_text(json.dumps(stored))

    def windows(**overrides: Any) -> list[int | None]:
        config = load_config(ModelSource(qwen, overrides=overrides, implementation="transformers"))
        return [layer.window for layer in config.layers]

    assert windows() == [None, WINDOW, WINDOW]
    assert windows(max_window_layers=2) == [None, None, WINDOW]
    assert windows(use_sliding_window=False) == [None, None, None]


@pytest.mark.parametrize("model_type", ["gemma3_text", "cohere2", "exaone4"])
def test_a_pattern_of_windows_is_overridden_unless_the_file_lists_the_layers(tmp_path: Path, model_type: str) -> None:
    stored = {"model_type": model_type, "num_hidden_layers": 4, "sliding_window_pattern": 4}

    def overridden(**more: Any) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({**stored, **more}))
        config = load_library_config(tmp_path, {"sliding_window_pattern": 2}, trust_remote_code=False)
        found: list[str] = config.layer_types
        return found

    assert overridden() == ["sliding_attention", "full_attention"] * 2
    with pytest.raises(
        ConfigError, match="--hf-overrides: sliding_window_pattern has no effect on a model with layer_"
    ):
        overridden(layer_types=["full_attention"] * 4)


def test_an_override_takes_layers_away(tmp_path: Path) -> None:
    folder = str(make_library_model(tmp_path, "Gemma3ForCausalLM"))
    config = load_config(ModelSource(folder, overrides={"num_hidden_layers": 2}, has_dummy_weights=True))
    assert [layer.window for layer in config.layers] == [WINDOW, None]


def test_rope_is_overridden_by_its_older_keys_too(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path / "glm", "GlmForCausalLM", rope_parameters={"rope_theta": 500.0})

    def overridden(**overrides: Any) -> dict[str, Any]:
        config = load_library_config(folder, overrides, trust_remote_code=False)
        found: dict[str, Any] = config.rope_parameters
        return found

    plain = overridden()
    assert plain["partial_rotary_factor"] == 0.5
    assert overridden(rope_theta=7.0) == {**plain, "rope_theta": 7.0}
    scaling = {"type": "yarn", "factor": 4.0}
    expected = {**plain, **scaling, "rope_type": "yarn", "original_max_position_embeddings": 1024}
    assert overridden(rope_scaling=scaling) == expected
    assert overridden(rope_scaling=scaling, rope_theta=7.0) == {**expected, "rope_theta": 7.0}
    assert scaling == {"type": "yarn", "factor": 4.0}
    config = load_config(ModelSource(str(folder), overrides={"rope_scaling": scaling}))
    assert config.context_length == 4096


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("overrides", [{"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_overrides_switch_the_scaling_of_rope_off_whatever_the_spelling_of_the_file(
    tmp_path: Path, overrides: dict[str, Any], spelling: str
) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    stored = {"model_type": "llama", "rope_theta": 500.0, spelling: rope}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = load_library_config(tmp_path, overrides, trust_remote_code=False)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("Gemma3ForCausalLM", "for each type of layer; give these"), ("GPT2LMHeadModel", "has no rotary embedding")],
)
def test_rope_that_the_older_keys_do_not_fit_is_not_overridden(tmp_path: Path, architecture: str, words: str) -> None:
    folder = make_library_model(tmp_path, architecture)
    with pytest.raises(ConfigError, match=f"--hf-overrides: rope_theta cannot be changed: this model .*{words}"):
        load_config(ModelSource(str(folder), overrides={"rope_theta": 7.0}))


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [({}, {}, (2,)), ({}, {"eos_token_id": 7}, (7,)), ({"eos_token_id": 5}, {"eos_token_id": 7}, (7, 5))],
)
def test_the_end_token_of_the_class_counts_only_where_no_file_names_one(
    tmp_path: Path, in_config: dict[str, int], in_generation: dict[str, int], expected: tuple[int, ...]
) -> None:
    file = make_library_model(tmp_path, "GPTNeoXForCausalLM") / "config.json"
    stored = {key: value for key, value in json.loads(file.read_text()).items() if key != "eos_token_id"}
    file.write_text(json.dumps({**stored, **in_config}))
    (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    assert TransformersConfig.load(str(tmp_path)).eos_token_ids == expected


def test_a_missing_tensor_is_an_error_and_not_noise(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path, "OlmoForCausalLM")
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.o_proj\.weight missing"):
        load(folder)


def test_a_file_that_the_library_cannot_read_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path, "OlmoForCausalLM")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-4])  # the last tensor ends behind the file
    with pytest.raises(ConfigError, match="transformers cannot load the weights"):
        load(folder)


@pytest.mark.parametrize(
    ("architecture", "factors"),
    [("Phi3ForCausalLM", {}), ("PhimoeForCausalLM", {"short_mscale": 1.2, "long_mscale": 1.7})],
)
def test_rotary_embeddings_that_depend_on_the_longest_request_limit_the_context(
    tmp_path: Path, architecture: str, factors: dict[str, float]
) -> None:
    """Otherwise a request's tokens would depend on the requests beside it. Phi 3 of 128k is such a model."""
    half = TransformersConfig.load(str(make_library_model(tmp_path, architecture))).head_dim // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + index / half for index in range(half)],
        "long_factor": [4.0] * half,
        "original_max_position_embeddings": 128,
        "factor": 8.0,
        **factors,
    }
    folder = make_library_model(tmp_path, architecture, rope_parameters=rope, original_max_position_embeddings=128)
    executor = load(folder)
    assert executor.model.config.context_length == 128
    cases = draw_prompts(folder, [9, 100], MAX_NEW, seed=7)
    driver = Driver(executor)
    texts = [driver.start(slot, prompt) for slot, (prompt, _) in enumerate(cases)]
    assert driver.finish(texts, MAX_NEW, chunk=24) == [expected for _, expected in cases]
    executor.close()


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "bloom": "_supports_attention_backend",
    "codegen": "_supports_attention_backend",
    "falcon": "_supports_attention_backend",
    "gptj": "_supports_attention_backend",
    "mpt": "_supports_attention_backend",
    "llama4_text": "attend within chunks",
    "mamba": "keep a state",
    "falcon_mamba": "keep a state",
    "t5": "encoder-decoder",
    "gemma3": "vision",
    "bert": "see later tokens",
}


@pytest.mark.parametrize(("model_type", "words"), REFUSED.items())
def test_a_model_that_pages_cannot_serve_is_refused_with_the_reason(
    tmp_path: Path, model_type: str, words: str
) -> None:
    write_config(tmp_path, model_type)
    with pytest.raises(UnsupportedModelError, match=f"cannot be served: .*{words}"):
        TransformersConfig.load(str(tmp_path))


def test_a_decoder_whose_tokens_see_later_tokens_is_refused_by_both_implementations(tmp_path: Path) -> None:
    write_config(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    with pytest.raises(UnsupportedModelError, match=r"is_causal false .* its tokens see later tokens \(is_causal\)"):
        load_config(ModelSource(str(tmp_path)))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("OlmoForCausalLM", {"model_type": ["olmo"]}, "transformers cannot read config.json"),
        ("OlmoForCausalLM", {"vocab_size": "many"}, "transformers cannot read config.json .*'vocab_size' expected int"),
        ("DeepseekV3ForCausalLM", {"num_attention_heads": 0}, "0 query heads are not a multiple of 0 KV heads"),
        ("MistralForCausalLM", {"sliding_window": 0}, r"attention has a window of 0 tokens \(sliding_window\)"),
    ],
)
def test_impossible_values_are_refused_with_a_sentence(
    tmp_path: Path, architecture: str, changes: dict[str, Any], words: str
) -> None:
    file = make_library_model(tmp_path, architecture) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(UnsupportedModelError, match=words):
        TransformersConfig.load(str(tmp_path))


@pytest.mark.parametrize("architecture", ["OlmoForSequenceClassification", 7])
def test_weights_of_another_kind_of_model_are_refused(tmp_path: Path, architecture: Any) -> None:
    write_config(tmp_path, "olmo", architecture=architecture)
    with pytest.raises(UnsupportedModelError, match=f"{architecture} cannot be served: its weights are"):
        TransformersConfig.load(str(tmp_path))


def test_code_of_a_checkpoint_does_not_run_unless_it_is_trusted(tmp_path: Path) -> None:
    write_config(tmp_path, "olmo")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'has-run')!r}, 'w')\n")
    with pytest.raises(UnsupportedModelError, match="--trust-remote-code, and runs that code"):
        TransformersConfig.load(str(tmp_path))
    assert not (tmp_path / "has-run").exists()


def test_other_code_of_a_checkpoint_is_another_model(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path, "OlmoForCausalLM")
    digests = set()
    for code in ("", "x = 1\n", "x = 2\n"):
        (folder / "code.py").write_text(code)
        digests.add(TransformersConfig.load(str(folder), trust_remote_code=True).digest)
    assert len(digests) == 3


@pytest.mark.parametrize("architecture", ["PhimoeForCausalLM", "Qwen2MoeForCausalLM"])
def test_a_window_that_only_the_library_s_masks_apply_is_refused(tmp_path: Path, architecture: str) -> None:
    layers = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "max_window_layers": 0}
    changes = {"sliding_window": 16, **(layers if architecture.startswith("Qwen") else {})}
    folder = make_library_model(tmp_path, architecture, **changes)
    with pytest.raises(UnsupportedModelError, match="logits over pages differ from the library's"):
        load(folder)


@pytest.mark.parametrize(
    ("architecture", "overrides", "window"),
    [
        ("MistralForCausalLM", {}, 24),
        ("MistralForCausalLM", {"sliding_window": 1024}, None),  # the whole context
        ("Gemma2ForCausalLM", {}, None),
        ("LlamaForCausalLM", {}, None),
    ],
)
def test_a_model_has_a_window_if_every_layer_has_one(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], window: int | None
) -> None:
    folder = make_library_model(tmp_path, architecture, **overrides)
    assert load_config(ModelSource(str(folder), implementation="transformers")).window == window


def test_a_mistral_with_types_of_layers_is_the_ministral_that_the_library_takes_it_for(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path, "MistralForCausalLM")
    stored = json.loads((folder / "config.json").read_text())
    stored["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    (folder / "config.json").write_text(json.dumps(stored))
    executor = load(folder)
    assert [layer.window for layer in executor.model.config.layers] == [WINDOW, None, WINDOW]
    check_tokens(executor, draw_prompts(folder, LENGTHS, MAX_NEW, seed=7), MAX_NEW)
    executor.close()


def test_masks_in_an_old_checkpoint_are_not_its_weights(tmp_path: Path) -> None:
    folder = make_library_model(tmp_path, "GPTNeoXForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load(folder).close()


def write_config(folder: Path, model_type: str, architecture: Any = "") -> None:
    """Write a small config.json of a model, and a file with one tensor, which is never read."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = CONFIG_MAPPING[model_type]()
    config.architectures = [architecture or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "Other")]
    config.save_pretrained(folder)
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")


# ---- untested models -------------------------------------------------------------------------------------------------


def test_a_reduced_copy_of_a_right_model_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_library_model(tmp_path, "Gemma2ForCausalLM", vocab_size=VOCAB_SIZE)
    monkeypatch.setattr("common.engine.models.implementation.TESTED", frozenset())
    load(folder).close()


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "GptOssForCausalLM"])
def test_a_reduced_copy_that_differs_from_the_library_is_refused(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Baton's side ignores windows, soft caps and sinks here."""
    from common.engine.attention.protocol import AttentionParams

    config = TransformersConfig.load(str(make_library_model(tmp_path, architecture)))
    monkeypatch.setattr(
        TransformersModel,
        "_attention_params",
        lambda self: [AttentionParams(scale=layer.scale) for layer in self.config.layers],
    )
    with pytest.raises(UnsupportedModelError, match="logits over pages differ from the library's"):
        transformers_check.check_reduced_copy(config)
