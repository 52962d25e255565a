"""Decoding one stream through HTTP beside a process that spins on one of the cores, and without it, in turns; where
another server is named, the same of that one. The servers that are not measured are stopped meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from bench import serve
from bench.quota import Usage

TOKENS = 128
"""Of one measurement."""


@contextlib.contextmanager
def spinner() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is busy on the last core that this one may use; stopped at first."""
    core = max(os.sched_getaffinity(0))
    command = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"]
    process = subprocess.Popen(command)
    process.send_signal(signal.SIGSTOP)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def decode_rate(server: serve.Server, rng: random.Random) -> float:
    """Tokens a second after the first."""
    came = serve.complete(server.port, server.model, serve.ids(32, rng), TOKENS)
    return (TOKENS - 1) / (came[-1] - came[0])


def run(commands: list[str], repeats: int) -> None:
    """Prints the table: the first command line is ours."""
    rng = random.Random(time.time_ns())
    rates: list[tuple[list[float], list[float]]] = [([], []) for _ in commands]  # without it and beside it
    others = []
    with contextlib.ExitStack() as stack:
        servers = []
        for i, command in enumerate(commands):
            servers.append(serve.Server(f"server {i + 1}", command))
            stack.callback(servers[-1].stop)
            servers[-1].signal(signal.SIGSTOP)
        busy = stack.enter_context(spinner())
        for repeat in range(repeats):
            for server, found in zip(servers, rates, strict=True):
                server.signal(signal.SIGCONT)
                decode_rate(server, rng)  # it has been asleep
                for beside in (False, True) if repeat % 2 == 0 else (True, False):
                    busy.send_signal(signal.SIGCONT if beside else signal.SIGSTOP)
                    usage = Usage(server.process.pid, busy.pid)
                    found[beside].append(decode_rate(server, rng))
                    others.append(usage.others())
                busy.send_signal(signal.SIGSTOP)
                server.signal(signal.SIGSTOP)
    show([s.label for s in servers], rates)
    print(f"\nothers used {statistics.median(others):.1f} cores meanwhile")


def show(labels: list[str], rates: list[tuple[list[float], list[float]]]) -> None:
    """Medians, and the ratios of pairs that were measured one after the other."""
    print(f"tokens/s of one stream, {TOKENS} tokens, {len(rates[0][0])} pairs\n")
    print(f"{'':12}{'alone':>10}{'beside':>10}   beside / alone (pairs)")
    for label, (alone, beside) in zip(labels, rates, strict=True):
        ratios = sorted(b / a for a, b in zip(alone, beside, strict=True))
        print(f"{label:12}{statistics.median(alone):10.1f}{statistics.median(beside):10.1f}   "
              f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")  # fmt: skip
    for label, (_, beside) in zip(labels[1:], rates[1:], strict=True):
        ratios = sorted(a / b for a, b in zip(rates[0][1], beside, strict=True))
        print(f"\nbeside it, {labels[0]} / {label}: {statistics.median(ratios):.2f} "
              f"({ratios[0]:.2f} to {ratios[-1]:.2f})")  # fmt: skip
