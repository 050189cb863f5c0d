"""Where each tensor of a model comes from: a tensor of the checkpoint, a part of one, or several that are decoded.

The rest of the loader sees one tensor for each name in ``allocate_weights``, whatever the checkpoint stores.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.engine.models.checkpoints.checkpoint import StoredTensor
from common.engine.models.expert_config import ExpertConfig
from common.errors import ConfigError


class CheckpointFiles:
    """The tensors of a checkpoint by name, mapped; a file is opened when its first tensor is read."""

    def __init__(self, stored: dict[str, StoredTensor]) -> None:
        self._stored = stored
        self._readers: dict[Path, Any] = {}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, which is the mapped file itself.

        Raises:
            ConfigError: the file cannot be read.
        """
        file = self._stored[name].file
        try:
            if file not in self._readers:
                self._readers[file] = safe_open(file, framework="pt")
            tensor: Tensor = self._readers[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: cannot be read as safetensors ({error})") from error
        return tensor


class TensorSource(Protocol):
    """A tensor of the model.

    Attributes:
        shape: of the tensor.
        stored: names of the checkpoint's tensors that it is made of.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def stored(self) -> tuple[str, ...]: ...

    def read(self, files: CheckpointFiles) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, files: CheckpointFiles) -> Tensor:
        return files.tensor(self.name)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows of one expert in a tensor ``[experts, rows, inputs]`` of all of them."""

    name: str
    expert: int
    first: int
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, files: CheckpointFiles) -> Tensor:
        return files.tensor(self.name)[self.expert, self.first : self.first + self.shape[0]]


def plain_sources(
    stored: dict[str, StoredTensor], names: Iterable[str], experts: ExpertConfig | None
) -> dict[str, TensorSource]:
    """Return the sources in tensors that hold plain numbers, by the names of ``allocate_weights``.

    Experts may have a tensor each, or one tensor may have those of a whole layer, as transformers 5 keeps them:
    ``mlp.experts.gate_up_proj`` ``[experts, 2 * width, hidden]`` and ``mlp.experts.down_proj``.
    """
    found: dict[str, TensorSource] = {}
    for name in names:
        shape = stored[name].shape
        ours = name if experts is None else experts.keys.name_of(name)
        base, _, matrix = ours.rpartition(".")
        if experts is None or not base.endswith(".experts") or len(shape) != 3:
            found[ours] = WholeTensor(name, shape)
            continue
        parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
        rows = shape[1] // len(parts)
        for expert in range(shape[0]):
            for index, part in enumerate(parts):
                place = ExpertRows(name, expert, index * rows, (rows, shape[2]))
                found[f"{base}.{expert}.{part}.weight"] = place
    return found
