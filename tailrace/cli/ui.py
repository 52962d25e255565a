"""`tailrace ui`: the dashboard of a ledger, without a server."""

from __future__ import annotations

from typing import Annotated

import typer

from tailrace.cli import ledgers


def command(
    ledger: ledgers.Place = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 8001,
) -> None:
    """Show a ledger in the browser: requests, their waterfalls, shapes, cost.

    It only reads, and answers on this machine alone. Live load, steps and the
    playground need a running server: `tailrace serve --ui`.

    [bold]Examples[/bold]

      tailrace ui
      tailrace ui --ledger postgresql://ada@db/tailrace --port 0
    """
    from tailrace.web import alone

    raise typer.Exit(alone.run(ledgers.place_of(ledger), port, typer.echo))
