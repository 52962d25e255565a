"""What `tailrace lab` shows: how it goes on, then each experiment's numbers and what they say."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from tailrace.measure.lab.experiment import Mark, Verdict
from tailrace.measure.lab.perform import Chapter, Report

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.measure.lab.experiment import Lesson, Table

WIDE = 130
"""Columns where the output is no terminal."""
COLOURS = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.OPEN: "yellow"}


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being done, where that is a terminal."""
    from rich.console import Console

    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with Console(stderr=True).status("...") as status:
        yield lambda what: status.update(what)


def as_json(report: Report) -> bytes:
    """All of it but the plots."""

    def short(one: Chapter) -> Chapter:
        lesson = one.lesson and msgspec.structs.replace(one.lesson, figures=[])
        return msgspec.structs.replace(one, lesson=lesson)

    plain = msgspec.structs.replace(report, chapters=[short(one) for one in report.chapters])
    return msgspec.json.format(msgspec.json.encode(plain), indent=2)


def show(report: Report) -> None:
    """Everything but the plots, for people."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDE)
    console.print(f"{report.model} on {report.where}", style="bold", soft_wrap=True)
    for one in report.chapters:
        console.print(f"\n{one.name}: {one.question}", style="bold", soft_wrap=True)
        if one.lesson is None:
            console.print(f"Not done: {one.missing}", style="red", soft_wrap=True)
        else:
            _lesson(console, one.lesson)


def _lesson(console: Console, lesson: Lesson) -> None:
    console.print(lesson.did, style="dim", soft_wrap=True)
    for table in lesson.tables:
        _table(console, table)
    console.print()
    for finding in lesson.findings:
        mark = "" if finding.mark is Mark.MEASURED else f" [{finding.mark}]"
        console.print(f"- {finding.text}{mark}", soft_wrap=not console.is_terminal)
    for belief in lesson.beliefs:
        console.print(f"“{belief.says}” ", end="", soft_wrap=True)
        console.print(belief.verdict, style=COLOURS[belief.verdict], end=". ", soft_wrap=True)
        console.print(belief.because, style="dim", soft_wrap=True)
    for note in lesson.notes:
        console.print(note, style="dim", soft_wrap=not console.is_terminal)


def _table(console: Console, table: Table) -> None:
    from rich.table import Table as Grid

    console.print()
    made = Grid(box=None, header_style="bold", pad_edge=False)
    for place, head in enumerate(table.heads):
        made.add_column(head, justify="right" if place else "left")
    for row in table.rows:
        made.add_row(*row)
    console.print(made)
    if table.mark is not Mark.MEASURED:
        console.print(f"[{table.mark}]", style="dim")
