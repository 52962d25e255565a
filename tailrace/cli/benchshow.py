"""What `tailrace bench` shows: progress while it runs, and its results as text."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from tailrace.measure import result
from tailrace.measure.record import Outcome, Record
from tailrace.measure.report import words
from tailrace.measure.result import Bench, Measured

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.measure.counting import Plan

WIDE = 120
"""Columns that everything takes; in fewer, some are left out."""
RECENT = 5.0
"""Seconds over which the rate that progress shows is taken."""


class Progress:
    """A line on standard error while a run goes on. With `on` False it shows nothing."""

    def __init__(self, *, on: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn(),
            console=Console(stderr=True), disable=not on, refresh_per_second=4, transient=True,
        )  # fmt: skip
        self._on = on

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line above it; on plain standard error where it shows nothing."""
        if self._on:
            self._bars.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def begin(self, label: str, plan: Plan) -> Callable[[Record], object]:
        """A run begins; gives what is told of its records."""
        if not self._on:
            return lambda _: None
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        task = self._bars.add_task(label, total=plan.seconds or plan.sessions, said="warming up")
        recent: deque[tuple[float, int]] = deque()
        done = failed = 0
        begun = time.monotonic()

        def closed(record: Record) -> None:
            nonlocal done, failed, begun
            now = time.monotonic()
            recent.append((now, record.output_tokens or len(record.chunks)))
            while recent and recent[0][0] < now - RECENT:
                recent.popleft()
            if not record.measured:
                begun = begun if done else now
                return
            done += record.turn == 0
            failed += record.outcome is not Outcome.OK
            rate = sum(tokens for _, tokens in recent) / min(RECENT, max(now - begun, 1.0))
            said = f"{done:,} done" + (f", [red]{failed:,} failed[/red]" if failed else "") + f", {rate:,.0f} tokens/s"
            self._bars.update(task, completed=now - begun if plan.seconds else done, said=said)

        return closed


def as_json(bench: Bench) -> str:
    """Everything but the requests."""
    short = msgspec.structs.replace(bench, runs=[msgspec.structs.replace(run, records=[]) for run in bench.runs])
    return msgspec.json.format(msgspec.json.encode(short), indent=2).decode()


def write(bench: Bench, path: Path) -> None:
    """A file of what its name says: everything, a line a request, or the report. Raises InvalidInput."""
    if path.suffix == ".json":
        result.save(bench, path)
    elif path.suffix == ".csv":
        result.write(path, result.csv(bench.runs))
    else:
        from tailrace.measure.report.html import html

        result.write(path, html(bench).encode())


def console() -> Console:
    """Of standard output: as wide as the terminal, or wide enough for everything."""
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDE)


def show(bench: Bench) -> None:
    """Everything, for people."""
    if bench.kind == "engines":
        from tailrace.cli import compareshow

        compareshow.show(bench)
    else:
        _show(console(), bench)


def _show(console: Console, bench: Bench) -> None:
    if bench.kind in ("run", "import"):
        for run in bench.runs:
            _show_run(console, bench, run)
        return
    if not bench.runs:
        return
    first = bench.runs[0]
    console.print(f"{first.workload} on {first.model} at {first.url}\n", style="bold", soft_wrap=True)
    heads, rows = words.levels(bench)
    marked = words.chosen(bench)
    table(console, heads, [[row[0] + " *" if at == marked else row[0], *row[1:]] for at, row in enumerate(rows)])
    if finding := words.found(bench):
        console.print(f"\n{finding}", soft_wrap=True)
    if bench.differences:
        urls = list(dict.fromkeys(run.url for run in bench.runs))
        console.print(f"\nA is {urls[0]}, B is {urls[-1]}: medians, and the ratio of pairs\n", soft_wrap=True)
        table(console, *words.differences(bench))


def _show_run(console: Console, bench: Bench, run: Measured) -> None:
    summary = run.summary
    source = "" if run.source == "measured" else f" ({run.source})"
    console.print(f"{run.workload} on {run.model} at {run.url}, {run.load}{source}", style="bold", soft_wrap=True)
    short = " (interrupted)" if summary.interrupted else ""
    console.print(
        f"{summary.requests:,} requests in {summary.rates.seconds:.1f} s, {words.failed(run)}{short}\n",
        style="red" if summary.failures else None,
    )
    narrow = console.width < WIDE
    kept = [at for at, head in enumerate(words.HEADS) if not (narrow and head in ("p90", "95 % interval"))]
    rows = [[row[at] for at in kept] for row in words.latencies(run)]
    table(console, [words.HEADS[at] for at in kept], rows)
    console.print()
    lines = {"throughput": words.throughput(run), "goodput": words.goodput(bench, run)}
    if bench.price is not None:
        lines["cost"] = words.cost(result.cost(summary, bench.price))
    lines |= {"shape": words.shape(run), "phases": words.phases(run)}
    for name, text in lines.items():
        _line(console, name, text)
    for error, count in summary.errors.items():
        _line(console, "failed", f"{count:,} x {error}", "red")
    if run.source == "measured":
        _line(console, "client", words.verdict(run), "yellow" if summary.client.reasons else None)
    for note in run.notes:
        _line(console, "note", note, "yellow")
    console.print()


def _line(console: Console, name: str, text: str | None, style: str | None = None) -> None:
    if text is not None:
        console.print(f"{name:12}{text}", style=style, soft_wrap=True)


def table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Words on the left, numbers on the right."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, head in enumerate(heads):
        last = place == len(heads) - 1 and head != "n"
        table.add_column(head, justify="left" if not place or last else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
