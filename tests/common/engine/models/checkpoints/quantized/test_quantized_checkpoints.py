"""Quantized checkpoints give the tokens of the plain model that they mean, in every format, family and rank.

The reference is ``support.engine.quantized_models``, which encodes by the public descriptions of the formats.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.engine_driver import Driver
from support.engine.quantized_models import FORMATS, quantize_model
from support.engine.reference_models import EXPERTS, draw_prompts, make_model
from torch import Tensor

from common.engine.factory import load_executor
from common.engine.models.checkpoints.quantized.config import parse_quantization
from common.engine.models.checkpoints.quantized.gptq import decode_gptq
from common.engine.models.checkpoints.weights import load_weights
from common.engine.models.config import ModelConfig
from common.engine.models.decoder import DecoderWeights
from common.engine.models.feed_forward import ExpertLoop, Experts, FeedForward, Mlp
from common.engine.models.linear import Linear
from common.engine.tensor_parallel.shard import WHOLE_MODEL, Shard
from common.errors import ConfigError, UnsupportedModelError

CPU = torch.device("cpu")
MAX_NEW = 6


def make_pair(tmp_path: Path, kind: str, family: str = "qwen3", **overrides: Any) -> tuple[Path, Path]:
    """Return a plain model, and a quantized checkpoint that means it."""
    plain = make_model(tmp_path / "plain", family, seed=2, **overrides)
    return plain, quantize_model(plain, tmp_path / "quantized", kind)


def matrices_of(weights: DecoderWeights) -> list[Tensor]:
    """All matrices of all layers; of experts, those of each."""

    def of(mlp: FeedForward) -> list[Linear]:
        if isinstance(mlp, Experts):
            assert isinstance(mlp.product, ExpertLoop)
            return [mlp.router, *(linear for expert in mlp.product.experts for linear in of(expert))]
        assert isinstance(mlp, Mlp)
        return [mlp.gate_up, mlp.down]

    linears = [linear for layer in weights.layers for linear in (layer.qkv, layer.o, *of(layer.mlp))]
    return [linear.weight for linear in linears if linear.weight is not None]


def assert_same(first: Path, second: Path, shard: Shard = WHOLE_MODEL) -> None:
    found, expected = (
        matrices_of(load_weights(ModelConfig.load(str(folder)), "float32", CPU, shard)) for folder in (first, second)
    )
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change keys of ``quantization_config``."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    content["quantization_config"] = {**content.get("quantization_config", {}), **changes}
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("kind", FORMATS)
def test_decoded_matrices_are_those_that_were_encoded(tmp_path: Path, kind: str) -> None:
    plain, quantized = make_pair(tmp_path, kind)
    assert_same(quantized, plain)


@pytest.mark.parametrize("kind", ["fp8 in blocks", "gptq, act-order", "awq", "compressed, packed int4"])
def test_tokens_equal_those_of_transformers_with_the_decoded_model(tmp_path: Path, kind: str) -> None:
    plain, quantized = make_pair(tmp_path, kind)
    prompts = draw_prompts(plain, [1, 17, 70], MAX_NEW, seed=4)
    executor = load_executor(ModelConfig.load(str(quantized)), dtype="float32", num_slots=4, num_pages=30, page_size=16)
    driver = Driver(executor)
    texts = [driver.start(slot, prompt) for slot, (prompt, _) in enumerate(prompts)]
    assert driver.finish(texts, MAX_NEW) == [expected for _, expected in prompts]
    executor.close()


@pytest.mark.parametrize("kind", ["fp8 in blocks", "gptq, 4 bits", "awq", "compressed, packed int4 with zero points"])
@pytest.mark.parametrize(("family", "overrides"), [("qwen3_moe", EXPERTS), ("mixtral", {"num_local_experts": 2})])
def test_experts_are_decoded(tmp_path: Path, kind: str, family: str, overrides: dict[str, Any]) -> None:
    plain, quantized = make_pair(tmp_path, kind, family, num_hidden_layers=1, **overrides)
    assert_same(quantized, plain)


@pytest.mark.parametrize("kind", ["fp8 in blocks", "gptq, act-order", "awq", "compressed, packed int4"])
def test_each_rank_decodes_its_part(tmp_path: Path, kind: str) -> None:
    plain, quantized = make_pair(tmp_path, kind, "llama")
    for rank in range(2):
        assert_same(quantized, plain, Shard(rank, 2))


def test_weights_may_be_rounded_again(tmp_path: Path) -> None:
    _, quantized = make_pair(tmp_path, "awq")
    config = ModelConfig.load(str(quantized))
    executor = load_executor(config, num_slots=1, num_pages=4, page_size=16, weight_dtype="int8")
    assert executor.model.weights.layers[0].qkv.weight is None
    executor.close()


def test_the_dtype_is_that_of_the_tensors_that_are_not_quantized(tmp_path: Path) -> None:
    _, quantized = make_pair(tmp_path, "gptq, 4 bits")  # scales are float16
    assert ModelConfig.load(str(quantized)).dtype == "float32"
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    save_file({name: one.bfloat16() if one.dtype == torch.float32 else one for name, one in tensors.items()}, file)
    assert ModelConfig.load(str(quantized)).dtype == "bfloat16"


def test_the_memory_of_the_matrices_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, quantized = make_pair(tmp_path, "gptq, 4 bits")
    with caplog.at_level(logging.INFO):
        load_weights(ModelConfig.load(str(quantized)), "float32", CPU)
    assert "quantized checkpoint (GPTQ, 4 bits): 14 matrices of 0.00 GB take 0.00 GB as float32" in caplog.text


def test_a_zero_point_of_0_borrows_from_the_next_one_in_the_first_form_of_gptq() -> None:
    """Zero points 0, 5, 1, 1, 1, 1, 1, 1 are 0x11111150 in one word, and 0x3F once 1 is subtracted from each."""
    parts = {
        "qweight": torch.full((1, 8), 0x77777777, dtype=torch.int32),
        "qzeros": torch.tensor([[0x3F]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    quantization = parse_quantization({"quant_method": "gptq", "bits": 4}, Path())
    assert quantization is not None
    assert decode_gptq(parts, (8, 8), quantization)[:, 0].tolist() == [7, 2, 6, 6, 6, 6, 6, 6]


def gptq_of_sevens(word: int, num_groups: int) -> dict[str, Tensor]:
    """Return eight outputs of eight inputs for each group; the scale of the first group is 1, of the second 2, ..."""
    signed = word - (1 << 32) if word >> 31 else word
    return {
        "qweight": torch.full((num_groups, 8), 0x77777777, dtype=torch.int32),
        "qzeros": torch.full((num_groups, 1), signed, dtype=torch.int32),
        "scales": torch.arange(1, num_groups + 1)[:, None].repeat(1, 8).half(),
    }


@pytest.mark.parametrize("given", [{"sym": True}, {}], ids=["named", "by default"])
@pytest.mark.parametrize("word", [0x77777777, 0x88888888], ids=["less 1", "as they are"])
def test_zero_points_of_symmetric_gptq_are_in_the_middle_however_they_are_stored(
    word: int, given: dict[str, bool]
) -> None:
    quantization = parse_quantization({"quant_method": "gptq", "bits": 4, **given}, Path())
    assert quantization is not None
    assert decode_gptq(gptq_of_sevens(word, 1), (8, 8), quantization).unique().tolist() == [-1]


def test_groups_of_gptq_are_in_order_where_the_group_of_every_input_is_stored_as_0() -> None:
    quantization = parse_quantization({"quant_method": "gptq", "bits": 4, "desc_act": False}, Path())
    assert quantization is not None
    parts = {**gptq_of_sevens(0x77777777, 2), "g_idx": torch.zeros(16, dtype=torch.int32)}
    assert decode_gptq(parts, (8, 16), quantization)[0].tolist() == [-1] * 8 + [-2] * 8


def test_the_form_of_gptq_may_be_named_as_transformers_5_writes_it(tmp_path: Path) -> None:
    plain, quantized = make_pair(tmp_path, "gptq v2", num_hidden_layers=1)
    rewrite(quantized, checkpoint_format=None, format="GPTQ_V2")
    assert_same(quantized, plain)


def test_biases_of_zeros_are_ignored_and_others_are_not(tmp_path: Path) -> None:
    """AutoGPTQ gives every matrix a bias."""
    plain, quantized = make_pair(tmp_path, "gptq, 4 bits")
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.bias"
    save_file({**tensors, name: torch.zeros(48)}, file)
    assert_same(quantized, plain)
    save_file({**tensors, name: torch.ones(48)}, file)
    with pytest.raises(ConfigError, match=f"{name} unexpected"):
        assert_same(quantized, plain)


def test_scales_of_keys_values_and_queries_are_ignored(tmp_path: Path) -> None:
    plain, quantized = make_pair(tmp_path, "compressed, int8")
    file = quantized / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{kind}_scale": torch.ones(1) for kind in ("k", "v", "kv", "q")}
    save_file({**load_file(file), **scales}, file)
    assert_same(quantized, plain)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("gptq, 4 bits", {"scales": None}, "q_proj: cannot be decoded .*'scales' is missing"),
        ("gptq, 4 bits", {"qweight": torch.zeros(5, 128, dtype=torch.int32)}, "5 words do not hold 48 numbers"),
        ("awq", {"qzeros": torch.zeros(9, 16, dtype=torch.int32)}, "q_proj: cannot be decoded"),
        ("fp8 in blocks", {"weight_scale_inv": torch.ones(3, 3)}, r"scales \[3, 3\] do not fit a matrix \[128, 48\]"),
        ("fp8 in blocks", {"weight_scale_inv": None}, "q_proj.weight has type F8_E4M3, and no scale"),
        ("fp8 by channel", {"weight": torch.zeros(128, 40, dtype=torch.float8_e4m3fn)}, "q_proj: cannot be decoded"),
        ("fp8 by channel", {"weight": torch.zeros(1, 48, dtype=torch.float8_e4m3fn)}, r"not 8 bits \[128, 48\]"),
        ("fp8 by channel", {"weight": torch.zeros(128, 48, dtype=torch.bfloat16)}, r"weight is torch.bfloat16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, kind: str, change: dict[str, Tensor | None], words: str
) -> None:
    _, quantized = make_pair(tmp_path, kind, num_hidden_layers=1)
    file = quantized / "model.safetensors"
    changed = {f"model.layers.0.self_attn.q_proj.{part}": tensor for part, tensor in change.items()}
    tensors = {**load_file(file), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(ConfigError, match=words):
        load_weights(ModelConfig.load(str(quantized)), "float32", CPU)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, "bitsandbytes.*supported are fp8, compressed-tensors, awq, gptq"),
        ("awq", {"quant_method": None}, "None.*supported are"),
        ("awq", {"version": "gemv"}, "awq.*version gemv; only gemm"),
        ("awq", {"version": None, "format": "gemv"}, "awq.*format gemv; only gemm"),
        ("awq", {"zero_point": False}, "awq.*zero_point False"),
        ("gptq, 4 bits", {"bits": 3}, "gptq.*bits 3; only 4 and 8"),
        ("gptq, 4 bits", {"checkpoint_format": "marlin"}, "gptq.*checkpoint_format marlin"),
        ("gptq, 4 bits", {"format": "marlin"}, "gptq.*format marlin"),
        ("gptq, 4 bits", {"pack_dtype": "int16"}, "gptq.*pack_dtype int16; only int32"),
        ("compressed, int8", {"format": "nvfp4-pack-quantized"}, "compressed-tensors.*nvfp4-pack-quantized"),
        ("compressed, int8", {"quantization_status": "calibration"}, "quantization_status calibration"),
        ("compressed, int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("compressed, int8", {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        ("compressed, int8", {"config_groups": {"a": {"weights": {"num_bits": 3}}}}, "weights of int of 3 bits"),
    ],
)
def test_what_cannot_be_decoded_is_refused_by_name(
    tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    _, quantized = make_pair(tmp_path, kind, num_hidden_layers=1)
    rewrite(quantized, **changes)
    with pytest.raises(UnsupportedModelError, match=words):
        ModelConfig.load(str(quantized))


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ConfigError, match=r"model\.gguf: GGUF files are not read"):
        ModelConfig.load(str(file))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"no \*\.safetensors files; other formats, such as GGUF"):
        ModelConfig.load(str(tmp_path))
