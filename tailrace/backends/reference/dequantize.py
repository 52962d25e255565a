"""The values that each stored format's bytes stand for, in float32.

Block layouts: ggml's `ggml-common.h`. All arithmetic is float32 in the order that the formats define (scale times
quant, then minus or plus the offset), so that the result is the same to the bit wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import BLOCK, Format, Weight

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def dequantize(weight: Weight) -> Floats:
    """The weight's values, float32 of its shape."""
    values, size = BLOCK[weight.format]
    raw = np.ascontiguousarray(weight.data).reshape(-1)
    if values == 1:
        return _PLAIN[weight.format](raw).reshape(weight.shape)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged block's scale may be infinite or no number
        return _QUANTISED[weight.format](raw.reshape(-1, size)).reshape(weight.shape)


def _bf16(raw: Bytes) -> Floats:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


_PLAIN: dict[Format, Callable[[Bytes], Floats]] = {
    Format.F32: lambda raw: raw.view(np.float32).copy(),
    Format.F16: lambda raw: raw.view(np.float16).astype(np.float32),
    Format.BF16: _bf16,
}


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, groups, bytes] to [n, groups, 2 * bytes]: all the low halves, then all the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The 32 bits at byte `at`, each as 16 or 0: [blocks, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8)
    return _half(blocks, 0) * quants


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (quants.astype(np.float32) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * quants.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    quants: Floats = blocks[:, 2:].view(np.int8).astype(np.float32)
    return quants * _half(blocks, 0)


def _pairs(packed: Bytes) -> Bytes:
    """[n, groups, 32] bytes of four 2-bit quants to [n, groups * 4, 32]: the lowest bits of all first."""
    planes = np.stack([packed >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=2)
    return planes.reshape(len(packed), -1, 32)


def _q2_k(blocks: Bytes) -> Floats:
    """16 scales and minima of 4 bits, 256 quants of 2 bits, then their two float16 factors."""
    count = len(blocks)
    scales = _half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    quants = _pairs(blocks[:, 16:80].reshape(count, 2, 32)).reshape(count, 16, 16).astype(np.float32)
    return scales[:, :, None] * quants - minima[:, :, None]


def _q3_k(blocks: Bytes) -> Floats:
    """A third bit of each quant (set: as stored, clear: minus 4), two bits each, 16 scales of 6 bits, their factor."""
    count = len(blocks)
    third = np.unpackbits(blocks[:, :32, None], axis=2, bitorder="little")  # [n, byte, bit]
    third = third.transpose(0, 2, 1)  # [n, 8, 32]
    low = _pairs(blocks[:, 32:96].reshape(count, 2, 32))  # [n, 8, 32]
    quants = (low.astype(np.float32) - np.float32(4) * (1 - third).astype(np.float32)).reshape(count, 16, 16)
    packed = blocks[:, 96:108]
    low_scales = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high_scales = np.concatenate([packed[:, 8:] >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=1)
    scales = (low_scales | high_scales << np.uint8(4)).astype(np.float32) - np.float32(32)
    factors: Floats = _half(blocks, 108) * scales
    return factors[:, :, None] * quants


def _six_bit(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and eight minima of 6 bits each, packed in 12 bytes."""
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << np.uint8(4)], axis=1)
    minima = np.concatenate([second & 63, rest >> 4 | second >> 6 << np.uint8(4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    """Two float16 factors, scales and minima of 6 bits, 256 quants of 4 bits in groups of 64."""
    scales, minima = _six_bit(blocks[:, 4:16])
    scales, minima = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    quants = _nibbles(blocks[:, 16:].reshape(len(blocks), 4, 32)).reshape(len(blocks), 8, 32).astype(np.float32)
    return scales[:, :, None] * quants - minima[:, :, None]


def _q5_k(blocks: Bytes) -> Floats:
    """Q4_K with a fifth bit for each quant, 32 bytes whose bit g belongs to group g."""
    scales, minima = _six_bit(blocks[:, 4:16])
    scales, minima = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1)  # [n, 8, 32]
    low = _nibbles(blocks[:, 48:].reshape(len(blocks), 4, 32)).reshape(len(blocks), 8, 32)
    quants = (low | fifth << np.uint8(4)).astype(np.float32)
    return scales[:, :, None] * quants - minima[:, :, None]


def _q6_k(blocks: Bytes) -> Floats:
    """256 quants of 4 low bits in two halves, 2 high bits each, 16 signed scales of 8 bits, their factor."""
    count = len(blocks)
    low = blocks[:, :128].reshape(count, 2, 64)
    low = np.stack([low & 15, low >> 4], axis=2).reshape(count, 8, 32)
    high = _pairs(blocks[:, 128:192].reshape(count, 2, 32))
    quants = ((low | high << np.uint8(4)).astype(np.float32) - np.float32(32)).reshape(count, 16, 16)
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return scales[:, :, None] * quants


_QUANTISED: dict[Format, Callable[[Bytes], Floats]] = {
    Format.Q4_0: _q4_0,
    Format.Q4_1: _q4_1,
    Format.Q5_0: _q5_0,
    Format.Q5_1: _q5_1,
    Format.Q8_0: _q8_0,
    Format.Q2_K: _q2_k,
    Format.Q3_K: _q3_k,
    Format.Q4_K: _q4_k,
    Format.Q5_K: _q5_k,
    Format.Q6_K: _q6_k,
}
