"""Adapters in the kernels' own tiles, rounded to bfloat16: a decode step reads all of them, as it does the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import Adapter, Format, Weight
from tailrace.backends.cpu.store import pack
from tailrace.backends.reference.kept import round_to_bf16

Part = tuple[int, int, float, NDArray[np.uint8], NDArray[np.uint8]]
"""Number of the weight in the program, rank, scale, and the tiles of A and B."""


@dataclass(frozen=True, eq=False)
class CpuAdapter:
    """What `_kernels.Program.set_adapter` takes."""

    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tiles."""
        return sum(a.nbytes + b.nbytes for _, _, _, a, b in self.parts)


def pack_adapter(adapter: Adapter, numbers: Mapping[str, int]) -> CpuAdapter:
    """The adapter in tiles. `numbers` are those of the program's weights, by name."""
    tiles = [_tiles(matrix) for part in adapter.parts.values() for matrix in (part.a, part.b)]
    together = np.empty(sum(one.nbytes for one in tiles), np.uint8)  # numpy asks for huge pages for it
    placed = []
    at = 0
    for one in (*tiles[::2], *tiles[1::2]):  # in the order in which a step's stages read them
        placed.append(together[at : at + one.nbytes])
        placed[-1][:] = one
        at += one.nbytes
    count = len(adapter.parts)
    parts = zip(adapter.parts.items(), placed[:count], placed[count:], strict=True)
    return CpuAdapter(tuple((numbers[name], len(part.a), part.scale, a, b) for (name, part), a, b in parts))


def _tiles(matrix: NDArray[np.float32]) -> NDArray[np.uint8]:
    high = (round_to_bf16(matrix).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return pack(Weight("", Format.BF16, matrix.shape, high.view(np.uint8)))
