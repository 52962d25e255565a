"""Where a model's prepared entry lies, and the parts of it that need no tensors (see `prepared`).

Apart from `prepared`, so that a process which only wants the text parts imports neither numpy nor readers of weights.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tailrace.models.checkpoint import TextAssets, checkpoint_files
from tailrace.terms import ModelError

VERSION = 3
"""Changes whenever what an entry holds, or what it is worked out from, does."""

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TOKEN_BYTES = "token_bytes.bin"

_log = logging.getLogger("tailrace")


class TensorRow(msgspec.Struct, frozen=True, array_like=True):
    """`file` counts in the manifest's list; `heads` > 0: rows of so many heads, interleaved (`PermutedWeight`)."""

    name: str
    format: str
    shape: tuple[int, ...]
    file: int
    begin: int
    heads: int


class Manifest(msgspec.Struct, frozen=True):
    name: str
    path: str
    source_format: str
    config: dict[str, Any]
    files: list[str]
    tensors: list[TensorRow]
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool | None
    tokenizer_crc: int
    token_bytes_size: int


@dataclass(frozen=True)
class PreparedText:
    """What a prepared entry holds for `text`: the assets, the rows of the model's head (None: its configuration does
    not say), and where the table of token bytes lies."""

    assets: TextAssets
    rows: int | None
    token_bytes: Path


def prepared_dir(path: Path, root: Path | None = None) -> Path:
    """The folder of this model's entry, whether it is there or not. `root` is the cache (default: `TAILRACE_CACHE`,
    else `~/.cache/tailrace`). Raises ModelError when there is no model at `path`."""
    root = root or Path(os.environ.get("TAILRACE_CACHE") or Path.home() / ".cache" / "tailrace")
    path = path.resolve()
    identity: list[object] = [VERSION, str(path)]
    for file in checkpoint_files(path):
        try:
            stat = file.stat()
        except OSError as error:
            raise ModelError(f"{file}: cannot be read ({error.strerror or error})") from error
        identity += [file.name, stat.st_size, stat.st_mtime_ns]
    return root / "prepared" / f"{digest(str(path).encode())[:16]}-{digest(msgspec.json.encode(identity))[:32]}"


def open_text(path: Path, *, root: Path | None = None) -> PreparedText | None:
    """The text parts of the model's entry, in milliseconds; None when there is no whole entry."""
    try:
        folder = prepared_dir(path, root)
        manifest = read_manifest(folder / MANIFEST)
        rows = manifest.config.get("vocab_size")
        assets = text_of(folder, manifest, True)
        return PreparedText(assets, rows if isinstance(rows, int) else None, folder / TOKEN_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ModelError) as error:
        _log.warning("the prepared entry of %s is damaged, and is made anew: %s", path, error)
        return None


_SEAL = b'{"sha256":"%s","manifest":'
_HEAD = len(_SEAL) - 2 + 64


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(body: bytes) -> bytes:
    """The manifest with its own digest before it, as one JSON object."""
    return _SEAL % digest(body).encode() + body + b"}"


def read_manifest(path: Path) -> Manifest:
    """Raises FileNotFoundError, other OSErrors, and ValueError when the file is not what `seal` made."""
    raw = path.read_bytes()
    body = raw[_HEAD:-1]
    if raw[:_HEAD] != _SEAL % digest(body).encode():
        raise ValueError(f"{path} does not have the digest that it names")
    return msgspec.json.decode(body, type=Manifest)


def text_of(folder: Path, manifest: Manifest, tokenizer: bool) -> TextAssets:
    data = None
    if tokenizer:
        data = (folder / TOKENIZER).read_bytes()
        if zlib.crc32(data) != manifest.tokenizer_crc:
            raise ValueError(f"{folder / TOKENIZER} does not have the checksum of its manifest")
    if (folder / TOKEN_BYTES).stat().st_size != manifest.token_bytes_size:
        raise ValueError(f"{folder / TOKEN_BYTES} does not have the size of its manifest")
    return TextAssets(
        tokenizer_json=data,
        tokenizer_config=manifest.tokenizer_config,
        gguf=None,
        chat_template=manifest.chat_template,
        bos_id=manifest.bos_id,
        eos_ids=manifest.eos_ids,
        add_bos=manifest.add_bos,
    )
