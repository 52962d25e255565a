"""The order in which pages that nobody holds are evicted."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class Leaf(Protocol):
    """A page that may be evicted once nobody holds it and nothing hangs on it."""

    page: int  # -1 once it has left the index
    pins: int
    children: int
    used: int  # tick of its last use
    value: float  # what the policy says that it is worth
    entry: int  # number of its latest entry in a heap


L = TypeVar("L", bound=Leaf)


def is_current(entry: int, node: Leaf) -> bool:
    """Whether this entry number of a heap is the page's latest, and the page an evictable leaf."""
    return entry == node.entry and node.page >= 0 and not node.pins and not node.children


class Leaves(Generic[L]):
    """A heap of evictable leaves, the least valued first, of equals the least recently used. An entry that is no longer
    true stays until it surfaces, or until such entries are the majority; `count` is the number of true ones."""

    __slots__ = ("count", "heap")

    def __init__(self) -> None:
        self.count = 0
        self.heap: list[tuple[float, int, int, L]] = []  # (value, last used, entry number, leaf); numbers are unique

    def push(self, node: L) -> None:
        """Enters a page that has just become an evictable leaf."""
        self.count += 1
        heapq.heappush(self.heap, (node.value, node.used, node.entry, node))
        if len(self.heap) > 2 * self.count + 64:
            self.heap[:] = [entry for entry in self.heap if is_current(entry[2], entry[3])]
            heapq.heapify(self.heap)

    def check_integrity(self, nodes: list[L]) -> None:
        """AssertionError unless each of these that is an evictable leaf has its entry, and they are counted."""
        entries = {entry: (value, used, node) for value, used, entry, node in self.heap}
        assert len(entries) == len(self.heap), "two entries have one number"
        count = 0
        for node in nodes:
            if not node.pins and not node.children:
                count += 1
                found = entries.get(node.entry)
                assert found == (node.value, node.used, node), f"page {node.page} can never be evicted"
        assert count == self.count, "evictable leaves are miscounted"
