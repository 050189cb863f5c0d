"""Quantized checkpoints whose model transformers computes give the tokens of the plain model that they mean."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.engine_driver import Driver
from support.engine.library_models import make_library_model
from support.engine.quantized_models import FORMATS, quantize_model
from support.engine.reference_models import draw_prompts

from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.checkpoints.quantized.config import parse_quantization
from common.engine.models.checkpoints.quantized.late_tensors import decoded_tensors
from common.engine.models.implementation import ModelSource, load_config
from common.errors import ConfigError, UnsupportedModelError

MAX_NEW = 6
KINDS = ["fp8 in blocks", "fp8 by channel", "gptq, act-order", "awq", "compressed, packed int4 with zero points"]
#: One weight for queries, keys and values; biases; experts of their own tensors; latent keys and values.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Phi3ForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "GPTNeoXForCausalLM": {},
    "OlmoeForCausalLM": {},
    "DeepseekV3ForCausalLM": {"q_lora_rank": 32},
}


def make_pair(tmp_path: Path, kind: str, architecture: str) -> tuple[Path, Path]:
    """Return a plain model, and a quantized checkpoint that means it."""
    plain = make_library_model(tmp_path / "plain", architecture, seed=2, **ARCHITECTURES.get(architecture, {}))
    return plain, quantize_model(plain, tmp_path / "quantized", kind)


def load(folder: Path, dtype: str = "float32") -> TorchExecutor:
    config = load_config(ModelSource(str(folder), implementation="transformers"))
    return load_executor(config, dtype=dtype, num_slots=4, num_pages=30, page_size=16)


@pytest.mark.slow(sample=0.3)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_of_the_library_with_the_decoded_model(tmp_path: Path, kind: str, architecture: str) -> None:
    plain, quantized = make_pair(tmp_path, kind, architecture)
    prompts = draw_prompts(plain, [1, 17, 70], MAX_NEW, seed=4)
    executor = load(quantized)
    driver = Driver(executor)
    texts = [driver.start(slot, prompt) for slot, (prompt, _) in enumerate(prompts)]
    assert driver.finish(texts, MAX_NEW) == [expected for _, expected in prompts]
    executor.close()


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_tells_the_shapes_of_its_matrices(tmp_path: Path, kind: str) -> None:
    plain, quantized = make_pair(tmp_path, kind, "OlmoForCausalLM")
    quantization = parse_quantization(FORMATS[kind][0], quantized)
    assert quantization is not None
    decoded = decoded_tensors(quantized, quantization, torch.float32)
    tensors = load_file(plain / "model.safetensors")
    assert decoded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(decoded[name][...], tensor), name


def test_a_tensor_that_cannot_be_decoded_is_an_error_that_names_the_matrix(tmp_path: Path) -> None:
    _, quantized = make_pair(tmp_path, "gptq, 4 bits", "OlmoForCausalLM")
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.g_idx"] = torch.ones(3, dtype=torch.int32)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.down_proj"):
        load(quantized)


@pytest.mark.parametrize(
    ("kind", "scale", "dtype"),
    [("fp8 in blocks", "weight_scale_inv", "F8_E4M3"), ("compressed, int8", "weight_scale", "I8")],
)
def test_a_matrix_of_8_bits_without_a_scale_is_refused_by_name(
    tmp_path: Path, kind: str, scale: str, dtype: str
) -> None:
    _, quantized = make_pair(tmp_path, kind, "OlmoForCausalLM")
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.1.mlp.down_proj.{scale}"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"layers\.1\.mlp\.down_proj\.weight has type {dtype}, and no scale"):
        load(quantized)


def test_biases_of_zeros_are_ignored_and_others_are_an_error(tmp_path: Path) -> None:
    _, quantized = make_pair(tmp_path, "gptq, 4 bits", "OlmoForCausalLM")
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.bias"
    hidden = tensors["model.embed_tokens.weight"].shape[1]
    save_file({**tensors, name: torch.zeros(hidden)}, file, {"format": "pt"})
    load(quantized).close()
    save_file({**tensors, name: torch.ones(hidden)}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"the model has no model\.layers\.1\.mlp\.down_proj\.bias"):
        load(quantized)


def test_scales_of_an_activation_are_refused_by_name(tmp_path: Path) -> None:
    """AutoAWQ writes them where no norm or matrix before a matrix can take its scales, as after GELU."""
    _, quantized = make_pair(tmp_path, "awq", "GPTNeoXForCausalLM")
    file = quantized / "model.safetensors"
    name = "gpt_neox.layers.1.mlp.act.scales"
    save_file({**load_file(file), name: torch.full((96,), 2.0)}, file, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"{name} belongs to no matrix; scales of activations are not"):
        load(quantized)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "mxfp4"}, r"quantized checkpoint \(mxfp4\) is not supported"),
        ({"quant_method": "fp8", "weight_block_size": 128}, r"config\.json: quantization_config cannot be parsed \("),
    ],
)
def test_another_method_and_values_of_a_wrong_type_are_refused(tmp_path: Path, quantization: Any, words: str) -> None:
    file = make_library_model(tmp_path, "OlmoForCausalLM") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))
    with pytest.raises(ConfigError, match=words):
        load_config(ModelSource(str(tmp_path)))


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_memory_of_the_file_and_of_the_decoded_matrices_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str, num_bytes: int
) -> None:
    plain, quantized = make_pair(tmp_path, "awq", "OlmoForCausalLM")
    with caplog.at_level(logging.INFO):
        load(quantized, dtype).close()
    (line,) = (record for record in caplog.records if "quantized checkpoint" in record.msg)
    assert line.getMessage() == (
        f"quantized checkpoint (AWQ, 4 bits): 14 matrices of 0.00 GB take 0.00 GB as {dtype}, "
        "before --weight-dtype rounds them"
    )
    assert isinstance(line.args, tuple)
    matrices = {name: one for name, one in load_file(plain / "model.safetensors").items() if "proj" in name}
    in_file = [one.nbytes for name, one in load_file(quantized / "model.safetensors").items() if "proj" in name]
    assert line.args[2] == pytest.approx(sum(in_file) / 1e9)
    assert line.args[3] == pytest.approx(num_bytes * sum(one.numel() for one in matrices.values()) / 1e9)
