"""The ops of `backends.Ops` in numpy, over one batch, computed at once."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import PAGE_SIZE, Adapter, Attention, Batch, Format, Rope, Weight
from tailrace.backends.groups import first_page
from tailrace.backends.reference.kept import round_to_bf16

Array = NDArray[Any]
"""float32 or float64, as the backend was made."""

Rounded = Literal["", "int8", "bf16"]
"""To what products with quantised weights round their input, as a build of the cpu backend does; and, with "bf16", what
they multiply for a weight."""

QUERY_CHUNK = 128
"""Queries attended at once; bounds the score matrix of a long prompt."""

PLAIN = (Format.F32, Format.F16, Format.BF16)


class Store(Protocol):
    """What the ops need of the backend: decoded weights and the KV pages of a layer."""

    def values(self, weight: Weight) -> Array: ...

    def adapter(self, number: int) -> Adapter: ...

    def pages(self, layer: int) -> tuple[Array, Array]:
        """Keys and values: [pages, PAGE_SIZE, kv_heads, head_dim]."""
        ...

    def tables(self, layer: int, batch: Batch) -> NDArray[np.int32]:
        """The layer's columns of the block tables: [sequences, pages]."""
        ...

    def as_kept(self, k: Array, v: Array, layer: int) -> tuple[Array, Array]:
        """Rounds to what the layer's KV pages can hold: [tokens, kv_heads, head_dim]."""
        ...


class NumpyOps:
    """`backends.Ops` over arrays. With `invariant`, every row is computed by itself, in shapes that depend on its own
    position alone, so that a row's bits do not depend on what else is in the batch; otherwise whole matrices are."""

    def __init__(
        self, store: Store, batch: Batch, dtype: Any, *, last_layer: int, rounded: Rounded, invariant: bool
    ) -> None:
        self._store = store
        self._batch = batch
        self._dtype = dtype
        self._last_layer = last_layer
        self._rounded = rounded
        self._invariant = invariant
        lengths = np.diff(batch.starts)
        offsets = np.arange(len(batch.tokens)) - np.repeat(batch.starts[:-1], lengths)
        self._positions = np.repeat(batch.context, lengths) + offsets
        self._adapters = None if batch.adapters is None else np.repeat(batch.adapters, lengths)  # of each row

    def embed(self, table: Weight) -> Array:
        return self._store.values(table)[self._batch.tokens]

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        matrix = self._store.values(weight)
        if weight.format not in PLAIN:
            if self._rounded == "int8":
                x = round_to_int8(x)
            elif self._rounded == "bf16":
                x, matrix = round_to_bf16(x).astype(self._dtype), widen_to_bf16(matrix).astype(self._dtype)
        if self._invariant:
            result = np.stack([matrix @ row for row in x]) if len(x) else np.zeros((0, len(matrix)), self._dtype)
        else:
            result = x @ matrix.T
        result = result if bias is None else result + self._store.values(bias)
        if self._adapters is not None:
            self._adapt(x, weight.name, self._adapters, result)
        return result

    def _adapt(self, x: Array, name: str, adapters: NDArray[np.int32], result: Array) -> None:
        """Adds what the rows' adapters give, row by row."""
        for row, number in enumerate(adapters.tolist()):
            part = self._store.adapter(number).parts.get(name) if number >= 0 else None
            if part is not None:
                low = part.a.astype(self._dtype) @ x[row]
                result[row] += part.b.astype(self._dtype) @ (low * self._dtype(part.scale))

    def rms_norm(self, x: Array, weight: Weight, eps: float) -> Array:
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: Array = x * (self._dtype(1) / np.sqrt(mean + self._dtype(eps)))
        return normed * self._store.values(weight)

    def head_norm(self, x: Array, weight: Weight, eps: float) -> Array:
        heads = x.reshape(len(x), -1, weight.shape[0])
        return self.rms_norm(heads, weight, eps).reshape(x.shape)

    def rope(self, x: Array, rope: Rope, head_dim: int) -> Array:
        half = len(rope.inv_freq)
        angles = (self._positions.astype(np.float32)[:, None] * rope.inv_freq[None, :]).astype(np.float64)
        # Angles are float32 by definition; their cosines are exact, then rounded.
        cos = (np.cos(angles) * rope.scale).astype(self._dtype)[:, None, :]
        sin = (np.sin(angles) * rope.scale).astype(self._dtype)[:, None, :]
        heads = x.reshape(len(x), -1, head_dim)
        first, second = heads[..., :half], heads[..., half : 2 * half]
        parts = [first * cos - second * sin, second * cos + first * sin, heads[..., 2 * half :]]
        return np.concatenate(parts, axis=-1).reshape(x.shape)

    def attention(self, q: Array, k: Array, v: Array, spec: Attention) -> Array:
        self._keep(k, v, spec)
        queries = q.reshape(len(q), spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        result: Array = np.zeros_like(queries)
        needed = self._needed(len(q), spec)
        batch = self._batch
        for sequence in range(len(batch.context)):
            begin, end = int(batch.starts[sequence]), int(batch.starts[sequence + 1])
            rows = needed[(needed >= begin) & (needed < end)]
            if len(rows) == 0:
                continue
            context = int(batch.context[sequence])
            keys, values = self._gather(sequence, context, context + end - begin, spec)
            step = 1 if self._invariant else QUERY_CHUNK
            for at in range(0, len(rows), step):
                some = rows[at : at + step]
                result[some] = self._attend(queries[some], self._positions[some], keys, values, spec)
        return result.reshape(q.shape)

    def silu_mul(self, gate: Array, up: Array) -> Array:
        with np.errstate(over="ignore"):  # exp of a large negative gate: the quotient is then rightly zero
            gated: Array = gate / (self._dtype(1) + np.exp(-gate)) * up
        return gated

    def add(self, a: Array, b: Array) -> Array:
        return a + b

    def wanted(self, x: Array) -> Array:
        if self._adapters is not None:
            self._adapters = self._adapters[self._batch.wanted]
        return x[self._batch.wanted]

    def _needed(self, tokens: int, spec: Attention) -> NDArray[np.int64]:
        """Rows whose attention is ever read. After the last layer's keys and values are kept, only the wanted rows'."""
        if spec.layer == self._last_layer:
            return np.asarray(self._batch.wanted, np.int64)
        return np.arange(tokens)

    def _keep(self, k: Array, v: Array, spec: Attention) -> None:
        """Stores the batch's keys and values into its pages, rounded to what they can hold."""
        key_pages, value_pages = self._store.pages(spec.layer)
        sequence = np.repeat(np.arange(len(self._batch.context)), np.diff(self._batch.starts))
        page = self._store.tables(spec.layer, self._batch)[sequence, self._positions // PAGE_SIZE]
        slot = self._positions % PAGE_SIZE
        shape = (len(k), spec.kv_heads, spec.head_dim)
        kept = self._store.as_kept(k.reshape(shape), v.reshape(shape), spec.layer)
        key_pages[page, slot], value_pages[page, slot] = kept

    def _gather(self, sequence: int, context: int, length: int, spec: Attention) -> tuple[Array, Array]:
        """A sequence's keys and values in order, zero where queries from `context` on see none:
        [length, kv_heads, head_dim]."""
        skipped = 0 if spec.window is None else first_page(spec.window, context)
        table = self._store.tables(spec.layer, self._batch)[sequence, skipped : -(-length // PAGE_SIZE)]
        shape = (length, spec.kv_heads, spec.head_dim)
        found = []
        for pages in self._store.pages(spec.layer):
            values = np.zeros(shape, self._dtype)
            values[skipped * PAGE_SIZE :] = pages[table].reshape(-1, *shape[1:])[: length - skipped * PAGE_SIZE]
            found.append(values)
        return found[0], found[1]

    def _attend(self, q: Array, positions: Array, keys: Array, values: Array, spec: Attention) -> Array:
        """softmax(q k / scale) v over what each query sees. q is [rows, kv_heads, group, head_dim]."""
        first = 0 if spec.window is None else max(0, int(positions[0]) - spec.window + 1)
        last = int(positions[-1]) + 1
        keys, values = keys[first:last].transpose(1, 0, 2), values[first:last].transpose(1, 0, 2)
        rows, kv_heads, group, head_dim = q.shape
        q = q.transpose(1, 0, 2, 3).reshape(kv_heads, rows * group, head_dim)
        scores = (q @ keys.transpose(0, 2, 1) * self._dtype(spec.scale)).reshape(kv_heads, rows, group, -1)
        at = np.arange(first, last)[None, :]
        seen = at <= positions[:, None]
        if spec.window is not None:
            seen &= at > positions[:, None] - spec.window
        scores = np.where(seen[None, :, None, :], scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: Array = scores.reshape(kv_heads, rows * group, -1) @ values
        return mixed.reshape(kv_heads, rows, group, head_dim).transpose(1, 0, 2, 3)


def widen_to_bf16(weights: Array) -> NDArray[np.float32]:
    """What tiles multiply for weights, of at most 2^8: the nearest float16 of 2^8 times as much, and of that the
    nearest with three bits fewer, halves away from zero."""
    halves = (np.clip(weights, -256.0, 256.0) * 256.0).astype(np.float32)
    with np.errstate(over="ignore"):  # 2^16 has the bits of infinity
        bits = halves.astype(np.float16).view(np.uint16).astype(np.uint32)
    size = (bits & 0x7FFF) + 4 >> 3
    size[size < 0x80] = 0
    # the exponents' biases are 112 apart, and what is multiplied is 2^8 of the weight
    return ((bits & 0x8000 | size) << 16).astype(np.uint32).view(np.float32) * np.float32(2.0**104)


def round_to_int8(x: Array) -> Array:
    """Activations as the cpu backend multiplies them with quantised weights: per block of 32, in float32, quants are
    x * (127 / amax) rounded half to even, and come back times amax / 127."""
    blocks = x.astype(np.float32).reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax > 0)
    quants = np.clip(np.rint(blocks * inverse), -127, 127)
    rounded: Array = (quants * (amax / np.float32(127))).astype(x.dtype)
    return rounded.reshape(x.shape)
