"""Models with experts: their keys in config.json, and the three forms in which checkpoints hold their tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.reference_models import EXPERTS, make_model
from torch import Tensor

from common.engine.models.checkpoints.weights import load_weights
from common.engine.models.config import ModelConfig
from common.engine.models.expert_config import ExpertConfig
from common.engine.models.layers import TorchOperations
from common.engine.tensor_parallel.shard import WHOLE_MODEL, Shard
from common.errors import ConfigError, UnsupportedModelError

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {"qwen3_moe": EXPERTS, "mixtral": {"num_local_experts": 4}}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", request.param, num_hidden_layers=1, **MODELS[request.param])


def rewrite(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; a value of None removes its key."""
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def experts_of(folder: Path) -> ExpertConfig:
    experts = ModelConfig.load(str(folder)).experts
    assert experts is not None
    return experts


def qwen(tmp_path: Path, **changes: Any) -> Path:
    folder = make_model(tmp_path, "qwen3_moe", num_hidden_layers=1, **EXPERTS)
    rewrite(folder, **changes)
    return folder


def test_experts_are_read_from_the_keys_of_qwen_and_of_transformers_5(tmp_path: Path) -> None:
    folder = qwen(tmp_path)
    found = experts_of(folder)
    assert (found.num_experts, found.num_per_token, found.width, found.is_normalised) == (6, 3, 32, True)
    rewrite(folder, num_local_experts=None, num_experts=6, norm_topk_prob=None)
    assert (experts_of(folder).num_experts, experts_of(folder).is_normalised) == (6, False)


def test_mixtral_always_normalises_and_has_experts_of_the_intermediate_size(tmp_path: Path) -> None:
    found = experts_of(make_model(tmp_path, "mixtral", num_hidden_layers=2, num_local_experts=4))
    assert (found.num_experts, found.num_per_token, found.width, found.is_normalised) == (4, 2, 80, True)
    assert found.layers == (0, 1)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2, 3, 4)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 3]}, (1, 2, 4)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
    ],
)
def test_layers_without_experts_are_named_by_two_keys(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    assert experts_of(qwen(tmp_path, num_hidden_layers=5, **changes)).layers == layers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 of 6 experts"),
        ({"num_local_experts": 1, "num_experts_per_tok": 1}, "of 1 experts: there must be two"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size should be a positive integer"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step should be a positive integer, not 0"),
        ({"num_local_experts": None}, "num_experts should be a positive integer"),
    ],
)
def test_impossible_experts_are_refused_by_key(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = qwen(tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        ModelConfig.load(str(folder))


def test_mixtrals_window_counts_if_it_is_set(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "mixtral", num_hidden_layers=1, num_local_experts=2)
    rewrite(folder, sliding_window=None)  # removes the key, which then means none
    ModelConfig.load(str(folder))
    rewrite(folder, sliding_window=4096)
    with pytest.raises(UnsupportedModelError, match="sliding windows are not supported"):
        ModelConfig.load(str(folder))


def test_the_context_where_attention_costs_as_much_counts_the_experts_of_a_token(tmp_path: Path) -> None:
    config = ModelConfig.load(str(qwen(tmp_path)))
    heads, kv = 4 * 32, 2 * 32
    assert config.crossover_tokens == 48 * (2 * heads + 2 * kv + 3 * 3 * 32) / (2 * heads)


def fuse(folder: Path) -> None:
    """Store the experts of each layer in two tensors, as ``save_pretrained(save_original_format=False)`` does."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    experts = experts_of(folder)
    fused: dict[str, Tensor] = {}
    by_name = {experts.keys.name_of(name): tensor for name, tensor in tensors.items()}
    for name, tensor in by_name.items():
        if ".experts." not in name:
            fused[name] = tensor
    base = "model.layers.0.mlp.experts."
    parts = {
        part: torch.stack([by_name[f"{base}{index}.{part}.weight"] for index in range(experts.num_experts)])
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    fused[base + "gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
    fused[base + "down_proj"] = parts["down_proj"]
    save_file(fused, file)


@pytest.mark.parametrize("shard", [WHOLE_MODEL, Shard(1, 2)], ids=["whole", "second of two ranks"])
def test_experts_in_one_tensor_for_each_layer_are_the_same(folder: Path, shard: Shard) -> None:
    config = ModelConfig.load(str(folder))
    x = torch.randn(5, config.hidden_size)
    expected = load_weights(config, "float32", CPU, shard).layers[0].mlp
    fuse(folder)
    config = ModelConfig.load(str(folder))
    found = load_weights(config, "float32", CPU, shard).layers[0].mlp
    assert torch.equal(found(x, TorchOperations()), expected(x, TorchOperations()))


def test_a_missing_expert_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if ".experts.1." in name)]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts\.1\.\w+_proj\.weight missing"):
        load_weights(ModelConfig.load(str(folder)), "float32", CPU)
