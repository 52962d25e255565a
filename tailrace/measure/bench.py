"""Measurements of more than one run: several levels of load, the highest that keeps an SLO, A against B."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from tailrace.measure import load, statistics
from tailrace.measure.counting import Plan
from tailrace.measure.http import Pool
from tailrace.measure.record import Record
from tailrace.measure.result import Difference, Found, Knee, Measured
from tailrace.measure.slo import Slo
from tailrace.measure.summary import Summary, summarise
from tailrace.measure.target import Target
from tailrace.workload import make
from tailrace.workload.arrivals import Arrivals, Closed, Constant, Gamma, Poisson, Ramp, scaled
from tailrace.workload.spec import Workload

T = TypeVar("T")
Observe = Callable[[Record], object]
CLOSE = 1.06
"""A search ends when the lowest load that failed is this much above the highest that held."""
MOST_RUNS = 16


@dataclass(frozen=True)
class Bed:
    """A server that was prepared, and what it is asked. `begin` is told the label of each run before it begins, and
    gives what gets its records."""

    pool: Pool
    target: Target
    workload: Workload
    plan: Plan
    slo: Slo | None = None
    label: str = ""
    notes: tuple[str, ...] = ()
    begin: Callable[[str, Plan], Observe] = lambda _label, _plan: lambda _record: None


async def once(bed: Bed, seed: int | None = None) -> Measured:
    """One run. `seed` is another than the plan's, where each run is to have prompts of its own."""
    plan = bed.plan if seed is None else replace(bed.plan, seed=seed)
    label = bed.label or spoken(plan.arrivals)
    with _undisturbed():
        run = await load.run(bed.pool, bed.target, make.sessions(bed.workload, plan.seed), plan, bed.begin(label, plan))
    return Measured(
        label=label, url=bed.pool.url, model=bed.target.model, workload=bed.workload.name,
        load=spoken(plan.arrivals), level=level(plan.arrivals), open_loop=run.open_loop,
        summary=summarise(run, bed.slo), began=run.began, window=run.window, records=run.records,
        notes=list(bed.notes),
    )  # fmt: skip


async def sweep(bed: Bed, levels: Sequence[float]) -> tuple[list[Measured], Knee | None]:
    """A run at each level, and where the knee is."""
    runs = []
    for number, at in enumerate(levels):
        runs.append(await once(_at(bed, at), bed.plan.seed + number))
        if runs[-1].summary.interrupted:
            break
    return runs, knee(runs)


def knee(runs: Sequence[Measured]) -> Knee | None:
    """The level furthest above the straight line from the first to the last, in throughput over load, each scaled to 1
    (Satopaa et al. 2011). None with fewer than four levels, or where nothing bends."""
    order = sorted(range(len(runs)), key=lambda place: runs[place].level)
    if len(order) < 4:
        return None
    x = np.array([runs[place].level for place in order])
    y = np.array([_throughput(runs[place].summary) for place in order])
    if x[-1] <= x[0] or y.max() <= y[0]:
        return None
    above = (y - y[0]) / (y.max() - y[0]) - (x - x[0]) / (x[-1] - x[0])
    best = int(np.argmax(above))
    return Knee(float(x[best]), order[best]) if above[best] > 0.05 else None


def _throughput(summary: Summary) -> float:
    tokens = summary.rates.output_tokens
    return summary.rates.requests if tokens is None else tokens


async def search(bed: Bed, low: float, high: float) -> tuple[list[Measured], Found]:
    """The highest level between `low` and `high` at which the SLO holds, by bisection. A level at which the interval of
    the attainment holds what is wanted is neither surely good nor surely bad: it widens the interval of the answer."""
    assert bed.slo is not None
    runs: list[Measured] = []

    async def holds(at: float) -> bool:
        runs.append(await once(_at(bed, at), bed.plan.seed + len(runs)))
        goodput = runs[-1].summary.goodput
        return goodput is not None and goodput.met

    whole = isinstance(bed.plan.arrivals, Closed)
    if await holds(low) and not _stopped(runs):
        if await holds(high):
            low = high
        while high / low > CLOSE and high - low > (1 if whole else 0) and len(runs) < MOST_RUNS and not _stopped(runs):
            middle = round((low + high) / 2) if whole else (low * high) ** 0.5
            if await holds(middle):
                low = middle
            else:
                high = middle
    return runs, found(runs, bed.slo)


def _stopped(runs: Sequence[Measured]) -> bool:
    return runs[-1].summary.interrupted


def found(runs: Sequence[Measured], slo: Slo) -> Found:
    """The best run that met the SLO, and between which levels the truth lies."""
    best, sure, bad = None, 0.0, float("inf")
    for number, run in enumerate(runs):
        goodput = run.summary.goodput
        if goodput is None:
            continue
        if goodput.met and (best is None or run.level > runs[best].level):
            best = number
        if goodput.interval[0] >= slo.share:
            sure = max(sure, run.level)
        if goodput.interval[1] < slo.share:
            bad = min(bad, run.level)
    if best is None:
        return Found(None, None, (0.0, bad), None)
    goodput = runs[best].summary.goodput
    return Found(runs[best].level, goodput.per_second if goodput else None, (min(sure, bad), bad), best)


async def compare(a: Bed, b: Bed, pairs: int) -> tuple[list[Measured], list[Difference]]:
    """`pairs` short runs of each, in turn (A B B A ...), the two of a pair with the same sessions; and what differs."""
    runs: list[Measured] = []
    for number in range(pairs):
        for bed in (a, b) if number % 2 == 0 else (b, a):
            runs.append(await once(replace(bed, label=f"{bed.label} {number + 1}"), a.plan.seed + number))
            if _stopped(runs):
                return runs, differences(runs[: number * 2])
    return runs, differences(runs)


COMPARED: dict[str, tuple[bool, Callable[[Summary], float | None]]] = {
    "TTFT, median": (True, lambda s: _of(s, "ttft", "p50")),
    "TTFT, p95": (True, lambda s: _of(s, "ttft", "p95")),
    "TPOT, median": (True, lambda s: _of(s, "tpot", "p50")),
    "ITL, p99": (True, lambda s: _of(s, "itl", "p99")),
    "E2E, median": (True, lambda s: _of(s, "e2e", "p50")),
    "output tokens/s": (False, lambda s: s.rates.output_tokens),
    "requests/s": (False, lambda s: s.rates.requests),
    "goodput": (False, lambda s: s.goodput.per_second if s.goodput is not None else None),
}


def _of(summary: Summary, metric: str, quantile: str) -> float | None:
    stat = summary.latency[metric]
    return stat.quantiles[quantile] if stat is not None else None


def differences(runs: Sequence[Measured]) -> list[Difference]:
    """Of runs in the order A B B A A B ...; a metric that some run has not, or is 0 in one, is left out."""
    made = []
    flipped = [runs[place : place + 2] for place in range(0, len(runs) - 1, 2)]
    sides = [pair if number % 2 == 0 else pair[::-1] for number, pair in enumerate(flipped)]
    for name, (less, value) in COMPARED.items():
        found = [(value(first.summary), value(second.summary)) for first, second in sides]
        known = [(first, second) for first, second in found if first and second]
        if known and len(known) == len(found):
            a, b = ([pair[side] for pair in known] for side in (0, 1))
            made.append(Difference(name, less, float(np.median(a)), float(np.median(b)), statistics.ratio(a, b)))
    return made


def _at(bed: Bed, at: float) -> Bed:
    arrivals = scaled(bed.plan.arrivals, at)
    warmup = bed.plan.warmup
    if (
        isinstance(arrivals, Closed)
        and isinstance(bed.plan.arrivals, Closed)
        and warmup == bed.plan.arrivals.concurrency
    ):
        warmup = arrivals.concurrency
    return replace(bed, plan=replace(bed.plan, arrivals=arrivals, warmup=warmup), label="")


def level(arrivals: Arrivals) -> float:
    """The number of a load: sessions at a time, sessions a second, or times the recorded speed."""
    match arrivals:
        case Closed(concurrency):
            return concurrency
        case Ramp(_, last, _):
            return last
        case Constant(rate) | Poisson(rate) | Gamma(rate, _):
            return rate
        case _:
            return arrivals.speed


def spoken(arrivals: Arrivals) -> str:
    """A load in words."""
    match arrivals:
        case Closed(concurrency):
            return f"{concurrency} at a time"
        case Constant(rate):
            return f"{rate:.4g} a second, evenly"
        case Poisson(rate):
            return f"{rate:.4g} a second"
        case Gamma(rate, burstiness):
            return f"{rate:.4g} a second, burstiness {burstiness:g}"
        case Ramp(first, last, seconds):
            return f"{first:g} to {last:g} a second in {seconds:g} s"
        case _:
            return f"as recorded, {arrivals.speed:g} times as fast"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collections over what was there before, and few over what comes."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Runs it on uvloop; Ctrl-C cancels it, so that it may end with what it has."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
