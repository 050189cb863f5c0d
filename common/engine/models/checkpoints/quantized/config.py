"""Reads ``quantization_config`` of config.json. This module does not import torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, UnsupportedModelError

#: For each method, the last parts of the names of the tensors that belong to one matrix. Those that say how to round
#: inputs and outputs are not read: only the matrices are rounded here.
TENSORS = {
    "fp8": ("weight_scale_inv", "weight_scale", "weight", "input_scale", "activation_scale"),
    "compressed-tensors": (
        *("weight_scale", "weight_packed", "weight", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
    ),
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
}
#: Tensors that only a quantized matrix has.
MARKERS = ("weight_scale_inv", "weight_scale", "qweight")
_IGNORED = ("k_scale", "v_scale", "kv_scale", "q_scale")
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """How the matrices of a checkpoint are quantized. Bits and groups follow from the shapes of the tensors.

    Attributes:
        method: a key of ``TENSORS``.
        description: for the log.
        block: rows and columns of a matrix that share a scale; None: a scale is for a matrix, a row, or a group of one.
        has_zeros_less_one: whether zero points are stored less 1.
        is_symmetric: whether all zero points are half of the range; said of GPTQ alone.
    """

    method: str
    description: str
    block: tuple[int, int] | None = None
    has_zeros_less_one: bool = False
    is_symmetric: bool = False

    def matrix_of(self, name: str) -> tuple[str, str] | None:
        """Return the matrix that a tensor might belong to, and which of its tensors it is; None for other tensors."""
        base, _, part = name.rpartition(".")
        return (base, part) if part in TENSORS[self.method] else None

    def is_scale(self, name: str) -> bool:
        """Whether a tensor belongs to a quantized matrix only, and not to a plain one as well."""
        part = name.rpartition(".")[2]
        return self.is_ignored(name) or (part in TENSORS[self.method] and part != "weight")

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor says how to round keys, values or queries."""
        return name.rpartition(".")[2] in _IGNORED


def parse_quantization(config: Any, folder: Path) -> CheckpointQuantization | None:
    """Parse ``quantization_config``; None if the checkpoint has none.

    Raises:
        UnsupportedModelError: the method, or a setting of it, is not supported; the message names it.
        ConfigError: a value has a wrong type.
    """
    if not config:
        return None
    try:
        method = config.get("quant_method", "unnamed")
        if method not in _PARSERS:
            raise _refusal(folder, method, f"supported are {', '.join(_PARSERS)}")
        return _PARSERS[method](config, folder)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder}/config.json: quantization_config cannot be parsed ({error})") from error


def _refusal(folder: Path, method: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{folder}: quantized checkpoint ({method}) is not supported: {reason}")


def _parse_fp8(config: dict[str, Any], folder: Path) -> CheckpointQuantization:
    sizes = config.get("weight_block_size")
    block = None if sizes is None else _block(sizes)
    return CheckpointQuantization("fp8", "FP8" if block is None else f"FP8 in blocks of {block[0]} x {block[1]}", block)


def _parse_awq(config: dict[str, Any], folder: Path) -> CheckpointQuantization:
    key, form = _form(config, "checkpoint_format", "version", "format", default="gemm")
    if form != "gemm":
        raise _refusal(folder, "awq", f"{key} {form}; only gemm is")
    bits = config.get("bits", config.get("w_bit", 4))
    if bits != 4 or not config.get("zero_point", True):
        raise _refusal(
            folder, "awq", f"bits {bits}, zero_point {config.get('zero_point')}; only 4 bits with zero points"
        )
    return CheckpointQuantization("awq", "AWQ, 4 bits")


def _form(config: dict[str, Any], *keys: str, default: str) -> tuple[str, str]:
    """Return the key that tells the form of the packing, the first of ``keys`` as in transformers, and the form."""
    return next(((key, str(config[key]).lower()) for key in keys if config.get(key)), (keys[0], default))


def _parse_gptq(config: dict[str, Any], folder: Path) -> CheckpointQuantization:
    bits = config.get("bits")
    if bits not in (4, 8):
        raise _refusal(folder, "gptq", f"bits {bits}; only 4 and 8 are")
    key, form = _form(config, "checkpoint_format", "format", default="gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _refusal(folder, "gptq", f"{key} {form}; only gptq and gptq_v2 are")
    words = config.get("pack_dtype") or "int32"
    if words != "int32":
        raise _refusal(folder, "gptq", f"pack_dtype {words}; only int32 is")
    return CheckpointQuantization(
        "gptq", f"GPTQ, {bits} bits", has_zeros_less_one=form == "gptq", is_symmetric=bool(config.get("sym", True))
    )


def _parse_compressed(config: dict[str, Any], folder: Path) -> CheckpointQuantization:
    def refuse(reason: str) -> UnsupportedModelError:
        return _refusal(folder, "compressed-tensors", reason)

    # Files of earlier versions say frozen, with matrices that are compressed all the same: the format tells.
    status = config.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise refuse(f"quantization_status {status}; only compressed and frozen are")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise refuse("sparsity_config; only dense matrices are")
    if config.get("transform_config"):
        raise refuse("transform_config")
    weights = []
    for group in config.get("config_groups", {}).values():
        form = group.get("format") or config.get("format")
        if form not in _COMPRESSED_FORMATS:
            raise refuse(f"format {form}; only {', '.join(_COMPRESSED_FORMATS)} are")
        weights.append(group.get("weights") or {})
    kinds = {(one.get("type", "int"), one.get("num_bits", 8)) for one in weights}
    if not kinds <= {("int", 4), ("int", 8), ("float", 8)}:
        raise refuse(f"weights of {_listed(kinds)}; only int of 4 and 8 bits and float of 8 are")
    blocks = {_block(one["block_structure"]) for one in weights if one.get("block_structure")}
    if len(blocks) > 1:
        raise refuse(f"blocks of several sizes, {sorted(blocks)}")
    block = next(iter(blocks), None)
    return CheckpointQuantization("compressed-tensors", f"compressed-tensors, {_listed(kinds)}", block)


def _block(sizes: Any) -> tuple[int, int]:
    rows, columns = sizes
    return int(rows), int(columns)


def _listed(kinds: set[tuple[str, int]]) -> str:
    return " and ".join(f"{kind} of {bits} bits" for kind, bits in sorted(kinds))


_PARSERS: dict[str, Callable[[dict[str, Any], Path], CheckpointQuantization]] = {
    "fp8": _parse_fp8,
    "compressed-tensors": _parse_compressed,
    "awq": _parse_awq,
    "gptq": _parse_gptq,
}
