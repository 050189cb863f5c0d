"""Reads a LoRA adapter in PEFT's format, ``adapter_config.json`` and ``adapter_model.safetensors``.

What would change the numbers and is not supported is refused by name, and so is a setting that is not known: an adapter
that is half understood would answer with noise. The format is that of PEFT's ``LoraConfig`` and of its checkpoints
(https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from common.engine.models.checkpoints.checkpoint import read_json
from common.errors import ConfigError

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Keys that change no number of an adapter that is only applied, or that are read here.
_KNOWN = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "target_modules", "peft_type", "init_lora_weights", "bias"),
        *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"),
        *("lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "eva_config"),
        "fan_in_fan_out",  # how the model's own weight is stored
        *("megatron_core", "qalora_group_size", "runtime_config"),
    }
)
#: Ways to draw the first weights that leave those of the model as they are.
_PLAIN_STARTS = (True, False, "gaussian", "eva")
#: Far above what adapters have, which is about their rank.
MAX_ALPHA = 1e9
_HEADER_BYTES = 1 << 20  # of a safetensors file, and of a configuration, at most


class LowRankPair(NamedTuple):
    """What an adapter adds to one matrix ``[out, in]``: ``b @ a``.

    Attributes:
        a: ``[rank, in]``.
        b: ``[out, rank]`` float32, the adapter's scale included.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class AdapterCheckpoint:
    """An adapter as it is stored.

    Attributes:
        digest: 32 hexadecimal digits that depend on its scale and on the bytes of its tensors.
        pairs: by name of the matrix in the model's checkpoint.
    """

    digest: str
    rank: int
    pairs: dict[str, LowRankPair]


def read_adapter(
    folder: Path, matrices: Mapping[str, tuple[int, int]], *, max_rank: int, root: Path | None = None
) -> AdapterCheckpoint:
    """Read the adapter in ``folder`` for a model.

    Args:
        matrices: outputs and inputs of those of the model that adapters may change, by their names in its checkpoint.
        root: folder that both files must be in, once links are followed; None: they may be anywhere.
    Raises:
        ConfigError: a file is missing, damaged or outside of ``root``, the adapter does not fit the model, its rank is
            above ``max_rank``, or it is of a kind that is not supported. The message names the file.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    if not (folder / TENSORS).exists() and (folder / PICKLE).exists():
        raise ConfigError(f"{folder}: {PICKLE} is a pickle, which is not read; save the adapter as {TENSORS}")
    config, tensors = (_own_file(folder, name, root) for name in (CONFIG, TENSORS))
    rank, scale, targets = _read_config(config, max_rank)
    data = _read_bytes(tensors, max_bytes=_HEADER_BYTES + 4 * rank * sum(map(sum, matrices.values())))
    try:
        stored = safetensors.torch.load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a format that torch does not have
        raise ConfigError(f"{tensors}: cannot be read as safetensors ({error})") from error
    pairs = _pairs(stored, tensors, matrices, rank=rank, scale=scale)
    _check_targets(targets, pairs, config)
    digest = hashlib.blake2b(f"{scale!r} ".encode(), digest_size=16)
    digest.update(data)
    return AdapterCheckpoint(digest.hexdigest(), rank, pairs)


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


# ---- adapter_config.json ---------------------------------------------------------------------------------------------


def _read_config(file: Path, max_rank: int) -> tuple[int, float, object]:
    """Return the rank, the factor of the product, and ``target_modules``."""
    if file.stat().st_size > _HEADER_BYTES:
        raise ConfigError(f"{file}: has more than {_HEADER_BYTES} bytes, which no configuration of an adapter has")
    config = read_json(file)
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{file}: peft_type is {config.get('peft_type')!r}; only LORA is supported")
    for key, value in config.items():
        if key not in _KNOWN and value:
            raise ConfigError(f"{file}: {key} {value!r} is not supported; leave it out when the adapter is trained")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{file}: bias {config['bias']!r} is not supported; only none is")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise ConfigError(
            f"{file}: init_lora_weights {start!r} has changed the model's own weights; convert the adapter with PEFT's"
            " path_initial_model_for_weight_conversion"
        )
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"{file}: r should be a positive integer, not {rank!r}")
    if rank > max_rank:
        raise ConfigError(f"{file}: r is {rank}, and --max-lora-rank is {max_rank}; raise it on all nodes")
    if type(alpha) not in (int, float) or not abs(alpha) <= MAX_ALPHA:
        raise ConfigError(f"{file}: lora_alpha should be a number, not {alpha!r}")
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank  # arXiv 2312.03732
    return rank, scale, config.get("target_modules")


def _check_targets(targets: object, pairs: Mapping[str, LowRankPair], file: Path) -> None:
    """Refuse an adapter that lacks the tensors of a matrix that its configuration names."""
    for name in targets if isinstance(targets, list) else ():
        if not any(f".{matrix}".endswith(f".{name}") for matrix in pairs):
            raise ConfigError(f"{file}: target_modules has {name!r}, of which {TENSORS} has no tensors")


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _pairs(
    stored: dict[str, Tensor], file: Path, matrices: Mapping[str, tuple[int, int]], *, rank: int, scale: float
) -> dict[str, LowRankPair]:
    sides: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    for name, tensor in sorted(stored.items()):
        found = _TENSOR.fullmatch(name)
        if found is None or found[1] not in matrices:
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".N.", matrix) for matrix in matrices)
            raise ConfigError(f"{file}: {name} changes nothing that adapters can change here: {', '.join(kinds)}")
        outputs, inputs = matrices[found[1]]
        wanted = (rank, inputs) if found[2] == "A" else (outputs, rank)
        if tuple(tensor.shape) != wanted or tensor.dtype not in _FLOATS:
            raise ConfigError(
                f"{file}: {name} is {_described(tensor)}; a model of this shape and r {rank} need {list(wanted)}"
            )
        sides[found[2]][found[1]] = tensor
    if sides["A"].keys() != sides["B"].keys() or not stored:
        unpaired = sorted(sides["A"].keys() ^ sides["B"].keys())
        what = f"{unpaired[0]} is without its other half" if unpaired else "it has no tensors"
        raise ConfigError(f"{file}: {what}; save the adapter again")
    return {matrix: LowRankPair(a, sides["B"][matrix].float() * scale) for matrix, a in sides["A"].items()}


def _described(tensor: Tensor) -> str:
    kind: Any = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {kind}"
