"""The safetensors container: eight bytes of header length, a JSON header, then the data without holes.

Layout: https://github.com/huggingface/safetensors#format. A checkpoint is one file, or shards that an index names.
"""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.backends import BLOCK, Format
from tailrace.models.files.jsons import parse_object, read_object
from tailrace.models.files.mapped import MappedWeight, Span, check_spans, map_file, weight
from tailrace.terms import ModelError

FORMATS: dict[str, Format] = {"F32": Format.F32, "F16": Format.F16, "BF16": Format.BF16}
MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_safetensors(path: Path) -> dict[str, MappedWeight]:
    """Maps one file and checks its header. Raises ModelError naming the file, and the tensor, that is wrong."""
    return parse_safetensors(path, map_file(path))


def parse_safetensors(path: Path, mapped: mmap.mmap | bytes) -> dict[str, MappedWeight]:
    """The tensors of a file, as views of its bytes. Raises ModelError as `read_safetensors`."""
    size = len(mapped)
    if size < 8:
        raise ModelError(f"{path}: the file is too short for a safetensors header")
    length = int.from_bytes(mapped[:8], "little")
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise ModelError(
            f"{path}: the header claims to be {length} bytes long in a file of {size}; it is cut or damaged"
        )
    header = parse_object(path, mapped[8 : 8 + length])
    header.pop("__metadata__", None)
    begin = 8 + length
    tables = {name for name, entry in header.items() if _is_position_table(name, entry)}
    spans = [_span(path, name, entry, begin, size) for name, entry in header.items() if name not in tables]
    check_spans(path, spans, begin, size)
    covered = sum(span.end - span.begin for span in spans) + sum(_bytes_of(path, n, header[n]) for n in tables)
    if covered != size - begin:
        raise ModelError(f"{path}: the tensors cover {covered} of {size - begin} bytes of data; the file is damaged")
    data = np.frombuffer(mapped, np.uint8)
    return {span.name: weight(span, path, data) for span in spans}


def _is_position_table(name: str, entry: Any) -> bool:
    """Whether a tensor is the numbers 0, 1, 2, ... that old versions of transformers store with BERT."""
    return isinstance(entry, dict) and entry.get("dtype") == "I64" and name.endswith("embeddings.position_ids")


def _bytes_of(path: Path, name: str, entry: Any) -> int:
    """Bytes of a tensor that is passed over."""
    offsets = _naturals(entry.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{path}: tensor {name} has the impossible data_offsets {str(entry.get('data_offsets'))[:60]}")
    return offsets[1] - offsets[0]


def _span(path: Path, name: str, entry: Any, begin: int, size: int) -> Span:
    """The header's entry of one tensor, checked. `begin` is where the data starts, `size` the file's."""
    if not isinstance(entry, dict):
        raise ModelError(f"{path}: tensor {name} is described by {type(entry).__name__}, not by an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in FORMATS:
        raise ModelError(
            f"{path}: tensor {name} is stored as {str(dtype)[:40]}, which is not supported; supported are "
            f"{', '.join(FORMATS)}"
        )
    shape, offsets = _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if shape is None or prod(shape) > 1 << 62:
        raise ModelError(f"{path}: tensor {name} has the impossible shape {str(entry.get('shape'))[:60]}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{path}: tensor {name} has the impossible data_offsets {str(entry.get('data_offsets'))[:60]}")
    if offsets[1] > size - begin:
        raise ModelError(
            f"{path}: tensor {name} ends at byte {begin + offsets[1]} of a file of {size}; it is cut short or damaged"
        )
    wanted = prod(shape) * BLOCK[FORMATS[dtype]][1]
    if offsets[1] - offsets[0] != wanted:
        raise ModelError(f"{path}: tensor {name} has {offsets[1] - offsets[0]} bytes, but its shape needs {wanted}")
    return Span(name, FORMATS[dtype], shape, begin + offsets[0], begin + offsets[1])


def _naturals(value: Any) -> tuple[int, ...] | None:
    """A list of whole numbers below 2**62, none negative; None for anything else. (`True` is an int only to Python.)"""
    if not isinstance(value, list) or len(value) > 8:
        return None
    return tuple(value) if all(type(item) is int and 0 <= item < 1 << 62 for item in value) else None


def read_checkpoint(folder: Path) -> dict[str, MappedWeight]:
    """All tensors of a checkpoint folder: `model.safetensors`, or the shards of its index, or the only file there.
    Raises ModelError when there is none, when a shard is missing, and when index and shards disagree."""
    if (folder / SINGLE).exists():
        return read_safetensors(folder / SINGLE)
    if (folder / INDEX).exists():
        return _read_shards(folder, folder / INDEX)
    found = sorted(path for path in folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{folder}: there is no {SINGLE}, no {INDEX} and no .gguf file; the weights are missing")
    if len(found) > 1 or "-of-" in found[0].name:
        raise ModelError(f"{folder}: there are shards such as {found[0].name}, but {INDEX} is missing")
    return read_safetensors(found[0])


def _read_shards(folder: Path, index: Path) -> dict[str, MappedWeight]:
    listed = read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelError(f"{index}: there is no weight_map")
    for name, shard in listed.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(
                f"{index}: tensor {name} is said to be in {shard!r}, which is not a .safetensors file here"
            )
    tensors: dict[str, MappedWeight] = {}
    for shard in sorted(set(listed.values())):
        if not (folder / shard).is_file():
            raise ModelError(f"{folder / shard}: the shard is missing, but {INDEX} names it")
        for name, found in read_safetensors(folder / shard).items():
            if name in tensors:
                raise ModelError(f"{folder / shard}: tensor {name} is in {listed[name]} too")
            if listed.get(name) != shard:
                raise ModelError(f"{folder / shard}: tensor {name} is here, but {INDEX} says {listed.get(name)}")
            tensors[name] = found
    for name, shard in listed.items():
        if name not in tensors:
            raise ModelError(f"{folder / shard}: tensor {name} is missing, but {INDEX} says that it is here")
    return tensors
