"""`backends.Backend` in numpy: KV pages as arrays, ops computed at once, sampling by the rules of `sampler`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import PAGE_SIZE, Adapter, Batch, Forward, Inline, PackedAdapter, Pages, Result, Weight
from tailrace.backends.groups import PageGroup, layer_groups
from tailrace.backends.kvdtype import KvDtype, parse
from tailrace.backends.reference.dequantize import dequantize
from tailrace.backends.reference.kept import key_as_read, value_as_read
from tailrace.backends.reference.ops import Array, NumpyOps, Rounded
from tailrace.backends.reference.sampler import sample

VERSION = 1
"""Changes whenever the same input may give other bits, or a page has another layout."""


class ReferenceBackend(Inline):
    """Runs a model in numpy. `pages` is the number of KV pages of PAGE_SIZE tokens, one for each of `groups` where
    there are several; `dtype` is that of all arithmetic; keys and values are rounded as `kv_dtype` (or its name) keeps
    them before anything reads them. `rounded`: how the products with quantised weights round, as a build of
    the cpu backend does. `batch_invariant` computes row by row: slower, and then a request's bits do not depend on its
    company. `vocab_limit`: token ids at or past it are never drawn (padding rows of the head)."""

    name = "reference"
    kernels = "numpy"

    def __init__(
        self,
        model: Forward,
        *,
        pages: Pages,
        dtype: type[np.floating[Any]] = np.float32,
        kv_dtype: KvDtype | str = "f32",
        rounded: Rounded = "",
        batch_invariant: bool = False,
        vocab_limit: int | None = None,
        groups: Sequence[PageGroup] | None = None,
    ) -> None:
        self._model = model
        self._vocab_limit = vocab_limit
        self._dtype = dtype
        self._kv_dtype = parse(kv_dtype) if isinstance(kv_dtype, str) else kv_dtype
        self._kv_dtype.check(len(model.attentions))
        self._rounded = rounded
        self.batch_invariant = batch_invariant
        self._values: dict[int, tuple[Weight, Array]] = {}
        self._pages: dict[int, tuple[Array, Array]] = {}
        self._adapters: dict[int, Adapter] = {}
        self._groups = layer_groups(groups, model.attentions, pages)
        self._group_count = len(groups or (None,))
        for spec in model.attentions:
            shape = (self._groups[spec.layer][1], PAGE_SIZE, spec.kv_heads, spec.head_dim)
            self._pages[spec.layer] = (np.zeros(shape, dtype), np.zeros(shape, dtype))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the decoded weights in use so far."""
        return sum(values.nbytes for _, values in self._values.values())

    @property
    def kv_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._pages.values())

    @property
    def page_bytes(self) -> int:
        return sum(array[0].nbytes for both in self._pages.values() for array in both)

    @property
    def numerics(self) -> str:
        modes = f"{self._kv_dtype.name} {self._rounded} {self.batch_invariant}"
        return f"reference-{VERSION} numpy-{np.__version__} {np.dtype(self._dtype)} {modes}"

    def read_page(self, page: Pages, out: bytearray | memoryview | None = None) -> bytearray | memoryview:
        out = bytearray(self.page_bytes) if out is None else out
        out[:] = b"".join(array[one].tobytes() for array, one in self._arrays(page))
        return out

    def write_page(self, page: Pages, data: bytes | bytearray | memoryview) -> None:
        if len(data) != self.page_bytes:
            raise ValueError(f"a page takes {self.page_bytes} bytes, not {len(data)}")
        begin = 0
        for array, one in self._arrays(page):
            part = np.frombuffer(data, array.dtype, array[0].size, begin)
            if one >= 0:
                array[one] = part.reshape(array.shape[1:])
            begin += part.nbytes

    def _arrays(self, page: Pages) -> list[tuple[Array, int]]:
        """Keys and values of every layer, group by group, and which of their pages it is."""
        pages = (page,) if isinstance(page, int) else page
        ordered = sorted(self._pages, key=lambda layer: self._groups[layer][0])
        return [(array, pages[self._groups[layer][0]]) for layer in ordered for array in self._pages[layer]]

    def run(self, batch: Batch) -> Result:
        ops = NumpyOps(
            self,
            batch,
            self._dtype,
            last_layer=self._model.attentions[-1].layer,
            rounded=self._rounded,
            invariant=self.batch_invariant,
        )
        logits = np.asarray(self._model.forward(ops), np.float32)
        result = sample(logits, batch.sampling, vocab_limit=self._vocab_limit)
        if batch.want_logits:
            result.logits = logits
        return result

    def pack_adapter(self, adapter: Adapter) -> Adapter:
        return adapter

    def set_adapter(self, number: int, adapter: PackedAdapter | None) -> None:
        assert adapter is None or isinstance(adapter, Adapter), "another backend's adapter"
        if adapter is None:
            self._adapters.pop(number, None)
        else:
            self._adapters[number] = adapter

    def adapter(self, number: int) -> Adapter:
        return self._adapters[number]

    def values(self, weight: Weight) -> Array:
        """The weight's values, decoded once. The weight itself is kept, so that its identity stays its own."""
        key = id(weight)
        if key not in self._values:
            self._values[key] = (weight, dequantize(weight).astype(self._dtype))
        return self._values[key][1]

    def pages(self, layer: int) -> tuple[Array, Array]:
        return self._pages[layer]

    def tables(self, layer: int, batch: Batch) -> NDArray[np.int32]:
        width = batch.tables.shape[1] // self._group_count
        group = self._groups[layer][0]
        return batch.tables[:, group * width : (group + 1) * width]

    def as_kept(self, k: Array, v: Array, layer: int) -> tuple[Array, Array]:
        key, value = self._kv_dtype.of(layer)
        return key_as_read(k, key).astype(self._dtype), value_as_read(v, value).astype(self._dtype)
