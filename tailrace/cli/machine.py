"""`tailrace machine`: what this machine gives at most, and how near a model's operations come to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli import output
from tailrace.cli.pull import complete

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.backends.cpu.machine import Ceilings, Roofline, StepPoints
    from tailrace.models import Checkpoint

BUSY = 0.1
"""Share of the cores that others may use before it is said."""

WIDE = 100
"""Columns that the whole table takes; with fewer, shapes are left out."""

LEGEND = """
Gop/s: billions of operations a second that were attained, two a multiply-add; op/byte: how many a byte that has to be
moved. Memory allows op/byte times the reading rate of where the bytes lie, arithmetic allows the rate of the fastest
instructions that give the same sums. The lower one holds the operation; share is how near it comes. Times are of the
best round; products are timed alone, the rest within the step.
"""


def command(
    model: Annotated[
        str | None,
        typer.Argument(help="A known name (it is pulled when absent), or a path. Default: smollm2-135m if it is here.",
                       autocompletion=complete),
    ] = None,
    only_ceilings: Annotated[bool, typer.Option("--ceilings", help="Only the ceilings; run no model.")] = False,
    context: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Tokens that each decoding sequence has behind it.")
    ] = 512,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="About how long the ceilings are measured, and then the model.")
    ] = 6.0,
    threads: Annotated[int | None, typer.Option(help="Most threads. Default: one a core.")] = None,
    kernels: Annotated[
        str | None, typer.Option(help="Instruction path, one that can run here. Default: the best.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:  # fmt: skip
    """Measure this machine's ceilings, and how near a model comes to them.

    Ceilings: reading, by number of threads and level of cache; multiply-adds of
    each kind; hand-overs between threads; page faults. Then the model's
    operations are timed, decoding one sequence and sixteen and computing a
    prompt of 512 tokens, and held against what bounds them. All of it is saved
    as machine.json in the cache. What else runs meanwhile makes it worse.

    [bold]Examples[/bold]

      tailrace machine
      tailrace machine --ceilings --threads 1
      tailrace machine ./model.gguf --context 2048 --json
    """
    from tailrace.backends.cpu.machine import measure, save, this_machine
    from tailrace.models import catalogue, open_checkpoint

    machine = this_machine(kernels, threads)
    path = None if only_ceilings else _model_path(model)
    checkpoint = open_checkpoint(path) if path is not None else None  # what is none is not found out after minutes
    with output.measuring() as report:
        ceilings = measure(machine, seconds=seconds, report=report)
        saved = save(catalogue.cache_dir(), ceilings)
        roofline = _roofline(checkpoint, ceilings, context, seconds, report) if checkpoint is not None else None
        if roofline is not None:
            saved = save(catalogue.cache_dir(), ceilings, roofline)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode({"ceilings": ceilings, "roofline": roofline}), indent=2))
        return
    show(ceilings, roofline, saved, hint=path is None and not only_ceilings)


def _model_path(model: str | None) -> Path | None:
    """Where the model lies; None where none is named and the default one is not here."""
    from tailrace.cli import serve
    from tailrace.models import catalogue

    if model is not None:
        return serve.find_model(model)
    return None if catalogue.missing(catalogue.DEFAULT) else catalogue.resolve(catalogue.DEFAULT)


def _roofline(
    checkpoint: Checkpoint, ceilings: Ceilings, context: int, seconds: float, report: Callable[[str], None]
) -> Roofline:
    from tailrace.backends.cpu.machine import measure_roofline
    from tailrace.models import load_model
    from tailrace.models.entry import prepared_dir

    model = load_model(checkpoint)
    return measure_roofline(model, ceilings, name=checkpoint.name, longest=model.config.max_context, context=context,
                            seconds=seconds, cache_dir=prepared_dir(checkpoint.path), report=report)  # fmt: skip


def show(ceilings: Ceilings, roofline: Roofline | None, saved: Path | None, *, hint: bool) -> None:
    """Prints the tables."""
    from rich.console import Console

    console = Console(highlight=False)
    _show_ceilings(console, ceilings)
    if roofline is not None:
        _show_roofline(console, roofline)
    elif hint:
        console.print("For a model's operations under these ceilings: tailrace machine MODEL, or tailrace pull first.")
    if saved is not None:
        console.print(f"[dim]Saved in {saved}[/dim]", soft_wrap=True)
    for what, busy in (("ceilings", ceilings), ("model's times", roofline)):
        used = busy.others_cores if busy is not None else None
        if used is not None and used > BUSY * ceilings.machine.cores:
            console.print(f"[yellow]While the {what} were measured, others used {used:.1f} of {ceilings.machine.cores} "
                          "cores: this machine is better than that.[/yellow]", soft_wrap=True)  # fmt: skip


def _show_ceilings(console: Console, ceilings: Ceilings) -> None:
    from rich.markup import escape
    from rich.table import Table

    machine = ceilings.machine
    counts = sorted({found.threads for found in ceilings.bandwidths})
    console.print(f"[bold]{escape(machine.cpu)}[/bold]", soft_wrap=True)
    console.print(f"{machine.cores} cores, {machine.kernels} kernels, tailrace {machine.version}, "
                  f"{ceilings.measured_at}\n", soft_wrap=True)  # fmt: skip
    table = Table("reading, GB/s", *(f"{n} thread{'s' * (n > 1)}" for n in counts), "bytes a thread", box=None,
                  header_style="bold")  # fmt: skip
    for level in dict.fromkeys(found.level for found in ceilings.bandwidths):
        row = {found.threads: found for found in ceilings.bandwidths if found.level == level}
        rates = [_rate(row[n].bytes_per_second, row[n].median_bytes_per_second) if n in row else "" for n in counts]
        sizes = dict.fromkeys(output.size(found.working_set_bytes // n) for n, found in row.items())
        table.add_row(level, *rates, ", ".join(sizes))
    console.print(table)
    counts = sorted({found.threads for found in ceilings.arithmetics})
    table = Table("multiply-adds, G/s", *(f"{n} thread{'s' * (n > 1)}" for n in counts), "by", box=None,
                  header_style="bold")  # fmt: skip
    for kind in dict.fromkeys(found.kind for found in ceilings.arithmetics):
        row_of = {found.threads: found for found in ceilings.arithmetics if found.kind == kind}
        rates = [_rate(row_of[n].multiply_adds_per_second, row_of[n].median_multiply_adds_per_second) for n in counts]
        table.add_row(kind, *rates, row_of[counts[0]].instructions)
    console.print(table)
    table = Table("microseconds", "best", "usual", "", box=None, header_style="bold")
    for name, best, median, what in (
        ("spinning hand-over", ceilings.spinning_hand_over_seconds, ceilings.median_spinning_hand_over_seconds,
         "to a thread that spins, and back"),
        ("parked hand-over", ceilings.parked_hand_over_seconds, ceilings.median_parked_hand_over_seconds,
         "to a thread that sleeps on a futex, and back"),
        ("page fault", ceilings.page_fault_seconds, ceilings.median_page_fault_seconds,
         f"first touch of {output.size(ceilings.page_bytes)} of fresh memory"),
    ):  # fmt: skip
        if best is not None and median is not None:
            table.add_row(name, f"{best * 1e6:.2f}", f"{median * 1e6:.2f}", what)
    console.print(table)
    note = "everything in turn; the best of many short rounds, and in brackets, or as usual, the middle one."
    console.print(f"[dim]{ceilings.took_seconds:.0f} seconds, {note}[/dim]", soft_wrap=True)


def _rate(best: float, median: float) -> str:
    digits = 0 if best >= 99.5e9 else 1
    return f"{best / 1e9:.{digits}f} ({median / 1e9:.{digits}f})"


def _show_roofline(console: Console, roofline: Roofline) -> None:
    from rich.markup import escape

    console.print(f"\n[bold]{escape(roofline.model)}[/bold] on {roofline.threads} threads, {roofline.kernels} kernels, "
                  f"weights {roofline.weight_bytes / 1e6:.1f} MB", soft_wrap=True)  # fmt: skip
    for step in roofline.steps:
        _show_step(console, step)
    console.print(f"\n[dim]{' '.join(LEGEND.split())}[/dim]", soft_wrap=True)


def _show_step(console: Console, step: StepPoints) -> None:
    from rich.table import Table

    console.print(
        f"\n[bold]{step.step}[/bold]: {_ms(step.seconds)} ms (median {_ms(step.median_seconds)}), "
        f"{step.tokens_per_second:.0f} tokens/s, {step.share_of_ceiling:.0%} of what the ceilings below allow; "
        f"products {_ms(step.products_seconds)} ms, alone {_ms(step.products_alone_seconds)} ms",
        soft_wrap=True,
    )
    most = step.cold_bytes_per_second / step.cold_bytes
    console.print(
        f"[dim]weights and earlier KV are {step.cold_bytes / 1e6:.0f} MB; as much is read at "
        f"{step.cold_bytes_per_second / 1e9:.1f} GB/s, so at most {most:.0f} steps a second[/dim]",
        soft_wrap=True,
    )
    wide = console.width >= WIDE
    table = Table("operation", *(["shape"] * wide), box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("op/byte", "ms", "Gop/s", "memory\nallows", "arithmetic\nallows", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("held by", no_wrap=True)
    for p in step.points:
        rates = (p.operations_per_second, p.memory_ceiling_operations_per_second,
                 p.arithmetic_ceiling_operations_per_second)  # fmt: skip
        table.add_row(
            p.operation + (f" x{p.times}" if p.times > 1 else ""), *([p.shape] * wide), f"{p.operations_per_byte:.1f}",
            _ms(p.seconds), *(f"{rate / 1e9:.{0 if rate >= 99.5e9 else 1}f}" for rate in rates),
            f"{p.share_of_ceiling:.0%}", p.bound,
        )  # fmt: skip
    console.print(table)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{3 if seconds < 1e-2 else 1}f}"
