"""Models by name: what the known ones are, where they come from, and the cache that holds them.

Callers: `cli` (pull, info, serve), tests and `make`, through `resolve` and `pull`. Knows nothing of what is inside a
model's files: it moves bytes, and trusts them only once their SHA-256 is the catalogue's.

- `entries`: the catalogue, ours and the user's.
- `store`: the cache: what is there and intact, the lock, the atomic move into place.
- `sources`: the ways to fetch a file (imported only when something has to be fetched).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.models.catalogue import entries, store
from tailrace.models.catalogue.entries import Entry
from tailrace.models.catalogue.store import CacheError, Progress, cache_dir
from tailrace.terms import ModelError

if TYPE_CHECKING:
    from tailrace.models.catalogue.sources import Runner

__all__ = [
    "DEFAULT",
    "CacheError",
    "Progress",
    "PullError",
    "cache_dir",
    "known",
    "missing",
    "names",
    "present",
    "pull",
    "resolve",
    "texts",
]

DEFAULT = "smollm2-135m"
"""The model that is served when none is named."""


class PullError(ModelError):
    """No source gave the model; the message has a line for each and says what to do."""


def known(*, catalogue: Path | None = None) -> list[Entry]:
    """Every model that can be pulled by name: the user's own first, then the built-in ones."""
    return entries.load(catalogue)


def resolve(name: str | os.PathLike[str], *, cache: Path | None = None, catalogue: Path | None = None) -> Path:
    """Where a model lies: a known name that is in the cache, or a path to a `.gguf` file or to a directory.

    Raises `ModelError` for an unknown name, for texts, for a path that is not there, and for a known model that is not
    in the cache yet. Downloads nothing and takes milliseconds.
    """
    found = _model(name, catalogue)
    if isinstance(found, Path):
        return found
    path = store.installed(found, cache_dir(cache))
    if path is None:
        raise ModelError(f"{found.name} is not in the cache ({cache_dir(cache)}). Fetch it: tailrace pull {found.name}")
    return path


def pull(
    name: str | os.PathLike[str],
    progress: Callable[[Progress], None] | None = None,
    *,
    cache: Path | None = None,
    catalogue: Path | None = None,
    run: Runner | None = None,
) -> Path:
    """Fetches a model into the cache unless it is there intact, and says where it lies.

    The sources are tried in order. Bytes are verified in a staging folder and moved into place by one rename, under a
    lock that other pulls of the same model wait for. `progress` is called often, from the calling thread; `run`
    replaces the runner of child processes in tests. Raises `PullError` when no source works, `CacheError` when the
    cache cannot take the model, `ModelError` for unknown names.
    """
    found = _look_up(name, catalogue)
    if isinstance(found, Path):
        return found
    root = cache_dir(cache)
    report = progress or _silent
    path = store.installed(found, root)
    if path is None:
        path = _pull_locked(found, root, report, run)
    report(Progress(stage="done", source="", done=found.size, total=found.size, note=str(path)))
    return path


def missing(name: str | os.PathLike[str], *, cache: Path | None = None, catalogue: Path | None = None) -> bool:
    """Whether this is a known model that has to be pulled first. Raises as `resolve` does for what is unknown."""
    found = _model(name, catalogue)
    return isinstance(found, Entry) and not present(found, cache=cache)


def present(entry: Entry, *, cache: Path | None = None) -> bool:
    """Whether the cache holds it, verified."""
    return store.installed(entry, cache_dir(cache)) is not None


def texts(name: str, *, catalogue: Path | None = None) -> bool:
    """Whether this is the name of texts, which `pull` fetches."""
    found = entries.find(name, catalogue)
    return found is not None and found.texts


def names(name: str | os.PathLike[str], *, catalogue: Path | None = None) -> tuple[str, ...]:
    """The names of a known model, its proper one first; none for a path."""
    found = _look_up(name, catalogue)
    return (found.name, *found.aliases) if isinstance(found, Entry) else ()


def _pull_locked(entry: Entry, root: Path, report: Callable[[Progress], None], run: Runner | None) -> Path:
    try:
        with store.translated(root, entry), store.lock(root, entry.name, lambda note: report(_waiting(note))):
            path = store.installed(entry, root) or store.adopt(entry, root, report)
            return path or _fetch(entry, root, report, run)
    except CacheError:
        # A cache that cannot be written may still hold the model, put there by other means.
        path = store.intact(entry, root, report)
        if path is None:
            raise
        return path


def _fetch(entry: Entry, root: Path, report: Callable[[Progress], None], run: Runner | None) -> Path:
    from tailrace.models.catalogue import sources

    staging = store.staging(root, entry)
    failures = []
    for source in entry.sources:
        try:
            sources.fetch(source, entry, staging, report, run or sources.run_watched)
        except sources.SourceFailed as failure:
            failures.append(f"  - {source.title}: {failure}")
            report(Progress(stage="failed", source=source.title, done=0, total=entry.size, note=str(failure)))
        else:
            return store.publish(entry, root, staging)
    raise PullError(
        f"Could not get {entry.name}; every source failed:\n"
        + "\n".join(failures)
        + "\nCheck the network and pip's configuration (index, proxy, certificates), then pull again. Or put "
        f"{', '.join(file.name for file in entry.files)} into {store.model_dir(root, entry)} by other means: "
        "the next pull verifies and takes it."
    )


def _model(name: str | os.PathLike[str], catalogue: Path | None) -> Entry | Path:
    """As `_look_up`; ModelError for what is no model."""
    found = _look_up(name, catalogue)
    if isinstance(found, Entry) and found.texts:
        raise ModelError(f"{found.name} is texts, not a model. They are for: tailrace bench -w {found.name}")
    return found


def _look_up(name: str | os.PathLike[str], catalogue: Path | None) -> Entry | Path:
    """The entry of that name, or the path that it is. A name with a separator or ending in .gguf is always a path."""
    text = os.fspath(name)
    if not text.strip():
        raise ModelError(f"The model has no name. {_instead(catalogue)}")
    if not isinstance(name, str) or os.sep in text or text.startswith("~") or text.lower().endswith(".gguf"):
        path = Path(text).expanduser()
        if not path.exists():
            raise ModelError(f"There is no {path}. {_instead(catalogue)}")
        if not (path.is_file() or path.is_dir()):
            raise ModelError(f"{path} is neither a file nor a directory. {_instead(catalogue)}")
        return path
    entry = entries.find(text, catalogue)
    if entry is not None:
        return entry
    if Path(text).is_dir():
        return Path(text)
    raise ModelError(_unknown(text, catalogue))


def _unknown(name: str, catalogue: Path | None) -> str:
    import difflib

    spellings = [spelling for entry in entries.load(catalogue) for spelling in (entry.name, *entry.aliases)]
    close = difflib.get_close_matches(name.lower(), spellings, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    return (
        f"No model is called {name!r}.{hint} Known: {_names(catalogue)}. Any other model: give the path of its .gguf "
        f"file, or of a directory with config.json and safetensors."
    )


def _instead(catalogue: Path | None) -> str:
    return f"Give a .gguf file, a directory with config.json and safetensors, or one of: {_names(catalogue)}."


def _names(catalogue: Path | None) -> str:
    return ", ".join(entry.name for entry in entries.load(catalogue))


def _waiting(note: str) -> Progress:
    return Progress(stage="waiting", source="", done=0, total=0, note=note)


def _silent(_: Progress) -> None:
    pass
