"""The batches of plain decode steps, kept from step to step.

While the same requests decode, one step's arrays differ from the last one's in three numbers and a page number a
request. Writing those in place, without numpy calls, costs a fraction of building the arrays anew: a forward pass
leaves nothing of the interpreter in the caches, so what a step's Python costs is the code that it touches.

There are two batches that take turns, so that a step can be written while the one before it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tailrace.backends import PAGE_SIZE, Batch, Ends, Masks
from tailrace.backends.groups import PIECE
from tailrace.engine.plan import Chunk
from tailrace.engine.request import WindowTable

PIECE_PAGES = PIECE // PAGE_SIZE
"""Pages that a sliding group lets go at a time while its sequence decodes."""
SPARE_PAGES = 8
"""Pages by which a block table may grow before the batch has to be built anew."""


class _Side:
    """One of the two batches, and its moving numbers as flat memory."""

    def __init__(self, batch: Batch, groups: int) -> None:
        count, columns = batch.tables.shape
        width = columns // groups
        moving = np.stack([batch.tokens, batch.context, batch.sampling.position])
        tables = np.zeros((count, groups * (width + SPARE_PAGES)), np.int32)
        tables.reshape(count, groups, -1)[:, :, :width] = batch.tables.reshape(count, groups, width)
        masks = batch.sampling.masks
        self.masks = Masks(masks.row, np.zeros_like(masks.bits), np.zeros(1, np.int32)) if masks is not None else None
        self.cells = moving.reshape(-1).data
        self.tables = tables.reshape(-1).data
        self.batch = replace(
            batch,
            tokens=moving[0],
            context=moving[1],
            tables=tables,
            sampling=replace(batch.sampling, position=moving[2], masks=self.masks),
        )


class Steady:
    """Batches in which every sequence has one token. `slots` are its requests' rows, in order. `ends`: what may end a
    row's request with any token; None where that takes more than a look at the token. `groups` of pages have a table
    each."""

    def __init__(self, batch: Batch, slots: Sequence[int], ends: Ends | None, groups: int = 1) -> None:
        self.slots = list(slots)
        self.ends = ends
        self._groups = groups
        self._width = batch.tables.shape[1] // groups + SPARE_PAGES
        self._now, self._other = _Side(batch, groups), _Side(batch, groups)

    @property
    def batch(self) -> Batch:
        """The step that was built last."""
        return self._now.batch

    def advance(self, chunks: Sequence[Chunk], *, known: bool = True) -> Batch | None:
        """Every sequence moved on by one token, in the other of the two batches; it is the one that was built last when
        `turn` has been called. `known` False leaves the tokens out. None where a block table has no room left."""
        side, count, width = self._other, len(self.slots), self._width
        cells, tables, columns = side.cells, side.tables, width * self._groups
        for row, chunk in enumerate(chunks):
            request, begin = chunk.request, chunk.begin
            page = begin // PAGE_SIZE
            if page >= width:
                return None
            tables[row * columns + page] = request.pages[page]
            if request.tables:
                self._slide(tables, row * columns, request.tables, page)
            if known:
                cells[row] = request.tokens[begin]
            cells[row + count] = begin
            cells[row + 2 * count] = chunk.end
        if side.masks is not None:
            side.masks.ready[0] = 0
        return side.batch

    def _slide(self, tables: memoryview, row: int, windows: Sequence[WindowTable], page: int) -> None:
        """Writes the page of a sequence's next token in its sliding groups, and clears those let go last: each batch
        sees to it at least once while they are."""
        for window in windows:
            row += self._width
            tables[row + page] = window.pages[page]
            for gone in range(max(0, window.first - PIECE_PAGES), window.first):
                tables[row + gone] = 0

    def turn(self) -> None:
        """The step that `advance` has written is the one that runs now."""
        self._now, self._other = self._other, self._now
