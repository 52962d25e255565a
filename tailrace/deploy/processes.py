"""What a process and all that it has started are, hold and have used, from Linux's /proc.

Where there is no /proc, a tree is its first process, and what it takes is not known (None).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
LISTENING = "0A"
"""The state of such a socket in /proc/net/tcp."""


class Member(NamedTuple):
    """One process of a tree. `started` (clock ticks since boot) tells it from a later one with the same id."""

    pid: int
    started: int


class _Stat(NamedTuple):
    parent: int
    session: int
    started: int
    ticks: int
    state: str


def member(pid: int) -> Member:
    """The process of that id."""
    stat = _stat(pid)
    return Member(pid, stat.started if stat is not None else 0)


def tree(root: Member) -> list[Member]:
    """The process, what descends from it, and what is in the session that it leads, though its parent has ended.
    Zombies hold nothing, and are left out."""
    stats = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None}
    if root.pid in stats and stats[root.pid].started != root.started:
        return []  # nothing of it is left, and its id is another's by now
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found: set[int] = set()
    todo = [root.pid, *(pid for pid, stat in stats.items() if stat.session == root.pid)]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, ())
    return [Member(pid, stats[pid].started) for pid in sorted(found) if pid in stats and stats[pid].state not in "ZX"]


def alive(members: Iterable[Member]) -> list[Member]:
    """Those that still run."""
    stats = [(one, _stat(one.pid)) for one in members]
    return [one for one, stat in stats if stat is not None and stat.started == one.started and stat.state not in "ZX"]


def send(members: Iterable[Member], number: signal.Signals) -> None:
    """A signal to each that still runs."""
    for one in alive(members):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one.pid, number)


def cpu_seconds(root: Member) -> float | None:
    """Processor time of the tree so far, with that of its members which have ended and were waited for."""
    ticks = [stat.ticks for one in tree(root) if (stat := _stat(one.pid)) is not None]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def rss(root: Member) -> int | None:
    """Bytes of memory that the tree holds: what its processes share counts once, and a mapped file counts whole though
    processes of others map it as well."""
    anonymous, files, known = 0, dict[tuple[str, str], int](), False
    for one in tree(root):
        with contextlib.suppress(OSError):
            anonymous += _held(one.pid, files)
            known = True
    return (anonymous + sum(files.values())) * 1024 if known else None


def _held(pid: int, files: dict[tuple[str, str], int]) -> int:
    """KiB of a process that are no file's: its part of what it shares. The pages of files go into `files`, by (inode,
    offset): of two processes that map the same part, the one with more of it counts."""
    anonymous, key, resident = 0, ("", ""), 0
    for line in (PROC / str(pid) / "smaps").read_text(errors="replace").splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            fields = rest.split()
            key = (f"{fields[2]} {fields[3]}", fields[1]) if fields[3] != "0" else ("", "")
        elif name == "Rss:":
            resident = int(rest.split()[0])
        elif name == "Pss:" and not key[0]:
            anonymous += int(rest.split()[0])
        elif name == "Anonymous:" and key[0]:
            own = int(rest.split()[0])  # copies that a process made of a file's pages
            anonymous += own
            files[key] = max(files.get(key, 0), resident - own)
    return anonymous


def listens(root: Member, port: int) -> bool:
    """Whether it is the tree that listens on a TCP port; True where that cannot be told."""
    inodes = {
        fields[9] for table in ("tcp", "tcp6") for line in _lines(PROC / "net" / table)
        if len(fields := line.split()) > 9 and fields[3] == LISTENING and fields[1].endswith(f":{port:04X}")
    }  # fmt: skip
    if not PROC.joinpath("net/tcp").exists():
        return True
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return any(wanted & _opened(one.pid) for one in tree(root))


def _opened(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry.path))
    return found


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []


def _pids() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(PROC) if name.isdigit()]
    return []


def _stat(pid: int) -> _Stat | None:
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    ticks = sum(map(int, fields[11:15]))  # user and system, of itself and of children that it has waited for
    return _Stat(int(fields[1]), int(fields[3]), int(fields[19]), ticks, fields[0])
