"""The ceilings of a machine as numbers with units, and the file `machine.json` in the cache that keeps them.

A cache may be shared by several machines and versions, so the file holds one entry for each `Machine` that was
measured, and in it what models attained there. It is written whole under another name and renamed, under a lock; one
that cannot be read is a warning, and made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec

from tailrace.backends.cpu.machine.points import Roofline

FILE = "machine.json"
FORMAT = 3
"""Changes whenever the meaning of a field does; entries of another format are not read."""

_log = logging.getLogger("tailrace")

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Machine(msgspec.Struct, frozen=True):
    """What the ceilings depend on: an entry of the file is of exactly one machine. `cores`: those that this process may
    use. `threads`: the most that were measured. `version`: of the library, since kernels change with it."""

    cpu: str
    cores: Count
    threads: Count
    kernels: str
    version: str


class Cache(msgspec.Struct, frozen=True):
    """One level of cache as the system reports it: its size, and how many cores share one of that size."""

    level: Count
    size_bytes: Count
    cores_sharing: Count

    @property
    def name(self) -> str:
        return f"L{self.level}"


class Bandwidth(msgspec.Struct, frozen=True):
    """What `threads` threads read together, each its own share of the working set over and over. `level`: where that
    lies, L1, L2, L3 or memory. Rates are the best of many short rounds, and their usual one (see `probe`)."""

    level: str
    threads: Count
    working_set_bytes: Count
    bytes_per_second: Positive
    median_bytes_per_second: Positive


class Arithmetic(msgspec.Struct, frozen=True):
    """Multiply-adds of one kind on `threads` threads together, operands in registers. `instructions` do it: in the
    kernel build that was measured, or in what else this processor has beside AVX-512. A multiply-add is two
    operations."""

    kind: str
    instructions: str
    threads: Count
    multiply_adds_per_second: Positive
    median_multiply_adds_per_second: Positive


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """All ceilings of one machine. Hand-overs are there and back again, between two threads; None on a single core.
    `others_cores`: how many of the cores other processes used meanwhile, which makes ceilings too low; None where the
    system does not tell."""

    machine: Machine
    measured_at: str
    """UTC, ISO 8601."""
    took_seconds: Positive
    others_cores: Annotated[float, msgspec.Meta(ge=0)] | None
    caches: tuple[Cache, ...]
    bandwidths: tuple[Bandwidth, ...]
    arithmetics: tuple[Arithmetic, ...]
    spinning_hand_over_seconds: Positive | None
    median_spinning_hand_over_seconds: Positive | None
    parked_hand_over_seconds: Positive | None
    median_parked_hand_over_seconds: Positive | None
    page_bytes: Count
    page_fault_seconds: Positive
    median_page_fault_seconds: Positive

    def levels(self, threads: int) -> list[str]:
        """The levels that were measured with so many threads, nearest first."""
        return [b.level for b in self.bandwidths if b.threads == threads]

    def kinds(self, threads: int) -> list[str]:
        """The kinds of multiply-add that were measured with so many threads."""
        return [a.kind for a in self.arithmetics if a.threads == threads]

    def bandwidth(self, level: str, threads: int) -> float:
        """Bytes per second. Raises KeyError for a level or number of threads that was not measured."""
        for found in self.bandwidths:
            if found.level == level and found.threads == threads:
                return found.bytes_per_second
        raise KeyError(f"no bandwidth of {level} on {threads} threads was measured")

    def multiply_adds(self, kind: str, threads: int) -> float:
        """Multiply-adds per second. Raises KeyError for a kind or number of threads that was not measured."""
        for found in self.arithmetics:
            if found.kind == kind and found.threads == threads:
                return found.multiply_adds_per_second
        raise KeyError(f"no {kind} multiply-adds on {threads} threads were measured")

    def level_of(self, size_bytes: int, threads: int) -> str:
        """The nearest measured level that so many bytes fit into, spread over the caches of `threads` cores."""
        measured = self.levels(threads)
        for cache in self.caches:
            if cache.name in measured and size_bytes <= cache.size_bytes * -(-threads // cache.cores_sharing):
                return cache.name
        return "memory"


class _Head(msgspec.Struct, frozen=True):
    format: int


class _Entry(msgspec.Struct, frozen=True):
    """Of one machine: its ceilings, and what each model attained when it was measured last."""

    ceilings: Ceilings
    rooflines: tuple[Roofline, ...] = ()


class _File(msgspec.Struct, frozen=True):
    format: int
    machines: tuple[_Entry, ...]


def load(root: Path, machine: Machine) -> Ceilings | None:
    """The ceilings that were saved for this machine under the cache's root; None where there are none. A file that
    cannot be read is a warning, and as good as none."""
    return next((found.ceilings for found in _read(root / FILE) if found.ceilings.machine == machine), None)


def save(root: Path, ceilings: Ceilings, roofline: Roofline | None = None) -> Path | None:
    """Puts the ceilings in the place of what was saved for the same machine, and a model's roofline in the place of
    that model's; those of others stay. The file, or None and a warning when it cannot be written."""
    path, temporary = root / FILE, None
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f".{FILE}.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = {found.ceilings.machine: found for found in _read(path)}
            rooflines = entries.pop(ceilings.machine, _Entry(ceilings)).rooflines
            if roofline is not None:
                rooflines = (*(found for found in rooflines if found.model != roofline.model), roofline)
            file_of = _File(FORMAT, (*entries.values(), _Entry(ceilings, rooflines)))
            body = msgspec.json.format(msgspec.json.encode(file_of), indent=2)
            with tempfile.NamedTemporaryFile(dir=root, prefix=f".{FILE}.", delete=False) as file:
                temporary = file.name
                file.write(body + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # a shared cache: others may read it
            os.replace(temporary, path)
    except OSError as error:
        _log.warning("the ceilings are not kept: %s", error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return None
    return path


def _read(path: Path) -> tuple[_Entry, ...]:
    try:
        body = path.read_bytes()
        found = msgspec.json.decode(body, type=_Head).format
        if found != FORMAT:
            raise ValueError(f"it is of format {found}, not {FORMAT}")
        return msgspec.json.decode(body, type=_File).machines
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read and is ignored (tailrace machine writes it anew): %s", path, error)
        return ()
