"""The same server with its prefix cache and without: by an option of our own, or by prompts that no cache can know."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tailrace.measure.lab.stand import Served, Stand
from tailrace.workload.session import Piece, Session, Turn

OFF = ("--no-prefix-cache",)
MARK_TOKENS = 8
"""Of the words that stand before a prompt which no cache is to know."""


@dataclass(frozen=True)
class Both:
    """With the cache and without. `how`: how it was taken away, in words. `marked`: prompts without it begin with words
    of their own."""

    on: Served
    off: Served
    how: str
    marked: bool


@asynccontextmanager
async def both(stand: Stand) -> AsyncIterator[Both]:
    """Two servers of our own, or one of others in two ways."""
    if stand.start is None:
        async with stand.server() as served:
            how = "every prompt without it begins with words of its own, which no cache can know"
            yield Both(served, served, how, True)
        return
    async with stand.server() as on, stand.server(*OFF) as off:
        yield Both(on, off, "a second server with --no-prefix-cache", False)


def unknown(session: Session) -> Session:
    """The same session with a different beginning of every turn's prompt."""

    def marked(at: int, turn: Turn) -> Turn:
        first = turn.pieces[0]
        mark = Piece(f"unknown/{session.number}/{at}/{first.source}", MARK_TOKENS, first.role)
        return replace(turn, pieces=(mark, *turn.pieces))

    return replace(session, turns=tuple(marked(at, turn) for at, turn in enumerate(session.turns)))
