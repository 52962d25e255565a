"""What is read of keys and values that are kept in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tailrace.backends.kvdtype import Kept
from tailrace.backends.reference import kept as rounding
from tailrace.backends.reference.kept import key_as_read, round_to_int4_each, spin, value_as_read

Reader = Callable[[Any, Kept], Any]
SHAPES = [2, 6, 16, 20, 48, 64, 80, 96, 128, 512]


@pytest.mark.parametrize("n", SHAPES)
def test_a_rotation_keeps_lengths_and_is_its_own_inverse(n: int) -> None:
    x = np.random.default_rng(n).normal(size=(3, 2, n)).astype(np.float32)
    turned = spin(x)
    assert np.allclose(spin(turned), x, atol=1e-5)
    assert np.allclose((turned**2).sum(axis=-1), (x**2).sum(axis=-1), rtol=1e-5)


def test_a_rotation_is_that_of_hadamard() -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(0).normal(size=(5, 64))
    assert np.allclose(spin(x), x @ matrix / 8, atol=1e-5)


@pytest.mark.parametrize("n", SHAPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_what_is_read_is_as_near_as_its_bits_allow(n: int, size: float) -> None:
    x = (np.random.default_rng(n).normal(size=(40, n)) * size).astype(np.float32)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    turned = spin(x)
    for as_read in (key_as_read, value_as_read):
        assert np.array_equal(as_read(x, Kept.F32), x)
        assert (np.abs(as_read(x, Kept.BF16) - x) <= 2.0**-8 * np.abs(x)).all()
        assert (np.abs(as_read(x, Kept.F16) - x) <= 2.0**-11 * np.abs(x) + 2.0**-25).all()
    assert (np.abs(value_as_read(x, Kept.I8) - x) <= largest * 0.51 / 127 + 1e-6).all()
    read, most = spin(key_as_read(x, Kept.I8)), np.abs(turned).max(axis=-1, keepdims=True)
    assert (np.abs(read - turned) <= most * 0.51 / 127 + 1e-6 * largest + 4e-6).all()  # a small scale is subnormal
    read = spin(value_as_read(x, Kept.I4))
    steps = max(float(np.ptp(turned[:, at : at + 32], axis=-1).max()) / 15 for at in range(0, n, 32))
    assert np.sqrt(((read - turned) ** 2).mean(axis=-1)).max() <= 0.52 * steps + 2e-3 * largest.max()


def test_what_is_fitted_to_four_bits_is_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(400, 64)).astype(np.float32)
    error = [((round_to_int4_each(x) - x) ** 2).mean()]
    monkeypatch.setattr(rounding, "FITS", 0)
    error.append(((round_to_int4_each(x) - x) ** 2).mean())
    assert error[0] < 0.92 * error[1]


def test_a_key_with_one_large_dimension_keeps_the_small_ones() -> None:
    x = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)
    x[:, 9] = 60.0
    off = [np.delete(np.abs(read(x, Kept.I8) - x), 9, axis=1).mean() for read in (key_as_read, value_as_read)]
    assert off[0] < 0.4 * off[1]


@pytest.mark.parametrize("as_read", [key_as_read, value_as_read])
@pytest.mark.parametrize("kept", list(Kept))
def test_zeros_are_kept_and_what_is_no_number_stays_none(kept: Kept, as_read: Reader) -> None:
    x = np.zeros((3, 64), np.float32)
    x[1, 5], x[2, 7] = np.nan, np.inf
    read = as_read(x, kept)
    assert not read[0].any()
    assert np.isnan(read[1, 5])
    assert not np.isfinite(read[2, 7])


@pytest.mark.parametrize("as_read", [key_as_read, value_as_read])
@pytest.mark.parametrize("kept", [Kept.F16, Kept.I8, Kept.I4])
def test_numbers_past_the_range_of_a_scale_stay_numbers(kept: Kept, as_read: Reader) -> None:
    x = np.full((1, 64), 3e38, np.float32)
    x[0, ::2] = -3e38
    rotated = kept == Kept.I4 or (kept == Kept.I8 and as_read is key_as_read)
    assert np.isfinite(as_read(x, kept)).all() or rotated  # a rotation itself is past float32
