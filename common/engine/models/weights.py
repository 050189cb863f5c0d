"""Loads a model's weights from safetensors files, which are mapped: CPUs pack most weights straight from the file.

A tensor that is missing, unexpected or of the wrong shape is an error, since the model would answer with noise.
"""

import logging
import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.engine.kv_pool import TORCH_DTYPES
from common.engine.models.checkpoint import StoredTensor, stored_tensors
from common.engine.models.config import ModelConfig
from common.engine.models.decoder import DecoderWeights, allocate_weights
from common.engine.tensor_parallel.shard import WHOLE_MODEL, Shard
from common.errors import ConfigError
from common.reminder import Reminder

log = logging.getLogger(__name__)

#: Tensors that some exporters add; they follow from the configuration and are ignored.
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".masked_bias")


def load_weights(config: ModelConfig, dtype: str, device: torch.device, shard: Shard = WHOLE_MODEL) -> DecoderWeights:
    """Load the checkpoint in ``config.folder`` onto ``device``, converted to ``dtype`` (a resolved name).

    Args:
        shard: the part to load, which is copied straight from the mapped file.

    Raises:
        ConfigError: a tensor is missing, unexpected, unreadable or of the wrong shape; the message names it.
    """
    _, whole = allocate_weights(config, TORCH_DTYPES[dtype], torch.device("meta"))
    own = shard.config_of(config)
    weights, parts = allocate_weights(own, TORCH_DTYPES[dtype], device, has_head=shard.rank == 0)
    stored = stored_tensors(config.folder)
    if config.is_tied:
        stored.pop("lm_head.weight", None)  # a copy of the embedding that some exporters add
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith(_IGNORED_ENDINGS)}
    _check(whole, stored, config.folder)
    progress = _Progress(len(parts))
    for file in dict.fromkeys(stored[name].file for name in parts):
        some = {name: part for name, part in parts.items() if stored[name].file == file}
        _copy(file, some, shard, progress)
    return weights


class _Progress:
    """Logs every few seconds how many tensors are loaded."""

    def __init__(self, num_all: int) -> None:
        self._num_all, self._num_loaded = num_all, 0
        self._began_at = time.monotonic()
        self._reminder = Reminder(self._began_at)

    def add_one(self) -> None:
        self._num_loaded += 1
        now = time.monotonic()
        if self._reminder.is_due(now):
            log.info("loaded %d of %d tensors in %.0f s", self._num_loaded, self._num_all, now - self._began_at)


def _check(parts: dict[str, Tensor], stored: dict[str, StoredTensor], folder: Path) -> None:
    wrong = [
        f"{name} is {list(tensor.shape)}, should be {list(parts[name].shape)}"
        for name, tensor in stored.items()
        if name in parts and tensor.shape != tuple(parts[name].shape)
    ]
    complaints = {
        "missing": [name for name in parts if name not in stored],
        "unexpected": [name for name in stored if name not in parts],
        "of the wrong shape": wrong,
    }
    found = [f"{_some(names)} {what}" for what, names in complaints.items() if names]
    if found:
        raise ConfigError(f"{folder}: the tensors do not match config.json: {'; '.join(found)}")


def _some(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _take(part: Tensor, stored: Tensor) -> None:
    """Fill a part. A whole weight, unlike rows of one, becomes the mapped file itself where formats agree."""
    is_whole = part.nbytes == part.untyped_storage().nbytes()
    if is_whole and part.device == stored.device and part.dtype == stored.dtype:
        part.data = stored
    else:
        part.copy_(stored)


def _copy(file: Path, parts: dict[str, Tensor], shard: Shard, progress: _Progress) -> None:
    try:
        with safe_open(file, framework="pt") as reader:
            for name, part in sorted(parts.items()):
                stored = reader.get_slice(name)
                whole, own = tuple(stored.get_shape()), tuple(part.shape)
                if not shard.has(name):
                    part.zero_()
                elif whole == own:
                    _take(part, reader.get_tensor(name))  # a slice that is all of it would be slower
                else:
                    part.copy_(stored[shard.part_of(whole, own)])
                progress.add_one()
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read as safetensors ({error})") from error
