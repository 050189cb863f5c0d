"""FP8 as in ``common.engine.attention.scaled_formats``: the same bytes by integer operations, also on older GPUs."""

import triton
import triton.language as tl


@triton.jit
def scale_of(scales):
    """Return the powers of two that stored scales stand for."""
    return (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize(x):
    """Return ``[rows, columns]`` float32 as bytes of E4M3, and the scale of each row."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    scales = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    scales = tl.maximum(scales, 1)
    scaled = x * scale_of(254 - scales)[:, None]
    bits = scaled.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Three of 23 bits of mantissa are kept, the rest is rounded to the nearest, or to the even one of two; the bias of
    # the exponent is 7 instead of 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 numbers are multiples of 2**-9, which is what a float32 from 2**14 on is rounded to.
    small = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    return (tl.where(magnitude < (121 << 23), small, normal) | sign).to(tl.uint8), scales.to(tl.uint8)


@triton.jit
def dequantize(numbers, scales):
    """Return ``[rows, columns]`` float32 from bytes of E4M3 and the scale of each row."""
    # Shifted by 7 bits the number is a float16 whose exponent is too small by the difference of the biases, 8.
    bits = numbers.to(tl.uint16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0 * scale_of(scales)[:, None]
