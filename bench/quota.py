"""Decoding under a CPU quota, as a container has it: one stream through HTTP, the server in a control group of its own.

Throughput may fall in proportion to the quota, and no further. A server for each quota is up; the load goes from one to
the next in turns, and those that are not measured are stopped meanwhile. The client is outside of the groups.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shlex
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import serve
from tailrace.backends.cpu.machine.probe import Others
from tailrace.backends.cpu.threads import usable_cores

QUOTAS = (200, 150, 100, 50)
"""Per cent of one core."""

TOKENS = 128
"""Of one measurement."""

PERIOD = 100_000
"""Microseconds over which a quota counts, as containers have it."""

ROOT = Path("/sys/fs/cgroup")


class NoGroups(Exception):
    """This system lets us set no quota; the text says why."""


@dataclass(frozen=True)
class Group:
    """A control group with a CPU quota, of version 1 or 2."""

    place: Path

    def enter(self, command: str) -> str:
        """The command line that runs `command` inside."""
        inside = f"echo $$ > {shlex.quote(str(self.place / 'cgroup.procs'))} && exec {command}"
        return f"sh -c {shlex.quote(inside)}"

    def throttled(self) -> float:
        """Seconds that its threads have waited for the next period, all together."""
        stat = dict(line.split() for line in (self.place / "cpu.stat").read_text().splitlines())
        return int(stat["throttled_usec"]) / 1e6 if "throttled_usec" in stat else int(stat["throttled_time"]) / 1e9


@contextlib.contextmanager
def group(name: str, quota: int, root: Path = ROOT) -> Iterator[Group]:
    """A new group of that name with so many per cent of a core; it is removed in the end, when its processes have gone.
    Raises NoGroups."""
    parent = _controller(root)
    place, allowed = parent / name, quota * PERIOD // 100
    try:
        place.mkdir()
    except OSError as error:
        raise NoGroups(f"{place} cannot be made: {error.strerror}") from error
    try:
        try:
            if parent == root:
                (place / "cpu.max").write_text(f"{allowed} {PERIOD}")
            else:
                (place / "cpu.cfs_period_us").write_text(str(PERIOD))
                (place / "cpu.cfs_quota_us").write_text(str(allowed))
        except OSError as error:
            raise NoGroups(f"{place} takes no quota: {error.strerror}") from error
        yield Group(place)
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                place.rmdir()
                break
            time.sleep(0.05)


def _controller(root: Path) -> Path:
    """Where groups with a CPU quota can be made: version 2's root, or version 1's cpu hierarchy. Raises NoGroups."""
    try:
        if "cpu" in (root / "cgroup.controllers").read_text().split():
            (root / "cgroup.subtree_control").write_text("+cpu")
            return root
    except OSError:
        pass
    for name in ("cpu", "cpu,cpuacct"):
        if (root / name / "cgroup.procs").exists():
            return root / name
    raise NoGroups(f"{root} has no CPU controller that this process may use (mount one, or run as root)")


@dataclass
class Run:
    """What was measured under one quota, a value for each turn."""

    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of all that it has started and that live."""
    total, todo = 0.0, [pid]
    while todo:
        one = todo.pop()
        total += time.clock_gettime(~one << 3 | 2)  # the clock of a process's CPU time: see clock_getcpuclockid(3)
        for task in Path(f"/proc/{one}/task").iterdir():
            todo += map(int, (task / "children").read_text().split())
    return total


class Usage:
    """What processes use from when this is made; and what all but them and this one use of its cores."""

    def __init__(self, *pids: int) -> None:
        self._pids, self._others, self._begin = pids, Others(), time.perf_counter()
        self._used = sum(map(cpu_seconds, pids))

    def seconds(self) -> float:
        """CPU time of the processes."""
        return sum(map(cpu_seconds, self._pids)) - self._used

    def others(self) -> float:
        """Cores that others used."""
        took = time.perf_counter() - self._begin
        return max(0.0, (self._others.cores() or 0.0) - self.seconds() / took)


def run(command: str, repeats: int, quotas: Sequence[int] = QUOTAS) -> None:
    """Prints the table. Raises NoGroups."""
    rng, runs = random.Random(time.time_ns()), {quota: Run() for quota in quotas}
    with contextlib.ExitStack() as stack:
        groups = {q: stack.enter_context(group(f"tailrace-bench-{os.getpid()}-{q}", q)) for q in quotas}
        servers = {}
        for quota in quotas:
            servers[quota] = serve.Server(f"{quota} %", groups[quota].enter(command))
            stack.callback(servers[quota].stop)
            servers[quota].signal(signal.SIGSTOP)
        for _ in range(repeats):
            for quota, server in servers.items():
                server.signal(signal.SIGCONT)
                prompt = serve.ids(32, rng)
                time.sleep(2 * PERIOD / 1e6)  # what it has left of the period in which it was stopped
                usage, waited = Usage(server.process.pid), groups[quota].throttled()
                came = serve.complete(server.port, server.model, prompt, TOKENS)
                runs[quota].rates.append((TOKENS - 1) / (came[-1] - came[0]))
                runs[quota].cpu.append(usage.seconds() / TOKENS)
                runs[quota].others.append(usage.others())
                runs[quota].gaps.append(max(b - a for a, b in itertools.pairwise(came)))
                runs[quota].waits.append(groups[quota].throttled() - waited)
                server.signal(signal.SIGSTOP)
    show(runs)


def show(runs: dict[int, Run]) -> None:
    """The first one is what the others are held against."""
    first = next(iter(runs))
    print(f"{usable_cores()} cores without a quota; one stream, {TOKENS} tokens, medians of {len(runs[first].rates)}\n")
    print(f"{'quota':>6}{'tokens/s':>10}{'of first':>10}{'in proportion':>15}{'CPU ms/token':>14}{'longest gap ms':>16}"
          f"{'throttled s':>13}{'cores of others':>17}")  # fmt: skip
    for quota, found in runs.items():
        ratios = [a / b for a, b in zip(found.rates, runs[first].rates, strict=True)]
        print(f"{quota:5}%{statistics.median(found.rates):10.1f}{statistics.median(ratios):10.2f}{quota / first:15.2f}"
              f"{statistics.median(found.cpu) * 1e3:14.2f}{statistics.median(found.gaps) * 1e3:16.1f}"
              f"{statistics.median(found.waits):13.2f}{statistics.median(found.others):17.1f}")  # fmt: skip
