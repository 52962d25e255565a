"""The known pages of one sliding group of layers: what the prefix index has of them beside its own.

A full page of tokens is a node of the prefix index, and the page of full attention stays as long as the node does. Of a
sliding group it may have a page besides (`Side`), which comes and goes by itself: a sequence that goes on after n pages
needs those alone that its window still reaches. So nothing hangs on a side, and any of them that nobody holds may be
evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tailrace.kv.leaves import Leaves, is_current
from tailrace.kv.retention import Policy

if TYPE_CHECKING:
    from tailrace.kv.pages import PagePool
    from tailrace.kv.prefix import Node, Tree

CAUSES = ("pressure", "ttl", "quota", "reset", "parent")
"""Why a side is forgotten: as pages are (`prefix.CAUSES`), or because its node has been."""


class Side:
    """A sliding group's page of one node."""

    __slots__ = ("children", "depth", "entry", "kept", "node", "page", "pins", "used", "uses", "value")

    def __init__(self, node: Node, page: int) -> None:
        self.node = node
        self.page = page  # -1 once it has left the index
        self.depth = node.depth
        self.children = 0  # for ever
        self.pins = 0
        self.kept = False
        self.used = 0
        self.uses = 0
        self.value = 0.0
        self.entry = 0

    @property
    def alive(self) -> bool:
        """False once it has left the index."""
        return self.page >= 0


class WindowIndex:
    """The sides of one sliding group, in its own pool.

    `first(n)` is the first page that a sequence needs which goes on after `n` pages. `number` is the group's place in
    `Node.sides`. `share` and `keep_pages` are as the prefix index has them, of this pool.

    Invariants:

    - A side's page is held once in the pool by the index, however many requests hold it too.
    - A request pins the sides whose pages are in its table, and no others. A side that leaves the index while pinned
      (its node was evicted, or its step has failed) is only forgotten: whoever holds its page keeps it.
    - `evictable` is the number of unpinned sides, and all of them may go at any time.
    - No tenant has more than its share in unpinned sides once `unpin` has returned.
    """

    def __init__(
        self,
        pool: PagePool,
        first: Callable[[int], int],
        policy: Policy,
        *,
        number: int = 0,
        share: float = 1.0,
        keep_pages: int = 0,
    ) -> None:
        self.pool = pool
        self.first = first
        self.number = number
        self.evictable = 0
        self.kept = 0
        self.evictions = dict.fromkeys(CAUSES, 0)  # ever
        self._policy = policy
        self._share = int(share * pool.size) if share < 1.0 else None
        self._keep_pages = keep_pages
        self._leaves: Leaves[Side] = Leaves()
        self._of_tenant: dict[Tree, Leaves[Side]] = {}  # where tenants have a share
        self._sides: dict[int, Side] = {}  # by page
        self._now = 0.0
        self._tick = 0
        self._entries = 0

    def __len__(self) -> int:
        return len(self._sides)

    def has(self, path: Sequence[Node], count: int) -> int:
        """`count` where a sequence can go on after the first `count` nodes of the path with what is known here; else
        the number of the last node whose side it lacks: it can go on after no more than that."""
        number = self.number
        for at in range(count - 1, self.first(count) - 1, -1):
            sides = path[at].sides
            if sides is None or sides[number] is None:
                return at
        return count

    def of(self, path: Sequence[Node], count: int) -> list[Side]:
        """The sides of a usable path that a sequence needs which goes on after `count` pages, the path and no fewer."""
        found = [node.sides[self.number] for node in path[self.first(count) :] if node.sides is not None]
        return [side for side in found if side is not None]

    def insert(self, node: Node, page: int) -> Side | None:
        """Makes `page` known as the node's. Returns its side, pinned for the caller; None where it has one already."""
        if node.sides is None:
            node.sides = [None] * len(node.tree.keep_sides)
        if node.sides[self.number] is not None:
            return None
        side = Side(node, page)
        node.sides[self.number] = side
        self.pool.share((page,))
        self._sides[page] = side
        side.pins = 1
        if node.kept and node.digest in node.tree.keep_sides[self.number] and self.kept < self._keep_pages:
            side.kept = True
            side.pins += 1
            self.kept += 1
        return side

    def pin(self, sides: Iterable[Side]) -> None:
        """One more pin on each. The caller shares the pages in the pool itself."""
        for side in sides:
            if not side.pins:
                self.evictable -= 1
                self._leaves.count -= 1
                if self._share is not None:
                    self._of_tenant[side.node.tree].count -= 1
            side.pins += 1

    def unpin(self, sides: Sequence[Side]) -> None:
        """Takes back one pin from each, those that have left the index meanwhile apart, and marks them as just used."""
        self._tick += 1
        tree = None
        for side in reversed(sides):
            if side.page < 0:
                continue
            side.used = self._tick
            side.uses += 1
            side.pins -= 1
            if not side.pins:
                self._push(side)
                tree = side.node.tree
        if self._share is not None and tree is not None:
            leaves = self._of_tenant[tree]
            while leaves.count > self._share and (least := self._pop(leaves)) is not None:
                self._forget(least, "quota")

    def advance(self, now: float) -> None:
        """It is `now`: forgets unpinned sides that the policy calls overdue."""
        self._now = now
        worth, heap = self._policy.overdue(now), self._leaves.heap
        while heap and heap[0][0] < worth:
            *_, entry, side = heapq.heappop(heap)
            if is_current(entry, side):
                self._forget(side, "ttl")

    def make_room(self, count: int) -> bool:
        """Evicts so that `count` pages are free; False, and nothing evicted, where that cannot be."""
        short = count - self.pool.free
        if short > self.evictable:
            return False
        while short > 0 and (side := self._pop(self._leaves)) is not None:
            self._policy.evicted(side.value)
            self._forget(side, "pressure")
            short -= 1
        return True

    def drop(self, side: Side, cause: str = "") -> None:
        """Its node has left the index, or its content was never written: it is forgotten, pinned or not."""
        if side.page < 0:
            return
        if side.kept:
            side.kept = False
            self.kept -= 1
            side.pins -= 1
            if not side.pins:
                self._push(side)
        if cause:
            self.evictions[cause] += 1
        self._remove(side)

    def reset(self) -> None:
        """Forgets every side that nobody pins."""
        while (side := self._pop(self._leaves)) is not None:
            self._forget(side, "reset")

    def pages(self) -> list[int]:
        """The pages that the index holds."""
        return list(self._sides)

    def check_integrity(self, held: Iterable[Sequence[Side | None]], nodes: Iterable[Node]) -> None:
        """AssertionError unless these (every running request's) are exactly the pins counted, the nodes' sides are
        exactly those known, and the counts and heaps agree."""
        pins: dict[int, int] = {}
        for sides in held:
            for one in sides:
                if one is not None and one.alive:
                    pins[id(one)] = pins.get(id(one), 0) + 1
        found = {}
        for node in nodes:
            one = node.sides[self.number] if node.sides is not None else None
            if one is not None:
                assert one.alive, "a node has a side that is gone"
                assert one.node is node
                found[one.page] = one
        assert found == self._sides, "sides are lost"
        for side in found.values():
            assert side.pins == pins.pop(id(side), 0) + side.kept, f"page {side.page} counts {side.pins} pins"
            assert not side.kept or side.node.kept, "a side is kept without its node"
        assert not pins, "a request holds a side that nobody knows of"
        everything = list(found.values())
        assert self.kept == sum(side.kept for side in everything) <= self._keep_pages, "kept is miscounted"
        assert self.evictable == sum(not side.pins for side in everything), "evictable is miscounted"
        self._leaves.check_integrity(everything)
        for tree, leaves in self._of_tenant.items():
            leaves.check_integrity([side for side in everything if side.node.tree is tree])
            assert self._share is not None
            assert leaves.count <= self._share, "a tenant has more than its share"

    def _push(self, side: Side) -> None:
        """Its last pin has gone."""
        self.evictable += 1
        side.value = self._policy.value(side, self._now)
        self._entries += 1
        side.entry = self._entries
        self._leaves.push(side)
        if self._share is not None:
            self._of_tenant.setdefault(side.node.tree, Leaves()).push(side)

    def _pop(self, leaves: Leaves[Side]) -> Side | None:
        heap = leaves.heap
        while heap:
            *_, entry, side = heapq.heappop(heap)
            if is_current(entry, side):
                return side
        return None

    def _forget(self, side: Side, cause: str) -> None:
        self.evictions[cause] += 1
        self._remove(side)

    def _remove(self, side: Side) -> None:
        node = side.node
        if not side.pins:
            self.evictable -= 1
            self._leaves.count -= 1
            if self._share is not None:
                leaves = self._of_tenant[node.tree]
                leaves.count -= 1
                if not leaves.count:
                    del self._of_tenant[node.tree]
        assert node.sides is not None
        node.sides[self.number] = None
        del self._sides[side.page]
        self.pool.release((side.page,))
        side.page = -1
