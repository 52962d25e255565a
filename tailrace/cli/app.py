"""The full command line: all commands, with help, completion and explanations of mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from tailrace.cli import (
    bench,
    chat,
    compare,
    cost,
    devices,
    evaluate,
    explain,
    generate,
    info,
    keys,
    kv,
    lab,
    ledger,
    machine,
    options,
    pull,
    serve,
    simulate,
    size,
    ui,
    usage,
)

app = typer.Typer(
    name="tailrace",
    help="Serve open-weight language models, and see where every millisecond goes.",
    epilog="Start here: [bold]tailrace serve[/bold] in one terminal, [bold]tailrace chat[/bold] in another.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(arguments: Sequence[str]) -> int:
    """Runs one command; gives its exit status. Wrong use ends the process with 2 by itself."""
    outcome = typer.main.get_command(app)(args=list(arguments), prog_name="tailrace", standalone_mode=True)
    return outcome if isinstance(outcome, int) else 0


def _version(wanted: bool) -> None:
    if wanted:
        from tailrace import __version__

        typer.echo(f"tailrace {__version__}")
        raise typer.Exit


@app.callback()
def _tailrace(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("pull")(pull.command)
app.command("info")(info.command)
app.command("serve")(options.command(options.SERVE, serve.run, serve.DOC))
app.command("chat")(chat.command)
app.command("generate")(generate.command)
app.command("bench")(bench.command)
app.command("compare")(compare.command)
app.command("simulate")(simulate.command)
app.command("machine")(machine.command)
app.command("size")(size.command)
app.command("devices")(devices.command)
app.add_typer(lab.app, name="lab")
app.command("usage")(usage.command)
app.command("cost")(cost.command)
app.command("explain")(explain.command)
app.command("ui")(ui.command)
app.add_typer(ledger.app, name="ledger")
app.add_typer(kv.app, name="kv")
app.add_typer(evaluate.app, name="eval")
app.add_typer(keys.app, name="keys")
