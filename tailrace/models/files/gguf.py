"""The GGUF container (versions 2 and 3, little-endian): typed metadata, then tensor descriptions, then data.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and length is checked against the bytes
that are left before anything of that size is allocated or looped over.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.backends import BLOCK, Format
from tailrace.models.files.mapped import MappedWeight, Span, check_spans, map_file, stored_bytes, weight
from tailrace.terms import ModelError

_TYPE_NAMES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
    "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 "
    "IQ4_NL_8_8 MXFP4 NVFP4 Q1_0"
)
TYPES = _TYPE_NAMES.split()
"""GGML's tensor types by their number."""

FORMATS: dict[int, Format] = {number: Format(name) for number, name in enumerate(TYPES) if name in set(Format)}
"""Those that can be read."""

SCALARS: dict[int, str] = dict(
    enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "|b1", "-", "-", "<u8", "<i8", "<f8"])
)
"""Numpy's name of each metadata type of fixed size; `-` stands for strings and lists."""

STRING, ARRAY = 8, 9
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 22
"""More entries than any model has; a larger count is a damaged header."""


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says. `metadata` values are int, float, bool, str, or a list of one of them; `tensors` go by the
    file's own names, shapes in row-major order."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, MappedWeight]


def read_gguf(path: Path) -> GgufFile:
    """Maps the file and checks its header. Raises ModelError naming the file, and the key or tensor, that is wrong."""
    mapped = map_file(path)
    cursor = _Cursor(path, mapped)
    tensor_count, key_count = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string("a metadata key", limit=65535)
        if key in metadata:
            raise ModelError(f"{path}: metadata key {key} appears twice")
        metadata[key] = cursor.value(cursor.u32(f"the type of {key}"), key)
    spans = _read_spans(cursor, tensor_count, _alignment(path, metadata))
    data = np.frombuffer(mapped, np.uint8)
    return GgufFile(path, metadata, {span.name: weight(span, path, data) for span in spans})


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says without its data: `tensors` give the type's name and the shape, row-major."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]


def parse_header(path: Path, data: mmap.mmap | bytes) -> GgufHeader:
    """The header at the beginning of `data`, which may end with it. Types that cannot be computed with are read too.
    Raises ModelError as `read_gguf`, and where the data ends inside the header."""
    cursor = _Cursor(path, data)
    tensor_count, key_count = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string("a metadata key", limit=65535)
        metadata[key] = cursor.value(cursor.u32(f"the type of {key}"), key)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for _ in range(tensor_count):
        name, shape, number = _read_description(cursor)
        if name in tensors:
            raise ModelError(f"{path}: tensor {name} appears twice")
        if number >= len(TYPES):
            raise ModelError(f"{path}: tensor {name} has the unknown type {number}")
        cursor.u64(f"the offset of {name}")
        tensors[name] = (TYPES[number], shape)
    return GgufHeader(path, metadata, tensors)


def _read_description(cursor: _Cursor) -> tuple[str, tuple[int, ...], int]:
    """A tensor's name, shape in row-major order, and type."""
    name = cursor.string("a tensor name", limit=65535)
    axes = cursor.u32(f"the axes of {name}")
    if not 1 <= axes <= 4:
        raise ModelError(f"{cursor.path}: tensor {name} has {axes} axes; expected 1 to 4")
    shape = tuple(cursor.u64(f"the shape of {name}") for _ in range(axes))[::-1]
    return name, shape, cursor.u32(f"the type of {name}")


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and of metadata keys."""
    path = cursor.path
    if cursor.take(4, "the magic number") != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (it does not begin with GGUF)")
    version = cursor.u32("the version")
    if version in (2 << 24, 3 << 24):
        raise ModelError(f"{path}: big-endian GGUF is not supported; convert it to little-endian")
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
    tensors, keys = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    # The smallest key takes 8 + 4 + 1 bytes, the smallest tensor description 8 + 4 + 8 + 4 + 8.
    if keys > min(MAX_KEYS, cursor.left // 13):
        raise ModelError(f"{path}: the header claims {keys} metadata keys, more than the file can hold")
    if tensors > min(MAX_TENSORS, cursor.left // 32):
        raise ModelError(f"{path}: the header claims {tensors} tensors, more than the file can hold")
    return tensors, keys


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment is {alignment!r}; expected a power of two")
    return alignment


def _read_spans(cursor: _Cursor, count: int, alignment: int) -> list[Span]:
    path = cursor.path
    described: dict[str, tuple[Format, tuple[int, ...], int]] = {}
    for _ in range(count):
        name, shape, number = _read_description(cursor)
        if name in described:
            raise ModelError(f"{path}: tensor {name} appears twice")
        kind = _format(path, name, number)
        offset = cursor.u64(f"the offset of {name}")
        if offset % alignment:
            raise ModelError(f"{path}: tensor {name} begins at {offset}, which is not a multiple of {alignment}")
        if 0 in shape or prod(shape) > 1 << 62:
            raise ModelError(f"{path}: tensor {name} has the impossible shape {list(shape)}")
        if shape[-1] % BLOCK[kind][0]:
            raise ModelError(f"{path}: tensor {name} has rows of {shape[-1]} values, not whole blocks of {kind}")
        described[name] = (kind, shape, offset)
    begin = -(-cursor.at // alignment) * alignment
    spans = [
        Span(name, kind, shape, begin + offset, begin + offset + stored_bytes(kind, shape))
        for name, (kind, shape, offset) in described.items()
    ]
    check_spans(path, spans, begin, cursor.size)
    return spans


def _format(path: Path, name: str, number: int) -> Format:
    if number not in FORMATS:
        known = TYPES[number] if number < len(TYPES) else f"the unknown type {number}"
        raise ModelError(
            f"{path}: tensor {name} is stored as {known}, which is not supported; supported are {', '.join(Format)}"
        )
    return FORMATS[number]


class _Cursor:
    """Reads forward through a mapped file, and never past its end."""

    def __init__(self, path: Path, mapped: mmap.mmap | bytes) -> None:
        self.path = path
        self.size = len(mapped)
        self.at = 0
        self._mapped = mapped

    @property
    def left(self) -> int:
        return self.size - self.at

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes. `what` is named in the error when there are fewer."""
        if count > self.left:
            raise ModelError(f"{self.path}: the file ends inside {what} (byte {self.at}, {count} more expected)")
        begin = self.at
        self.at = begin + count
        return self._mapped[begin : self.at]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str, limit: int = 1 << 62) -> str:
        """A length of eight bytes, then that many of UTF-8."""
        length = self.u64(what)
        if length > limit:
            raise ModelError(f"{self.path}: {what} claims to be {length} bytes long")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {what} is not UTF-8") from error

    def value(self, kind: int, key: str) -> Any:
        """A metadata value of this type."""
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            return self._array(key)
        if SCALARS.get(kind, "-") == "-":
            raise ModelError(f"{self.path}: metadata key {key} has the unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return self._numbers(dtype, self.take(dtype.itemsize, key), key)[0]

    def _array(self, key: str) -> list[Any]:
        kind, count = self.u32(key), self.u64(key)
        if kind == STRING:
            if count > min(MAX_STRINGS, self.left // 8):
                raise ModelError(f"{self.path}: metadata key {key} claims {count} strings, more than it can hold")
            return self._strings(count, key)
        if SCALARS.get(kind, "-") == "-":
            raise ModelError(f"{self.path}: metadata key {key} is a list of the unsupported type {kind}")
        dtype = np.dtype(SCALARS[kind])
        if count > MAX_STRINGS:
            raise ModelError(f"{self.path}: metadata key {key} claims {count} numbers, more than any model has")
        return self._numbers(dtype, self.take(count * dtype.itemsize, key), key)

    def _strings(self, count: int, key: str) -> list[str]:
        """`count` strings; a tight loop, since vocabularies and merges hold a hundred thousand of them."""
        mapped, size, at = self._mapped, self.size, self.at
        length_of = struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                (length,) = length_of(mapped, at)
                begin, at = at + 8, at + 8 + length
                if at > size:
                    raise ModelError(f"{self.path}: the file ends inside {key}")
                strings.append(str(mapped[begin:at], "utf-8"))
        except struct.error as error:
            raise ModelError(f"{self.path}: the file ends inside {key}") from error
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: entry {len(strings)} of {key} is not UTF-8") from error
        self.at = at
        return strings

    def _numbers(self, dtype: np.dtype[Any], raw: bytes, key: str) -> list[Any]:
        if dtype.kind == "b" and raw.strip(b"\x00\x01"):
            raise ModelError(f"{self.path}: metadata key {key} holds a truth value that is neither 0 nor 1")
        numbers: list[Any] = np.frombuffer(raw, dtype).tolist()
        return numbers
