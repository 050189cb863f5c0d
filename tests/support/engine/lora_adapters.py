"""Random LoRA adapters in PEFT's format, and the models that they make of others.

The merged model is computed by the formula of the format's description, ``W + lora_alpha / r * B @ A``, or with the
square root of ``r`` for rank-stabilised adapters. Where a parameter holds all experts of a layer, A has the experts one
after the other, and in B they alternate.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]
#: Matrices of an expert in the parameters of the library's classes, in the order in which these declare them.
_IN_PARAMETERS = {"gate_up_proj": ("gate_proj|w1", "up_proj|w3"), "down_proj": ("down_proj|w2",)}


class Target(NamedTuple):
    """What two tensors of an adapter change.

    Attributes:
        name: which patterns are compared with.
        place: that of its tensors.
        experts: for each expert the matrices below each other.
    """

    name: str
    place: str
    experts: list[list[str]]


def rank_and_scale(name: str, config: Mapping[str, Any]) -> tuple[int, float]:
    """Return what an adapter's configuration says about a matrix or parameter."""

    def value(key: str, otherwise: Any) -> Any:
        patterns = (config.get(key) or {}).items()
        return next((one for pattern, one in patterns if re.match(rf"(.*\.)?({pattern})$", name)), otherwise)

    rank = value("rank_pattern", config["r"])
    return rank, value("alpha_pattern", config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def targets_of(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Iterator[Target]:
    """Return what an adapter changes of a model."""

    def is_named(name: str, names: Sequence[str]) -> bool:
        return any(f".{name}".endswith(f".{end}") for end in names)

    matrices = sorted(name.removesuffix(".weight") for name, weight in weights.items() if weight.dim() == 2)
    for matrix in matrices:
        if is_named(matrix, config["target_modules"]):
            yield Target(matrix, matrix, [[matrix]])
    parameters = config.get("target_parameters") or ()
    layers = {int(found[1]) for name in matrices if (found := re.search(r"\.layers\.(\d+)\.", name))}
    for layer in sorted(layers):
        place = f"model.layers.{layer}.mlp"
        routers = [name for name in matrices if re.fullmatch(rf"model\.layers\.{layer}\..*\.gate", name)]
        if not routers:
            continue  # a dense layer
        if is_named(f"{place}.gate.weight", parameters):
            yield Target(f"{place}.gate.weight", f"{place}.gate", [routers])
        adapted = [kind for kind in _IN_PARAMETERS if is_named(f"{place}.experts.{kind}", parameters)]
        for number, kind in enumerate(reversed(adapted)):
            found_by_part = [
                sorted(
                    (name for name in matrices if re.search(rf"layers\.{layer}\..*experts\.\d+\.({part})$", name)),
                    key=lambda name: int(name.split(".")[-2]),
                )
                for part in _IN_PARAMETERS[kind]
            ]
            experts = [list(parts) for parts in zip(*found_by_part, strict=True)]
            yield Target(f"{place}.experts.{kind}", f"{place}.experts{'.base_layer' * number}", experts)


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
    weights = load_file(model / "model.safetensors")
    for target in targets_of(weights, settings):
        own_rank, _ = rank_and_scale(target.name, settings)
        shapes = [weights[f"{matrix}.weight"].shape for matrix in target.experts[0]]
        outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
        if config.get("fan_in_fan_out"):
            outputs, inputs = inputs, outputs
        prefix, num_ranks = f"base_model.model.{target.place}.lora_", own_rank * len(target.experts)
        stored[f"{prefix}A.weight"] = torch.randn(num_ranks, inputs, generator=random) * inputs**-0.5
        half = torch.randn(outputs, num_ranks, generator=random) * own_rank**-0.5 * 0.5
        stored[f"{prefix}B.weight"] = half
    stored |= tensors or {}
    save_file({name: tensor for name, tensor in stored.items() if tensor.numel()}, folder / "adapter_model.safetensors")
    return folder


def merge(folder: Path, model: Path, adapter: Path) -> Path:
    """Save the model with the adapter's products added to its weights into ``folder``."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    pairs, weights = load_file(adapter / "adapter_model.safetensors"), load_file(folder / "model.safetensors")
    for target in targets_of(weights, config):
        rank, scale = rank_and_scale(target.name, config)
        prefix = f"base_model.model.{target.place}.lora_"
        if f"{prefix}A.weight" not in pairs:
            continue
        a, b = (pairs[f"{prefix}{side}.weight"].double() for side in "AB")
        for number, matrices in enumerate(target.experts):
            change = (scale * b[:, number :: len(target.experts)] @ a[number * rank : (number + 1) * rank]).float()
            names = [f"{matrix}.weight" for matrix in matrices]
            change = change.T if config.get("fan_in_fan_out") else change
            for name, part in zip(names, change.split([len(weights[name]) for name in names]), strict=True):
                weights[name] = weights[name].float() + part
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
