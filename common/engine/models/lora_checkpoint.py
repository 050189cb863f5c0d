"""Reads a LoRA adapter in PEFT's format, ``adapter_config.json`` and ``adapter_model.safetensors``.

What would change the numbers and is not supported is refused by name, and so is a setting that is not known: an adapter
that is half understood would answer with noise. The format is that of PEFT's ``LoraConfig`` and of its checkpoints
(https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from common.engine.models.checkpoint import read_json
from common.engine.models.config import ModelConfig
from common.errors import ConfigError

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
#: The matrices of a layer that adapters may change, by their names in a checkpoint.
MODULES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
_TENSOR = re.compile(
    rf"base_model\.model\.model\.layers\.(\d+)\.({'|'.join(map(re.escape, MODULES))})\.lora_([AB])\.weight"
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Keys that change no number of an adapter that is only applied, or that are read here.
_KNOWN = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "target_modules", "peft_type", "init_lora_weights", "bias"),
        *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"),
        *("lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "eva_config"),
        *("megatron_core", "qalora_group_size", "runtime_config"),
    }
)
#: Ways to draw the first weights that leave those of the model as they are.
_PLAIN_STARTS = (True, False, "gaussian", "eva")
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
        pairs: by layer and name of the matrix, which is one of ``MODULES``.
    """

    digest: str
    rank: int
    pairs: dict[tuple[int, str], LowRankPair]


def read_adapter(folder: Path, model: ModelConfig, *, max_rank: int, root: Path | None = None) -> AdapterCheckpoint:
    """Read the adapter in ``folder`` for a model.

    Args:
        root: folder that both files must be in, once links are followed; None: they may be anywhere.
    Raises:
        ConfigError: a file is missing, damaged or outside of ``root``, the adapter does not fit the model, its rank is
            above ``max_rank``, or it is of a kind that is not supported. The message names the file.
    """
    if model.experts is not None:
        raise ConfigError(f"{folder}: adapters are for models whose layers are dense, and this one has experts")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    if not (folder / TENSORS).exists() and (folder / PICKLE).exists():
        raise ConfigError(f"{folder}: {PICKLE} is a pickle, which is not read; save the adapter as {TENSORS}")
    config, tensors = (_own_file(folder, name, root) for name in (CONFIG, TENSORS))
    rank, scale, targets = _read_config(config, max_rank)
    data = _read_bytes(tensors, max_bytes=_HEADER_BYTES + 4 * rank * _num_inputs_and_outputs(model))
    try:
        stored = safetensors.torch.load(data)
    except SafetensorError as error:
        raise ConfigError(f"{tensors}: cannot be read as safetensors ({error})") from error
    pairs = _pairs(stored, tensors, model, rank=rank, scale=scale)
    _check_targets(targets, pairs, config)
    digest = hashlib.blake2b(f"{scale!r} ".encode(), digest_size=16)
    digest.update(data)
    return AdapterCheckpoint(digest.hexdigest(), rank, pairs)


def shape_of(module: str, model: ModelConfig) -> tuple[int, int]:
    """Return outputs and inputs of a matrix of ``MODULES``."""
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, wide = model.hidden_size, model.intermediate_size
    return {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }[module]


def _num_inputs_and_outputs(model: ModelConfig) -> int:
    """Return the numbers of an adapter of rank 1 that changes every matrix."""
    return model.num_layers * sum(sum(shape_of(module, model)) for module in MODULES)


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
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ConfigError(f"{file}: lora_alpha should be a number, not {alpha!r}")
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank  # arXiv 2312.03732
    return rank, scale, config.get("target_modules")


def _check_targets(targets: object, pairs: dict[tuple[int, str], LowRankPair], file: Path) -> None:
    """Refuse an adapter that lacks the tensors of a matrix that its configuration names."""
    changed = [f".model.layers.{layer}.{module}" for layer, module in pairs]
    for name in targets if isinstance(targets, list) else ():
        if not any(module.endswith(f".{name}") for module in changed):
            raise ConfigError(f"{file}: target_modules has {name!r}, of which {TENSORS} has no tensors")


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _pairs(
    stored: dict[str, Tensor], file: Path, model: ModelConfig, *, rank: int, scale: float
) -> dict[tuple[int, str], LowRankPair]:
    sides: dict[str, dict[tuple[int, str], Tensor]] = {"A": {}, "B": {}}
    for name, tensor in sorted(stored.items()):
        found = _TENSOR.fullmatch(name)
        if found is None or int(found[1]) >= model.num_layers:
            raise ConfigError(
                f"{file}: {name} changes nothing that adapters can change here: {', '.join(MODULES)} of"
                f" {model.num_layers} layers"
            )
        outputs, inputs = shape_of(found[2], model)
        wanted = (rank, inputs) if found[3] == "A" else (outputs, rank)
        if tuple(tensor.shape) != wanted or tensor.dtype not in _FLOATS:
            raise ConfigError(
                f"{file}: {name} is {_described(tensor)}; a model of this shape and r {rank} need {list(wanted)}"
            )
        sides[found[3]][int(found[1]), found[2]] = tensor
    if sides["A"].keys() != sides["B"].keys() or not stored:
        unpaired = sorted(sides["A"].keys() ^ sides["B"].keys())
        what = (
            f"layer {unpaired[0][0]} has {unpaired[0][1]} without its other half" if unpaired else "it has no tensors"
        )
        raise ConfigError(f"{file}: {what}; save the adapter again")
    return {place: LowRankPair(a, sides["B"][place].float() * scale) for place, a in sides["A"].items()}


def _described(tensor: Tensor) -> str:
    kind: Any = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {kind}"
