"""What files hold, by their headers alone: tensors, types and bytes of safetensors, of one file or many."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tailrace.models.files.jsons import parse_object
from tailrace.models.files.safetensors import INDEX, MAX_HEADER, SINGLE
from tailrace.terms import ModelError

TYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits of a value of each type that safetensors has."""

FIRST = 256 << 10
"""Bytes of a file that are asked for first: most headers are shorter."""

Fetch = Callable[[str, int, int], bytes | None]
"""A file's bytes: its name, how many, from where on; None where there is no such file."""


@dataclass(frozen=True)
class Stored:
    """What headers say: values (parameters, and scales where there are any), bytes in all, and bytes by type. `whole`
    is false where an index alone was read, which says bytes only."""

    bytes: int
    values: int | None
    by_type: dict[str, int]
    files: int
    whole: bool


def folder_fetch(folder: Path) -> Fetch:
    """Pieces of files in a folder."""

    def fetch(name: str, count: int, begin: int) -> bytes | None:
        try:
            with (folder / name).open("rb") as file:
                file.seek(begin)
                return file.read(count)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ModelError(f"{folder / name}: cannot be read ({error.strerror or error})") from None

    return fetch


def read_stored(fetch: Fetch, where: str, *, every: bool) -> Stored | None:
    """What the headers of a checkpoint say; None where it has none. Of many files only the index is read, unless
    `every` one's header is wanted. Raises ModelError for headers that are wrong."""
    index = fetch(INDEX, MAX_HEADER, 0)
    if index is None:
        return read_files(fetch, [SINGLE], where) if fetch(SINGLE, 8, 0) is not None else None
    said = parse_object(Path(f"{where}/{INDEX}"), index)
    listed = said.get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(one, str) for one in listed.values()):
        raise ModelError(f"{where}/{INDEX}: there is no weight_map")
    files = sorted(set(listed.values()))
    for name in files:
        if "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise ModelError(f"{where}/{INDEX}: {name[:100]!r} is no name of a file beside it (NAME.safetensors)")
    if every:
        return read_files(fetch, files, where)
    metadata = said.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(size, int | float) or size <= 0:
        return read_files(fetch, files, where)
    return Stored(int(size), None, {}, len(files), False)


def read_files(fetch: Fetch, files: Iterable[str], where: str) -> Stored:
    """What these files' headers say."""
    by_type: dict[str, int] = {}
    values = count = 0
    for name in files:
        count += 1
        for tensor, entry in _header(fetch, name, where).items():
            kind, shape = _entry(f"{where}/{name}", tensor, entry)
            by_type[kind] = by_type.get(kind, 0) + -(-prod(shape) * TYPE_BITS[kind] // 8)
            values += prod(shape)
    return Stored(sum(by_type.values()), values, by_type, count, True)


def _header(fetch: Fetch, name: str, where: str) -> dict[str, Any]:
    """The header of one file: eight bytes of length, then JSON."""
    first = fetch(name, FIRST, 0)
    if first is None:
        raise ModelError(f"{where}/{name}: the file is missing, but the index names it")
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or not 2 <= length <= MAX_HEADER:
        raise ModelError(f"{where}/{name}: this is no safetensors file (its header would be {length} bytes)")
    raw = first[8 : 8 + length]
    if len(raw) < length:
        raw += fetch(name, length - len(raw), 8 + len(raw)) or b""
    if len(raw) < length:
        raise ModelError(f"{where}/{name}: the file ends inside its header")
    header = parse_object(Path(f"{where}/{name}"), raw)
    header.pop("__metadata__", None)
    return header


def _entry(where: str, name: str, entry: Any) -> tuple[str, list[int]]:
    kind, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if kind not in TYPE_BITS:
        raise ModelError(f"{where}: tensor {name} has the unknown type {str(kind)[:40]!r}")
    if not isinstance(shape, list) or not all(type(one) is int and 0 <= one < 1 << 48 for one in shape):
        raise ModelError(f"{where}: tensor {name} has the impossible shape {str(shape)[:60]}")
    return kind, shape
