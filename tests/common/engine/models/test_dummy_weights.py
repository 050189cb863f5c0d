"""``--load-format dummy``: models without weight files, whose random weights all nodes and ranks agree on."""

from pathlib import Path

import pytest
import torch
from support.engine.engine_driver import Driver
from support.engine.library_models import make_library_model
from support.engine.reference_models import EXPERTS, make_model

from common.config.node import NodeConfig
from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.checkpoints.weights import load_weights
from common.engine.models.config import ModelConfig
from common.engine.models.dummy_weights import dummy_tensor
from common.engine.models.implementation import ModelSource, load_config
from common.engine.tensor_parallel.shard import WHOLE_MODEL, Shard
from common.errors import ConfigError

CPU = torch.device("cpu")


def without_weights(folder: Path) -> str:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return str(folder)


def load(folder: str) -> TorchExecutor:
    config = load_config(ModelSource(folder, has_dummy_weights=True))
    return load_executor(config, num_slots=2, num_pages=8, page_size=16)


def outputs(folder: str) -> list[int]:
    executor = load(folder)
    text = Driver(executor).start(0, tuple(range(20)))
    text._driver.finish([text], 6)
    executor.close()
    return text.output


def test_random_numbers_follow_from_name_and_shape() -> None:
    drawn = dummy_tensor("a.weight", (1200, 1000))
    assert torch.equal(drawn, dummy_tensor("a.weight", (1200, 1000)))
    assert not torch.equal(drawn, dummy_tensor("b.weight", (1200, 1000)))
    assert float(drawn.std()) == pytest.approx(0.02, rel=0.01)
    assert len(drawn.unique(dim=0)) == len(drawn), "no row is there twice"
    assert dummy_tensor("layers.0.input_layernorm.weight", (8,)).tolist() == [1.0] * 8
    assert dummy_tensor("transformer.h.0.ln_1.weight", (8,)).tolist() == [1.0] * 8
    assert dummy_tensor("q_proj.bias", (8,)).tolist() == [0.0] * 8
    assert dummy_tensor("input_layernorm.bias", (8,)).tolist() == [0.0] * 8


@pytest.mark.parametrize(("family", "overrides"), [("qwen3", {}), ("qwen2", {}), ("qwen3_moe", EXPERTS)])
def test_a_native_model_needs_no_weight_files_and_is_the_same_each_time(
    tmp_path: Path, family: str, overrides: dict[str, int]
) -> None:
    folder = without_weights(make_model(tmp_path, family, **overrides))
    config = load_config(ModelSource(folder, has_dummy_weights=True))
    assert (config.implementation, config.dtype) == ("native", "float32")
    assert outputs(folder) == outputs(folder)


def test_a_model_of_transformers_needs_none_either(tmp_path: Path) -> None:
    folder = without_weights(make_library_model(tmp_path, "GptOssForCausalLM"))
    assert load_config(ModelSource(folder, has_dummy_weights=True)).implementation == "transformers"
    assert outputs(folder) == outputs(folder)


def test_ranks_have_their_parts_of_the_same_weights(tmp_path: Path) -> None:
    config = ModelConfig.load(without_weights(make_model(tmp_path, "llama")), has_dummy_weights=True)
    shards = (WHOLE_MODEL, Shard(0, 2), Shard(1, 2))
    whole, first, second = (load_weights(config, "float32", CPU, shard).layers[0].o.weight for shard in shards)
    assert whole is not None and first is not None and second is not None
    assert torch.equal(torch.cat([first, second], dim=1), whole)


def test_dummy_weights_are_another_model_to_other_nodes(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path, "qwen3"))
    real, dummy = (load_config(ModelSource(folder, has_dummy_weights=is_dummy)) for is_dummy in (False, True))
    assert real.digest != dummy.digest


def test_without_the_option_missing_weights_are_an_error(tmp_path: Path) -> None:
    folder = without_weights(make_model(tmp_path, "qwen3"))
    with pytest.raises(ConfigError, match=r"no \*\.safetensors files"):
        load_config(ModelSource(folder, implementation="native"))


@pytest.mark.parametrize("given", ["gguf", "pt", "npcache", "bitsandbytes"])
def test_other_formats_are_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match=f"--load-format {given}: only safetensors files are read"):
        NodeConfig(load_format=given)
    NodeConfig(load_format="safetensors")
