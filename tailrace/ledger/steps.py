"""One step's time, divided among the requests that took part in it, and what each did to the others.

The work of a token is one, and as much again for each `parity` tokens of context that its attention reads (see
`engine.loading.attention_parity`). A step's seconds are divided in that proportion, so that the shares of a step add up
to its time, whatever it cost to read the weights once for all of them.
"""

from __future__ import annotations

from tailrace.ledger.timeline import Fold
from tailrace.terms import Event, EventKind

MOST_NAMED = 8
"""Requests of which one remembers that they slowed it down."""
OTHERS = "others"
"""Those beyond them."""


class Step:
    """The events of one step, gathered until it is `divide`d. Folds have taken the events in already."""

    __slots__ = ("at", "begin", "chunks", "left_out", "parity", "parts", "prompt", "tokens", "work")

    def __init__(self, begin: float, at: float, parity: float) -> None:
        self.begin = begin
        self.at = at
        self.parity = parity
        self.parts: list[tuple[Fold, float, bool]] = []  # work, and whether for its prompt
        self.tokens: list[Fold] = []  # that got a token otherwise than at their prompt's end
        self.chunks: list[tuple[Fold, int, float]] = []  # prompt tokens and work
        self.left_out: list[Fold] = []
        self.prompt = 0  # prompt tokens in all
        self.work = 0.0

    def take(self, fold: Fold, event: Event) -> None:
        """A CHUNK, TOKEN or STALLED event."""
        if event.kind is EventKind.TOKEN:
            if self.chunks and any(owner is fold for owner, _, _ in self.chunks):
                return  # the token at the end of its prompt: its work is the chunk's
            rows = event.rows or 1
            self.tokens.append(fold)
        elif event.kind is EventKind.STALLED:
            self.left_out.append(fold)
            return
        else:
            rows = event.computed or event.rows
        work = float(rows)
        if self.parity:
            work += rows * max(0.0, fold.context - rows / 2) / self.parity
        self.work += work
        self.parts.append((fold, work, bool(event.computed) and event.kind is EventKind.CHUNK))
        if event.computed and event.kind is EventKind.CHUNK:
            self.chunks.append((fold, event.computed, work))
            self.prompt += event.computed

    def divide(self) -> None:
        """Tells the folds their shares."""
        seconds = self.at - self.begin
        together = len(self.parts)
        if self.work:
            share = seconds / self.work
            for fold, work, prompt in self.parts:
                fold.device += work * share
                if prompt:
                    fold.device_prefill += work * share
        for fold in self.tokens:
            fold.decode_beside += together
        if self.chunks:
            self._blame(seconds)

    def _blame(self, seconds: float) -> None:
        for fold, tokens, _ in self.chunks:
            fold.prefill_beside += self.prompt - tokens
        largest, _, _ = max(self.chunks, key=lambda chunk: chunk[2])
        taken = seconds * sum(work for _, _, work in self.chunks) / self.work
        for fold in self.tokens:
            self._slow(fold, largest.request, taken)
            if fold.gap_end == self.at:
                fold.gap_cause = fold.gap_cause or f"prompt {largest.request}"
        for fold in self.left_out:
            self._slow(fold, largest.request, seconds)
            fold.hindrance = f"{fold.hindrance} prompt {largest.request}"

    def _slow(self, fold: Fold, by: str, seconds: float) -> None:
        if by == fold.request:
            return
        name = by if by in fold.slowed or len(fold.slowed) < MOST_NAMED else OTHERS
        fold.slowed[name] = fold.slowed.get(name, 0.0) + seconds
