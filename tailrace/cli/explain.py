"""`tailrace explain`: where a request's time went, and why."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli import ledgers
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.ledger.lookup import Story
    from tailrace.ledger.record import Record

COLOURS = {
    "prepare": "bright_black", "queue": "yellow", "kv_lookup": "bright_magenta", "kv_load": "magenta",
    "prefill": "blue", "decode": "green", "stall": "red", "stream": "cyan", "other": "white",
}  # fmt: skip
DAY = 86_400.0
"""The slowest requests are looked for in so many seconds, where nothing else is said."""
BAR = 44
MOST = 60
"""Requests of a window that are shown."""
EIGHTHS = " ▏▎▍▌▋▊▉█"


def command(
    request: Annotated[
        str | None, typer.Argument(help="The id of an answer (chatcmpl-...), or the x-request-id.", show_default=False)
    ] = None,
    slowest: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1000, help="Those that took longest instead (of a day, "
                             "unless --since says otherwise).")
    ] = None,
    by: Annotated[str, typer.Option(metavar="WHAT", help="Longest in what: e2e, ttft or tpot.")] = "e2e",
    window: Annotated[
        str | None, typer.Option(metavar="TIME", help="All of the last 30s, 10m or 1h (before --until) side by side; "
                                 "with --slowest, those of it.")
    ] = None,
    since: ledgers.Since = None,
    until: ledgers.Until = None,
    ledger: ledgers.Place = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:  # fmt: skip
    """Say where a request's time went, and why it took what it took.

    A waterfall of its phases, then in words: whom it waited for, what came from
    the cache and why not more, how quick its prompt was computed, with whom it
    shared steps, whose prompts slowed it down. Read from a server's ledger.

    [bold]Examples[/bold]

      tailrace explain chatcmpl-692d...
      tailrace explain --slowest 3 --since 1h
      tailrace explain --window 30s
    """
    from tailrace.ledger import lookup

    if (request is None) == (slowest is None and window is None):
        raise InvalidInput("name a request, or give --slowest or --window", param="request")
    if by not in ("e2e", "ttft", "tpot"):
        raise InvalidInput(f"--by is e2e, ttft or tpot, not {by}", param="by")
    span = ledgers.span(since, until)
    if window is not None:
        if since is not None:
            raise InvalidInput("--window and --since: choose one", param="window")
        import time

        from tailrace.ledger.usage import Span

        end = time.time() if span.until is None else span.until
        span = Span(end - ledgers.seconds(window, "--window"), span.until)
    if slowest is not None and span.since is None:
        import time

        span = type(span)((span.until or time.time()) - DAY, span.until)
    found = ledgers.opened(ledger)
    try:
        if slowest is None and request is None:
            records, total = lookup.window(found, MOST, span)
            show_window(records, total, as_json=as_json)
            return
        if request is not None:
            stories = lookup.find(found, request)
        else:
            stories = lookup.slowest(found, slowest or 1, span, by=f"{by}_us")
    finally:
        found.close()
    if not stories:
        what = "request of that time" if request is None else f"request {request}"
        raise InvalidInput(f"the ledger {found.shown} has no {what}", param="request")
    show_stories(stories, as_json=as_json)


def show_stories(stories: list[Story], *, as_json: bool) -> None:
    """Prints waterfalls and words."""
    from tailrace.ledger.words import sentences

    if as_json:
        known = [{**_plain(one.record), "detail": one.detail, "ahead": one.ahead, "hardware": one.hardware,
                  "words": sentences(one)} for one in stories]  # fmt: skip
        typer.echo(ledgers.as_json(known))
        return
    console = _console()
    for at, story in enumerate(stories):
        if at:
            console.print()
        _show(console, story)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _show(console: Console, story: Story) -> None:
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from tailrace.ledger.lookup import phases
    from tailrace.ledger.words import sentences, time_of

    record = story.record
    end = f"{record.outcome} ({record.finish or record.code})" if record.finish or record.code else record.outcome
    console.print(f"[bold]{escape(record.request)}[/bold]  {escape(_who(record))}  {end}", soft_wrap=True)
    came = datetime.datetime.fromtimestamp(record.received / 1e6)
    console.print(f"[dim]came {came:%Y-%m-%d %H:%M:%S.%f}[/dim]")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    for justify in ("left", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    whole = max(record.e2e_us / 1e6, 1e-9)
    width = max(12, min(BAR, console.width - 34))
    done = 0.0
    for name, seconds in phases(record):
        drawn = bar(done / whole, seconds / whole, width)
        share = f"{seconds / whole:.1%}"
        table.add_row(name, Text(drawn, style=COLOURS[name]), time_of(seconds), share)
        done += seconds
    console.print(table)
    for sentence in sentences(story):
        console.print(f"- {escape(sentence)}", soft_wrap=not console.is_terminal)


def _who(record: Record) -> str:
    named = [record.endpoint, record.model, record.adapter and f"adapter {record.adapter}",
             record.key and f"key {record.key}", record.workload and f"workload {record.workload}"]  # fmt: skip
    return ", ".join(filter(None, named))


def bar(start: float, share: float, width: int) -> str:
    """A bar from `start` on of `share` of the width, both 0 to 1, in eighths of a character; a sign of life where it is
    less."""
    begin = round(start * width * 8)
    end = max(begin + 1, round((start + share) * width * 8)) if share > 0 else begin
    end = min(end, width * 8)
    begin = min(begin, end - 1) if share > 0 else begin
    cells = []
    for at in range(width):
        low, high = max(begin - 8 * at, 0), min(end - 8 * at, 8)
        filled = high - low
        if filled <= 0:
            cells.append(" ")
        elif filled == 8:
            cells.append("█")
        else:  # a part of a character begins at its left, or is as good as half of it
            cells.append(EIGHTHS[filled] if low == 0 else "▐" if filled >= 3 else "▕")
    return "".join(cells).rstrip()


def show_window(records: list[Record], total: int, *, as_json: bool) -> None:
    """Prints requests side by side, on one axis of time, and where their time went in all."""
    if as_json:
        typer.echo(ledgers.as_json({"requests": [_plain(record) for record in records], "total": total}))
        return
    if not records:
        typer.echo("No request ended in that time.")
        return
    from rich.table import Table
    from rich.text import Text

    from tailrace.ledger.lookup import phases
    from tailrace.ledger.words import time_of

    console = _console()
    first = min(record.received for record in records)
    whole = max(max(record.ended for record in records) - first, 1)
    shown = f"the latest {len(records)} of {total} requests" if total > len(records) else f"{total} requests"
    came = datetime.datetime.fromtimestamp(first / 1e6)
    console.print(f"{shown}, from {came:%Y-%m-%d %H:%M:%S}, {time_of(whole / 1e6)} in all")
    width = max(12, min(80, console.width - 44))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    for justify in ("left", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    spent: dict[str, float] = {}
    for record in records:
        line = Text(" " * round((record.received - first) / whole * width))
        for name, seconds in phases(record):
            spent[name] = spent.get(name, 0.0) + seconds
            upto = round((record.received - first + _until(record, name)) / whole * width)
            line.append(LETTERS[name] * max(0, upto - len(line)), style=COLOURS[name])
        if len(line) == 0 or line.plain.isspace():
            line.append("·")
        table.add_row(record.request, line, time_of(record.e2e_us / 1e6))
    console.print(table)
    everything = sum(spent.values()) or 1.0
    legend = Text()
    for name in COLOURS:
        if spent.get(name):
            legend.append(f"{LETTERS[name]} {name} {spent[name] / everything:.1%}  ", style=COLOURS[name])
    console.print(legend)


LETTERS = {"prepare": "t", "queue": "q", "kv_lookup": "?", "kv_load": "l", "prefill": "P", "decode": "d", "stall": "!",
           "stream": "s", "other": "."}  # fmt: skip
"""A phase in one character, for where there are no colours."""


def _until(record: Record, phase: str) -> float:
    """Microseconds from when a request came to the end of a phase, as if each came in one piece."""
    from tailrace.ledger.lookup import phases

    done = 0.0
    for name, seconds in phases(record):
        done += seconds * 1e6
        if name == phase:
            break
    return done


def _plain(record: Record) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(record)
