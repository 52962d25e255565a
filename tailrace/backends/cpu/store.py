"""The weights in the kernels' own tiles: packed once, kept in a file beside the model's other prepared parts, mapped.

A file holds an index (JSON: format version, tensor names, formats, shapes, offsets) and the tiles. It is written whole
under another name and renamed, so it is there or not; an index that does not fit is ignored and written anew.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import Weight
from tailrace.backends.cpu.memory import File
from tailrace.native import _kernels

VERSION = 2
"""Changes whenever the tile layout does."""

_ALIGN = 4096
_MAGIC = b"TAILRACE-TILES\n"
_log = logging.getLogger("tailrace")


def pack(weight: Weight, threads: int = 1) -> NDArray[np.uint8]:
    """The matrix in tiles: uint8 [packed bytes]."""
    n, k = weight.shape
    _, padded, _, size = _kernels.packed_shape(weight.format.value, n, k)
    out = np.empty(size, np.uint8)
    rows = np.ascontiguousarray(weight.data)
    tiles = padded // 16
    cuts = [tiles * i // threads for i in range(threads + 1)]
    if threads == 1:
        _kernels.pack(weight.format.value, rows, k, 0, tiles, out)
        return out
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda i: _kernels.pack(weight.format.value, rows, k, cuts[i], cuts[i + 1], out), range(threads)))
    return out


class TileStore:
    """Tiles of a model's matrices: from the file where it fits, else packed now and written for the next start. `own`:
    what is read from the file is to be memory of this process, where that is possible."""

    def __init__(self, weights: Iterable[Weight], path: Path | None, threads: int = 1, *, own: bool = False) -> None:
        matrices = {w.name: w for w in weights if len(w.shape) == 2}
        self._index = {
            name: {"format": w.format.value, "shape": list(w.shape), "size": _packed_size(w)}
            for name, w in sorted(matrices.items())
        }
        self.from_file = False
        self._file: File | None = None
        self._own = own
        self._tiles: dict[str, NDArray[np.uint8]] = {}
        if path is not None and self._map(path):
            return
        self._tiles = {name: pack(w, threads) for name, w in matrices.items()}
        if path is not None:
            self._write(path)
            self._map(path)

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles."""
        return sum(int(str(e["size"])) for e in self._index.values())

    @property
    def copy(self) -> tuple[int, int]:
        """Address and bytes of the file's copy in memory of this process; nothing where there is none."""
        file = self._file
        return (file.data.ctypes.data, file.data.nbytes) if file is not None and file.copied else (0, 0)

    def settle(self, *, wait: bool = False) -> None:
        """Start-up is over: see `memory.File`."""
        work = self._file.settle() if self._file is not None else None
        if work is not None and wait:
            work.join()

    def __call__(self, weight: Weight) -> NDArray[np.uint8]:
        return self._tiles[weight.name]

    def _header(self) -> bytes:
        offset, entries = 0, {}
        for name, entry in self._index.items():
            entries[name] = {**entry, "offset": offset}
            offset += -(-int(str(entry["size"])) // _ALIGN) * _ALIGN
        text = json.dumps({"version": VERSION, "tensors": entries, "bytes": offset}, sort_keys=True).encode()
        head = _MAGIC + len(text).to_bytes(8, "little") + text
        return head + b"\0" * (-len(head) % _ALIGN)

    def _map(self, path: Path) -> bool:
        """Takes the tiles from the file; False where there is none or it does not hold exactly these tensors."""
        header = self._header()
        try:
            with path.open("rb") as f:
                total = len(header) + sum(-(-int(str(e["size"])) // _ALIGN) * _ALIGN for e in self._index.values())
                if os.fstat(f.fileno()).st_size != total or f.read(len(header)) != header:
                    return False
                self._file = File(f, own=self._own)
        except OSError:
            return False
        whole, at = self._file.data, len(header)
        for name, entry in self._index.items():
            size = int(str(entry["size"]))
            self._tiles[name] = whole[at : at + size]
            at += -(-size // _ALIGN) * _ALIGN
        self.from_file = True
        return True

    def _write(self, path: Path) -> None:
        import tempfile

        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as f:
                temporary = f.name
                f.write(self._header())
                for name in self._index:
                    tiles = self._tiles[name]
                    f.write(tiles.data)
                    f.write(b"\0" * (-tiles.nbytes % _ALIGN))
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except OSError as e:
            _log.warning("the repacked weights are not kept, so the next start repacks them again: %s", e)
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)


def _packed_size(weight: Weight) -> int:
    n, k = weight.shape
    return _kernels.packed_shape(weight.format.value, n, k)[3]
