"""Random LoRA adapters in PEFT's format, and the models that they make of others.

The merged model is computed by the formula of the format's description, ``W + lora_alpha / r * B @ A``, or with the
square root of ``r`` for rank-stabilised adapters.
"""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


def make_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] = ALL,
    seed: int = 0,
    tensors: Tensors | None = None,
    **config: Any,
) -> Path:
    """Save a random adapter for the model in ``model`` into ``folder``.

    Args:
        targets: ends of the names of the matrices to change.
        tensors: changes to what is stored, by name; an empty tensor removes one.
        config: further keys of ``adapter_config.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "bias": "none",
        "lora_dropout": 0.05,
        "inference_mode": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    random = torch.Generator().manual_seed(seed)
    stored: Tensors = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        matrix = name.removesuffix(".weight")
        if weight.dim() != 2 or not any(f".{matrix}".endswith(f".{target}") for target in targets):
            continue
        outputs, inputs = weight.shape[::-1] if config.get("fan_in_fan_out") else weight.shape
        stored[f"base_model.model.{matrix}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * inputs**-0.5
        half = torch.randn(outputs, rank, generator=random) * rank**-0.5 * 0.5
        stored[f"base_model.model.{matrix}.lora_B.weight"] = half
    stored |= tensors or {}
    save_file({name: tensor for name, tensor in stored.items() if tensor.numel()}, folder / "adapter_model.safetensors")
    return folder


def merge(folder: Path, model: Path, adapter: Path) -> Path:
    """Save the model with the adapter's products added to its weights into ``folder``."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    pairs, weights = load_file(adapter / "adapter_model.safetensors"), load_file(folder / "model.safetensors")
    for name, a in pairs.items():
        if ".lora_A." in name:
            b = pairs[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            change = scale * (b.double() @ a.double()).float()
            weights[target] = weights[target].float() + (change.T if config.get("fan_in_fan_out") else change)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
