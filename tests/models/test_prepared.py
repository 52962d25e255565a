"""A prepared entry gives the same checkpoint in milliseconds, or is ignored; it never stops a start."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest

from tailrace.backends.reference import ReferenceBackend
from tailrace.models import Checkpoint, entry, load_model, open_checkpoint
from tailrace.models.files.mapped import PermutedWeight
from tailrace.models.prepared import CONTENT, content_digest, open_prepared, prepared_dir, publish, publish_checkpoint
from tests.batches import logits_of
from tests.models.test_checkpoint import LOGITS, PROMPT, copy, gguf_of

TOKENIZER = b'{"tokenizer": true}'
TABLE = b"table of bytes"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return gguf_of("llama", **{"tokenizer.ggml.eot_token_id": 5}).write(tmp_path / "x.gguf")


def prepare(path: Path, root: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    settings = {"eos_token": "e"}
    assert publish_checkpoint(
        path, checkpoint, tokenizer_json=TOKENIZER, tokenizer_config=settings, token_bytes=TABLE, root=root
    )
    return checkpoint


def test_an_entry_gives_the_same_checkpoint(path: Path, root: Path) -> None:
    assert open_prepared(path, root=root) is None
    fresh = prepare(path, root)
    found = open_prepared(path, root=root)
    assert found is not None
    assert (found.path, found.name, found.config, found.source_format) == (
        fresh.path.resolve(),
        fresh.name,
        fresh.config,
        fresh.source_format,
    )
    assert list(found.tensors) == list(fresh.tensors)
    for name, weight in fresh.tensors.items():
        other = found.tensors[name]
        assert (other.format, other.shape, type(other)) == (weight.format, weight.shape, type(weight))
        assert np.array_equal(other.data, weight.data)
    assert found.text.tokenizer_json == TOKENIZER
    assert found.text.tokenizer_config == {"eos_token": "e"}
    assert (found.text.bos_id, found.text.eos_ids, found.text.gguf) == (1, (2, 5), None)
    logits = logits_of(ReferenceBackend(load_model(found), pages=5), PROMPT[:80], range(80))
    assert np.abs(logits - LOGITS["llama"]).max() < 1e-4


def test_a_folder_can_be_prepared_too(tmp_path: Path, root: Path) -> None:
    folder = copy("qwen3", tmp_path / "model")
    fresh = prepare(folder, root)
    found = open_prepared(folder, root=root)
    assert found is not None
    assert found.config == fresh.config
    assert all(np.array_equal(found.tensors[name].data, weight.data) for name, weight in fresh.tensors.items())


def test_rows_stay_unread_until_touched(path: Path, root: Path) -> None:
    prepare(path, root)
    found = open_prepared(path, root=root)
    assert found is not None
    weight = found.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(weight, PermutedWeight)
    assert "data" not in weight.__dict__


def test_the_tokenizer_is_read_only_when_wanted(path: Path, root: Path) -> None:
    prepare(path, root)
    (prepared_dir(path, root) / "tokenizer.json").unlink()
    assert open_prepared(path, root=root) is None
    found = open_prepared(path, root=root, tokenizer=False)
    assert found is not None
    assert found.text.tokenizer_json is None


def test_a_changed_model_has_another_entry_and_the_old_one_goes(path: Path, root: Path) -> None:
    prepare(path, root)
    old = prepared_dir(path, root)
    gguf_of("llama", **{"general.name": "another"}).write(path)
    assert prepared_dir(path, root) != old
    assert open_prepared(path, root=root) is None
    prepare(path, root)
    found = open_prepared(path, root=root)
    assert found is not None
    assert found.name == "another"
    assert not old.exists()


def test_a_touched_or_replaced_file_has_another_entry(tmp_path: Path, root: Path) -> None:
    folder = copy("qwen3", tmp_path / "model")
    prepare(folder, root)
    status = (folder / "config.json").stat()
    os.utime(folder / "config.json", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert open_prepared(folder, root=root) is None


def test_another_path_has_another_entry(path: Path, root: Path, tmp_path: Path) -> None:
    prepare(path, root)
    other = tmp_path / "y.gguf"
    other.write_bytes(path.read_bytes())
    prepare(other, root)
    assert open_prepared(path, root=root) is not None
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    assert open_prepared(link, root=root) is not None


@pytest.mark.parametrize("part", ["manifest.json", "tokenizer.json", "token_bytes.bin"])
def test_a_damaged_entry_is_ignored_and_can_be_made_anew(
    part: str, path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(path, root)
    file = prepared_dir(path, root) / part
    whole = file.read_bytes()
    spoilt = [whole[: len(whole) // 2], b""]
    if part != "token_bytes.bin":  # whose content `text` checks
        spoilt += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 97)]
    for bad in spoilt:
        file.write_bytes(bad)
        with caplog.at_level(logging.WARNING):
            assert open_prepared(path, root=root) is None
        assert "made anew" in caplog.text
    prepare(path, root)
    assert open_prepared(path, root=root) is not None


def test_a_failure_to_write_is_a_warning(path: Path, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.write_text("a file where the cache folder should be")
    checkpoint = open_checkpoint(path)
    with caplog.at_level(logging.WARNING):
        assert not publish_checkpoint(
            path, checkpoint, tokenizer_json=b"", tokenizer_config={}, token_bytes=b"", root=root
        )
        assert publish(path, "weights", lambda file: None, root=root) is None
    assert caplog.text.count("not kept") == 2
    assert open_prepared(path, root=root) is None


def test_a_full_disk_leaves_nothing_behind(path: Path, root: Path) -> None:
    def full(file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    assert publish(path, "weights", full, root=root) is None
    assert list(prepared_dir(path, root).iterdir()) == []


def test_others_may_keep_files_in_an_entry(path: Path, root: Path) -> None:
    kept = publish(path, "weights.bin", lambda file: file.write_bytes(b"tiles") and None, root=root)
    assert kept == prepared_dir(path, root) / "weights.bin"
    prepare(path, root)
    assert kept.read_bytes() == b"tiles"
    assert (prepared_dir(path, root) / "token_bytes.bin").read_bytes() == TABLE


def test_a_relative_path_is_the_same_from_anywhere(path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    prepare(Path(path.name), root)
    monkeypatch.chdir("/")
    found = open_prepared(path, root=root)
    assert found is not None
    assert found.path == path.resolve()


def test_the_cache_is_where_the_environment_says(path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_CACHE", str(root))
    assert prepared_dir(path).parent == root / "prepared"


def test_a_newer_format_makes_another_entry(path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(path, root)
    monkeypatch.setattr(entry, "VERSION", entry.VERSION + 1)
    assert open_prepared(path, root=root) is None


@pytest.mark.alone
def test_the_real_model_opens_in_milliseconds(smollm2: Path, root: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    tokenizer = bytes(3_000_000)
    assert publish_checkpoint(
        smollm2, checkpoint, tokenizer_json=tokenizer, tokenizer_config={}, token_bytes=bytes(600_000), root=root
    )
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        found = open_prepared(smollm2, root=root)
        times.append(time.perf_counter() - begin)
        assert found is not None
    assert min(times) < 0.05  # a few milliseconds where nothing else runs
    assert load_model(found).config == load_model(checkpoint).config


def test_what_is_in_a_model_is_told_by_its_files_and_not_by_where_or_when(
    path: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = content_digest(path, root=root)
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "y.gguf"
    other.write_bytes(path.read_bytes())
    os.utime(other, (1_000_000, 1_000_000))
    assert content_digest(other, root=root) == digest
    (prepared_dir(other, root) / CONTENT).write_text("damaged")
    assert content_digest(other, root=root) == digest
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    other.write_bytes(changed)
    assert content_digest(other, root=root) != digest
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("it is kept"))
    assert content_digest(path, root=root) == digest
