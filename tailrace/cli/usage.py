"""`tailrace usage`: how much was used, by key, model, workload, day."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli import ledgers, output

if TYPE_CHECKING:
    from tailrace.ledger.usage import Usage


def command(
    by: ledgers.By = "key",
    since: ledgers.Since = None,
    until: ledgers.Until = None,
    ledger: ledgers.Place = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, for spreadsheets.")] = False,
) -> None:  # fmt: skip
    """Say how much was used, from a server's ledger.

    Requests and those that failed, were refused or left (JSON and CSV tell them
    apart), tokens in, of them cached, and out, time of the device, mean time to
    the first token, and how many met their SLO. Days and hours are UTC.

    [bold]Examples[/bold]

      tailrace usage
      tailrace usage --by day,workload --since 7d
      tailrace usage --by tenant --since 2026-11-01 --until 2026-12-01 --csv
    """
    from tailrace.ledger import usage

    ledgers.only_one(as_json, as_csv)
    names = ledgers.names(by)
    found = ledgers.opened(ledger)
    try:
        lines = usage.usage(found, names, ledgers.span(since, until))
    finally:
        found.close()
    if as_json:
        typer.echo(ledgers.as_json(lines))
    elif as_csv:
        typer.echo(ledgers.rows_as_csv([flat(line) for line in lines]), nl=False)
    else:
        show(names, lines)


def flat(line: Usage) -> dict[str, Any]:
    """A line as one level of names and values."""
    import msgspec

    values = msgspec.structs.asdict(line)
    return {**values.pop("group"), **values}


def show(names: list[str], lines: list[Usage]) -> None:
    """Prints the table."""
    if not lines:
        typer.echo("No request ended in that time.")
        return
    heads = [*names, "requests", "not ok", "tokens in", "cached", "out", "device", "TTFT", "at SLO"]
    ledgers.table(heads, ([*shown(names, line), *cells(line)] for line in lines), left=len(names))


def shown(names: list[str], line: Usage) -> list[str]:
    """A line's group; a dash where a request had none."""
    return [line.group[name] or "-" for name in names]


def cells(line: Usage) -> list[str]:
    """A line's numbers in words."""
    counts = (line.requests, line.requests - line.ok)
    tokens = (line.prompt_tokens, line.cached_tokens, line.output_tokens)
    ttft = "-" if line.ttft is None else output.seconds(line.ttft)
    met = "-" if not line.judged else f"{line.met / line.judged:.1%}"
    return [*map(str, counts), *map(output.count, tokens), duration(line.device_seconds), ttft, met]


def duration(seconds: float) -> str:
    """A time of any length: 84 ms, 2.41 s, 31 min, 5.2 h."""
    if seconds < 120:
        return output.seconds(seconds)
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
