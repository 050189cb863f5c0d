"""Reads a LoRA adapter in PEFT's format, ``adapter_config.json`` and ``adapter_model.safetensors``.

Tensors that do not fit the model are refused by name. The format is that of PEFT's checkpoints
(https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from common.engine.models.lora.adapter_config import AdapterConfig, read_config
from common.errors import ConfigError

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: What the header of a safetensors file takes, at most: in any case, and for the two tensors of each matrix.
_HEADER_BYTES, _HEADER_BYTES_PER_MATRIX = 1 << 20, 512
#: What PEFT puts in place of a module is wrapped around it.
_WRAPPED = ".base_layer"


class LowRankPair(NamedTuple):
    """What an adapter adds to one matrix ``[out, in]``: ``b @ a``.

    Attributes:
        a: ``[rank, in]``.
        b: ``[out, rank]`` float32, the adapter's scale included.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Adaptable:
    """What adapters may change of a model.

    Attributes:
        matrices: outputs and inputs by the name in the model's checkpoint.
        parameters: parameters of the library's classes that hold several of the matrices: by the name of the module and
            that of the parameter, in the order of their declaration, for each expert the matrices below each other.
    """

    matrices: Mapping[str, tuple[int, int]]
    parameters: Mapping[str, Mapping[str, Sequence[Sequence[str]]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdapterCheckpoint:
    """An adapter as it is stored.

    Attributes:
        digest: 32 hexadecimal digits that depend on its scales and on the bytes of its tensors.
        pairs: by name of the matrix in the model's checkpoint.
    """

    digest: str
    pairs: dict[str, LowRankPair]


def read_adapter(folder: Path, adaptable: Adaptable, *, max_rank: int, root: Path | None = None) -> AdapterCheckpoint:
    """Read the adapter in ``folder`` for a model.

    Args:
        root: folder that both files must be in, once links are followed; None: they may be anywhere.
    Raises:
        ConfigError: a file is missing, damaged or outside of ``root``, the adapter does not fit the model, its rank is
            above ``max_rank``, or it is of a kind that is not supported. The message names the file.
    """
    if not os.path.isdir(folder):  # False in a folder that may not be searched, where the method raises
        raise ConfigError(f"{folder}: there is no such folder")
    if not (folder / TENSORS).exists() and (folder / PICKLE).exists():
        raise ConfigError(f"{folder}: {PICKLE} is a pickle, which is not read; save the adapter as {TENSORS}")
    config_file, tensors = (_own_file(folder, name, root) for name in (CONFIG, TENSORS))
    config = read_config(config_file, max_rank)
    sizes = sum(map(sum, adaptable.matrices.values()))
    header = _HEADER_BYTES + _HEADER_BYTES_PER_MATRIX * len(adaptable.matrices)
    data = _read_bytes(tensors, max_bytes=header + 4 * config.max_rank * sizes)
    try:
        stored = safetensors.torch.load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a format that torch does not have
        raise ConfigError(f"{tensors}: cannot be read as safetensors ({error})") from error
    changes = _changes(stored, tensors, adaptable, config)
    _check_targets(config, changes, config_file)
    pairs: dict[str, LowRankPair] = {}
    for name, pair in (found for change in changes for found in change.pairs()):
        if name in pairs:
            raise ConfigError(f"{tensors}: changes {name} twice, by itself and with other experts")
        pairs[name] = pair
    scales = {change.target.name: change.target.scale for change in changes}
    digest = hashlib.blake2b(f"{sorted(scales.items())!r} ".encode(), digest_size=16)
    digest.update(data)
    return AdapterCheckpoint(digest.hexdigest(), pairs)


def _own_file(folder: Path, name: str, root: Path | None) -> Path:
    file = folder / name
    if root is not None and not file.resolve().is_relative_to(root):
        raise ConfigError(f"{file}: is a link that leaves --lora-dir")
    if not file.is_file():
        raise ConfigError(f"{file}: missing; an adapter in PEFT's format has {CONFIG} and {TENSORS}")
    return file


def _read_bytes(file: Path, max_bytes: int) -> bytes:
    """Return the whole file, so that its digest and its tensors are of the same bytes."""
    try:
        with file.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{file}: has more than the {max_bytes} bytes that an adapter of its rank needs here")
    return data


@dataclass(frozen=True, slots=True)
class _Target:
    """A matrix, or a parameter that holds several matrices.

    Attributes:
        name: of the matrix, or of the parameter with that of its module.
        experts: for each expert the names of the matrices below each other, and their outputs; of a matrix one entry.
    """

    name: str
    rank: int
    scale: float
    inputs: int
    experts: Sequence[Mapping[str, int]]

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of A and B."""
        num_ranks = len(self.experts) * self.rank
        return {"A": (num_ranks, self.inputs), "B": (sum(self.experts[0].values()), num_ranks)}


@dataclass(frozen=True, slots=True)
class _Change:
    """What is stored for a target.

    Attributes:
        a: ``[experts * rank, in]``, one expert after the other.
        b: ``[out, rank * experts]``, in which the experts alternate.
    """

    target: _Target
    a: Tensor
    b: Tensor

    def pairs(self) -> Iterator[tuple[str, LowRankPair]]:
        experts, b = self.target.experts, self.b.float() * self.target.scale
        for number, (a, outputs) in enumerate(zip(self.a.split(self.target.rank), experts, strict=True)):
            parts = b[:, number :: len(experts)].split(list(outputs.values()))
            yield from ((name, LowRankPair(a, part)) for name, part in zip(outputs, parts, strict=True))


def _changes(stored: dict[str, Tensor], file: Path, adaptable: Adaptable, config: AdapterConfig) -> list[_Change]:
    targets: dict[str, _Target] = {}  # by what is stored
    sides: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    for name, tensor in sorted(stored.items()):
        found = _TENSOR.fullmatch(name)
        target = None if found is None else targets.get(found[1]) or _target(found[1], adaptable, config)
        if found is None or target is None:
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".N.", matrix) for matrix in adaptable.matrices)
            raise ConfigError(f"{file}: {name} changes nothing that adapters can change here: {', '.join(kinds)}")
        wanted = target.shapes[found[2]]
        if tuple(tensor.shape) != wanted or tensor.dtype not in _FLOATS:
            raise ConfigError(
                f"{file}: {name} is {_described(tensor)}; a model of this shape and r {target.rank} need {list(wanted)}"
            )
        targets[found[1]] = target
        sides[found[2]][found[1]] = tensor
    if sides["A"].keys() != sides["B"].keys() or not stored:
        unpaired = sorted(sides["A"].keys() ^ sides["B"].keys())
        what = f"{unpaired[0]} is without its other half" if unpaired else "it has no tensors"
        raise ConfigError(f"{file}: {what}; save the adapter again")
    return [_Change(targets[place], a, sides["B"][place]) for place, a in sides["A"].items()]


def _target(place: str, adaptable: Adaptable, config: AdapterConfig) -> _Target | None:
    """Return what the tensors of a place change; None if adapters cannot change that.

    Args:
        place: the name of a matrix, or of a module whose parameters are adapted. PEFT wraps such a module once for each
            of them, in their order, so that the place of the last one is the module's name.
    """
    module = place
    while module.endswith(_WRAPPED):
        module = module.removesuffix(_WRAPPED)
    num_wrapped = (len(place) - len(module)) // len(_WRAPPED)
    parameters = adaptable.parameters.get(module, {})
    adapted = [parameter for parameter in parameters if config.is_target(f"{module}.{parameter}")]
    if num_wrapped < len(adapted):
        parameter = adapted[-1 - num_wrapped]
        name, experts = f"{module}.{parameter}", parameters[parameter]
    elif place in adaptable.matrices:
        name, experts = place, [[place]]
    else:
        return None
    rank, matrices = config.rank_of(name), adaptable.matrices
    return _Target(
        name=name,
        rank=rank,
        scale=config.scale_of(name, rank),
        inputs=matrices[experts[0][0]][1],
        experts=[{matrix: matrices[matrix][0] for matrix in expert} for expert in experts],
    )


def _check_targets(config: AdapterConfig, changes: Sequence[_Change], file: Path) -> None:
    """Refuse an adapter without tensors of a parameter that its configuration names.

    PEFT skips names in ``target_modules`` that the model does not have.
    """
    for name in config.parameters:
        if not any(f".{change.target.name}".endswith(f".{name}") for change in changes):
            raise ConfigError(f"{file}: target_parameters has {name!r}, of which {TENSORS} has no tensors")


def _described(tensor: Tensor) -> str:
    kind: Any = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {kind}"
