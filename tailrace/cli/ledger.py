"""`tailrace ledger`: what is in a ledger, its sums made anew, its requests as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tailrace.cli import ledgers
from tailrace.terms import InvalidInput

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Look after a server's ledger.")


@app.command()
def show(
    ledger: ledgers.Place = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say what is in a ledger: servers, their rows, and from when on rows are there.

    [bold]Examples[/bold]

      tailrace ledger show
    """
    found = ledgers.opened(ledger)
    try:
        content = found.content()
    finally:
        found.close()
    if as_json:
        typer.echo(ledgers.as_json(content))
        return
    typer.echo(f"{found.shown}: version {content.version}, {content.rows} rows of {content.runs} servers")
    if content.oldest is not None and content.newest is not None:
        import datetime

        first, last = (datetime.datetime.fromtimestamp(at) for at in (content.oldest, content.newest))
        typer.echo(f"requests that ended from {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S}")


@app.command()
def rebuild(ledger: ledgers.Place = None) -> None:
    """Make the sums that `usage` and `cost` read anew, from the rows.

    Those of hours whose rows are deleted stay as they are. The server that
    writes the ledger may run meanwhile; it waits.

    [bold]Examples[/bold]

      tailrace ledger rebuild
    """
    found = ledgers.opened(ledger, read_only=False)
    try:
        count = found.rebuild()
    finally:
        found.close()
    typer.echo(f"{count} sums were made anew")


@app.command()
def trace(
    out: Annotated[Path, typer.Argument(help="Where to write it: a .jsonl file.", metavar="FILE")],
    workload: Annotated[str | None, typer.Option(help="Of this workload only.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only.")] = None,
    since: ledgers.Since = None,
    until: ledgers.Until = None,
    ledger: ledgers.Place = None,
) -> None:
    """Write a ledger's requests as a trace, to be sent again.

    A line a request, in Mooncake's format: when it came, how many tokens it
    had in and out, and which of its prompt's blocks of 64 tokens began as
    another's did. What was said is not in it.

    [bold]Examples[/bold]

      tailrace ledger trace week.jsonl --since 7d
      tailrace bench http://127.0.0.1:8000 -w week.jsonl --speed 10
      tailrace kv replay week.jsonl
    """
    from tailrace.ledger import trace as traces

    if out.suffix != ".jsonl":
        raise InvalidInput(f"{out}: its name ends in .jsonl, by which others know what it is", param="out")
    span = ledgers.span(since, until)
    found = ledgers.opened(ledger)
    try:
        count = traces.save(out, traces.lines(found, span, workload=workload, tenant=tenant))
    finally:
        found.close()
    if not count:
        raise InvalidInput(f"no request that generated anything ended in that time ({found.shown})", param="since")
    typer.echo(f"{count} requests are in {out}")
