"""A GGUF file is read as it was written, or refused with what is wrong with it."""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from tailrace.backends import BLOCK, Format
from tailrace.models.files.gguf import FORMATS, TYPES, read_gguf
from tailrace.terms import ModelError
from tests.models.gguf_bytes import ARRAY, STRING, GgufBytes, Tensor, text


def two_tensors() -> GgufBytes:
    """A small right file: a matrix [2, 3] and a vector [4], both F32."""
    matrix = Tensor((2, 3), np.arange(6, dtype=np.float32).tobytes())
    vector = Tensor((4,), np.arange(4, dtype=np.float32).tobytes())
    return GgufBytes([("general.architecture", "llama"), ("a.list", [1, 2, 3])], [("m", matrix), ("v", vector)])


def test_values_and_tensors_come_back(tmp_path: Path) -> None:
    made = two_tensors()
    made.metadata += [("s", "grüß"), ("f", 0.5), ("yes", True), ("no", False), ("words", ["a", "", "ü"]), ("n", 7)]
    file = read_gguf(made.write(tmp_path / "x.gguf"))
    assert file.metadata == {
        "general.architecture": "llama",
        "a.list": [1, 2, 3],
        "s": "grüß",
        "f": 0.5,
        "yes": True,
        "no": False,
        "words": ["a", "", "ü"],
        "n": 7,
    }
    assert file.tensors["m"].shape == (2, 3)
    assert file.tensors["m"].data.shape == (2, 12)
    assert file.tensors["m"].data[1].view(np.float32).tolist() == [3, 4, 5]
    assert file.tensors["v"].data.shape == (1, 16)


@pytest.mark.parametrize("kind", list(Format))
def test_every_format_is_read_as_the_gguf_package_writes_it(kind: Format, tmp_path: Path) -> None:
    values, size = BLOCK[kind]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (3, 5 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=gguf.GGMLQuantizationType[kind.value])
    writer.add_array("names", ["x", "y"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "x.gguf")
    assert file.metadata["names"] == ["x", "y"]
    assert file.tensors["t"].format is kind
    assert file.tensors["t"].shape == (3, 5 * values)
    assert np.array_equal(file.tensors["t"].data, raw)


def test_type_numbers_are_those_of_the_gguf_package() -> None:
    for kind in gguf.GGMLQuantizationType:
        assert TYPES[kind] == kind.name
    assert {number: kind.value for number, kind in FORMATS.items()} == {
        int(kind): kind.name for kind in gguf.GGMLQuantizationType if kind.name in set(Format)
    }


@pytest.mark.parametrize("kind", sorted(set(range(42)) - set(FORMATS)))
def test_other_types_are_refused_by_name(kind: int, tmp_path: Path) -> None:
    made = two_tensors()
    made.tensors[1][1].kind = kind
    with pytest.raises(ModelError, match=f"tensor v is stored as {TYPES[kind]}, which is not supported"):
        read_gguf(made.write(tmp_path / "x.gguf"))


def _set(name: str, value: object) -> Callable[[GgufBytes], None]:
    return lambda made: setattr(made, name, value)


def _tensor(index: int, name: str, value: object) -> Callable[[GgufBytes], None]:
    return lambda made: setattr(made.tensors[index][1], name, value)


def _key(key: str | bytes, value: object) -> Callable[[GgufBytes], None]:
    return lambda made: made.metadata.append((key, value))


def _list(kind: int, count: int, rest: bytes = b"") -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + rest


def _again(made: GgufBytes) -> None:
    made.tensors.append(("m", made.tensors[1][1]))


WRONG: dict[str, tuple[Callable[[GgufBytes], None], str]] = {
    "magic": (_set("magic", b"GGML"), "not a GGUF file"),
    "version 1": (_set("version", 1), "version 1 is not supported"),
    "version 4": (_set("version", 4), "version 4 is not supported"),
    "big-endian": (_set("version", 3 << 24), "big-endian"),
    "too many tensors": (_set("tensor_count", 3), "x.gguf"),
    "absurdly many tensors": (_set("tensor_count", 1 << 60), "claims 1152921504606846976 tensors"),
    "absurdly many keys": (_set("key_count", 1 << 63), "metadata keys, more than the file can hold"),
    "key twice": (_key("a.list", 1), "metadata key a.list appears twice"),
    "key not UTF-8": (_key(b"\xff\xfe", 1), "is not UTF-8"),
    "value not UTF-8": (_key("k", struct.pack("<I", STRING) + text(b"\xff")), "k is not UTF-8"),
    "entry not UTF-8": (_key("k", _list(STRING, 2, text(b"a") + text(b"\xff"))), "entry 1 of k is not UTF-8"),
    "unknown value type": (_key("k", struct.pack("<I", 13) + b"\0" * 8), "k has the unknown type 13"),
    "huge value type": (_key("k", struct.pack("<I", 1 << 31) + b"\0" * 8), "k has the unknown type"),
    "string past the end": (_key("k", struct.pack("<IQ", STRING, 1 << 40)), "ends inside k"),
    "string of 2**64 - 1": (_key("k", struct.pack("<IQ", STRING, (1 << 64) - 1)), "claims to be"),
    "long list of strings": (_key("k", _list(STRING, 1 << 40)), "strings, more than it can hold"),
    "long list of numbers": (_key("k", _list(4, 1 << 40)), "numbers, more than any model has"),
    "list past the end": (_key("k", _list(4, 1 << 20)), "ends inside k"),
    "strings past the end": (_key("k", _list(STRING, 4, text("a"))), "k"),
    "list of lists": (_key("k", _list(ARRAY, 1, _list(4, 0))), "list of the unsupported type 9"),
    "truth value 2": (_key("k", struct.pack("<IB", 7, 2)), "neither 0 nor 1"),
    "alignment 0": (_key("general.alignment", 0), "general.alignment is 0"),
    "alignment 24": (_key("general.alignment", 24), "general.alignment is 24"),
    "alignment word": (_key("general.alignment", "32"), "general.alignment is '32'"),
    "tensor twice": (_again, "tensor m appears twice"),
    "unaligned": (_tensor(1, "offset", 33), "tensor v begins at 33"),
    "past the end": (_tensor(1, "offset", 64), "tensor v occupies bytes"),
    "far past the end": (_tensor(1, "offset", (1 << 64) - 32), "tensor v occupies bytes"),
    "overlap": (_tensor(1, "offset", 0), "tensors v and m overlap"),
    "too large": (_tensor(0, "shape", (2, 1 << 40)), "tensor m occupies bytes"),
    "shape overflows": (_tensor(0, "shape", (1 << 32, 1 << 32)), "impossible shape"),
    "empty axis": (_tensor(0, "shape", (0, 3)), "impossible shape"),
    "five axes": (_tensor(0, "shape", (1, 1, 1, 1, 6)), "has 5 axes"),
    "no axes": (_tensor(0, "shape", ()), "has 0 axes"),
    "broken block": (_tensor(0, "kind", 2), "tensor m has rows of 3 values, not whole blocks of Q4_0"),
}


@pytest.mark.alone
@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_a_wrong_file_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    spoil, message = WRONG[wrong]
    made = two_tensors()
    spoil(made)
    path = made.write(tmp_path / "x.gguf")
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=message) as refused:
        read_gguf(path)
    assert str(path) in str(refused.value)
    assert time.monotonic() - begin < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = two_tensors().build()
    needed = len(whole) - 16  # the last tensor's padding may be missing
    path = tmp_path / "x.gguf"
    for length in range(needed):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"x\.gguf"):
            read_gguf(path)
    path.write_bytes(whole[:needed])
    assert set(read_gguf(path).tensors) == {"m", "v"}


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError, match="no such file"):
            read_gguf(path)
