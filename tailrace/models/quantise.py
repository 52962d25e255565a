"""Rounding a model's float matrices to 8 or 4 bits while it is loaded: a transform of a plain model.

`int8`: blocks of 32 values along a row, each with one float16 scale; symmetric, in the bytes of GGUF's Q8_0. `int4`:
blocks of 32 with a float16 scale and minimum, in the bytes of Q4_1; embedding and output head are int8 there, since
they are what an error of 4 bits hurts most. Norms and biases, matrices that are quantised already, and those whose rows
are not whole blocks stay as they are. Nothing is computed before a backend reads a weight's data, and a backend that
finds its own form of the weights in its cache never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import BLOCK, Format, Weight
from tailrace.backends.reference.dequantize import dequantize
from tailrace.models.decoder import Layer, Model
from tailrace.models.files.mapped import PermutedWeight, half_split_order
from tailrace.terms import ModelError

VERSION = 1
"""Changes whenever the same matrix may be rounded to other bytes."""

KINDS: dict[str, tuple[Format, Format]] = {
    "int8": (Format.Q8_0, Format.Q8_0),
    "int4": (Format.Q4_1, Format.Q8_0),
}
"""Formats of the layers' matrices, and of embedding and output head."""

LARGEST = float(np.finfo(np.float16).max)
"""What a float16 minimum can hold; no sound weight comes near it."""

_FLOATS = frozenset({Format.F32, Format.F16, Format.BF16})
_AT_ONCE = 2048
"""Blocks rounded at once: a quarter of a mebibyte as float32, so that all steps of it stay in a core's cache."""

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class RoundedWeight(Weight):
    """A matrix of floats that reads as blocks of `format`. Its data is worked out anew whenever it is read, by
    `threads` threads, and kept by nobody: a backend reads it once."""

    def __init__(self, source: Weight, kind: Format, threads: int) -> None:
        for field, value in (("name", source.name), ("format", kind), ("shape", source.shape)):
            object.__setattr__(self, field, value)
        self.__dict__["source"] = source
        self.__dict__["threads"] = threads

    @property
    def data(self) -> Bytes:
        """Raises ModelError for a value that is no finite float16."""
        source: Weight = self.__dict__["source"]
        return _rounded(source, self.format, self.__dict__["threads"])


def quantise(model: Model, kind: str, *, threads: int = 1) -> Model:
    """The model with its float matrices rounded to `kind` (int8 or int4), and a `variant` that says so; the model
    itself where it has none. `threads` is how many round at a time. Raises ModelError for an unknown kind."""
    if kind not in KINDS:
        raise ModelError(f"weights are quantised to {' or '.join(KINDS)}, not to {kind!r}")
    inner, outer = KINDS[kind]

    def to(form: Format) -> Callable[[Weight], Weight]:
        return lambda weight: RoundedWeight(weight, form, threads) if roundable(weight) else weight

    made = map_matrices(model, to(inner), to(outer))
    return replace(made, variant=f"{kind}.{VERSION}") if any(rounded(made)) else model


def map_matrices(model: Model, inner: Callable[[Weight], Weight], outer: Callable[[Weight], Weight]) -> Model:
    """The model with other weights in its layers (`inner`), and another embedding and output head (`outer`), which
    stay one where they are."""

    def layer_of(layer: Layer) -> Layer:
        weights = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
        made = {name: inner(weight) for name, weight in weights.items() if isinstance(weight, Weight)}
        changed: dict[str, Any] = {name: weight for name, weight in made.items() if weight is not weights[name]}
        return replace(layer, **changed) if changed else layer

    embedding = outer(model.embedding)
    head = embedding if model.head is model.embedding else outer(model.head)
    return replace(model, embedding=embedding, head=head, layers=tuple(map(layer_of, model.layers)))


def roundable(weight: Weight) -> bool:
    """Whether it is a matrix of floats whose rows are whole blocks of 32."""
    return len(weight.shape) == 2 and weight.format in _FLOATS and weight.shape[1] % 32 == 0


def rounded(model: Model) -> Iterator[Weight]:
    """The weights that `quantise` has changed."""
    return (weight for weight in model.weights() if isinstance(weight, RoundedWeight))


def unchanged(kind: str, name: object) -> str:
    """What a person is told who wants `kind` for a model that has nothing to quantise."""
    return (
        f"--quantize {kind} changes nothing: {name} has no matrix that is stored as F32, F16 or BF16, with rows of "
        "whole blocks of 32"
    )


def _rounded(source: Weight, kind: Format, threads: int) -> Bytes:
    """The matrix in blocks of `kind`: uint8 [rows, bytes a row]. A few rows at a time: it never exists as float32."""
    rows, columns = source.shape
    values, size = BLOCK[kind]
    step = max(1, _AT_ONCE * values // columns)
    out = np.empty((rows, columns // values * size), np.uint8)
    stored, order = source, None
    if isinstance(source, PermutedWeight):  # its own `data` would keep a copy of the whole matrix
        stored, order = source.stored, half_split_order(source.heads, rows // source.heads)
    data = stored.data  # once: it may be worked out whenever it is read

    def work(begin: int) -> None:
        end = min(begin + step, rows)
        raw = data[begin:end] if order is None else data[order[begin:end]]
        floats = dequantize(Weight(source.name, source.format, (end - begin, columns), raw))
        if not np.abs(floats).max() <= LARGEST:  # NaN compares as false
            raise ModelError(
                f"{source.name}: a value is no number, or larger than {LARGEST:.0f}, so it cannot be quantised; the "
                "file is damaged, or must be served without --quantize"
            )
        out[begin:end] = _ROUND[kind](floats.reshape(-1, values)).reshape(end - begin, -1)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(0, rows, step)))
    return out


def to_q8_0(x: Floats) -> Bytes:
    """Blocks [n, 32] as Q8_0: uint8 [n, 34], a float16 scale and 32 signed quants, of at most 127 either way."""
    largest = np.abs(x).max(axis=1)
    scale = (largest / np.float32(127)).astype(np.float16)
    short = scale.astype(np.float32) * np.float32(127.5) < largest  # among the smallest halves, rounded down too far
    scale[short] = np.nextafter(scale[short], np.float16(np.inf))
    out = np.empty((len(x), 34), np.uint8)
    out[:, :2] = scale.view(np.uint8).reshape(-1, 2)
    quants = np.rint(x * _inverse(scale.astype(np.float32))[:, None])
    out[:, 2:] = np.clip(quants, -127, 127).astype(np.int8).view(np.uint8)
    return out


_STARTS = ((0.0, 0.0), (1 / 30, 0.0), (0.0, 1 / 30))
"""Where the search begins, as shares of a block's range that are cut off below and above: nothing, or half of one of
the 15 steps at one end, which moves every level between two of its neighbours."""
_ROUNDS = 2
"""A third gains less than a hundredth of the squared error."""


@np.errstate(over="ignore", invalid="ignore")  # a try past what a float can hold: its error is no number, and it loses
def to_q4_1(x: Floats) -> Bytes:
    """Blocks [n, 32] as Q4_1: uint8 [n, 20], a float16 scale and minimum and 32 quants of 0 to 15.

    From each start, twice, the quants are rounded and the scale and minimum taken that fit them best (least squares: a
    few sums over the block); the quants are then rounded with those as float16. A block keeps the try with the smallest
    squared error; the first try is the plain one, minimum and range / 15, so it is never worse than that."""
    x = np.ascontiguousarray(x.T)  # [32, n]: sums over a block add up whole rows
    quants, left = np.empty_like(x), np.empty_like(x)  # made once: fresh memory costs more than what is computed in it
    low, total = x.min(axis=0), x.sum(axis=0)
    width = x.max(axis=0) - low

    def error(scale: Floats, least: Floats) -> Floats:
        _levels(x, scale, least, quants)
        np.multiply(quants, scale, out=left)
        np.add(left, least, out=left)
        np.subtract(left, x, out=left)
        return np.asarray(np.einsum("ij,ij->j", left, left))

    scale, least = _as_halves(width / np.float32(15)), _as_halves(low)
    smallest = error(scale, least)
    for below, above in _STARTS:
        fitted = width * np.float32((1 - below - above) / 15), low + width * np.float32(below)
        for _ in range(_ROUNDS):
            _levels(x, *fitted, quants)
            fitted = _fit(x, quants, total)
        tried = _as_halves(fitted[0]), _as_halves(fitted[1])
        found = error(*tried)
        better = found < smallest
        for kept, new in ((scale, tried[0]), (least, tried[1]), (smallest, found)):
            np.copyto(kept, new, where=better)
    _levels(x, scale, least, quants)
    whole = quants.astype(np.uint8)
    out = np.empty((x.shape[1], 20), np.uint8)
    out[:, 0:2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    out[:, 2:4] = least.astype(np.float16).view(np.uint8).reshape(-1, 2)
    out[:, 4:] = (whole[:16] | whole[16:] << np.uint8(4)).T
    return out


def _as_halves(x: Floats) -> Floats:
    """Rounded to float16."""
    return x.astype(np.float16).astype(np.float32)


def _levels(x: Floats, scale: Floats, least: Floats, out: Floats) -> None:
    """The nearest of the 16 levels, into `out` [32, n]."""
    np.subtract(x, least, out=out)
    np.multiply(out, _inverse(scale), out=out)
    np.rint(out, out=out)
    np.clip(out, 0, 15, out=out)


def _fit(x: Floats, quants: Floats, total: Floats) -> tuple[Floats, Floats]:
    """Scale and minimum with the least squared error for these quants; `total` is the sum of each block's values."""
    count = np.float32(len(x))
    first, second = quants.sum(axis=0), np.einsum("ij,ij->j", quants, quants)
    spread = count * second - first * first
    scale = (count * np.einsum("ij,ij->j", quants, x) - first * total) * _inverse(spread)
    return scale, (total - scale * first) / count


def _inverse(x: Floats) -> Floats:
    """1 / x, and 0 for 0."""
    return np.divide(np.float32(1), x, out=np.zeros_like(x), where=x != 0)


_ROUND: dict[Format, Callable[[Floats], Bytes]] = {Format.Q8_0: to_q8_0, Format.Q4_1: to_q4_1}
