"""Measures the ceilings of this machine: everything in turn, several times over, each time in many short rounds. What
else runs comes and goes, so that it would spoil whatever is measured all at once. The ceiling is the best round of all
turns; what is usual, the middle one of the turns' medians.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tailrace import __version__
from tailrace.backends.cpu.machine.ceilings import Arithmetic, Bandwidth, Cache, Ceilings, Machine
from tailrace.backends.cpu.memory import available_memory
from tailrace.backends.cpu.threads import usable_cores
from tailrace.native import _kernels
from tailrace.terms import InvalidInput

SECONDS = 6.0
"""About how long all rounds take together; memory has to be touched besides."""

TURNS = 3
"""How often each is measured."""

_USUAL_CACHES = (Cache(1, 32 << 10, 1), Cache(2, 512 << 10, 1))
"""Where the system does not tell."""

_LEAST_MEMORY, _MOST_MEMORY = 64 << 20, 512 << 20
"""Bytes of the working set that lies in memory."""

Report = Callable[[str], None]


def this_machine(kernels: str | None = None, threads: int | None = None) -> Machine:
    """The machine that this process runs on, as far as it may use it. `kernels`: None is the best build. `threads`:
    None is one a core. Raises InvalidInput for kernels that cannot run here and for more threads than cores."""
    names, cores = _kernels.available(), usable_cores()
    if kernels is not None and kernels not in names:
        raise InvalidInput(
            f"kernels {kernels!r} cannot run on this machine; it can run: {', '.join(names)}", param="kernels"
        )
    if threads is not None and not 1 <= threads <= cores:
        raise InvalidInput(f"threads must be 1 to {cores}, the cores that can be used, not {threads}", param="threads")
    return Machine(_cpu_model(), cores, threads or cores, kernels or names[0], __version__)


class Probe(NamedTuple):
    """Something to measure: gives the best of many rounds, and their median. `best`: of several such."""

    what: str
    measure: Callable[[], tuple[float, float]]
    best: Callable[[list[float]], float]


def measure(machine: Machine, *, seconds: float = SECONDS, report: Report | None = None) -> Ceilings:
    """Measures everything, in about so many seconds; `report` is told what is next. Best on a quiet machine."""
    begin, others, kernels = time.monotonic(), Others(), machine.kernels
    caches = find_caches(sorted(os.sched_getaffinity(0))[0])
    counts = thread_counts(machine.threads)
    sets = [(level, n, size) for n in counts for level, size in working_sets(caches, n, available_memory())]
    peaks = [(kind, how, n) for n in sorted({1, machine.threads}) for kind, how in _kernels.peaks(kernels)]
    share = seconds / (2 * len(sets) + len(peaks) + 4) / TURNS  # reading is measured in two ways
    reads = [
        Probe(f"reading {level}, {_threads(n)}", partial(_kernels.read_rate, kernels, size, n, 2 * share), max)
        for level, n, size in sets
    ]
    rates = [
        Probe(f"{kind} multiply-adds, {_threads(n)}", partial(_kernels.multiply_add_rate, kernels, kind, n, share), max)
        for kind, _, n in peaks
    ]
    times = [Probe("page faults", partial(_kernels.page_fault, share), min)]
    if machine.cores > 1:
        times.append(Probe("hand-overs, spinning", partial(_kernels.hand_over, False, share), min))
        times.append(Probe("hand-overs, parked", partial(_kernels.hand_over, True, 2 * share), min))
    found = in_turns([*reads, *rates, *times], report or (lambda _: None))
    read, rated, (fault, *hand_overs) = (
        found[: len(reads)], found[len(reads) : len(reads) + len(rates)], found[len(reads) + len(rates) :]
    )  # fmt: skip
    spinning, parked = hand_overs or ((None, None), (None, None))
    return Ceilings(
        machine=machine,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        took_seconds=time.monotonic() - begin,
        others_cores=others.cores(),
        caches=caches,
        bandwidths=tuple(Bandwidth(level, n, size * n, *r) for (level, n, size), r in zip(sets, read, strict=True)),
        arithmetics=tuple(Arithmetic(kind, how, n, *r) for (kind, how, n), r in zip(peaks, rated, strict=True)),
        spinning_hand_over_seconds=spinning[0],
        median_spinning_hand_over_seconds=spinning[1],
        parked_hand_over_seconds=parked[0],
        median_parked_hand_over_seconds=parked[1],
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        page_fault_seconds=fault[0],
        median_page_fault_seconds=fault[1],
    )


def in_turns(probes: Sequence[Probe], say: Report) -> list[tuple[float, float]]:
    """Of each probe, the best and the usual of all turns."""
    turns: list[list[tuple[float, float]]] = [[] for _ in probes]
    for turn in range(TURNS):
        for probe, measured in zip(probes, turns, strict=True):
            say(f"{probe.what} ({turn + 1} of {TURNS})")
            measured.append(probe.measure())
    return [
        (probe.best([best for best, _ in measured]), statistics.median(median for _, median in measured))
        for probe, measured in zip(probes, turns, strict=True)
    ]


class Others:
    """How much of this process's cores others use, from when this is made."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._began = self._now()

    def cores(self) -> float | None:
        """Cores' worth of time since then, that of this process left out; None where the system does not tell."""
        ended = self._now()
        if self._began is None or ended is None:
            return None
        (wall, busy, own), (wall_now, busy_now, own_now) = self._began, ended
        return max(0.0, (busy_now - busy - (own_now - own)) / max(wall_now - wall, 1e-3))

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds on the clock, seconds that the cores were busy, and of these, seconds of this process."""
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = 0
        try:
            for line in self._stat.read_text().splitlines():
                name, *fields = line.split()
                if name in names:
                    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
                    ticks += user + nice + system + irq + softirq + steal
        except (OSError, ValueError):
            return None
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


def thread_counts(threads: int) -> list[int]:
    """Powers of two up to this number, and it."""
    return sorted({1 << i for i in range(threads.bit_length())} | {threads})


def working_sets(caches: tuple[Cache, ...], threads: int, memory_bytes: int) -> list[tuple[str, int]]:
    """The levels that can be told apart with so many threads, and the bytes that each thread reads to be in one: half
    of its share of the cache. Memory's are four times all caches, within bounds and a quarter of what is free."""
    found: list[tuple[str, int]] = []
    nearer = 0  # bytes of the level before
    for cache in caches:
        size = cache.size_bytes // 2 // min(threads, cache.cores_sharing) // 4096 * 4096
        if size > nearer:
            found.append((cache.name, size))
        nearer = cache.size_bytes // min(threads, cache.cores_sharing)
    last = caches[-1].size_bytes * -(-threads // caches[-1].cores_sharing) if caches else 0
    total = min(max(4 * last, _LEAST_MEMORY), _MOST_MEMORY, max(memory_bytes // 4, 16 << 20))
    return [*found, ("memory", total // threads // 4096 * 4096)]


def find_caches(core: int, root: Path = Path("/sys/devices/system/cpu")) -> tuple[Cache, ...]:
    """The data caches of a core, nearest first; usual sizes where the system does not tell."""
    found: dict[int, Cache] = {}
    for place in sorted(root.glob(f"cpu{core}/cache/index*")):
        try:
            if (place / "type").read_text().strip() not in ("Data", "Unified"):
                continue
            level, text = int((place / "level").read_text()), (place / "size").read_text().strip()
            size = int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0)
            sharing = _count((place / "shared_cpu_list").read_text().strip())
        except (OSError, ValueError, IndexError):
            continue
        if level >= 1 and size >= 4096:
            found[level] = Cache(level, size, max(1, sharing))
    return tuple(found[level] for level in sorted(found)) or _USUAL_CACHES


def _count(cores: str) -> int:
    """How many cores a list such as 0-3,8 names."""
    total = 0
    for part in cores.split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


def _cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name with its numbers, since hypervisors give many kinds one name."""
    fields: dict[str, str] = {}
    try:
        for line in path.read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    except OSError:
        pass
    name = fields.get("model name") or platform.processor() or platform.machine() or "unknown"
    numbers = [f"{key} {fields[key]}" for key in ("cpu family", "model", "stepping", "CPU implementer", "CPU part")
               if key in fields]  # fmt: skip
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
