"""The batch of plain decode steps, kept from step to step.

While the same requests decode, one step's arrays differ from the last one's in three numbers a request and, once in a
page, one page number. Writing those in place, without numpy calls, costs a fraction of building the arrays anew: a
forward pass leaves nothing of the interpreter in the caches, so what a step's Python costs is the code that it touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tailrace.backends import PAGE_SIZE, Batch
from tailrace.engine.plan import Chunk

SPARE_PAGES = 8
"""Pages by which a block table may grow before the batch has to be built anew."""


class Steady:
    """A batch in which every sequence has one token, and what moves in it. `slots` are its requests' rows, in order."""

    def __init__(self, batch: Batch, slots: Sequence[int]) -> None:
        count, width = batch.tables.shape
        moving = np.stack([batch.tokens, batch.context, batch.sampling.position])
        tables = np.zeros((count, width + SPARE_PAGES), np.int32)
        tables[:, :width] = batch.tables
        self.slots = list(slots)
        self._width = width + SPARE_PAGES
        self._cells = moving.reshape(-1).data
        self._tables = tables.reshape(-1).data
        self.batch = replace(
            batch,
            tokens=moving[0],
            context=moving[1],
            tables=tables,
            sampling=replace(batch.sampling, position=moving[2]),
        )

    def advance(self, chunks: Sequence[Chunk]) -> bool:
        """Moves every sequence on by one token. False where a block table has no room left for that."""
        cells, count = self._cells, len(self.slots)
        for row, chunk in enumerate(chunks):
            request, begin = chunk.request, chunk.begin
            if begin % PAGE_SIZE == 0:
                page = begin // PAGE_SIZE
                if page >= self._width:
                    return False
                self._tables[row * self._width + page] = request.pages[page]
            cells[row] = request.tokens[begin]
            cells[row + count] = begin
            cells[row + 2 * count] = chunk.end
        return True
