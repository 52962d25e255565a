"""What a start would otherwise work out again, kept beside the model cache: headers read, tokenizer rebuilt.

An entry is a folder `<cache>/prepared/<key>/`, where the key names the model's path and the size and modification time
of every file that it is read from: a changed model has another key. Each file is written under another name and then
renamed; `manifest.json` comes last, so an entry is there or not. Other rooms may keep files of their own in it
(`publish`). A missing or damaged entry is ignored, and a failure to write is only a warning.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.backends import Format, Weight
from tailrace.models.checkpoint import Checkpoint, checkpoint_files
from tailrace.models.entry import (
    MANIFEST,
    TOKEN_BYTES,
    TOKENIZER,
    Manifest,
    TensorRow,
    prepared_dir,
    read_manifest,
    seal,
    text_of,
)
from tailrace.models.files.mapped import MappedWeight, PermutedWeight, Span, map_file, stored_bytes, weight
from tailrace.terms import ModelError

CONTENT = "content"
"""The file of an entry with the model's `content_digest`."""

_log = logging.getLogger("tailrace")


def open_prepared(path: Path, *, root: Path | None = None, tokenizer: bool = True) -> Checkpoint | None:
    """The model's checkpoint from its entry, in milliseconds; None when there is no whole entry. Without `tokenizer`,
    its bytes are not read (the engine process does not need them)."""
    try:
        folder = prepared_dir(path, root)
        manifest = read_manifest(folder / MANIFEST)
        text = text_of(folder, manifest, tokenizer)
        checkpoint_path = Path(manifest.path)
        return Checkpoint(
            checkpoint_path, manifest.name, manifest.config, _tensors(manifest), text, manifest.source_format
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ModelError) as error:
        _log.warning("the prepared entry of %s is damaged, and is made anew: %s", path, error)
        return None


def publish_checkpoint(
    path: Path,
    checkpoint: Checkpoint,
    *,
    tokenizer_json: bytes,
    tokenizer_config: dict[str, Any],
    token_bytes: bytes,
    root: Path | None = None,
) -> bool:
    """Makes the model's entry, for `open_prepared` to find, and removes entries of what the path held before. The
    tokenizer's parts come from `text`. False (and a warning) when it cannot be written."""
    try:
        manifest = _manifest(checkpoint, tokenizer_json, tokenizer_config, len(token_bytes))
        body = msgspec.json.encode(manifest)
        sealed = seal(body)
        folder = prepared_dir(path, root)
        _write(folder / TOKENIZER, lambda file: _fill(file, tokenizer_json))
        _write(folder / TOKEN_BYTES, lambda file: _fill(file, token_bytes))
        _write(folder / MANIFEST, lambda file: _fill(file, sealed))
        _remove_stale(folder)
    except (OSError, ModelError, TypeError) as error:
        _log.warning("the prepared model is not kept, so the next start works it out again: %s", error)
        return False
    return True


def publish(path: Path, name: str, writer: Callable[[Path], None], *, root: Path | None = None) -> Path | None:
    """Adds a file to the model's entry: `writer` fills the path that it is given, which is then renamed to `name`. The
    file's path, or None (and a warning) when it cannot be written."""
    try:
        target = prepared_dir(path, root) / name
        _write(target, writer)
    except (OSError, ModelError) as error:
        _log.warning("%s is not kept, so the next start works it out again: %s", name, error)
        return None
    return target


def content_digest(path: Path, *, root: Path | None = None) -> str:
    """SHA-256 (hexadecimal) over the names and contents of the files that the model at `path` is read from: the same on
    every machine that has them. It is worked out once and kept in the model's entry. Raises ModelError when there is no
    model, or a file cannot be read."""
    try:
        kept = (prepared_dir(path, root) / CONTENT).read_text()
        if re.fullmatch("[0-9a-f]{64}", kept):
            return kept
    except (OSError, UnicodeDecodeError):
        pass
    state = hashlib.sha256()
    single = path.resolve().is_file()
    for file in checkpoint_files(path.resolve()):
        try:
            with file.open("rb") as data:
                name = b"" if single else file.name.encode()  # what a single file is called says nothing
                state.update(b"%d:%s" % (len(name), name) + hashlib.file_digest(data, "sha256").digest())
        except OSError as error:
            raise ModelError(f"{file}: cannot be read ({error.strerror or error})") from error
    found = state.hexdigest()
    publish(path, CONTENT, lambda target: _fill(target, found.encode()), root=root)
    return found


def _remove_stale(folder: Path) -> None:
    """Removes entries of what the same path held before."""
    import shutil

    for stale in folder.parent.glob(f"{folder.name.split('-')[0]}-*"):
        if stale != folder:
            shutil.rmtree(stale, ignore_errors=True)


def _manifest(
    checkpoint: Checkpoint, tokenizer_json: bytes, tokenizer_config: dict[str, Any], token_bytes_size: int
) -> Manifest:
    files: dict[str, int] = {}
    tensors = []
    for tensor in checkpoint.tensors.values():
        heads = tensor.heads if isinstance(tensor, PermutedWeight) else 0
        stored = tensor.stored if isinstance(tensor, PermutedWeight) else tensor
        if not isinstance(stored, MappedWeight):
            raise ModelError(f"{checkpoint.path}: tensor {tensor.name} is not a view of a file")
        file = files.setdefault(str(stored.file.resolve()), len(files))
        tensors.append(TensorRow(tensor.name, tensor.format, tensor.shape, file, stored.begin, heads))
    text = checkpoint.text
    return Manifest(
        name=checkpoint.name,
        path=str(checkpoint.path.resolve()),
        source_format=checkpoint.source_format,
        config=checkpoint.config,
        files=list(files),
        tensors=tensors,
        tokenizer_config=tokenizer_config,
        chat_template=text.chat_template,
        bos_id=text.bos_id,
        eos_ids=text.eos_ids,
        add_bos=text.add_bos,
        tokenizer_crc=zlib.crc32(tokenizer_json),
        token_bytes_size=token_bytes_size,
    )


def _tensors(manifest: Manifest) -> dict[str, Weight]:
    """The tensors as views of the model's own files. Raises ValueError when one does not fit in its file."""
    paths = [Path(file) for file in manifest.files]
    mapped: list[NDArray[np.uint8]] = [np.frombuffer(map_file(file), np.uint8) for file in paths]
    tensors: dict[str, Weight] = {}
    for entry in manifest.tensors:
        kind = Format(entry.format)
        end = entry.begin + stored_bytes(kind, entry.shape)
        if not 0 <= entry.file < len(paths) or entry.begin < 0 or end > len(mapped[entry.file]):
            raise ValueError(f"tensor {entry.name} does not lie in its file")
        if not entry.shape or prod(entry.shape) == 0:
            raise ValueError(f"tensor {entry.name} has the shape {list(entry.shape)}")
        span = Span(entry.name, kind, entry.shape, entry.begin, end)
        stored = weight(span, paths[entry.file], mapped[entry.file])
        tensors[entry.name] = PermutedWeight(stored, entry.heads) if entry.heads else stored
    return tensors


def _fill(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write(target: Path, writer: Callable[[Path], None]) -> None:
    """Lets `writer` fill a temporary file beside the target, then puts it in the target's place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        writer(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
