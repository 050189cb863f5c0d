"""Quantized copies of a checkpoint, written by the public descriptions of the formats, beside their plain meaning.

Every encoder takes a matrix ``[out, in]`` and returns the tensors that stand for it, by the last parts of their names,
and the matrix that they mean, in float32. Nothing here shares code with the decoders.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Encoded = tuple[dict[str, Tensor], Tensor]
Encoder = Callable[[Tensor], Encoded]
GROUP = 16
BLOCK = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(numbers: NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack numbers along the last axis into words, as the loops of AutoGPTQ and AutoAWQ do."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows, columns = numbers.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(order):
            if word * per_word + column < columns:
                words[:, word] |= numbers[:, word * per_word + column].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32).copy())


def in_groups(matrix: Tensor, bits: int, group: int, *, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return values ``[out, in]`` from 0, and scales and zero points ``[out, groups]``, of rounding to the nearest."""
    parts = matrix.unflatten(1, (-1, group))
    most = 2**bits - 1
    if is_symmetric:
        scales = (parts.abs().amax(2) / (most // 2)).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = parts.amin(2).clamp_max(0), parts.amax(2).clamp_min(0)
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(0, most)
    values = ((parts / scales[..., None]).round() + zeros[..., None]).clamp(0, most)
    return values.flatten(1), scales, zeros


def meaning(values: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    return (values - zeros[:, groups]) * scales[:, groups]


def encode_gptq(matrix: Tensor, bits: int = 4, *, form: str = "gptq", has_act_order: bool = False) -> Encoded:
    """With act-order, inputs belong to groups in a random order.

    GPTQModel writes the zero points of the first form less 1, and subtracts from all of a word as from one number.
    """
    num_in = matrix.shape[1]
    order = torch.randperm(num_in) if has_act_order else torch.arange(num_in)
    values, scales, zeros = in_groups(matrix[:, order], bits, GROUP, is_symmetric=False)
    groups = torch.empty(num_in, dtype=torch.int64)
    groups[order] = torch.arange(num_in) // GROUP
    values = values[:, order.argsort()]
    words = pack(zeros.T.numpy(), bits)
    if form == "gptq":
        ones = sum(1 << place for place in range(0, 32, bits))
        words = torch.from_numpy((words.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    parts = {
        "qweight": pack(values.numpy(), bits).T.contiguous(),
        "qzeros": words,
        "scales": scales.T.half().contiguous(),
        "g_idx": groups.int(),
    }
    return parts, meaning(values, scales, zeros, groups)


def encode_awq(matrix: Tensor) -> Encoded:
    values, scales, zeros = in_groups(matrix, 4, GROUP, is_symmetric=False)
    parts = {
        "qweight": pack(values.T.numpy(), 4, _AWQ_ORDER),
        "qzeros": pack(zeros.T.numpy(), 4, _AWQ_ORDER),
        "scales": scales.T.half().contiguous(),
    }
    return parts, meaning(values, scales, zeros, torch.arange(matrix.shape[1]) // GROUP)


def encode_fp8(matrix: Tensor, kind: str, name: str, dtype: torch.dtype = torch.float32) -> Encoded:
    """``kind``: tensor, channel or block; ``name`` and ``dtype`` of the scales."""
    num_out, num_in = matrix.shape
    rows = {"tensor": num_out, "channel": 1, "block": BLOCK}[kind]
    columns = BLOCK if kind == "block" else num_in
    scales = torch.empty(-(-num_out // rows), -(-num_in // columns))
    values, decoded = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn), torch.empty(matrix.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            exact = matrix[place].abs().max() / 448
            if dtype == torch.float8_e8m0fnu:
                exact = 2 ** exact.log2().ceil()
            scale = exact.to(dtype).float()
            scales[i, j] = scale
            values[place] = (matrix[place] / scale).to(torch.float8_e4m3fn)
            decoded[place] = values[place].float() * scale
    stored = scales.to(dtype)
    return {"weight": values, name: stored.view(()) if kind == "tensor" else stored}, decoded


def encode_packed(
    matrix: Tensor, bits: int, group: int | None = GROUP, *, is_symmetric: bool = True, has_act_order: bool = False
) -> Encoded:
    """compressed-tensors' ``pack-quantized``; without a group each row has a scale."""
    num_out, num_in = matrix.shape
    order = torch.randperm(num_in) if has_act_order else torch.arange(num_in)
    values, scales, zeros = in_groups(matrix[:, order], bits, group or num_in, is_symmetric=is_symmetric)
    groups = torch.empty(num_in, dtype=torch.int64)
    groups[order] = torch.arange(num_in) // (group or num_in)
    values = values[:, order.argsort()]
    parts = {
        "weight_packed": pack(values.numpy(), bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor([num_out, num_in]),
    }
    if not is_symmetric:
        parts["weight_zero_point"] = pack(zeros.T.numpy(), bits).T.contiguous()
    if has_act_order:
        parts["weight_g_idx"] = groups.int()
    return parts, meaning(values, scales.bfloat16().float(), zeros, groups)


def encode_int8(matrix: Tensor, *, is_symmetric: bool = True) -> Encoded:
    """compressed-tensors' ``int-quantized``, with a scale for each row, as for inputs of 8 bits."""
    values, scales, zeros = in_groups(matrix, 8, matrix.shape[1], is_symmetric=is_symmetric)
    parts = {"weight": (values - 128).to(torch.int8), "weight_scale": scales, "input_scale": torch.ones(1)}
    if not is_symmetric:
        parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return parts, meaning(values, scales, zeros, torch.zeros(matrix.shape[1], dtype=torch.int64))


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return a ``quantization_config`` of compressed-tensors; by default 8-bit integers with a scale for each row."""
    arguments = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", **weights}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "sparsity_config": {},
        "transform_config": {},
    }


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_GROUPS = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
_BLOCKS = {**_FP8, "weight_block_size": [BLOCK, BLOCK]}
#: A ``quantization_config`` and its encoder, by a name for tests.
FORMATS: dict[str, tuple[dict[str, Any], Encoder]] = {
    "fp8 in blocks": (_BLOCKS, partial(encode_fp8, kind="block", name="weight_scale_inv")),
    "fp8 in blocks, bfloat16 scales": (
        _BLOCKS,
        partial(encode_fp8, kind="block", name="weight_scale_inv", dtype=torch.bfloat16),
    ),
    "fp8 in blocks, powers of two": (
        {**_BLOCKS, "scale_fmt": "ue8m0"},
        partial(encode_fp8, kind="block", name="weight_scale_inv", dtype=torch.float8_e8m0fnu),
    ),
    "fp8 by channel": (_FP8, partial(encode_fp8, kind="channel", name="weight_scale")),
    "fp8 by tensor": (_FP8, partial(encode_fp8, kind="tensor", name="weight_scale")),
    "gptq, 4 bits": ({**_GPTQ, "bits": 4}, encode_gptq),
    "gptq, 8 bits": ({**_GPTQ, "bits": 8}, partial(encode_gptq, bits=8)),
    "gptq, act-order": ({**_GPTQ, "bits": 4, "desc_act": True}, partial(encode_gptq, has_act_order=True)),
    "gptq v2": ({**_GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}, partial(encode_gptq, form="gptq_v2")),
    "awq": (_AWQ, encode_awq),
    "compressed, int8": (compressed("int-quantized"), encode_int8),
    "compressed, int8 with zero points": (
        compressed("int-quantized", symmetric=False),
        partial(encode_int8, is_symmetric=False),
    ),
    "compressed, packed int8 by row": (compressed("pack-quantized"), partial(encode_packed, bits=8, group=None)),
    "compressed, packed int4": (compressed("pack-quantized", **_GROUPS), partial(encode_packed, bits=4)),
    "compressed, packed int4 with zero points": (
        compressed("pack-quantized", symmetric=False, **_GROUPS),
        partial(encode_packed, bits=4, is_symmetric=False),
    ),
    "compressed, packed int4, act-order": (
        compressed("pack-quantized", symmetric=False, actorder="group", **_GROUPS),
        partial(encode_packed, bits=4, is_symmetric=False, has_act_order=True),
    ),
    "compressed, fp8 by channel": (
        compressed("float-quantized", type="float"),
        partial(encode_fp8, kind="channel", name="weight_scale"),
    ),
    "compressed, fp8 in blocks": (
        compressed("float-quantized", type="float", strategy="block", block_structure=[BLOCK, BLOCK]),
        partial(encode_fp8, kind="block", name="weight_scale"),
    ),
}


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Whether exporters would quantize a tensor: a matrix of a layer, but no router of experts."""
    return tensor.dim() == 2 and ".layers." in name and not name.endswith((".gate.weight", "norm.weight"))


def quantize_model(plain: Path, folder: Path, kind: str) -> Path:
    """Write a quantized copy of the model in ``plain`` to ``folder``.

    The matrices in ``plain`` become those that the copy means.
    """
    config, encode = FORMATS[kind]
    torch.manual_seed(5)
    shutil.copytree(plain, folder)
    tensors = load_file(plain / "model.safetensors")
    quantized: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not is_quantized(name, tensor):
            quantized[name] = tensor
            continue
        parts, tensors[name] = encode(tensor)
        base = name.removesuffix(".weight")
        quantized.update({f"{base}.{part}": value.contiguous() for part, value in parts.items()})
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    save_file(quantized, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return folder
