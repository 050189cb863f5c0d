"""Loads a model's weights from safetensors files, which are mapped: CPUs pack most weights straight from the file.

Matrices of quantized checkpoints are decoded. A tensor that is missing, unexpected or of the wrong shape is an error,
since the model would answer with noise.
"""

import logging
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.engine.kv_pool import TORCH_DTYPES
from common.engine.models.checkpoints.checkpoint import StoredTensor, stored_tensors
from common.engine.models.checkpoints.quantized.sources import QuantizedMatrix, log_memory, quantized_names
from common.engine.models.checkpoints.tensor_sources import CheckpointFiles, TensorSource, plain_sources
from common.engine.models.config import STORED_DTYPES, ModelConfig
from common.engine.models.decoder import DecoderWeights, allocate_weights
from common.engine.models.dummy_weights import DummyTensor
from common.engine.tensor_parallel.shard import WHOLE_MODEL, Shard
from common.errors import ConfigError
from common.reminder import Reminder

log = logging.getLogger(__name__)

#: Tensors that some exporters add; they follow from the configuration and are ignored.
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".masked_bias")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_weights(config: ModelConfig, dtype: str, device: torch.device, shard: Shard = WHOLE_MODEL) -> DecoderWeights:
    """Load the checkpoint in ``config.folder`` onto ``device``, converted to ``dtype`` (a resolved name).

    Args:
        shard: the part to load, which is copied straight from the mapped file.

    Raises:
        ConfigError: a tensor is missing, unexpected, unreadable or of the wrong shape; the message names it.
    """
    stored = {} if config.has_dummy_weights else stored_tensors(config.folder)
    files = CheckpointFiles(stored)
    if config.is_tied and _EMBEDDING in stored and _HEAD in stored:
        config = _tied_as_stored(config, stored, files)
    _, whole = allocate_weights(config, TORCH_DTYPES[dtype], torch.device("meta"))
    sources = _find_sources(config, stored, {name: tuple(part.shape) for name, part in whole.items()}, files)
    if config.is_tied and _EMBEDDING not in sources and _HEAD in sources:
        sources[_EMBEDDING] = sources.pop(_HEAD)  # of two names of one tensor, some exporters keep the first
    _check(whole, sources, config.folder)
    own = shard.config_of(config)
    weights, parts = allocate_weights(own, TORCH_DTYPES[dtype], device, has_head=shard.rank == 0)
    progress = _Progress(len(parts))
    for name in sorted(parts, key=lambda name: ([stored[one].file for one in sources[name].stored[:1]], name)):
        if shard.has(name):
            _fill(parts[name], sources[name].read(files), shard)
        else:
            parts[name].zero_()
        progress.add_one()
    if config.quantization is not None:
        names = [name for name in parts if isinstance(sources[name], QuantizedMatrix)]
        log_memory(
            config.quantization,
            num_matrices=len(names),
            in_files=sum(stored[each].num_bytes for name in names for each in sources[name].stored),
            decoded=sum(parts[name].nbytes for name in names),
            dtype=TORCH_DTYPES[dtype],
        )
    return weights


def _tied_as_stored(config: ModelConfig, stored: dict[str, StoredTensor], files: CheckpointFiles) -> ModelConfig:
    """Take a copy of the embedding, which some exporters add, from ``stored``; untie a projection that differs.

    transformers decides in the same way: a fine-tune may have untied the two, and kept the setting.
    """
    embedding, head = files.tensor(_EMBEDDING), files.tensor(_HEAD)
    if embedding.dtype == head.dtype and torch.equal(embedding, head):
        del stored[_HEAD]
        return config
    log.warning(
        "%s: %s is not %s, so that tie_word_embeddings in config.json has no effect", config.folder, _HEAD, _EMBEDDING
    )
    return replace(config, is_tied=False)


def _find_sources(
    config: ModelConfig, stored: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]], files: CheckpointFiles
) -> dict[str, TensorSource]:
    """Return where each tensor of the model comes from, by its name in ``allocate_weights``.

    Args:
        shapes: of the model's tensors.
    """
    if config.has_dummy_weights:
        return {name: DummyTensor(name, shape) for name, shape in shapes.items()}
    names = [name for name in stored if not name.endswith(_IGNORED_ENDINGS)]
    if config.quantization is None:
        return plain_sources(stored, names, config.experts)
    matrices = quantized_names(names, config.quantization)
    taken = {name for parts in matrices.values() for name in parts.values()}
    plain = [name for name in names if name not in taken and not config.quantization.is_ignored(name)]
    found = plain_sources(stored, plain, config.experts)
    for name, source in list(found.items()):
        dtype = stored[source.stored[0]].dtype
        if dtype not in STORED_DTYPES:
            raise ConfigError(f"{config.folder}: {source.stored[0]} has type {dtype}, and no scale")
        if name not in shapes and name.endswith(".bias") and not files.tensor(source.stored[0]).any():
            del found[name]  # AutoGPTQ gives every matrix a bias
    for base, parts in matrices.items():
        name = f"{base}.weight" if config.experts is None else config.experts.keys.name_of(f"{base}.weight")
        found[name] = QuantizedMatrix(base, parts, shapes.get(name, ()), config.quantization)
    return found


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


def _check(parts: dict[str, Tensor], sources: dict[str, TensorSource], folder: Path) -> None:
    wrong = [
        f"{name} is {list(source.shape)}, should be {list(parts[name].shape)}"
        for name, source in sources.items()
        if name in parts and source.shape != tuple(parts[name].shape)
    ]
    complaints = {
        "missing": [name for name in parts if name not in sources],
        "unexpected": [name for name in sources if name not in parts],
        "of the wrong shape": wrong,
    }
    found = [f"{_some(names)} {what}" for what, names in complaints.items() if names]
    if found:
        raise ConfigError(f"{folder}: the tensors do not match config.json: {'; '.join(found)}")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + rest


def _fill(part: Tensor, whole: Tensor, shard: Shard) -> None:
    """Fill a part. A whole weight, unlike rows of one, becomes the mapped file itself where formats agree."""
    if part.shape != whole.shape:
        part.copy_(whole[shard.part_of(tuple(whole.shape), tuple(part.shape))])
        return
    is_whole = part.nbytes == part.untyped_storage().nbytes()
    if is_whole and part.device == whole.device and part.dtype == whole.dtype:
        part.data = whole
    else:
        part.copy_(whole)
