"""A model's matrices in bf16, whatever they are stored in: what quantised weights would be without their blocks.

Nothing is won by it but a comparison: the values are those that are stored, rounded to eight bits of mantissa.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import Format, Weight
from tailrace.backends.reference.dequantize import dequantize
from tailrace.models.decoder import Model
from tailrace.models.quantise import map_matrices


class WidenedWeight(Weight):
    """A matrix that reads as bf16. Its data is worked out anew whenever it is read, and kept by nobody."""

    def __init__(self, source: Weight) -> None:
        for field, value in (("name", source.name), ("format", Format.BF16), ("shape", source.shape)):
            object.__setattr__(self, field, value)
        self.__dict__["source"] = source

    @property
    def data(self) -> NDArray[np.uint8]:
        """uint8 [rows, 2 x columns]."""
        bits = dequantize(self.__dict__["source"]).view(np.uint32)
        bits += np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))  # to the nearest, ties to even
        return np.ascontiguousarray((bits >> np.uint32(16)).astype(np.uint16)).view(np.uint8)


def widened(model: Model) -> Model:
    """The model with all of its matrices in bf16, and a `variant` that says so; the model itself where they are."""

    def wide(weight: Weight) -> Weight:
        return weight if len(weight.shape) != 2 or weight.format is Format.BF16 else WidenedWeight(weight)

    made = map_matrices(model, wide, wide)
    return replace(made, variant="bf16") if any(isinstance(one, WidenedWeight) for one in made.weights()) else model
