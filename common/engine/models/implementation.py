"""Chooses what computes a model: the native decoder where its family is known, else the library transformers."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from common.config.shared import ModelImplementation, WeightDtype
from common.engine.models.base_config import BaseModelConfig
from common.engine.models.checkpoints.weights import load_weights
from common.engine.models.config import ModelConfig
from common.engine.models.decoder import Decoder
from common.engine.models.protocol import CausalModel
from common.engine.models.transformers_impl.config import TESTED, TransformersConfig
from common.engine.tensor_parallel.group import RankGroup
from common.engine.tensor_parallel.shard import WHOLE_MODEL, Shard, check_divisible
from common.errors import ConfigError, FetchError, UnsupportedModelError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is, and how to read it.

    Attributes:
        path_or_hub_id: value of ``--model``.
        overrides: keys of config.json that have other values than in the file.
        trust_remote_code: whether code of the checkpoint may run.
        has_dummy_weights: the weights are to be random numbers, and no file of them is read.
    """

    path_or_hub_id: str
    revision: str | None = None
    implementation: ModelImplementation = "auto"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    has_dummy_weights: bool = False


def load_config(source: ModelSource) -> BaseModelConfig:
    """Read the configuration of a model, and decide what computes it.

    Raises:
        ConfigError: the folder or model does not exist, or a file is damaged.
        UnsupportedModelError: no implementation that ``source`` allows can compute the model.
    """
    native_refusal = ""
    if source.implementation != "transformers":
        try:
            return ModelConfig.load(
                source.path_or_hub_id,
                revision=source.revision,
                overrides=source.overrides,
                has_dummy_weights=source.has_dummy_weights,
            )
        except UnsupportedModelError as error:
            if source.implementation == "native":
                raise
            native_refusal = str(error)
    try:
        config = TransformersConfig.load(
            source.path_or_hub_id,
            revision=source.revision,
            overrides=source.overrides,
            trust_remote_code=source.trust_remote_code,
            has_dummy_weights=source.has_dummy_weights,
        )
    except ConfigError as error:
        if not native_refusal or isinstance(error, FetchError):
            raise
        raise UnsupportedModelError(f"{native_refusal}. Nor can transformers compute it: {error}") from error
    if native_refusal:
        log.info("the native implementation refuses this model: %s", native_refusal)
    return config


def load_model(
    config: BaseModelConfig,
    dtype: str,
    device: torch.device,
    *,
    weight_dtype: WeightDtype = "auto",
    shard: Shard = WHOLE_MODEL,
) -> Callable[[RankGroup | None], CausalModel]:
    """Load a model's weights, packed for this machine.

    Args:
        dtype: a resolved name.
        shard: the part to load.
    Returns:
        A function that makes the model once the ranks that compute it are connected.
    Raises:
        ConfigError: the weights do not match the configuration.
    """
    if isinstance(config, ModelConfig):
        own = shard.config_of(config)
        weights = load_weights(config, dtype, device, shard)
        weights.pack(weight_dtype)
        return lambda group: Decoder(own, weights, group, whole=config, shard=shard)
    assert isinstance(config, TransformersConfig)
    from common.engine.models.transformers_impl.check import check_reduced_copy  # imports transformers
    from common.engine.models.transformers_impl.model import load_transformers_model

    is_tested = config.architecture in TESTED and not config.trust_remote_code and not config.has_unseen_window
    if not is_tested and shard.rank == 0:
        check_reduced_copy(config, shard.size)
    return load_transformers_model(config, dtype, device, weight_dtype, shard)


def check_divided_model(config: BaseModelConfig, num_ranks: int) -> None:
    """Refuse a number of ranks among which this model cannot be divided.

    Raises:
        ConfigError: names the reason.
    """
    if isinstance(config, TransformersConfig):
        from common.engine.models.transformers_impl.tp_plan import check_tp_plan  # imports transformers

        check_tp_plan(config, num_ranks)
    else:
        check_divisible(config, num_ranks)
