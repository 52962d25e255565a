"""The part of the report that shows engines side by side: the choice first, then all that speaks for and against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from tailrace.measure import metrics
from tailrace.measure.engines import judge
from tailrace.measure.record import Outcome, Record
from tailrace.measure.report import page, sides, words
from tailrace.measure.report.curves import forest
from tailrace.measure.report.plots import count, distribution
from tailrace.measure.report.svg import Axis, Plot, axis
from tailrace.measure.result import Bench

COLOURS = 8
SHOWN = ("output tokens/s", "TTFT, median", "TPOT, median", "E2E, median", "CPU seconds a token", "memory",
         "start to first token")  # fmt: skip
"""Metrics of the plot of ratios."""


def html(bench: Bench) -> list[str]:
    """Its sections."""
    parts = []
    if bench.decision is not None:
        kind = "good" if bench.decision.chosen is not None else ""
        parts.append(f"<h2{f' class={kind}' if kind else ''}>{escape(sides.headline(bench.decision))}</h2>")
        parts.append(f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in bench.decision.reasons)}</ul>")
    heads, rows = sides.table(bench)
    if rows and len(heads) > 1:
        parts += ["<h2>Medians of the turns</h2>", page.table(heads, rows)]
    parts.append(page.plots([*_plots(bench)]))
    if bench.differences:
        parts += [f"<h2>Against {escape(sides.reference(bench))}</h2>", page.table(*sides.ratios(bench))]
    parts.append("<h2>What was run</h2>")
    for label, told, command in sides.configurations(bench):
        shown = f"<br><code>{escape(command)}</code>" if command else ""
        parts.append(f"<p class=command><b>{escape(label)}</b> {escape(told)}{shown}</p>")
    heads, rows = words.levels(bench)
    return [*parts, "<h2>Every turn</h2>", page.table(["turn", *heads[1:]], rows)]


def _plots(bench: Bench) -> Iterator[str]:
    colours = {side.label: f"c{place % COLOURS}" for place, side in enumerate(sides.measured(bench))}
    found = [one for one in sides.against(bench) if one.metric in SHOWN]
    for other in dict.fromkeys(one.sides[1] for one in found):
        yield forest([one for one in found if one.sides[1] == other])
    goal = bench.decision.goal if bench.decision is not None else SHOWN[0]
    yield from _turns(bench, goal, colours)
    for title, of, bound, caption in (
        ("Time to first token", metrics.ttft, "ttft", "The share of requests whose first token came within a time."),
        ("Time per output token", metrics.tpot, "tpot", "The share of requests with no more time a token than that."),
        ("End to end", metrics.e2e, "e2e", "The share of requests that were answered within a time."),
    ):
        lines = [
            (colour, label, values)
            for label, colour in colours.items() if (values := _values(bench, label, of))
        ]  # fmt: skip
        if lines:
            limit = bench.slo.bounds.get(bound) if bench.slo is not None else None
            yield distribution(title, lines, limit, f"{caption} All turns together.")
    for metric in ("memory", "CPU seconds a token"):
        if metric != goal:
            yield from _turns(bench, metric, colours)


def _values(bench: Bench, label: str, of: Callable[[Record], float | None]) -> Sequence[float]:
    side = next(side for side in bench.sides if side.label == label)
    records = (record for turn in side.turns if turn.run is not None for record in bench.runs[turn.run].records)
    good = (record for record in records if record.measured and record.outcome is Outcome.OK)
    return [value for record in good if (value := of(record)) is not None]


def _turns(bench: Bench, metric: str, colours: dict[str, str]) -> Iterator[str]:
    """A metric turn by turn: how far engines are apart, beside how far turns of one are."""
    lines = {side.label: sides.turns_of(bench, side, metric) for side in sides.measured(bench)}
    every = [value for points in lines.values() for _, value in points]
    if not every:
        return
    last = max(number for points in lines.values() for number, _ in points)
    unit, show = metric, (lambda value: words.amount(metric, value))
    if metric == "memory":
        unit, show = "MiB", count
        lines = {label: [(number, value / 2**20) for number, value in points] for label, points in lines.items()}
        every = [value / 2**20 for value in every]
    plot = Plot(
        Axis("turn", 0.6, last + 0.4, lambda value: f"{value:g}" if value == int(value) else ""),
        axis(unit, every, show), metric,
    )  # fmt: skip
    for label, points in lines.items():
        plot.line([(float(number), value) for number, value in points], colours[label], label, dots=True)
    better = "Less is better" if judge.METRICS[metric][0] else "More is better"
    yield page.figure(f"{metric}, turn by turn", str(plot), f"{better}. Where lines cross, the turns disagree.")
