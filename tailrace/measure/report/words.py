"""Numbers and findings in words, the same in the terminal and on the page."""

from __future__ import annotations

from tailrace.measure.result import Bench, Cost, Difference, Measured
from tailrace.measure.statistics import Stat

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "gap": "chunk gap", "e2e": "E2E"}
HEADS = ("", "mean", "p50", "95 % interval", "p90", "p95", "p99", "95 % interval", "n")
"""Of the table of latencies."""


def ms(seconds: float) -> str:
    """A time with three digits: 12.3 ms, 1.23 s."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def rate(value: float | None) -> str:
    """A number a second, or that it is not known."""
    if value is None:
        return "not known"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(amount: float) -> str:
    """Bytes, in the binary unit that leaves few digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def latencies(run: Measured) -> list[list[str]]:
    """The table's rows under `HEADS`."""
    rows = []
    for metric, name in NAMES.items():
        if metric == "gap" and run.summary.itl_basis == "tokens":
            continue  # it would be the same
        from_usage = metric == "itl" and run.summary.itl_basis == "usage" and run.source == "measured"
        rows.append([name + (" (from usage)" if from_usage else ""), *_cells(run.summary.latency.get(metric))])
    return rows


def _cells(stat: Stat | None) -> list[str]:
    if stat is None:
        return ["not defined", *[""] * 7]

    def interval(name: str) -> str:
        return " to ".join(map(ms, stat.intervals[name])) if name in stat.intervals else ""

    def quantile(name: str) -> str:
        return ms(stat.quantiles[name]) if name in stat.quantiles else ""

    return [ms(stat.mean), quantile("p50"), interval("p50"), quantile("p90"), quantile("p95"), quantile("p99"),
            interval("p99"), f"{stat.n:,}"]  # fmt: skip


def quantile(run: Measured, metric: str, name: str) -> str:
    """One of a metric, empty where there is none."""
    stat = run.summary.latency.get(metric)
    return ms(stat.quantiles[name]) if stat is not None and name in stat.quantiles else ""


def levels(bench: Bench) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a table with a run a line."""
    heads = ["load", "n", "failed", "TTFT p50", "p95", "TPOT p50", "E2E p50", "tokens/s", "requests/s"]
    heads += ["good", "95 % interval"] if bench.slo is not None else []
    rows = []
    for run in bench.runs:
        summary = run.summary
        cells = [
            run.label, f"{summary.requests:,}", f"{summary.failures:,}", quantile(run, "ttft", "p50"),
            quantile(run, "ttft", "p95"), quantile(run, "tpot", "p50"), quantile(run, "e2e", "p50"),
            rate(summary.rates.output_tokens), rate(summary.rates.requests),
        ]  # fmt: skip
        if summary.goodput is not None:
            low, high = summary.goodput.interval
            cells += [f"{summary.goodput.attainment:.1%}", f"{low:.1%} to {high:.1%}"]
        rows.append([*cells, "may be the bottleneck" if summary.client.reasons else ""])
    return [*heads, "client"], rows


def chosen(bench: Bench) -> int | None:
    """The run that was looked for: the knee, or the best."""
    if bench.found is not None:
        return bench.found.run
    return bench.knee.run if bench.knee is not None else None


def failed(run: Measured) -> str:
    """How many requests failed."""
    failures = run.summary.failures
    return f"{failures:,} of {run.summary.requests:,} failed" if failures else "none failed"


def throughput(run: Measured) -> str:
    """What it gives a second."""
    rates = run.summary.rates
    peak = "" if rates.peak_output_tokens is None else f" (peak {rate(rates.peak_output_tokens)})"
    return (
        f"{rate(rates.output_tokens)} output tokens/s{peak}, {rate(rates.total_tokens)} in all, "
        f"{rate(rates.requests)} requests/s"
    )


def goodput(bench: Bench, run: Measured) -> str | None:
    """How many kept the SLO; None where there is none."""
    good = run.summary.goodput
    if good is None or bench.slo is None:
        return None
    kept = ", ".join(f"{name} {share:.1%}" for name, share in good.kept.items())
    low, high = good.interval
    return (
        f"{rate(good.per_second)} requests/s; {good.attainment:.1%} ({low:.1%} to {high:.1%}) kept all of "
        f"{bench.slo}; of each: {kept}"
    )


def shape(run: Measured) -> str:
    """Tokens that were wanted and counted."""

    def counted(tokens: float | None) -> str:
        return "none" if tokens is None else f"{tokens:,.0f}"

    found = run.summary.shape
    return (
        f"{found.wanted_input:,.0f} tokens in and {found.wanted_output:,.0f} out wanted, {counted(found.input)} and "
        f"{counted(found.output)} counted by the server"
        + ("" if found.cached is None else f", {found.cached:.0%} of the input cached")
    )


def phases(run: Measured) -> str | None:
    """The server's own timeline, where it tells it."""
    total = sum(run.summary.phases.values())
    if not total:
        return None
    named = ", ".join(
        f"{name} {spent / total:.0%}" for name, spent in run.summary.phases.items() if spent > total / 200
    )
    return f"{named} of {ms(total)} (the server's own timeline)"


def cost(found: Cost) -> str:
    """Dollars of what is known."""
    parts = {
        "a million output tokens": found.per_million_output,
        "a million in all": found.per_million_total,
        "a thousand requests": found.per_thousand_requests,
        "a thousand good ones": found.per_thousand_good,
    }
    known = [f"${value:.3g} {name}" for name, value in parts.items() if value is not None]
    return f"{', '.join(known)} (idle time included)" if known else "not known"


def verdict(run: Measured) -> str:
    """Whether the client held things up."""
    client = run.summary.client
    if client.reasons:
        return "may have been the bottleneck: " + "; ".join(client.reasons)
    late = "" if client.dispatch_p99 is None else f", 99 % sent within {ms(client.dispatch_p99)} of when they were due"
    return f"not the bottleneck: {client.cpu:.0%} of a core{late}, {client.most_in_flight:,} in flight at most"


def found(bench: Bench) -> str | None:
    """What a search or a sweep came to."""
    if bench.knee is not None:
        return f"Knee at {bench.knee.level:g}: beyond it, more load costs latency and gives little."
    result = bench.found
    if result is None:
        return None
    if result.level is None:
        return f"No load kept {bench.slo}."
    low, high = result.interval
    above = "how much more is not known" if high == float("inf") else f"at {high:.4g} it surely is not"
    return (
        f"{result.level:.4g} is the highest load that kept {bench.slo}: {rate(result.goodput)} good requests/s. "
        f"At {low:.4g} it surely is kept, {above} (95 %)."
    )


def better(difference: Difference) -> str:
    """Which is better, where that is sure."""
    if not difference.sure:
        return "no sure difference"
    first, second = difference.sides
    return f"{second if (difference.ratio.ratio < 1.0) == difference.less_is_better else first} is better"


def differences(bench: Bench) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a comparison."""
    rows = []
    for one in bench.differences:
        show = ms if one.less_is_better else rate
        low, high = one.ratio.interval
        rows.append(
            [
                one.metric,
                show(one.a),
                show(one.b),
                f"{one.ratio.ratio:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{one.ratio.p:.2g}",
                str(one.ratio.pairs),
                better(one),
            ]
        )
    return ["", "A", "B", "B / A", "95 % interval", "p", "pairs", ""], rows


def amount(metric: str, value: float) -> str:
    """A value of a metric of a comparison, with its unit where the metric's name has none."""
    if metric == "memory":
        return f"{value / 2**20:,.0f} MiB"
    if metric.startswith("$"):
        return f"${value:.3g}"
    if metric == "CPU seconds a token" or metric.startswith(("TTFT", "TPOT", "ITL", "E2E", "start")):
        return ms(value)
    return rate(value)
