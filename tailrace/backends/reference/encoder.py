"""`backends.encoding` in numpy: the oracle of every other encoder backend. One text at a time, so that a text's bits
depend on that text alone."""

from __future__ import annotations

import math
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import Weight
from tailrace.backends.encoding import Encoding, Pooling, TextBatch
from tailrace.backends.reference.dequantize import dequantize

Array = NDArray[Any]
_ERF = np.frompyfunc(math.erf, 1, 1)


class ReferenceEncoder:
    """Runs an encoder in numpy, all arithmetic in `dtype`."""

    name = "reference"
    kernels = "numpy"
    threads = 1
    work: int | None = None

    def __init__(self, model: Encoding, *, dtype: type[np.floating[Any]] = np.float32) -> None:
        self._model = model
        self._dtype = dtype
        self._values: dict[int, tuple[Weight, Array]] = {}
        self.progress = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, decoded."""
        return sum(prod(weight.shape) for weight in self._model.weights()) * np.dtype(self._dtype).itemsize

    @property
    def width(self) -> int:
        return self._model.width

    def values(self, weight: Weight) -> Array:
        """A weight's values in the backend's dtype, kept."""
        if id(weight) not in self._values:
            self._values[id(weight)] = (weight, dequantize(weight).astype(self._dtype))
        return self._values[id(weight)][1]

    def encode(self, batch: TextBatch) -> NDArray[np.float32]:
        batch.check(self._model.vocab, self._model.kinds, self._model.longest)
        rows = []
        for begin, end in zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True):
            ops = TextOps(self, batch.tokens[begin:end], batch.kinds[begin:end], self._dtype)
            rows.append(np.asarray(self._model.forward(ops), np.float32))
            self.progress += end - begin
        return np.concatenate(rows)


class TextOps:
    """`EncoderOps` over one text, computed at once."""

    def __init__(
        self, store: ReferenceEncoder, tokens: NDArray[np.int32], kinds: NDArray[np.int32], dtype: Any
    ) -> None:
        self._values = store.values
        self._tokens = tokens
        self._kinds = kinds
        self._dtype = dtype

    def embed(self, words: Weight, positions: Weight, kinds: Weight | None, first: int) -> Array:
        at = np.arange(first, first + len(self._tokens))
        x: Array = self._values(words)[self._tokens] + self._values(positions)[at]
        return x if kinds is None else x + self._values(kinds)[self._kinds]

    def linear(self, x: Array, weight: Weight, bias: Weight | None) -> Array:
        result: Array = x @ self._values(weight).T
        return result if bias is None else result + self._values(bias)

    def layer_norm(self, x: Array, weight: Weight, bias: Weight, eps: float) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(np.square(centred), axis=-1, keepdims=True)
        normed: Array = centred / np.sqrt(variance + self._dtype(eps)) * self._values(weight)
        return normed + self._values(bias)

    def gelu(self, x: Array) -> Array:
        erf = np.asarray(_ERF(x.astype(np.float64) / math.sqrt(2)), self._dtype)
        scaled: Array = x * self._dtype(0.5) * (self._dtype(1) + erf)
        return scaled

    def tanh(self, x: Array) -> Array:
        bent: Array = np.tanh(x)
        return bent

    def attention(self, q: Array, k: Array, v: Array, heads: int, scale: float) -> Array:
        q, k, v = (x.reshape(len(x), heads, -1).transpose(1, 0, 2) for x in (q, k, v))
        scores = q @ k.transpose(0, 2, 1) * self._dtype(scale)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: Array = scores @ v
        return mixed.transpose(1, 0, 2).reshape(mixed.shape[1], -1)

    def add(self, a: Array, b: Array) -> Array:
        return a + b

    def pool(self, x: Array, how: Pooling) -> Array:
        if how == "mean":
            return np.asarray(x.mean(axis=0, keepdims=True))
        return x[:1] if how == "cls" else x[-1:]

    def unit(self, x: Array) -> Array:
        length = np.sqrt(np.square(x).sum(axis=-1, keepdims=True))
        scaled: Array = x / np.maximum(length, self._dtype(1e-12))
        return scaled
