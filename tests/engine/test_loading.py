"""Sizes that a model's configuration allows, and an engine at rest."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.backends.cpu import available_kernels
from tailrace.backends.kvdtype import parse
from tailrace.engine import process
from tailrace.engine.core import EngineCore
from tailrace.engine.loading import as_asked, build_backend, check_context, identity
from tailrace.engine.loading import load as load_model
from tailrace.engine.process import Loaded, Serving
from tailrace.engine.protocol import Control
from tailrace.engine.spec import EngineSpec
from tailrace.engine.wire import Line, pair
from tailrace.models import describe, open_checkpoint
from tailrace.models import load_model as bound
from tailrace.terms import ModelError
from tests.api.stand import load
from tests.models import random_llama

GOLDEN = Path(__file__).parent.parent / "golden"


class Shape:
    max_context = 4096
    extended_context = 16384


def test_more_context_than_the_model_reaches_is_refused_with_both_numbers() -> None:
    shape: Any = Shape()
    for asked in (None, 4096, 16384):
        check_context(EngineSpec("m", max_context=asked), shape)
    with pytest.raises(ModelError, match=r"16385 .*at most 16384.*4096"):
        check_context(EngineSpec("m", max_context=16385), shape)


def test_an_engine_that_rests_checks_its_books_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE", 0.01)
    checked = threading.Event()
    times: list[int] = []
    loaded: Loaded = load(EngineSpec("stand"))
    core = loaded.core
    assert isinstance(core, EngineCore)
    check = core.check_integrity

    def counted() -> None:
        check()
        times.append(1)
        checked.set()

    monkeypatch.setattr(core, "check_integrity", counted)
    ours, theirs = pair()
    near = Line(ours)
    far = Line(theirs)
    serving = Serving(loaded, far)
    running = threading.Thread(target=serving.run)
    running.start()
    assert checked.wait(30)
    near.send(msgspec.msgpack.encode(Control("reset_prefix")))  # a message: it may check once more
    near.send(msgspec.msgpack.encode(Control("stop")))
    running.join(30)
    assert not running.is_alive()
    assert 1 <= len(times) <= 2
    core.close()
    near.close()
    far.close()


def test_a_model_with_hardly_any_tokens_warms_up_and_serves(tmp_path: Path) -> None:
    """Toy checkpoints have toy vocabularies: the warm-up prompt must be made of ids that exist."""
    shutil.copytree(GOLDEN / "models" / "llama", tmp_path / "toy")
    vocabulary = {text: number for number, text in enumerate(["<unk>", "\u2581a", "b", "c"])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Prepend", "prepend": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "Fuse"},
        ]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>", "fuse_unk": True},
    }  # fmt: skip
    (tmp_path / "toy" / "tokenizer.json").write_text(json.dumps(tokenizer))
    spec = EngineSpec(str(tmp_path / "toy"), cache_dir=str(tmp_path / "cache"), kv_tokens=512, max_context=128)
    loaded = load_model(spec)
    try:
        process.warm_up(loaded)
        assert loaded.core.idle
    finally:
        loaded.core.close()


def test_quantised_weights_are_another_model_to_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting keeps its own weights and its own pages; the second start of one maps what the first has kept."""
    folder = random_llama.write(tmp_path / "m")
    identities: list[bytes] = []

    class Seen(EngineCore):
        def __init__(self, *parts: Any, **named: Any) -> None:
            identities.append(named["identity"])
            super().__init__(*parts, **named)

    monkeypatch.setattr("tailrace.engine.core.EngineCore", Seen)

    def sizes() -> list[int]:
        found = []
        for quantize in (None, "int8", "int4"):
            spec = EngineSpec(str(folder), cache_dir=str(tmp_path / "cache"), kv_tokens=512, quantize=quantize)
            loaded = load_model(spec)
            process.warm_up(loaded)
            loaded.core.close()
            found.append(loaded.weight_bytes)
        return found

    first = sizes()
    assert first == sorted(first, reverse=True)
    kept = sorted((tmp_path / "cache").rglob("tiles*"))
    assert len(kept) == len(set(first)) == len(set(identities)) == 3

    def never(*_: object) -> None:
        raise AssertionError("a start with a whole cache rounds nothing")

    monkeypatch.setattr("tailrace.models.quantise._rounded", never)
    assert sizes() == first
    assert len(set(identities)) == 3
    assert sorted((tmp_path / "cache").rglob("tiles*")) == kept


def test_pages_that_outlive_the_process_are_of_this_very_build(tmp_path: Path) -> None:
    """Kernels that give other bits, another build and another layout have other pages."""
    folder = random_llama.write(tmp_path / "m")
    model = bound(open_checkpoint(folder), max_context=64)
    made: set[bytes] = set()
    for kernels in available_kernels():
        for disk in (None, str(tmp_path / "kv")):
            spec = EngineSpec(str(folder), cache_dir=str(tmp_path / "cache"), kernels=kernels, kv_disk=disk)
            backend = build_backend(spec, model, pages=2, context=32, vocab=8)
            made.add(name := identity(spec, backend, 32))
            assert name == identity(spec, backend, 32)
            assert (backend.numerics.encode() in name) == (disk is not None)
    assert len(made) == 2 * len(available_kernels())


def test_types_of_kv_have_pages_of_their_own(tmp_path: Path) -> None:
    """Also layers that are left out: a page's bytes mean something else where they are others."""
    folder = random_llama.write(tmp_path / "m")
    model = bound(open_checkpoint(folder), max_context=64)
    made: list[bytes] = []
    for kind, skip in (("bf16", ""), ("k8v4", ""), ("k8v4", "0"), ("k8v4", "1"), ("int8", "0"), ("fp16", "")):
        spec = EngineSpec(str(folder), cache_dir=str(tmp_path / "cache"), kv_dtype=kind, kv_dtype_skip=skip)
        made.append(identity(spec, build_backend(spec, model, pages=2, context=32, vocab=8), 32))
    assert len(set(made)) == len(made)
    same = EngineSpec(str(folder), cache_dir=str(tmp_path / "cache"), kv_dtype="k16v16", kv_dtype_skip="0")
    assert identity(same, build_backend(same, model, pages=2, context=32, vocab=8), 32) == made[0]


@pytest.mark.parametrize(
    ("backend", "kind", "skip"), [("cpu", "f32", ""), ("cpu", "int8", "2"), ("reference", "int8", "2")]
)
def test_kv_that_a_backend_or_model_does_not_have_is_refused(
    tmp_path: Path, backend: str, kind: str, skip: str
) -> None:
    spec = EngineSpec(str(random_llama.write(tmp_path / "m")), backend=backend, kv_dtype=kind, kv_dtype_skip=skip,
                      cache_dir=str(tmp_path / "cache"), kv_tokens=512)  # fmt: skip
    with pytest.raises(ModelError, match=r"reference backend|layer 2.*0 \.\. 1"):
        load_model(spec)


def test_a_pool_in_fewer_bits_takes_what_info_says_and_serves(tmp_path: Path) -> None:
    folder = random_llama.write(tmp_path / "m")
    spec = EngineSpec(str(folder), cache_dir=str(tmp_path / "cache"), kv_tokens=512, kv_dtype="k8v4", kv_dtype_skip="1")
    loaded = load_model(spec)
    process.warm_up(loaded)
    assert loaded.core.idle
    loaded.core.close()
    info = describe(open_checkpoint(folder), kv_dtype=parse("k8v4", "1"))
    assert loaded.kv_bytes == 512 * info.kv_bytes_per_token


def test_replicas_share_pages_of_the_same_files_wherever_they_lie(tmp_path: Path) -> None:
    made: set[bytes] = set()
    for place in ("here", "there"):
        folder = random_llama.write(tmp_path / place)
        model = bound(open_checkpoint(folder), max_context=64)
        backend = build_backend(EngineSpec(str(folder)), model, pages=2, context=32, vocab=8)
        for valkey in (None, "valkey://host"):
            spec = EngineSpec(str(folder), cache_dir=str(tmp_path / "cache"), kv_valkey=valkey)
            made.add(name := identity(spec, backend, 32))
            assert (backend.numerics.encode() in name) == (valkey is not None)
    assert len(made) == 3


def test_a_model_with_nothing_to_quantise_is_served_as_it_is(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = bound(open_checkpoint(smollm2))
    assert as_asked(EngineSpec("four-bit.gguf", quantize="int8"), stored) is stored
    assert "--quantize int8 changes nothing: four-bit.gguf" in caplog.text
