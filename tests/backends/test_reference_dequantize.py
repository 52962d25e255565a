"""Every stored format decodes to the bits that the gguf package gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tailrace.backends import BLOCK, Format, Weight
from tailrace.backends.reference import dequantize


def random_weight(kind: Format, rows: int, blocks: int, seed: int) -> Weight:
    values, size = BLOCK[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    return Weight("t", kind, (rows, blocks * values), raw)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 5), (7, 3), (64, 9)])
@pytest.mark.parametrize("kind", list(Format))
def test_random_bytes_decode_to_the_same_bits(kind: Format, rows: int, blocks: int) -> None:
    """Any bytes are valid, scales that are infinite or no number included."""
    weight = random_weight(kind, rows, blocks, seed=rows)
    found = dequantize(weight)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(weight.data, gguf.GGMLQuantizationType[kind.value]).reshape(weight.shape)
    assert found.dtype == np.float32
    number = ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~number)
    assert np.array_equal(found.view(np.uint32)[number], expected.view(np.uint32)[number])


@pytest.mark.parametrize("kind", [Format.Q4_0, Format.Q4_1, Format.Q5_0, Format.Q5_1, Format.Q8_0])
def test_what_was_quantised_comes_back_close(kind: Format) -> None:
    """The layout means what it says: values return in their places, within a quantisation step."""
    values = np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[kind.value])
    found = dequantize(Weight("t", kind, (5, 96), raw))
    assert np.abs(found - values).max() < (0.5 if "4" in kind else 0.25)


def test_a_view_of_a_larger_array_decodes_too() -> None:
    weight = random_weight(Format.Q4_K, 6, 2, seed=1)
    part = Weight("t", Format.Q4_K, (3, 512), weight.data[::2])
    assert np.array_equal(dequantize(part), dequantize(weight)[::2], equal_nan=True)


def test_rows_taken_before_or_after_decoding_are_the_same() -> None:
    weight = random_weight(Format.Q6_K, 5, 2, seed=2)
    order = np.array([4, 0, 2])
    assert np.array_equal(dequantize(weight.rows(order)), dequantize(weight)[order], equal_nan=True)
