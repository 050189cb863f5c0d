"""The model's class in transformers over our pages and our attention: the price of ``--model-impl transformers``."""

from collections.abc import Mapping
from dataclasses import fields

from torch import Tensor

from common.engine.models.base_config import BaseModelConfig
from common.engine.models.config import ModelConfig
from common.engine.models.protocol import CausalModel
from common.engine.models.transformers_impl.config import TransformersConfig
from scripts.benchmarks.peers.transformers_peer import build_model

NAME = "its classes"


def paged_model(config: ModelConfig, tensors: Mapping[str, Tensor]) -> CausalModel:
    """Return the model over the tensors of a checkpoint, its linear layers packed as ours."""
    from common.engine.models.transformers_impl.attention import AttentionHook  # imports transformers
    from common.engine.models.transformers_impl.model import TransformersModel, pack

    embedding = tensors["model.embed_tokens.weight"]
    hook = AttentionHook()
    model = build_model(config, tensors)
    model.set_attn_implementation(hook.name)
    if embedding.device.type == "cpu":
        pack(model)
    own = TransformersConfig(
        **{field.name: getattr(config, field.name) for field in fields(BaseModelConfig)},
        architecture=type(model).__name__,
        overrides={},
        trust_remote_code=False,
        layer_attention=config.layers,
        values_per_head=config.head_dim,
    )
    return TransformersModel(own, model, hook, embedding.dtype)
