"""The page pool: who holds which KV page."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Pages 0 .. size-1, each with a count of its holders.

    Invariants:

    - A holder is one request whose block table names the page, the prefix index (once), or a load that fills it. A page
      is on the free list exactly when it has no holder, and is on it once.
    - Block tables are append-only: a holder never swaps a page that it holds for another, even an equal one. It takes
      pages with `take` (new, to be written) or `share` (complete, never written again) and gives all of them back with
      `release` when it ends or is preempted.
    - A page with more than one holder is complete: nobody writes it. So a page is only ever written by the one request
      that took it; or, while it is loaded, by the load, which holds it beside that request and may outlive it.
    - A released page may be handed out at once. Steps run one after another, so whatever step still writes it ends
      before the step of its next owner begins.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a page pool needs at least one page, not {size}")
        self.size = size
        self._holders = [0] * size
        self._free = list(range(size - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hands out `count` free pages with one holder each. ValueError where there are not that many: the caller looks
        at `free` first, and makes room."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} free")
        if count <= 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these held pages."""
        holders = self._holders
        for page in pages:
            if not holders[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer for each; the last one frees the page. ValueError on a page that nobody holds."""
        holders = self._holders
        for page in pages:
            left = holders[page] - 1
            if left < 0:
                raise ValueError(f"page {page} is released more often than it was taken")
            holders[page] = left
            if not left:
                self._free.append(page)

    def check_integrity(self, held: Iterable[Iterable[int]]) -> None:
        """AssertionError unless these tables (every request's, and the index's pages) are exactly the holders counted,
        and the free list is exactly the rest."""
        counted = [0] * self.size
        for table in held:
            for page in table:
                counted[page] += 1
        for page, (want, have) in enumerate(zip(counted, self._holders, strict=True)):
            assert want == have, f"page {page} has {want} holders but is counted as having {have}"
        assert len(set(self._free)) == len(self._free), "a page is on the free list twice"
        assert all(not counted[page] for page in self._free), "a held page is on the free list"
        assert len(self._free) == counted.count(0), "a page without holders is not on the free list"
