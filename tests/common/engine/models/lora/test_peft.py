"""Adapters that PEFT writes give the tokens of the models that PEFT merges; skipped where it is not installed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.engine_driver import Driver
from support.engine.library_models import make_library_model
from support.engine.reference_models import draw_prompts, load_reference

from common.engine.factory import load_executor
from common.engine.models.implementation import ModelSource, load_config

LENGTHS, MAX_NEW = [1, 17, 70], 6
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PATTERNS = {
    "r": 4,
    "rank_pattern": {r".*layers\.1\..*\.(q|v)_proj": 2, "down_proj": 7, "^model.layers.0.self_attn.q_proj": 6},
    "alpha_pattern": {"q_proj": 9, r"layers\.[01]\.mlp\.down_proj": 30},
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning")  # of patterns for parameters
@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("architecture", "implementation", "settings"),
    [
        ("Qwen3ForCausalLM", "native", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
        ("LlamaForCausalLM", "native", {"r": 5, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}),
        ("Qwen3MoeForCausalLM", "native", {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
        ("MixtralForCausalLM", "native", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}),
        ("MixtralForCausalLM", "native", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
        ("Qwen3MoeForCausalLM", "native", {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}),
        (
            "Qwen3MoeForCausalLM",
            "native",
            {"r": 4, "target_modules": [], "target_parameters": ["experts.gate_up_proj"]},
        ),
        ("Qwen3ForCausalLM", "native", {**PATTERNS, "target_modules": "all-linear"}),
        ("Gemma2ForCausalLM", "transformers", {**PATTERNS, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
        ("Gemma2ForCausalLM", "transformers", {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj", "down_proj"]}),
        ("OlmoeForCausalLM", "transformers", {"r": 4, "target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        ("GptOssForCausalLM", "transformers", {"r": 4, "target_modules": ["o_proj"], "target_parameters": EXPERTS}),
        ("GPT2LMHeadModel", "transformers", {"r": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    ],
)
def test_tokens_equal_those_of_the_model_that_peft_merges(
    tmp_path: Path, architecture: str, implementation: Any, settings: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    folder = make_library_model(tmp_path / "model", architecture, seed=7)
    plain = draw_prompts(folder, LENGTHS, MAX_NEW, seed=3)
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(load_reference(folder), config)
    adapted.save_pretrained(tmp_path / "adapter")
    cases = draw_prompts(adapted.merge_and_unload(), LENGTHS, MAX_NEW, seed=3)
    assert plain[-1] != cases[-1]
    executor = load_executor(
        load_config(ModelSource(str(folder), implementation=implementation)),
        device="cpu",
        dtype="float32",
        num_slots=8,
        num_pages=60,
        page_size=16,
    )
    executor.adapters["a"] = executor.read_adapter(tmp_path / "adapter", max_rank=8)
    driver = Driver(executor)
    texts = [driver.start(slot, prompt, adapter="a") for slot, (prompt, _) in enumerate(cases)]
    assert driver.finish(texts, MAX_NEW, chunk=24) == [expected for _, expected in cases]
    executor.close()
