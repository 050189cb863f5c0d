"""The quantized matrices of a checkpoint as sources of plain ones."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.checkpoints.checkpoint import StoredTensor
from common.engine.models.checkpoints.quantized.awq import decode_awq
from common.engine.models.checkpoints.quantized.compressed_tensors import decode_compressed
from common.engine.models.checkpoints.quantized.config import MARKERS, CheckpointQuantization
from common.engine.models.checkpoints.quantized.fp8 import decode_fp8
from common.engine.models.checkpoints.quantized.gptq import decode_gptq
from common.engine.models.checkpoints.quantized.packing import Parts
from common.engine.models.checkpoints.tensor_sources import CheckpointFiles
from common.errors import ConfigError

log = logging.getLogger(__name__)

DECODERS: dict[str, Callable[[Parts, tuple[int, ...], CheckpointQuantization], Tensor]] = {
    "fp8": decode_fp8,
    "compressed-tensors": decode_compressed,
    "awq": decode_awq,
    "gptq": decode_gptq,
}


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix, decoded from several tensors.

    Attributes:
        base: the part of their names that they have in common.
        parts: their names in the checkpoint, by what each of them is.
        shape: of the matrix.
    """

    base: str
    parts: Mapping[str, str]
    shape: tuple[int, ...]
    quantization: CheckpointQuantization

    @property
    def stored(self) -> tuple[str, ...]:
        return tuple(self.parts.values())

    def read(self, files: CheckpointFiles) -> Tensor:
        """Return the matrix in float32.

        Raises:
            ConfigError: a tensor is missing, or has the wrong shape or type.
        """
        tensors = {part: files.tensor(name) for part, name in self.parts.items()}
        try:
            if "weight" in tensors and (tensors["weight"].itemsize > 1 or tensors["weight"].shape != self.shape):
                found = tensors["weight"]
                raise ConfigError(f"its weight is {found.dtype} {list(found.shape)}, not 8 bits {list(self.shape)}")
            matrix = DECODERS[self.quantization.method](tensors, self.shape, self.quantization)
        except (ConfigError, KeyError, RuntimeError, IndexError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{self.base}: cannot be decoded ({self.quantization.description}): {what}") from error
        if matrix.shape != self.shape:
            raise ConfigError(f"{self.base} is {list(matrix.shape)} once decoded, should be {list(self.shape)}")
        return matrix


def quantized_names(names: Iterable[str], quantization: CheckpointQuantization) -> dict[str, dict[str, str]]:
    """Return the tensor names of quantized matrices, by matrix name, then by part."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if matrix := quantization.matrix_of(name):
            base, part = matrix
            found.setdefault(base, {})[part] = name
    return {base: parts for base, parts in found.items() if any(marker in parts for marker in MARKERS)}


def stored_shape(
    parts: Mapping[str, str], stored: Mapping[str, StoredTensor], files: CheckpointFiles
) -> tuple[int, ...]:
    """Return the shape of a matrix as its own tensors tell it, for a model whose names may be others.

    Raises:
        ConfigError: they do not tell it.
    """
    shapes = {part: stored[name].shape for part, name in parts.items()}
    try:
        if "weight" in shapes:
            return shapes["weight"]
        if "weight_shape" in parts:
            num_out, num_in = files.tensor(parts["weight_shape"]).tolist()
            return num_out, num_in
        rows, columns = shapes["qweight"]
        num_out = shapes["scales"][1]
        # AWQ packs outputs in qweight and in qzeros, GPTQ inputs in qweight, and outputs in qzeros.
        return (num_out, rows) if columns < num_out else (num_out, rows * num_out // shapes["qzeros"][1])
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(f"{', '.join(parts.values())} do not tell the shape of their matrix") from error


def log_memory(
    quantization: CheckpointQuantization, *, num_matrices: int, in_files: int, decoded: int, dtype: torch.dtype
) -> None:
    """Log what the matrices take in the files and once they are decoded to ``dtype``, both in bytes."""
    log.info(
        "quantized checkpoint (%s): %d matrices of %.2f GB take %.2f GB as %s, before --weight-dtype rounds them",
        quantization.description,
        num_matrices,
        in_files / 1e9,
        decoded / 1e9,
        str(dtype).removeprefix("torch."),
    )
