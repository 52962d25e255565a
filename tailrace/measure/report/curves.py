"""The plots of several runs: latency, throughput, goodput and cost against load; A beside B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tailrace.measure import metrics, result
from tailrace.measure.record import Outcome
from tailrace.measure.report import page
from tailrace.measure.report.plots import count, distribution, share
from tailrace.measure.report.svg import Axis, Plot, axis
from tailrace.measure.report.words import NAMES, ms
from tailrace.measure.result import Bench, Difference, Measured


def of_levels(bench: Bench) -> Iterator[str]:
    """Everything against load."""
    runs = sorted(bench.runs, key=lambda run: run.level)
    if len(runs) < 2:
        return
    unit = "sessions a second" if runs[0].open_loop else "sessions at a time"
    mark = bench.runs[chosen].level if (chosen := _chosen(bench)) is not None else None
    bounds = bench.slo.bounds if bench.slo is not None else {}
    yield _latency(
        runs,
        "ttft",
        "c0",
        unit,
        mark,
        bounds.get("ttft"),
        "Median and 95th percentile with the interval of the median. Where it bends, a queue begins.",
    )
    yield _latency(
        runs,
        "tpot",
        "c2",
        unit,
        mark,
        bounds.get("tpot"),
        "More requests in one step make each step longer: the price of throughput.",
    )
    yield _throughput(runs, unit, mark)
    yield _trade(runs)
    if bench.slo is not None:
        yield _goodput(bench, runs, unit, mark)
    if bench.price is not None:
        yield _cost(bench.price, runs, unit, mark)


def _chosen(bench: Bench) -> int | None:
    if bench.found is not None:
        return bench.found.run
    return bench.knee.run if bench.knee is not None else None


def _levels(runs: Sequence[Measured], unit: str) -> Axis:
    levels = [run.level for run in runs]
    return axis(unit, levels, count, log=levels[-1] > 8 * levels[0])


def _latency(
    runs: Sequence[Measured], metric: str, colour: str, unit: str, mark: float | None, bound: float | None, said: str
) -> str:
    found = [(run.level, stat) for run in runs if (stat := run.summary.latency.get(metric)) is not None]
    tails = [(level, stat.quantiles["p95"]) for level, stat in found if "p95" in stat.quantiles]
    middles = [(level, stat.quantiles["p50"]) for level, stat in found if "p50" in stat.quantiles]
    values = [value for _, value in (*tails, *middles)] + ([bound] if bound is not None else [])
    wide = bool(values) and max(values) > 20 * max(min(values), 1e-9)
    plot = Plot(_levels(runs, unit), axis(NAMES[metric], values, ms, log=wide), f"{NAMES[metric]} against load")
    edges = [(level, stat.intervals["p50"]) for level, stat in found if "p50" in stat.intervals]
    plot.band([(level, low) for level, (low, _) in edges], [(level, high) for level, (_, high) in edges], colour)
    if mark is not None:
        plot.upright(mark, "c5")
    if bound is not None:
        plot.level(bound, "c6", f"SLO: {ms(bound)}")
    plot.line(tails, "c1", "p95", dots=True)
    plot.line(middles, colour, "median", dots=True)
    return page.figure(f"{NAMES[metric]} against load", str(plot), said)


def _throughput(runs: Sequence[Measured], unit: str, mark: float | None) -> str:
    points = [(run.level, value) for run in runs if (value := run.summary.rates.output_tokens) is not None]
    label = "output tokens/s"
    if not points:
        points, label = [(run.level, run.summary.rates.requests) for run in runs], "requests/s"
    plot = Plot(_levels(runs, unit), axis(label, [value for _, value in points], count), "Throughput against load")
    if mark is not None:
        plot.upright(mark, "c5")
    plot.line(points, "c1", dots=True)
    return page.figure("Throughput against load", str(plot), "Where it goes flat, the server has no more to give.")


def _trade(runs: Sequence[Measured]) -> str:
    points, levels = [], []
    for run in runs:
        stat, tokens = run.summary.latency.get("tpot"), run.summary.rates.output_tokens
        if stat is not None and tokens is not None and stat.quantiles.get("p50"):
            points.append((1 / stat.quantiles["p50"], tokens))
            levels.append(run.level)
    if not points:
        return ""
    plot = Plot(
        axis("tokens/s of one user (median)", [x for x, _ in points], count),
        axis("output tokens/s in all", [y for _, y in points], count),
        "Interactivity and throughput",
    )
    plot.line(points, "c3", dots=True)
    for place in {0, len(points) - 1}:
        plot.text(*points[place], f"{levels[place]:g}")
    return page.figure(
        "What one user's speed costs all", str(plot), "Up is cheap, right is quick; each mark is a level of load."
    )


def _goodput(bench: Bench, runs: Sequence[Measured], unit: str, mark: float | None) -> str:
    known = [(run.level, run.summary.goodput) for run in runs if run.summary.goodput is not None]
    plot = Plot(_levels(runs, unit), Axis("share of good requests", 0.0, 1.02, share), "Goodput")
    plot.band([(at, good.interval[0]) for at, good in known], [(at, good.interval[1]) for at, good in known], "c2")
    assert bench.slo is not None
    plot.level(bench.slo.share, "c6", f"wanted: {bench.slo.share:.4g}")
    if mark is not None:
        plot.upright(mark, "c5")
    plot.line([(at, good.attainment) for at, good in known], "c2", "kept every bound", dots=True)
    return page.figure("Keeping the SLO", str(plot), f"{bench.slo}. Failures are not good. The band is of 95 %.")


def _cost(price: float, runs: Sequence[Measured], unit: str, mark: float | None) -> str:
    known = [
        (run.level, value) for run in runs if (value := result.cost(run.summary, price).per_million_output) is not None
    ]
    plot = Plot(
        _levels(runs, unit),
        axis("$ a million output tokens", [value for _, value in known], lambda v: f"${v:g}"),
        "Cost against load",
    )
    if mark is not None:
        plot.upright(mark, "c5")
    plot.line(known, "c4", dots=True)
    return page.figure("Cost against load", str(plot), f"At ${price:g} an hour, idle time included.")


def of_pairs(bench: Bench) -> Iterator[str]:
    """A beside B."""
    if bench.differences:
        yield forest(bench.differences)
    for metric, title in (("ttft", "Time to first token"), ("tpot", "Time per output token")):
        lines = []
        for colour, side in (("c0", "A"), ("c1", "B")):
            of = {"ttft": metrics.ttft, "tpot": metrics.tpot}[metric]
            values = [
                value for run in bench.runs if run.label.startswith(f"{side} ") for record in run.records
                if record.measured and record.outcome is Outcome.OK and (value := of(record)) is not None
            ]  # fmt: skip
            if values:
                lines.append((colour, side, values))
        if len(lines) == 2:
            yield distribution(title, lines, None, "All runs together; the share of requests within a time.")


def forest(found: Sequence[Difference]) -> str:
    """Ratios of the second side over the first, a line each."""
    first, second = found[0].sides
    edges = [edge for one in found for edge in one.ratio.interval]
    far = max(1.05, *(max(edge, 1 / edge) for edge in edges))
    plot = Plot(
        Axis(f"{second} / {first}", 1 / far / 1.02, far * 1.02, lambda v: f"{v:.3g}", True),
        Axis("", -0.6, len(found) - 0.4, lambda v: ""),
        "Ratios",
    )
    plot.upright(1.0, "c5")
    for place, one in enumerate(reversed(found)):
        colour = "c5" if not one.sure else "c2" if (one.ratio.ratio < 1) == one.less_is_better else "c6"
        plot.line([(edge, place) for edge in one.ratio.interval], colour)
        plot.scatter([(one.ratio.ratio, place)], colour, size=4.0)
        plot.text(one.ratio.ratio, place, one.metric)
    caption = (
        f"Medians of pairs and their intervals: green where {second} is surely better, red where {first} is, grey "
        "where these runs cannot tell."
    )
    return page.figure(f"{second} over {first}", str(plot), caption)
