"""Safetensors files and shards are read as they were written, or refused with what is wrong with them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tailrace.backends import Format
from tailrace.models.files.safetensors import INDEX, read_checkpoint, read_safetensors
from tailrace.terms import ModelError


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with this header (JSON, or bytes as they are) and data; `length` lies about the header's."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_the_safetensors_package_writes_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.normal(size=(3, 4)).astype(np.float32),
        "half": rng.normal(size=(2, 2)).astype(np.float16),
        "vector": np.arange(5, dtype=np.float32),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_safetensors(tmp_path / "x.safetensors")
    assert {name: weight.shape for name, weight in found.items()} == {name: a.shape for name, a in arrays.items()}
    assert found["half"].format is Format.F16
    for name, array in arrays.items():
        assert found[name].data.tobytes() == array.tobytes()
    assert found["matrix"].data.shape == (3, 16)
    assert found["vector"].data.shape == (1, 20)


def test_bfloat16_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"t": entry(0, 4, [2], "BF16")}, b"\x80\x3f\x00\xc0")
    assert read_safetensors(path)["t"].format is Format.BF16


TWO = {"a": entry(0, 8, [2]), "b": entry(8, 16, [1, 2])}
ZEROS = bytes(16)

WRONG: dict[str, tuple[Any, bytes, int | None, str]] = {
    "empty header": (b"", b"", None, "claims to be 0 bytes"),
    "header past the end": (TWO, ZEROS, 1 << 20, "claims to be 1048576 bytes"),
    "header of 2**64 - 1": (TWO, ZEROS, (1 << 64) - 1, "claims to be"),
    "not JSON": (b"{nonsense", ZEROS, None, "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', ZEROS, None, "not valid JSON"),
    "deep nesting": (b"[" * 100_000, ZEROS, None, "not valid JSON"),
    "a list": ([1], ZEROS, None, "expected a JSON object"),
    "tensor twice": (b'{"a": 1, "a": 2}', ZEROS, None, "a appears twice"),
    "huge number": (b'{"a": ' + b"9" * 10_000 + b"}", ZEROS, None, "not valid JSON"),
    "no object": ({"a": 3}, ZEROS, None, "tensor a is described by int"),
    "no dtype": ({"a": {}}, ZEROS, None, "tensor a is stored as None"),
    "integer": ({"a": entry(0, 16, [4], "I32")}, ZEROS, None, "tensor a is stored as I32, which is not supported"),
    "eight bits": ({"a": entry(0, 16, [16], "F8_E4M3")}, ZEROS, None, "stored as F8_E4M3, which is not supported"),
    "double": ({"a": entry(0, 16, [2], "F64")}, ZEROS, None, "stored as F64, which is not supported"),
    "negative axis": ({"a": entry(0, 16, [-4])}, ZEROS, None, "tensor a has the impossible shape"),
    "true axis": ({"a": entry(0, 16, [True, 4])}, ZEROS, None, "tensor a has the impossible shape"),
    "fraction": ({"a": entry(0, 16, [4.0])}, ZEROS, None, "tensor a has the impossible shape"),  # type: ignore[list-item]
    "overflow": ({"a": entry(0, 16, [1 << 40, 1 << 40])}, ZEROS, None, "tensor a has the impossible shape"),
    "backwards": ({"a": entry(16, 0, [4])}, ZEROS, None, "tensor a has the impossible data_offsets"),
    "negative offset": ({"a": entry(-4, 12, [4])}, ZEROS, None, "tensor a has the impossible data_offsets"),
    "one offset": ({"a": entry(0, 16, [4]) | {"data_offsets": [0]}}, ZEROS, None, "impossible data_offsets"),
    "past the end": ({"a": entry(0, 20, [5])}, ZEROS, None, "tensor a ends at byte"),
    "far past the end": ({"a": entry(0, 1 << 50, [1 << 48])}, ZEROS, None, "tensor a ends at byte"),
    "size and shape": ({"a": entry(0, 16, [3])}, ZEROS, None, "tensor a has 16 bytes, but its shape needs 12"),
    "overlap": ({"a": entry(0, 12, [3]), "b": entry(8, 16, [2])}, ZEROS, None, "tensors a and b overlap"),
    "same place": ({"a": entry(0, 16, [4]), "b": entry(0, 16, [4])}, ZEROS, None, "tensors a and b overlap"),
    "hole": ({"a": entry(0, 4, [1]), "b": entry(8, 16, [2])}, ZEROS, None, "cover 12 of 16 bytes"),
    "trailing data": (TWO, ZEROS + b"x", None, "cover 16 of 17 bytes"),
    "cut short": (TWO, ZEROS[:-1], None, "tensor b ends at byte"),
}


@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_a_wrong_file_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    header, data, length, message = WRONG[wrong]
    path = write(tmp_path / "x.safetensors", header, data, length=length)
    with pytest.raises(ModelError, match=message) as refused:
        read_safetensors(path)
    assert str(path) in str(refused.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.safetensors", TWO, ZEROS).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "x.safetensors").write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"x\.safetensors"):
            read_safetensors(tmp_path / "x.safetensors")


def shards(folder: Path) -> dict[str, str]:
    """Two shards and their index, which is returned."""
    write(folder / "model-00001-of-00002.safetensors", {"a": entry(0, 8, [2])}, bytes(8))
    write(folder / "model-00002-of-00002.safetensors", {"b": entry(0, 8, [2])}, bytes(8))
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index(folder, weight_map)
    return weight_map


def index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map}))


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    shards(tmp_path)
    assert sorted(read_checkpoint(tmp_path)) == ["a", "b"]


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: the shard is missing"):
        read_checkpoint(tmp_path)


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ModelError, match=r"index\.json is missing"):
        read_checkpoint(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"index\.json is missing"):
        read_checkpoint(tmp_path)


def test_a_tensor_that_is_not_in_its_shard_is_refused(tmp_path: Path) -> None:
    weight_map = shards(tmp_path)
    index(tmp_path, weight_map | {"c": "model-00001-of-00002.safetensors"})
    with pytest.raises(ModelError, match="tensor c is missing"):
        read_checkpoint(tmp_path)


def test_a_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    weight_map = shards(tmp_path)
    write(tmp_path / "model-00002-of-00002.safetensors", {"b": entry(0, 8, [2]), "c": entry(8, 12, [1])}, bytes(12))
    with pytest.raises(ModelError, match="tensor c is here"):
        read_checkpoint(tmp_path)
    index(tmp_path, weight_map | {"c": "model-00001-of-00002.safetensors"})
    with pytest.raises(ModelError, match="tensor c is here, but"):
        read_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards(tmp_path)
    write(tmp_path / "model-00002-of-00002.safetensors", {"b": entry(0, 8, [2]), "a": entry(8, 16, [2])}, bytes(16))
    with pytest.raises(ModelError, match=r"tensor a is in model-00001-of-00002\.safetensors too"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "x.bin", "", 3, None, ["x"], "a/b.safetensors"])
def test_an_index_names_files_of_its_own_folder_only(shard: Any, tmp_path: Path) -> None:
    index(tmp_path, {"a": shard})
    with pytest.raises(ModelError, match="tensor a is said to be in"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map_is_refused(weight_map: Any, tmp_path: Path) -> None:
    index(tmp_path, weight_map)
    with pytest.raises(ModelError, match="no weight_map"):
        read_checkpoint(tmp_path)
