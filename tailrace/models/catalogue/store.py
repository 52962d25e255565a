"""The cache of models: `<cache>/models/<name>/` holds a model's files and `manifest.json`, which says that they were
verified. Work in progress lives in `<cache>/models/.partial/<name>/` and moves into place by one rename, so whatever
has a model's name is complete. A file whose size or time of change is not the manifest's is hashed again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from tailrace.models.catalogue.entries import Entry, File
from tailrace.terms import ModelError

_MANIFEST = "manifest.json"
_CHUNK = 1 << 20


class CacheError(ModelError):
    """The cache cannot take the model: full, read-only, not ours. The message says what to do."""


class Progress(NamedTuple):
    """How far a pull is. `done` and `total` are bytes of the stage (total 0: unknown)."""

    stage: Literal["waiting", "downloading", "unpacking", "verifying", "failed", "done"]
    source: str
    done: int
    total: int
    note: str = ""


def cache_dir(given: Path | None = None) -> Path:
    """The cache's root: as given, else `TAILRACE_CACHE`, else `~/.cache/tailrace`."""
    return given or Path(os.environ.get("TAILRACE_CACHE") or Path.home() / ".cache" / "tailrace")


def model_dir(root: Path, entry: Entry) -> Path:
    """The folder of a model."""
    return root / "models" / entry.name


def model_path(root: Path, entry: Entry) -> Path:
    """What is handed to the reader: the file where there is one, else the folder."""
    folder = model_dir(root, entry)
    return folder / entry.files[0].name if len(entry.files) == 1 else folder


def installed(entry: Entry, root: Path) -> Path | None:
    """The model's path when the cache holds it as verified; reads no more than the manifest and the files' stat."""
    folder = model_dir(root, entry)
    try:
        verified = json.loads((folder / _MANIFEST).read_bytes())["files"]
        for file in entry.files:
            stat = (folder / file.name).stat()
            if stat.st_size != file.size or verified.get(file.name) != _facts(file, stat.st_mtime_ns):
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or no manifest of ours
        return None
    return model_path(root, entry)


def intact(entry: Entry, root: Path, report: Callable[[Progress], None]) -> Path | None:
    """The model's path when its files are there and hash right. Writes nothing."""
    folder = model_dir(root, entry)
    if not all(_has_size(folder / file.name, file.size) for file in entry.files):
        return None
    if all(sha256(folder / file.name, report) == file.sha256 for file in entry.files):
        return model_path(root, entry)
    return None


def adopt(entry: Entry, root: Path, report: Callable[[Progress], None]) -> Path | None:
    """Takes files that lie in the model's folder without a valid manifest, if they hash right."""
    path = intact(entry, root, report)
    if path is not None:
        _write_manifest(entry, model_dir(root, entry))
    return path


def staging(root: Path, entry: Entry) -> Path:
    """The folder to fetch into, made; what an earlier attempt left in it may be resumed. Raises ENOSPC early."""
    import shutil  # here and below: a start needs none of it

    folder = root / "models" / ".partial" / entry.name
    folder.mkdir(parents=True, exist_ok=True)
    missing = sum(file.size for file in entry.files if not _has_size(folder / file.name, file.size))
    if shutil.disk_usage(folder).free < missing:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return folder


def publish(entry: Entry, root: Path, folder: Path) -> Path:
    """Moves a staging folder, whose files are all verified, to the model's name. The lock is held."""
    import shutil

    for extra in folder.iterdir():
        if extra.name not in {file.name.partition("/")[0] for file in entry.files}:
            shutil.rmtree(extra) if extra.is_dir() else extra.unlink()
    _write_manifest(entry, folder)
    final = model_dir(root, entry)
    old = folder.with_name(f"{entry.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():  # damaged, or of another version of the catalogue; who has it mapped keeps it
        final.rename(old)
    folder.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return model_path(root, entry)


def discard(root: Path, entry: Entry) -> None:
    """Drops what a pull left half done."""
    import shutil

    shutil.rmtree(root / "models" / ".partial" / entry.name, ignore_errors=True)


@contextlib.contextmanager
def lock(root: Path, name: str, waiting: Callable[[str], None]) -> Iterator[None]:
    """Holds the model's lock; it goes with the process that held it, however that ends."""
    import fcntl

    folder = root / "models" / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(f"another process is pulling {name}")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def translated(root: Path, entry: Entry) -> Iterator[None]:
    """Turns what the file system says into a `CacheError` that says what to do."""
    try:
        yield
    except OSError as error:
        elsewhere = "or choose another place with --cache or TAILRACE_CACHE"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            discard(root, entry)
            raise CacheError(
                f"No space left for {entry.name} in {root}: it needs {megabytes(entry.size)}, and as much again while "
                f"it is unpacked. Free some space, {elsewhere}."
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise CacheError(
                f"The cache {root} cannot be written ({error.strerror}: {error.filename}). "
                f"Make it writable, {elsewhere}."
            ) from error
        raise CacheError(f"The cache {root} does not work: {error}. Repair it, {elsewhere}.") from error


def sha256(path: Path, report: Callable[[Progress], None]) -> str:
    """The file's SHA-256, in hexadecimal."""
    import hashlib

    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            report(Progress("verifying", path.name, done, total))
    return digest.hexdigest()


def megabytes(size: int) -> str:
    """A size for people."""
    return f"{size / 1e6:,.1f} MB"


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _write_manifest(entry: Entry, folder: Path) -> None:
    files = {file.name: _facts(file, (folder / file.name).stat().st_mtime_ns) for file in entry.files}
    part = folder / f"{_MANIFEST}.part"
    with part.open("wb") as stream:
        stream.write(json.dumps({"files": files}).encode())
        stream.flush()
        os.fsync(stream.fileno())
    part.rename(folder / _MANIFEST)
    _sync_folder(folder)


def _facts(file: File, mtime_ns: int) -> dict[str, int | str]:
    return {"size": file.size, "mtime_ns": mtime_ns, "sha256": file.sha256}


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
