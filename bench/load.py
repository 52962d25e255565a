"""What the load generator itself can do on one core, against a mock server on another: streams, tokens, lateness.

Poisson arrivals keep about so many streams going, each of 100 tokens, one a piece; the client's share of a core, the
processor time of a token, and how late requests were sent follow from its own records.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import uvloop

from tailrace.measure import load
from tailrace.measure.counting import Plan
from tailrace.measure.http import Pool, more_files
from tailrace.measure.load import Run
from tailrace.measure.summary import summarise
from tailrace.measure.target import Target
from tailrace.workload import make, spec
from tailrace.workload.arrivals import Poisson

TOKENS = 100
FIRST = 0.05
"""Seconds to the first token."""
LOADS = ((200, 2_000), (2_200, 22_000), (4_000, 40_000))
"""Streams at a time, and tokens a second of all of them."""


def once(streams: int, rate: float, seconds: float) -> tuple[Run, float]:
    """One run, and the processor seconds of this process for it."""
    gap = streams / rate
    life = FIRST + gap * (TOKENS - 1)
    command = [sys.executable, "-m", "tests.measure.mock", str(FIRST), str(gap)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}) as mock:
        assert mock.stdout is not None
        url = mock.stdout.readline().strip()
        workload = spec.parse(f"input = 32\noutput = {TOKENS}", "load")

        async def run() -> Run:
            pool = Pool(url)
            try:
                plan = Plan(Poisson(streams / life), seconds=seconds, warmup_seconds=life, sustain=False)
                return await load.run(pool, Target("mock", "completions", "ids"), make.sessions(workload), plan)
            finally:
                pool.close()

        begun = time.process_time()
        try:
            return uvloop.run(run()), time.process_time() - begun
        finally:
            mock.kill()


def run(loads: Sequence[tuple[int, float]] = LOADS, seconds: float = 10.0) -> None:
    """Prints the table."""
    more_files()
    names = ("streams", "at most", "tokens/s", "failed", "core", "us a token", "sent late p99", "loop late p99")
    print("".join(f"{name:>15}" for name in names))
    for streams, rate in loads:
        found, cpu = once(streams, rate, seconds)
        summary, client = summarise(found), found.client
        tokens = sum(len(record.chunks) for record in found.records)
        cells = [f"{streams:,}", f"{client.most_in_flight:,}", f"{summary.rates.output_tokens or 0:,.0f}",
                 str(summary.failures), f"{client.cpu:.0%}", f"{1e6 * cpu / tokens:.1f}",
                 f"{1000 * (client.dispatch_p99 or 0):.2f} ms", f"{1000 * client.lag_p99:.2f} ms"]  # fmt: skip
        print("".join(f"{cell:>15}" for cell in cells), flush=True)
