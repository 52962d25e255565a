"""Whatever a file's bytes are, it opens or it is refused: no other exception, no hang, no giant allocation."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.models import describe, open_checkpoint
from tailrace.models.files.gguf import read_gguf
from tailrace.models.files.safetensors import read_safetensors
from tailrace.terms import ModelError
from tests.models.test_checkpoint import GOLDEN, gguf_of

GGUF = gguf_of("llama").build()
GGUF_HEAD = GGUF.index(b"output_norm.weight") if b"output_norm.weight" in GGUF else 4096
FOLDER = GOLDEN / "models" / "qwen3"
SAFE = (FOLDER / "model.safetensors").read_bytes()
SAFE_HEAD = 8 + int.from_bytes(SAFE[:8], "little")
CONFIG = (FOLDER / "config.json").read_bytes()

fuzz = settings(
    max_examples=100, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def spoil(whole: bytes, head: int, edits: list[tuple[float, bytes]], cut: float) -> bytes:
    """Overwrites bytes of the header at fractions of its length, then cuts the file."""
    raw = bytearray(whole)
    for at, patch in edits:
        begin = int(at * head)
        raw[begin : begin + len(patch)] = patch
    return bytes(raw[: len(raw) - int(cut * len(raw))])


PATCHES = st.one_of(
    st.binary(min_size=1, max_size=9),
    st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\xff" * 4, (1 << 40).to_bytes(8, "little"), b"\x09\0\0\0", b'"', b"}"]),
)
EDITS = st.lists(st.tuples(st.floats(0, 0.999), PATCHES), min_size=0, max_size=4)
CUTS = st.one_of(st.just(0.0), st.floats(0, 1))


def opens_or_is_refused(path: Path) -> None:
    message = ""
    try:
        describe(open_checkpoint(path))
    except ModelError as error:
        message = str(error)
    assert len(message) < 2000


@fuzz
@given(edits=EDITS, cut=CUTS)
def test_a_spoilt_gguf_file(edits: list[tuple[float, bytes]], cut: float, folder: Path) -> None:
    path = folder / "x.gguf"
    path.write_bytes(spoil(GGUF, GGUF_HEAD, edits, cut))
    opens_or_is_refused(path)


@fuzz
@given(edits=EDITS, cut=CUTS)
def test_a_spoilt_safetensors_file(edits: list[tuple[float, bytes]], cut: float, folder: Path) -> None:
    (folder / "config.json").write_bytes(CONFIG)
    (folder / "model.safetensors").write_bytes(spoil(SAFE, SAFE_HEAD, edits, cut))
    opens_or_is_refused(folder)


JSONS: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*json.loads(CONFIG), "rope_scaling", "rope_theta", "layer_types", "quantization_config", "auto_map"})


@fuzz
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSONS, min_size=1, max_size=3))
def test_a_strange_configuration(changes: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(json.loads(CONFIG) | changes))
    (folder / "model.safetensors").write_bytes(SAFE)
    opens_or_is_refused(folder)


@fuzz
@given(
    rope=st.dictionaries(
        st.sampled_from(
            [
                "rope_type",
                "type",
                "factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "attention_factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
                "rope_theta",
            ]
        ),
        st.sampled_from(["yarn", "llama3", "dynamic", "linear"]) | st.floats() | st.integers(),
        max_size=7,
    )
)
def test_a_strange_rope(rope: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(json.loads(CONFIG) | {"rope_parameters": rope}))
    (folder / "model.safetensors").write_bytes(SAFE)
    opens_or_is_refused(folder)


@fuzz
@given(header=JSONS, data=st.binary(max_size=40))
def test_any_json_as_a_safetensors_header(header: Any, data: bytes, folder: Path) -> None:
    raw = json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    with contextlib.suppress(ModelError):
        read_safetensors(path)


@fuzz
@given(raw=st.binary(max_size=200))
def test_any_bytes_as_a_gguf_file(raw: bytes, folder: Path) -> None:
    path = folder / "x.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + raw)
    with contextlib.suppress(ModelError):
        read_gguf(path)


def test_every_byte_of_a_gguf_header_may_be_any_other(folder: Path) -> None:
    """Each of the first bytes in turn becomes 0xff: counts, lengths and types at their worst."""
    path = folder / "x.gguf"
    begin = time.monotonic()
    for at in range(400):
        path.write_bytes(GGUF[:at] + b"\xff" + GGUF[at + 1 :])
        opens_or_is_refused(path)
    assert time.monotonic() - begin < 30
