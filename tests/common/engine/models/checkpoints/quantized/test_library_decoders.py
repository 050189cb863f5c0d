"""Decoded matrices are those that the formats' own libraries decode; a library that is not installed is skipped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.quantized_models import BLOCK, FORMATS, quantize_model
from support.engine.reference_models import make_model
from torch import Tensor

from common.engine.models.checkpoints.quantized.config import parse_quantization
from common.engine.models.checkpoints.quantized.late_tensors import LateTensor, decoded_tensors

#: compressed-tensors 0.20 no longer reads this one.
REMOVED = "compressed, packed int4, act-order"


def decode_own(tmp_path: Path, kind: str) -> tuple[Path, dict[str, LateTensor]]:
    """Return the folder of a quantized model, and its tensors in float32 as Baton decodes them, by name."""
    plain = make_model(tmp_path / "plain", "qwen3", seed=2, hidden_size=64, intermediate_size=96)
    folder = quantize_model(plain, tmp_path / "quantized", kind)
    quantization = parse_quantization(FORMATS[kind][0], folder)
    assert quantization is not None
    return folder, decoded_tensors(folder, quantization, torch.float32)


def decode_both(tmp_path: Path, kind: str, library_settings: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each tensor of a model in float32 as Baton and as transformers decode it, by name."""
    from transformers import AutoModelForCausalLM

    folder, own = decode_own(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=library_settings, local_files_only=True
    )
    found = model.state_dict()
    assert own.keys() == found.keys()
    return {name: (tensor[...], found[name]) for name, tensor in own.items()}


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.startswith("fp8 in blocks")])
def test_fp8_in_blocks_is_decoded_as_transformers_does(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("accelerate")
    from transformers import FineGrainedFP8Config

    settings = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), dequantize=True)
    for name, (own, other) in decode_both(tmp_path, kind, settings).items():
        assert torch.equal(own, other), name


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.startswith("compressed") and kind != REMOVED])
def test_compressed_tensors_are_decoded_as_that_library_does(tmp_path: Path, kind: str) -> None:
    """It multiplies in the format of the scales, which is bfloat16 where integers are packed."""
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    for name, (own, other) in decode_both(tmp_path, kind, CompressedTensorsConfig(dequantize=True)).items():
        is_rounded = "packed" in kind and "_proj." in name
        assert torch.equal(own.bfloat16().float() if is_rounded else own, other), name


@pytest.mark.filterwarnings("ignore")  # its own, and those of what it imports
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.startswith(("gptq", "awq"))])
def test_gptq_and_awq_are_decoded_as_gptqmodel_does(tmp_path: Path, kind: str) -> None:
    """Its layers multiply the identity matrix, in float16, in which the result is the matrix itself."""
    gptqmodel = pytest.importorskip("gptqmodel")
    folder, own = decode_own(tmp_path, kind)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    # It reads asymmetric GPTQ only where it has been written by a release that is known to pack it correctly.
    config["quantization_config"]["meta"] = {"quantizer": ["gptqmodel:5.0.0"]}
    file.write_text(json.dumps(config))
    backend = gptqmodel.BACKEND.TORCH_AWQ if kind == "awq" else gptqmodel.BACKEND.TORCH
    model = gptqmodel.GPTQModel.load(str(folder), device="cpu", dtype=torch.float16, backend=backend).model
    found = {name: module for name, module in model.named_modules() if hasattr(module, "qweight")}
    assert len(found) == 2 * 7
    for name, module in found.items():
        matrix = own[f"{name}.weight"][...]
        decoded = module(torch.eye(matrix.shape[1], dtype=torch.float16)).T
        assert decoded.dtype == torch.float16
        assert torch.equal(matrix.half(), decoded), name
