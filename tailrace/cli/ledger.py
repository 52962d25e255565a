"""`tailrace ledger`: what is in a ledger, and its sums made anew."""

from __future__ import annotations

from typing import Annotated

import typer

from tailrace.cli import ledgers

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
