"""What a run comes to: rates over the steady window, latencies of the measured requests, failures beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tailrace.measure import metrics, statistics
from tailrace.measure.load import Run
from tailrace.measure.record import Outcome, Record
from tailrace.measure.slo import Slo
from tailrace.measure.statistics import Interval, Stat
from tailrace.measure.watch import Client

BIN = 1.0
"""Seconds over which a peak is taken, at least."""


class Rates(msgspec.Struct, frozen=True):
    """Per second of the steady window, `seconds` long. Tokens are None where the server counts none. `peak` is the best
    second, or longer bin; input tokens count when the first token after them comes."""

    seconds: float
    requests: float
    output_tokens: float | None
    peak_output_tokens: float | None
    total_tokens: float | None
    chunks: float


class Goodput(msgspec.Struct, frozen=True):
    """`per_second`: requests that kept every bound. `attainment`: the share of all measured requests that did, failures
    among the others, with its interval. `kept`: the share of each bound alone."""

    per_second: float
    attainment: float
    interval: Interval
    kept: dict[str, float]
    met: bool


class Shape(msgspec.Struct, frozen=True):
    """Tokens a request, mean: asked for and got, as the server counted; `cached` is the share of input tokens that were
    found in a cache. None where the server says nothing."""

    wanted_input: float
    wanted_output: float
    input: float | None
    output: float | None
    cached: float | None


class Summary(msgspec.Struct, frozen=True):
    """All of it. Times in seconds. `itl_basis`: "tokens" where pieces were tokens, "usage" where only the mean of a
    request is known."""

    requests: int
    outcomes: dict[str, int]
    errors: dict[str, int]
    rates: Rates
    latency: dict[str, Stat | None]
    itl_basis: str
    shape: Shape
    phases: dict[str, float]
    """Mean seconds a request of each phase of the server's own timeline."""
    goodput: Goodput | None
    client: Client
    interrupted: bool = False

    @property
    def failures(self) -> int:
        """Measured requests that were not answered completely."""
        return self.requests - self.outcomes.get(Outcome.OK, 0)


def summarise(run: Run, slo: Slo | None = None) -> Summary:
    """The summary of a run."""
    measured = run.measured
    good = [record for record in measured if record.outcome is Outcome.OK]
    basis = "tokens" if metrics.by_token(good) else "usage"
    gaps = [metrics.gaps(record) for record in good]
    return Summary(
        requests=len(measured),
        outcomes=dict(Counter(record.outcome.value for record in measured)),
        errors=dict(Counter(record.error for record in measured if record.error).most_common(10)),
        rates=rates(run),
        latency={
            "ttft": _each(good, metrics.ttft), "tpot": _each(good, metrics.tpot), "e2e": _each(good, metrics.e2e),
            "itl": statistics.describe(gaps) if basis == "tokens" else _each(good, metrics.tpot),
            "gap": statistics.describe(gaps),
        },
        itl_basis=basis, shape=_shape(measured, good), phases=_phases(good),
        goodput=None if slo is None else _goodput(run, slo), client=run.client, interrupted=run.interrupted,
    )  # fmt: skip


def _each(records: Sequence[Record], metric: Callable[[Record], float | None]) -> Stat | None:
    """One value a request."""
    values = [value for value in map(metric, records) if value is not None]
    return statistics.describe([(value,) for value in values], undefined=len(records) - len(values))


def rates(run: Run) -> Rates:
    """What came in the window, whichever request it belongs to; of requests that failed, nothing counts."""
    begin, end = run.window
    seconds = max(end - begin, 1e-9)
    counted = [record for record in run.records if record.outcome in (Outcome.OK, Outcome.STOPPED)]
    per_chunk = tokens_per_chunk(counted)
    times, weights, inputs = [], [], 0
    for record in counted:
        inside = [at for at in record.chunks if begin <= at <= end]
        times += inside
        weights += [_weight(record, per_chunk)] * len(inside)
        if record.chunks and begin <= record.chunks[0] <= end:
            inputs += record.input_tokens or record.wanted_input
    output = float(sum(weights)) if per_chunk is not None else None
    bins = np.histogram(times, max(1, int(seconds / BIN)), (begin, begin + seconds), weights=weights)[0]
    done = sum(record.outcome is Outcome.OK and begin <= (record.ended or 0.0) <= end for record in run.records)
    return Rates(
        seconds=seconds, requests=done / seconds, output_tokens=None if output is None else output / seconds,
        peak_output_tokens=None if output is None else float(bins.max()) * len(bins) / seconds,
        total_tokens=None if output is None else (output + inputs) / seconds, chunks=len(times) / seconds,
    )  # fmt: skip


def tokens_per_chunk(records: Sequence[Record]) -> float | None:
    """How many tokens a piece has, of the requests whose tokens the server counted; None where there are none."""
    counted = [record for record in records if record.output_tokens is not None and record.chunks]
    pieces = sum(len(record.chunks) for record in counted)
    return sum(record.output_tokens or 0 for record in counted) / pieces if pieces else None


def _weight(record: Record, per_chunk: float | None) -> float:
    """Tokens of one piece of a request: its own usage, spread evenly; of one without, as many as others have."""
    if record.output_tokens is None:
        return per_chunk if per_chunk is not None else 1.0
    return record.output_tokens / len(record.chunks)


def _shape(measured: Sequence[Record], good: Sequence[Record]) -> Shape:
    def mean(values: Sequence[int | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    cached = [record for record in good if record.cached_tokens is not None and record.input_tokens]
    total = sum(record.input_tokens or 0 for record in cached)
    return Shape(
        wanted_input=mean([record.wanted_input for record in measured]) or 0.0,
        wanted_output=mean([record.wanted_output for record in measured]) or 0.0,
        input=mean([record.input_tokens for record in good]), output=mean([record.output_tokens for record in good]),
        cached=sum(record.cached_tokens or 0 for record in cached) / total if total else None,
    )  # fmt: skip


def _phases(good: Sequence[Record]) -> dict[str, float]:
    told = [record.phases for record in good if record.phases]
    names = dict.fromkeys(name for phases in told for name in phases)
    return {name: sum(phases.get(name, 0.0) for phases in told) / len(told) for name in names}


def _goodput(run: Run, slo: Slo) -> Goodput:
    begin, end = run.window
    measured = run.measured
    kept = sum(map(slo.good, measured))
    passed = sum(begin <= (record.ended or 0.0) <= end and slo.good(record) for record in run.records)
    total = len(measured)
    return Goodput(
        per_second=passed / max(end - begin, 1e-9), attainment=kept / total if total else 0.0,
        interval=statistics.share(kept, total),
        kept={
            name: sum(map(Slo({name: bound}).good, measured)) / total if total else 0.0
            for name, bound in slo.bounds.items()
        },
        met=bool(total) and kept / total >= slo.share,
    )  # fmt: skip
