"""Words for people: errors, sizes, durations. Plain strings; rich is imported by who needs more."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator


def error(message: str) -> None:
    """One error on standard error, the word in red where that is a terminal."""
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\033[1;31merror:\033[0m {message}" if colour else f"error: {message}", file=sys.stderr)


def size(amount: float) -> str:
    """Bytes, in the binary unit that leaves few digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def count(amount: float) -> str:
    """A number of things: 134.5 M."""
    for unit in ("", " k", " M", " B"):
        if amount < 1000:
            return f"{amount:.0f}{unit}" if unit == "" else f"{amount:.1f}{unit}"
        amount /= 1000
    return f"{amount:.1f} T"


def seconds(amount: float) -> str:
    """A duration: 84 ms, 2.41 s."""
    return f"{amount * 1000:.0f} ms" if amount < 1 else f"{amount:.2f} s"


@contextlib.contextmanager
def measuring() -> Iterator[Callable[[str], None]]:
    """Shows on standard error what is being measured, where that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with console.status("Measuring ...") as status:
        yield lambda what: status.update(f"Measuring: {what}")
