"""Random weights in place of a checkpoint's, for benchmarks: speed does not depend on what the weights are.

They depend on their names and shapes alone, so that all nodes and ranks of a model have the same.
"""

import hashlib
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.checkpoints.tensor_sources import CheckpointFiles

#: Numbers that are drawn for a tensor, and repeated. Rows of no usual length begin at the same number again.
_NUM_DRAWN = 1_000_003
_DEVIATION = 0.02
#: In names of norms; the last one is GPT-2's.
_NORM = re.compile(r"norm|(^|\.)ln_")


def dummy_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return random numbers in float32; ones for the weights of norms, zeros for other vectors."""
    if len(shape) < 2:
        is_norm = name.endswith("weight") and _NORM.search(name) is not None
        return torch.ones(shape) if is_norm else torch.zeros(shape)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    drawn = torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(seed)) * _DEVIATION
    num_numbers = torch.Size(shape).numel()
    return drawn.repeat(-(-num_numbers // _NUM_DRAWN))[:num_numbers].view(shape)


@dataclass(frozen=True, slots=True)
class DummyTensor:
    """A tensor of random numbers: a ``TensorSource``."""

    name: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[str, ...]:
        return ()

    def read(self, files: CheckpointFiles) -> Tensor:
        return dummy_tensor(self.name, self.shape)
