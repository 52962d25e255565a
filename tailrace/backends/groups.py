"""Layers whose KV pages live equally long, and how many pages each such group needs.

All layers with one window keep and drop the same pages, so they share page numbers and a block table: a group. A layer
has arrays of its own below those numbers, so layers of different head shapes need no groups of their own.

The first group is that of full attention, where every page of a sequence stays; it exists even where a model has no
such layer, and its pages are then nothing but numbers. What an engine knows of a sequence hangs on them. The others are
sliding ones, narrowest window first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tailrace.backends import PAGE_SIZE, Attention, Pages
from tailrace.backends.kvdtype import BF16, KvDtype

PIECE = 64
"""Positions that attention reads at once, from a multiple of them on (SPLIT of the kernels): a page is read as long as
any of its piece can be seen, so that is how long it has to stay."""


@dataclass(frozen=True)
class PageGroup:
    """Attention layers with one window; None is full attention."""

    window: int | None
    layers: tuple[Attention, ...]

    def page_bytes(self, kept: KvDtype = BF16) -> int:
        """Bytes of memory of one page over all layers."""
        return sum(PAGE_SIZE * kept.pool_bytes(spec.layer, spec.kv_heads, spec.head_dim) for spec in self.layers)


def page_groups(attentions: Iterable[Attention], context: int) -> tuple[PageGroup, ...]:
    """The groups of a model that serves `context` tokens. A window that is no shorter than that is full attention."""
    layers: dict[int | None, list[Attention]] = {None: []}
    for spec in attentions:
        window = spec.window if spec.window is not None and spec.window < context else None
        layers.setdefault(window, []).append(spec)
    windows = sorted(window for window in layers if window is not None)
    return tuple(PageGroup(window, tuple(layers[window])) for window in (None, *windows))


def layer_groups(
    groups: Sequence[PageGroup] | None, attentions: Iterable[Attention], pages: Pages
) -> dict[int, tuple[int, int]]:
    """Each layer's group, by number, and the pages of its pool. Without `groups` all layers are in one, and windows
    only hide what is kept all the same. ValueError where `pages` does not name one pool for each."""
    if groups is None:
        groups = (PageGroup(None, tuple(attentions)),)
    counts = (pages,) if isinstance(pages, int) else pages
    if len(counts) != len(groups):
        raise ValueError(f"{len(counts)} pools for {len(groups)} groups of layers")
    return {spec.layer: (at, counts[at]) for at, group in enumerate(groups) for spec in group.layers}


def pages_for(tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // PAGE_SIZE)


def first_page(window: int, position: int) -> int:
    """The first page that attention with this window reads for a query at `position`, or for any after it."""
    return max(0, position - window + 1) // PIECE * (PIECE // PAGE_SIZE)


def most_pages(window: int | None, tokens: int, chunk: int) -> int:
    """Most pages that a sequence of `tokens` holds at a time where a step computes at most `chunk` of them: the window
    before the step's first token, the pieces that it cuts, and the step."""
    if window is None:
        return pages_for(tokens)
    return min(pages_for(tokens), pages_for(window - 1 + PIECE - 1 + chunk))


def plan_pages(windows: Sequence[int], pages: int, context: int, chunk: int) -> tuple[int, ...]:
    """Pages of each sliding group's pool beside `pages` of full attention.

    Both fill up together where requests of all lengths up to the served context are equally frequent: over these, a
    sequence of n pages holds n of the one and at most `most_pages` of the other. Never fewer than one request of the
    longest context needs, and never more than there are of full attention, where they would be of no use.
    """
    longest = pages_for(context)
    full = longest * (longest + 1) // 2
    found = []
    for window in windows:
        most = most_pages(window, context, chunk)
        held = most * (most + 1) // 2 + (longest - most) * most
        found.append(min(pages, max(most, -(-pages * held // full))))
    return tuple(found)


def pool_bytes(groups: Sequence[PageGroup], pages: int, context: int, chunk: int, kept: KvDtype = BF16) -> int:
    """Bytes of all pools together where that of full attention has `pages` (`plan_pages`)."""
    windows = [group.window for group in groups if group.window is not None]
    counts = (pages, *plan_pages(windows, pages, min(context, pages * PAGE_SIZE), chunk))
    return sum(count * group.page_bytes(kept) for count, group in zip(counts, groups, strict=True))


def affordable_pages(groups: Sequence[PageGroup], size: int, context: int, chunk: int, kept: KvDtype = BF16) -> int:
    """Most pages of full attention for which all pools together take at most `size` bytes."""
    low, high = 0, max(1, size)
    while low < high:
        middle = (low + high + 1) // 2
        fits = pool_bytes(groups, middle, context, chunk, kept) <= size
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
