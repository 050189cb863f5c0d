"""Tensors of a quantized checkpoint that are read and decoded one by one, when the library transformers takes them."""

import logging
from pathlib import Path
from types import EllipsisType

from torch import Tensor

from common.engine.models.checkpoints.checkpoint import stored_tensors
from common.engine.models.checkpoints.quantized.config import CheckpointQuantization
from common.engine.models.checkpoints.quantized.sources import QuantizedMatrix, quantized_names, stored_shape
from common.engine.models.checkpoints.tensor_sources import CheckpointFiles, TensorSource, WholeTensor

log = logging.getLogger(__name__)


class LateTensor:
    """A tensor that is read by ``tensor[...]``, as those of safetensors files are."""

    def __init__(self, source: TensorSource, files: CheckpointFiles) -> None:
        self._source = source
        self._files = files

    def __getitem__(self, _: EllipsisType) -> Tensor:
        return self._source.read(self._files)


def decoded_tensors(folder: Path, quantization: CheckpointQuantization) -> dict[str, LateTensor]:
    """Return the tensors of the plain model that a checkpoint means, by its own names.

    Raises:
        ConfigError: a header is damaged, or the tensors of a matrix do not tell its shape.
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
    for base, parts in matrices.items():
        shape = stored_shape(parts, stored, files)
        sources[f"{base}.weight"] = QuantizedMatrix(base, parts, shape, quantization)
    num_bytes = sum(stored[name].num_bytes for name in taken)
    log.info(
        "quantized checkpoint (%s): %d matrices of %.2f GB are decoded to --dtype, before --weight-dtype rounds them",
        *(quantization.description, len(matrices), num_bytes / 1e9),
    )
    return {name: LateTensor(source, files) for name, source in sources.items()}
