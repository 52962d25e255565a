"""The plots of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tailrace.measure import metrics
from tailrace.measure.record import Outcome, Record
from tailrace.measure.report import page
from tailrace.measure.report.svg import Axis, Plot, Point, axis, cumulative, legend, stack
from tailrace.measure.report.words import ms
from tailrace.measure.result import Bench, Measured
from tailrace.measure.summary import tokens_per_chunk

FEW = 5
"""Requests that one band of shapes must have."""


def share(value: float) -> str:
    """A share, as a tick."""
    return f"{value:.3g}".rstrip("0").rstrip(".") if value < 0.01 else f"{value:.0%}"


def count(value: float) -> str:
    """A number, as a tick."""
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def bytes_of(value: float) -> str:
    """Bytes, as a tick: decimal units, so that round numbers are."""
    power = next(power for power in (9, 6, 3, 0) if abs(value) >= 10**power or not power)
    return f"{value / 10**power:g} {({9: 'GB', 6: 'MB', 3: 'kB', 0: 'B'})[power]}"


def clock(value: float) -> str:
    """Seconds of a run, as a tick."""
    return f"{value:g} s"


def of_run(bench: Bench, run: Measured) -> Iterator[str]:
    """What its records can show; nothing where they were left out."""
    good = [record for record in run.records if record.measured and record.outcome is Outcome.OK]
    if not good:
        return
    ttft = [value for record in good if (value := metrics.ttft(record)) is not None]
    bounds = bench.slo.bounds if bench.slo is not None else {}
    yield distribution(
        "Time to first token",
        [("c0", "", ttft)],
        bounds.get("ttft"),
        "The share of requests whose first token came within a time.",
    )
    gaps = [gap for record in good for gap in metrics.gaps(record)]
    named = "Gaps between tokens (ITL)" if run.summary.itl_basis == "tokens" else "Chunk gaps"
    if gaps:
        what = "tokens" if run.summary.itl_basis == "tokens" else "pieces, each of one token or more"
        yield distribution(
            named,
            [("c2", "", gaps)],
            bounds.get("gap"),
            f"The share of gaps between {what} that were no longer than a time.",
        )
    yield _over_time(run)
    yield _flow(run)
    yield from _phases(run, good)
    if len({record.input_tokens or record.wanted_input for record in good}) > 3:
        yield _by_input(run, good)


def distribution(
    title: str, lines: Sequence[tuple[str, str, Sequence[float]]], bound: float | None, caption: str
) -> str:
    """Cumulative, on a logarithmic axis of time, with percentiles of the first line; `lines` are (colour, label,
    values)."""
    every = [value for _, _, values in lines for value in values if value > 0]
    x = axis("time", [*every, *([bound] if bound is not None else [])], ms, log=True)
    plot = Plot(x, Axis("share", 0.0, 1.02, share), title)
    if bound is not None:
        plot.upright(bound, "c6", f"SLO: {ms(bound)}")
    for colour, label, values in lines:
        plot.line(cumulative([max(value, x.low) for value in values]), colour, label)
    if len(lines) == 1:
        for quantile in (0.5, 0.95, 0.99):
            at = float(np.quantile(lines[0][2], quantile))
            plot.scatter([(max(at, x.low), quantile)], lines[0][0], size=3.5)
            if quantile != 0.95:
                plot.text(max(at, x.low), quantile, f"p{quantile * 100:.0f} {ms(at)}")
    return page.figure(title, str(plot), caption)


def _over_time(run: Measured) -> str:
    begin, end = run.window
    groups: dict[str, list[Point]] = {"c5": [], "c0": [], "c6": []}
    failed: list[float] = []
    for record in run.records:
        at, value = metrics.origin(record), metrics.ttft(record)
        if record.outcome in (Outcome.OK, Outcome.STOPPED):
            if at is not None and value is not None:
                groups["c0" if record.measured else "c5"].append((at, value))
        elif at is not None:
            failed.append(at)
    values = [value for points in groups.values() for _, value in points]
    last = max([at for points in groups.values() for at, _ in points] + failed, default=end)
    plot = Plot(axis("seconds from the beginning", [0.0, last], clock), axis("TTFT", values, ms), "TTFT over time")
    plot.shade(0.0, begin)
    if end < last:
        plot.shade(end, last)
    plot.scatter(groups["c5"], "c5", "not measured" if groups["c5"] else "")
    plot.scatter(groups["c0"], "c0", "measured")
    plot.scatter([(at, 0.0) for at in failed], "c6", "failed" if failed else "", size=3.5)
    return page.figure(
        "Time to first token over the run",
        str(plot),
        "Each request at the time at which it was due or sent. A rise means that a queue grew.",
    )


def _flow(run: Measured) -> str:
    """Tokens a second and requests in flight."""
    counted = [record for record in run.records if record.outcome in (Outcome.OK, Outcome.STOPPED)]
    per_chunk = tokens_per_chunk(counted) or 1.0
    end = max((record.chunks[-1] for record in counted if record.chunks), default=1.0)
    bins = max(1, min(120, int(end)))
    times = [at for record in counted for at in record.chunks]
    weights = [
        (record.output_tokens / len(record.chunks) if record.output_tokens is not None else per_chunk)
        for record in counted for _ in record.chunks
    ]  # fmt: skip
    made, edges = np.histogram(times, bins, (0.0, end), weights=weights)
    width = end / bins
    flow = [(float(edge + width / 2), float(value / width)) for edge, value in zip(edges[:-1], made, strict=True)]
    flights = _in_flight(run.records, [float(edge) for edge in edges])
    top = max(value for _, value in flow)
    most = max((value for _, value in flights), default=1.0) or 1.0
    plot = Plot(
        axis("seconds from the beginning", [0.0, end], clock), axis("output tokens/s", [0.0, top], count), "Flow"
    )
    plot.shade(0.0, run.window[0])
    if run.window[1] < end:
        plot.shade(run.window[1], end)
    plot.line([(at, value / most * top) for at, value in flights], "c5", f"in flight (scaled: the top is {most:g})")
    plot.line(flow, "c1", "output tokens/s")
    return page.figure("Throughput over the run", str(plot), "Rates are taken over the part that is not shaded.")


def _in_flight(records: Sequence[Record], at: Sequence[float]) -> list[Point]:
    begun = np.sort([record.sent for record in records if record.sent is not None])
    ended = np.sort([record.ended for record in records if record.sent is not None and record.ended is not None])
    return [(time, float(np.searchsorted(begun, time) - np.searchsorted(ended, time))) for time in at]


def _phases(run: Measured, good: Sequence[Record]) -> Iterator[str]:
    """Where the server says that the time went: on the whole, and by the length of the prompt."""
    told = [record for record in good if record.phases]
    if not told:
        return
    total = sum(run.summary.phases.values()) or 1.0
    names = [name for name, spent in run.summary.phases.items() if spent / total > 0.002]
    colours = {name: f"c{place % 8}" for place, name in enumerate(names)}
    rows = [("all requests", told)]
    told = sorted(told, key=lambda record: record.input_tokens or 0)
    lengths = [record.input_tokens or 0 for record in told]
    if lengths[-1] > 1.5 * lengths[0] and len(told) >= 4 * FEW:
        for part in np.array_split(np.arange(len(told)), 4):
            few = [told[place] for place in part]
            rows.append((f"{few[0].input_tokens:,} to {few[-1].input_tokens:,} tokens in", few))
    bars = []
    for label, records in rows:
        spent = {name: sum(record.phases.get(name, 0.0) for record in records) for name in names}
        whole = sum(spent.values()) or 1.0
        mean = ms(whole / len(records))
        parts = [(colours[name], value / whole, f"{name}: {ms(value / len(records))}") for name, value in spent.items()]
        bars.append((f"{label}: {mean}", parts))
    yield page.figure(
        "Where the server's time went",
        stack(bars) + legend([(colours[name], name) for name in names]),
        "The mean request's phases, from the server's own timeline of each, by the length of the prompt.",
    )


def _by_input(run: Measured, good: Sequence[Record]) -> str:
    points = [
        (float(record.input_tokens or record.wanted_input), value)
        for record in good if (value := metrics.ttft(record)) is not None
    ]  # fmt: skip
    plot = Plot(
        axis("input tokens", [x for x, _ in points], count), axis("TTFT", [y for _, y in points], ms), "TTFT by input"
    )
    plot.scatter(points, "c0")
    return page.figure(
        "Time to first token by the length of the prompt",
        str(plot),
        "What a prompt's tokens cost before the first word; what lies above the rest has waited.",
    )
