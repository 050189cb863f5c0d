"""Which part of a model a rank has."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.reference_models import make_model

from common.engine.models.checkpoints.weights import load_weights
from common.engine.models.config import ModelConfig
from common.engine.models.expert_config import QWEN_EXPERTS, ExpertConfig
from common.engine.models.feed_forward import Mlp
from common.engine.tensor_parallel.shard import WHOLE_MODEL, Shard, check_divisible
from common.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Four heads, two KV heads of 32, hidden size 48, intermediate size 80; biases everywhere."""
    folder = make_model(tmp_path_factory.mktemp("model"), "llama", attention_bias=True, mlp_bias=True)
    return ModelConfig.load(str(folder))


def test_without_ranks_the_shard_is_the_whole_model(config: ModelConfig) -> None:
    assert WHOLE_MODEL.config_of(config) == config
    assert WHOLE_MODEL.kv_heads(2) == range(2)


def test_two_ranks_divide_heads_and_the_intermediate_size(config: ModelConfig) -> None:
    own = Shard(1, 2).config_of(config)
    assert (own.num_heads, own.num_kv_heads, own.head_dim, own.intermediate_size, own.hidden_size) == (2, 1, 32, 40, 48)
    assert [Shard(rank, 2).kv_heads(2) for rank in range(2)] == [range(1), range(1, 2)]


def test_ranks_share_a_kv_head_where_they_are_more(config: ModelConfig) -> None:
    assert Shard(3, 4).config_of(config).num_kv_heads == 1
    assert [Shard(rank, 4).kv_heads(2) for rank in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]


@given(st.data())
def test_every_query_head_is_on_the_rank_of_its_kv_head(data: st.DataObject) -> None:
    num_kv_heads = data.draw(st.sampled_from((1, 2, 3, 4, 8)))
    group = data.draw(st.sampled_from((1, 2, 4, 6)))
    num_heads = num_kv_heads * group
    fits = [n for n in range(1, 65) if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)]
    num_ranks = data.draw(st.sampled_from(fits))
    mine = num_heads // num_ranks
    for rank, head in product(range(num_ranks), range(mine)):
        heads = Shard(rank, num_ranks).kv_heads(num_kv_heads)
        assert heads[head // (mine // len(heads))] == (rank * mine + head) // group


def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused(config: ModelConfig) -> None:
    for num_ranks in (3, 8):
        with pytest.raises(ConfigError, match=f"--tp {num_ranks}: attention heads 4"):
            check_divisible(config, num_ranks)
    with pytest.raises(ConfigError, match="intermediate size 81"):
        check_divisible(replace(config, intermediate_size=81), 2)
    experts = ExpertConfig(4, 2, 30, True, (0,), QWEN_EXPERTS)
    with pytest.raises(ConfigError, match="--tp 4: the experts' intermediate size 30"):
        check_divisible(replace(config, experts=experts), 4)
    with pytest.raises(ConfigError, match="3 KV heads"):
        check_divisible(replace(config, num_heads=12, num_kv_heads=3), 4)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_parts_of_all_ranks_are_the_weights_of_the_model(config: ModelConfig, num_ranks: int) -> None:
    whole = load_weights(config, "float32", CPU)
    shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
    ranks = [load_weights(config, "float32", CPU, shard) for shard in shards]
    assert ranks[0].head is not None
    assert all(rank.head is None for rank in ranks[1:])
    for index, layer in enumerate(whole.layers):
        parts = [rank.layers[index] for rank in ranks]
        mlps = [part.mlp for part in parts if isinstance(part.mlp, Mlp)]
        assert isinstance(layer.mlp, Mlp)
        x = torch.randn(5, config.hidden_size)
        gate, up = zip(*(mlp.gate_up(x).chunk(2, dim=1) for mlp in mlps), strict=True)
        assert torch.allclose(torch.cat([*gate, *up], dim=1), layer.mlp.gate_up(x), atol=1e-5)
        wide = torch.randn(5, config.intermediate_size)
        down = sum(mlp.down(piece) for mlp, piece in zip(mlps, wide.chunk(num_ranks, dim=1), strict=True))
        assert torch.allclose(torch.as_tensor(down), layer.mlp.down(wide), atol=1e-5)
        for shard, part in zip(shards, parts, strict=True):
            heads = np.split(layer.qkv(x).numpy(), [128, 192], axis=1)  # queries, keys, values
            kv = shard.kv_heads(config.num_kv_heads)
            queries = heads[0][:, shard.rank * 128 // num_ranks : (shard.rank + 1) * 128 // num_ranks]
            own = [queries, *(part[:, kv.start * 32 : kv.stop * 32] for part in heads[1:])]
            assert np.allclose(part.qkv(x).numpy(), np.concatenate(own, axis=1), atol=1e-5)


@pytest.mark.parametrize(
    ("first", "devices"), [("cpu", ["cpu", "cpu"]), ("cuda", ["cuda:0", "cuda:1"]), ("cuda:2", ["cuda:2", "cuda:3"])]
)
def test_each_rank_has_the_next_device(first: str, devices: list[str]) -> None:
    assert [Shard(rank, 2).device(first) for rank in range(2)] == devices
