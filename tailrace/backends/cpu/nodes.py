"""Threads and memory by NUMA node: a thread stays on one node, and the weights that it reads lie there.

Where the allowed CPUs belong to one node, memory stays as it is, and threads are at most spread over them. What the
system refuses (containers often may not say where memory lies) is logged once and left as it is: results are the same
either way.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from tailrace.native import _kernels

SYS = Path("/sys/devices/system/node")
UNIT = 2 << 20
"""Bytes that are placed together: a huge page of most machines. Cut, they would no longer be one."""
PREFERRED, INTERLEAVE, MOVE = 1, 3, 2
"""Of mbind(2): two modes and a flag."""
_MBIND = {"x86_64": 237, "aarch64": 235}
_NODES = 1024  # bits of the mask that mbind is given
_log = logging.getLogger("tailrace")


@dataclass(frozen=True)
class Node:
    """A NUMA node: those of its CPUs that this process may use, and whether it has memory."""

    id: int
    cpus: frozenset[int]
    memory: bool = True


def find(root: Path = SYS, allowed: Set[int] | None = None) -> list[Node]:
    """The nodes that have allowed CPUs, by number; none where the system does not say. `allowed`: by default those of
    the calling thread."""
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    try:
        with_memory = _numbers(root / "has_memory") if (root / "has_memory").exists() else None
        found = [
            Node(n, frozenset(cpus), with_memory is None or n in with_memory)
            for n in sorted(int(path.name[4:]) for path in root.glob("node[0-9]*"))
            if (cpus := _numbers(root / f"node{n}" / "cpulist") & allowed)
        ]
    except (OSError, ValueError):
        return []
    return found


def seats(nodes: Sequence[Node], threads: int) -> list[int]:
    """Which of the nodes each thread sits on: in order, and so many on each as it has of the CPUs."""
    places = [i for i, node in enumerate(nodes) for _ in node.cpus]
    return [places[len(places) * t // threads] for t in range(threads)]


def layout(
    reads: Iterable[tuple[int, int, int]], seats: Sequence[int], begin: int, end: int, unit: int = UNIT
) -> list[tuple[int, int, int]]:
    """Where the memory [begin, end) belongs, in units: runs (address, bytes, node), ascending.

    `reads`: (thread, address, bytes) of what each thread reads. A unit that several nodes read goes to the one that has
    been given the least, so far, of what it reads: so each node's memory has its share of the work also where matrices
    are smaller than units. Units that no thread reads are not named."""
    readers: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for thread, address, size in reads:
        first, last = max(address, begin), min(address + size, end)
        while first < last:
            stop = min(last, (first // unit + 1) * unit)
            readers[first // unit][seats[thread]] += stop - first
            first = stop
    owed: defaultdict[int, int] = defaultdict(int)
    runs: list[tuple[int, int, int]] = []
    for number, shares in sorted(readers.items()):
        for node, size in shares.items():
            owed[node] += size
        node = max(shares, key=lambda node: owed[node])
        owed[node] -= sum(shares.values())
        first, stop = max(number * unit, begin), min((number + 1) * unit, end)
        if runs and runs[-1][2] == node and runs[-1][0] + runs[-1][1] == first:
            first = runs.pop()[0]
        runs.append((first, stop - first, node))
    return runs


def place(program: _kernels.Program, nodes: Sequence[Node], copy: tuple[int, int]) -> None:
    """Binds the program's threads to the nodes, moves its weights in `copy` (address and bytes of memory that is this
    process's own) to whom they are for, and spreads its KV pools, which nobody may have touched yet, over all nodes.

    The calling thread is the program's thread 0: it is bound too, until the program is gone. Threads that it starts
    from then on (the engine's reader and heartbeat) are bound as it is, near what they talk to; so would processes be.
    """
    chairs = seats(nodes, program.threads)
    memory = [node.id for node in nodes if node.memory]
    before = os.sched_getaffinity(0)
    try:
        for thread in range(1, program.threads):
            if error := program.bind(thread, sorted(nodes[chairs[thread]].cpus)):
                raise OSError(error, f"binding a thread: {os.strerror(error)}")
        os.sched_setaffinity(0, nodes[chairs[0]].cpus)
        weakref.finalize(program, os.sched_setaffinity, threading.get_native_id(), before).atexit = False
        for address, size in program.pools():
            set_policy(address, size, INTERLEAVE, memory)
        for address, size, node in layout(program.reads(), chairs, copy[0], sum(copy)):
            if nodes[node].memory:
                set_policy(address, size, PREFERRED, [nodes[node].id], MOVE)
    except OSError as error:
        _log.warning("tailrace: threads and memory are not all placed by NUMA node: %s", error)


def spread(program: _kernels.Program) -> None:
    """Keeps each thread but the calling one on a CPU of its own, where there are as many CPUs as threads.

    Left to itself, Linux may put two threads on one CPU and leave the other to a busy neighbour: each sleeps now and
    then, so that one CPU seems enough for them. With fewer threads than CPUs, others may have a use for those too."""
    cpus = sorted(os.sched_getaffinity(0))
    if program.threads != len(cpus):
        return
    for thread in range(1, program.threads):
        if error := program.bind(thread, [cpus[thread]]):
            _log.warning("tailrace: a thread could not be kept on one core: %s", os.strerror(error))
            return


def set_policy(address: int, size: int, mode: int, nodes: Iterable[int], flags: int = 0) -> None:
    """mbind(2) of whole pages that begin at `address`. Raises OSError where the system refuses or has no such call."""
    number = _MBIND.get(os.uname().machine)
    if number is None:
        raise OSError(f"memory cannot be placed on {os.uname().machine}")
    mask = sum(1 << node for node in set(nodes)).to_bytes(_NODES // 8, "little")
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_long(mode), mask,
                 ctypes.c_ulong(_NODES + 1), ctypes.c_ulong(flags))  # fmt: skip
    if libc.syscall(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"mbind: {os.strerror(ctypes.get_errno())}")


def _numbers(path: Path) -> set[int]:
    """A list such as 0-3,8 of sysfs; empty where there is none."""
    text = path.read_text().strip()
    spans = [span.split("-") for span in text.split(",")] if text else []
    return {n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)}
