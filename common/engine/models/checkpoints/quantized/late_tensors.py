"""Tensors of a quantized checkpoint that are read and decoded one by one, when the library transformers takes them."""

import math
from pathlib import Path
from types import EllipsisType

import torch
from torch import Tensor

from common.engine.models.checkpoints.checkpoint import stored_tensors
from common.engine.models.checkpoints.quantized.config import CheckpointQuantization
from common.engine.models.checkpoints.quantized.sources import (
    QuantizedMatrix,
    log_memory,
    quantized_names,
    stored_shape,
)
from common.engine.models.checkpoints.tensor_sources import CheckpointFiles, TensorSource, WholeTensor
from common.errors import ConfigError

#: Types of matrices that need a scale, by their names in safetensors files.
_OF_8_BITS = ("F8_E4M3", "F8_E5M2", "I8")


class LateTensor:
    """A tensor that is read by ``tensor[...]``, as those of safetensors files are."""

    def __init__(self, source: TensorSource, files: CheckpointFiles) -> None:
        self._source = source
        self._files = files

    def __getitem__(self, _: EllipsisType) -> Tensor:
        return self._source.read(self._files)


def decoded_tensors(folder: Path, quantization: CheckpointQuantization, dtype: torch.dtype) -> dict[str, LateTensor]:
    """Return the tensors of the plain model that a checkpoint means, by its own names.

    Args:
        dtype: which the library converts them to; the log says what they take then.
    Raises:
        ConfigError: a header is damaged, a matrix of 8 bits has no scale, or its tensors do not tell its shape.
    """
    stored = stored_tensors(folder)
    files = CheckpointFiles(stored)
    matrices = quantized_names(stored, quantization)
    taken = {name for parts in matrices.values() for name in parts.values()}
    sources: dict[str, TensorSource] = {
        name: WholeTensor(name, tensor.shape)
        for name, tensor in stored.items()
        if name not in taken and not quantization.is_ignored(name)
    }
    for name in sources:
        if stored[name].dtype in _OF_8_BITS:  # the library would take its numbers as they are
            raise ConfigError(f"{folder}: {name} has type {stored[name].dtype}, and no scale")
    for base, parts in matrices.items():
        shape = stored_shape(parts, stored, files)
        sources[f"{base}.weight"] = QuantizedMatrix(base, parts, shape, quantization)
    log_memory(
        quantization,
        num_matrices=len(matrices),
        in_files=sum(stored[name].num_bytes for name in taken),
        decoded=dtype.itemsize * sum(math.prod(sources[f"{base}.weight"].shape) for base in matrices),
        dtype=dtype,
    )
    return {name: LateTensor(source, files) for name, source in sources.items()}
