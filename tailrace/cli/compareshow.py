"""What `tailrace compare` shows: which engines there are, what was measured of them, and the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.cli import benchshow
from tailrace.measure.report import sides
from tailrace.measure.result import Bench

if TYPE_CHECKING:
    from collections.abc import Sequence


def show(bench: Bench) -> None:
    """Everything, for people."""
    console = benchshow.console()
    if bench.runs:
        console.print(f"{sides.title(bench)}\n", style="bold", soft_wrap=True)
        benchshow.table(console, *sides.table(bench))
        console.print()
    if bench.differences:
        benchshow.table(console, *sides.ratios(bench))
        console.print()
    for label, told, command in sides.configurations(bench):
        console.print(f"{label:14}{told}", soft_wrap=True)
        if command:
            console.print(f"{'':14}{command}", style="dim", soft_wrap=True)
    if bench.decision is not None:
        console.print(f"\n{sides.headline(bench.decision)}", style="bold", soft_wrap=True)
        for reason in bench.decision.reasons:
            console.print(f"  - {reason}", soft_wrap=True)


def listing(found: Sequence[tuple[str, str, str, str]]) -> None:
    """Engines: name, version or nothing, where or why not, which models they take."""
    console = benchshow.console()
    for name, version, where, formats in found:
        console.print(f"{name:14}{version or 'not found':28}{where}", style=None if version else "dim", soft_wrap=True)
        console.print(f"{'':14}takes {formats}", style="dim", soft_wrap=True)
