"""A file mapped read-only, and the checks that both formats share."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import BLOCK, Format, Weight
from tailrace.terms import ModelError


@dataclass(frozen=True)
class Span:
    """Where one tensor's bytes lie: file offsets [begin, end)."""

    name: str
    format: Format
    shape: tuple[int, ...]
    begin: int
    end: int


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only. Raises ModelError when it is missing, unreadable, empty or not a regular file."""
    try:
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # mmap's word for an empty file
        raise ModelError(f"{path}: the file is empty") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error


def stored_bytes(kind: Format, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor as stored. The last axis must hold whole blocks (checked by the readers)."""
    values, size = BLOCK[kind]
    return prod(shape) // values * size


def check_spans(path: Path, spans: Iterable[Span], data_begin: int, file_size: int) -> None:
    """Raises ModelError when a tensor reaches past the end of the file, or two share bytes."""
    previous: Span | None = None
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        if span.begin < data_begin or span.end > file_size:
            raise ModelError(
                f"{path}: tensor {span.name} occupies bytes {span.begin} to {span.end}, but the data lies between "
                f"{data_begin} and the end of the file at {file_size}; the file is cut short or damaged"
            )
        if previous is not None and span.begin < previous.end:
            raise ModelError(f"{path}: tensors {previous.name} and {span.name} overlap")
        if span.end > span.begin:
            previous = span


@dataclass(frozen=True, eq=False)
class MappedWeight(Weight):
    """A weight that is a view of a file: its bytes begin at `begin`."""

    file: Path
    begin: int


def weight(span: Span, file: Path, data: NDArray[np.uint8]) -> MappedWeight:
    """The tensor as a view of the mapped file, all of whose bytes are `data`."""
    rows = prod(span.shape[:-1])
    view = data[span.begin : span.end].reshape(rows, (span.end - span.begin) // max(rows, 1))
    return MappedWeight(span.name, span.format, span.shape, view, file, span.begin)


class PermutedWeight(Weight):
    """A llama q or k projection as a GGUF file stores it, with the two halves of each head interleaved. The rows are
    put in Hugging Face's order, by a copy, when the data is first touched."""

    def __init__(self, stored: MappedWeight, heads: int) -> None:
        for field, value in (("name", stored.name), ("format", stored.format), ("shape", stored.shape)):
            object.__setattr__(self, field, value)
        self.__dict__["stored"] = stored
        self.__dict__["heads"] = heads

    @property
    def stored(self) -> MappedWeight:
        stored: MappedWeight = self.__dict__["stored"]
        return stored

    @property
    def heads(self) -> int:
        heads: int = self.__dict__["heads"]
        return heads

    @cached_property
    def data(self) -> NDArray[np.uint8]:
        order = half_split_order(self.heads, self.shape[0] // self.heads)
        if len(self.shape) > 1:
            return self.stored.rows(order).data
        values = self.stored.data.reshape(len(order), -1)  # a bias is one row of many values
        return np.ascontiguousarray(values[order]).reshape(1, -1)


def half_split_order(heads: int, head_dim: int) -> NDArray[np.int64]:
    """Where each row of a q or k projection lies in a GGUF file that interleaves the two halves of each head."""
    order = np.arange(heads * head_dim, dtype=np.int64).reshape(heads, head_dim // 2, 2)
    return np.ascontiguousarray(order.transpose(0, 2, 1)).reshape(-1)
