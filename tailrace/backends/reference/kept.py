"""Keys and values as the pages of the cpu backend keep them, and what is read of them: see native/kernels.h.

All in float32, and sums in the kernels' order, so that numbers round to the same side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.backends.kvdtype import GROUP, LANES, Kept

Floats = NDArray[np.float32]

MOST_F16 = np.float32(65504)
FITS = 2
"""How often four bits fit their scale and minimum to what was rounded, and round again."""
_ONES = np.array([bits.bit_count() % 2 for bits in range(LANES)])
_INDEX = np.arange(LANES)
SIGNS = np.where(_ONES[_INDEX[:, None] & _INDEX[None, :]], np.float32(-1), np.float32(1))
"""The Hadamard matrix of LANES rows, without its factor of 1/4."""


def key_as_read(x: NDArray[Any], kept: Kept) -> NDArray[Any]:
    """What is read of keys [..., head_dim] that are kept so: float32 of the same shape, F32 as it is."""
    return spin(round_to_int8_each(spin(x))) if kept == Kept.I8 else value_as_read(x, kept)


def value_as_read(x: NDArray[Any], kept: Kept) -> NDArray[Any]:
    """As `key_as_read`, of values."""
    match kept:
        case Kept.F32:
            return x
        case Kept.BF16:
            return round_to_bf16(x)
        case Kept.F16:
            return np.where(np.isfinite(x), _as_f16(np.asarray(x, np.float32)), np.float32(np.nan))
        case Kept.I8:
            return round_to_int8_each(x)
        case Kept.I4:
            return spin(round_to_int4_each(spin(x)))


def round_to_bf16(x: NDArray[Any]) -> Floats:
    """To the nearest bfloat16, ties to even, as float32. NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    result = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), result)


def round_to_int8_each(x: NDArray[Any]) -> Floats:
    """Each vector to -127 .. 127 times a float16."""
    x = np.asarray(x, np.float32)
    scale = _as_f16(np.abs(x).max(axis=-1, keepdims=True) / np.float32(127))
    return _finite(x, _quants(x, scale, -127, 127) * scale)


def round_to_int4_each(x: NDArray[Any]) -> Floats:
    """Each GROUP dimensions (the last may be fewer) to 0 .. 15 times a float16 plus a float16."""
    starts = range(0, x.shape[-1], GROUP)
    return np.concatenate([_round_to_int4(x[..., at : at + GROUP]) for at in starts], axis=-1)


def _round_to_int4(group: NDArray[Any]) -> Floats:
    n = group.shape[-1]
    x = np.asarray(group, np.float32)
    x = np.concatenate([x, np.repeat(x[..., -1:], -n % LANES, axis=-1)], axis=-1)  # whole lanes, as the kernels have it
    low = x.min(axis=-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = _as_f16((x.max(axis=-1, keepdims=True) - low) / np.float32(15))
        minimum = _as_f16(low)
        quants = _quants(x - minimum, scale, 0, 15)
        for _ in range(FITS):
            scale, minimum = _fit(x, quants, scale, minimum)
            quants = _quants(x - minimum, scale, 0, 15)
        return _finite(x, quants * scale + minimum)[..., :n]


def _fit(x: Floats, quants: Floats, scale: Floats, minimum: Floats) -> tuple[Floats, Floats]:
    """The scale and the minimum of the least squared error, where there are such; or else those that were."""
    y, count = x - minimum, np.float32(x.shape[-1])
    n, over = _sum(quants), _sum(y)
    spread = count * _sum(quants * quants) - n * n
    found = np.asarray((count * _sum(quants * y) - n * over) / np.where(spread > 0, spread, np.float32(1)), np.float32)
    fits = (found > 0) & (found < MOST_F16)
    fitted: Floats = np.where(fits, _as_f16(found), scale)
    return fitted, np.where(fits, _as_f16(np.asarray(minimum + (over - fitted * n) / count, np.float32)), minimum)


def _sum(x: Floats) -> Floats:
    """Over the last axis, of whole lanes: lane by lane, then halves."""
    lanes = x.reshape(*x.shape[:-1], -1, LANES)
    total: Floats = lanes[..., 0, :]
    for index in range(1, lanes.shape[-2]):
        total = total + lanes[..., index, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total


def spin(x: NDArray[Any]) -> Floats:
    """Vectors [..., n] with each run of 2^i dimensions rotated by the Hadamard matrix of that size, for the largest i
    that divides n. It is its own inverse."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _spin(np.asarray(x, np.float32))


def _spin(x: Floats) -> Floats:
    n = x.shape[-1]
    run, half = n & -n, 1
    y = x.reshape(-1, n)
    if run >= LANES:
        lanes = y.reshape(-1, n // LANES, LANES)
        y = np.zeros_like(lanes)
        for index in range(LANES):
            y = y + lanes[:, :, index : index + 1] * SIGNS[index]
        half = LANES
    while half < run:
        pairs = y.reshape(-1, n // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        y = np.stack([first + second, first - second], axis=2)
        half *= 2
    turned: Floats = y.reshape(x.shape) * (np.float32(1) / np.sqrt(np.float32(run)))
    return turned


def _as_f16(x: Floats) -> Floats:
    return np.clip(x, -MOST_F16, MOST_F16).astype(np.float16).astype(np.float32)


def _quants(x: Floats, scale: Floats, low: int, high: int) -> Floats:
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    with np.errstate(over="ignore", invalid="ignore"):
        quants: Floats = np.rint(np.clip(x * inverse, np.float32(low), np.float32(high)))
    return quants


def _finite(x: NDArray[Any], rounded: Floats) -> Floats:
    """`rounded`, but not a number in vectors that are not finite: they would have no scale."""
    return np.where(np.isfinite(x).all(axis=-1, keepdims=True), rounded, np.float32(np.nan))
