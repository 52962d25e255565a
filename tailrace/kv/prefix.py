"""The prefix index: which full pages are known, by what they hold and everything before it.

Verbs: `match`, `pin`, `unpin`, `insert`, `advance`, `evict`, `reset`, `check_integrity`; and `withdraw`, which takes
back inserts whose content was never written. Their contracts are in their docstrings. What a page is worth is for a
policy to say (`retention`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from tailrace.kv.leaves import Leaves, is_current
from tailrace.kv.pages import PagePool
from tailrace.kv.retention import Lru, Policy

if TYPE_CHECKING:
    from tailrace.kv.windows import Side, WindowIndex

Digest = Callable[[bytes, bytes], bytes]
CAUSES = ("pressure", "ttl", "quota", "reset")
"""Why a page is forgotten: room was needed, it had not been used for too long, its tenant had too many, or somebody
asked."""
REMEMBERED = 16_384
"""Pages of which one knows still that they are forgotten, and why."""


def root_digest(keys: Mapping[str, bytes]) -> bytes:
    """The parent digest of a sequence's first page: SHA-256 over the tagged extra keys (tenant salt, model identity,
    numerics...), each with its tag and length, so that no two sets of keys give the same bytes."""
    state = hashlib.sha256(b"tailrace kv root 1")
    for tag in sorted(keys):
        name = tag.encode()
        state.update(b"%d:%s%d:" % (len(name), name, len(keys[tag])))
        state.update(keys[tag])
    return state.digest()


def page_digest(parent: bytes, tokens: bytes) -> bytes:
    """Identity of a full page: SHA-256 over its parent's digest and its token ids (native int32 bytes)."""
    return hashlib.sha256(parent + tokens).digest()


class PageChain:
    """The identities of one sequence's full pages, computed once and grown as the sequence grows."""

    __slots__ = ("adapter", "digest", "digests", "page_bytes", "root", "tokens")

    def __init__(self, root: bytes, page_size: int, digest: Digest = page_digest, adapter: int | None = None) -> None:
        self.root = root
        self.adapter = adapter  # the id of the sequence's adapter, for those who are told of its pages
        self.page_bytes = 4 * page_size
        self.tokens: list[bytes] = []  # each full page's token ids
        self.digests: list[bytes] = []
        self.digest = digest

    def __len__(self) -> int:
        return len(self.digests)

    def extend(self, tokens: bytes) -> None:
        """Appends the full pages in `tokens`: int32 bytes that begin where the last full page ended."""
        size = self.page_bytes
        parent = self.digests[-1] if self.digests else self.root
        for begin in range(0, len(tokens) - size + 1, size):
            page = tokens[begin : begin + size]
            parent = self.digest(parent, page)
            self.tokens.append(page)
            self.digests.append(parent)


class Node:
    """One full page in the index. `pins` counts the requests whose path runs through it, and the index where it keeps
    the page for good (`kept`)."""

    __slots__ = (
        "children", "depth", "digest", "entry", "kept", "page", "parent", "pins", "sides", "tokens", "tree", "used",
        "uses", "value",
    )  # fmt: skip

    def __init__(self, digest: bytes, tokens: bytes, page: int, parent: Node | None, tree: Tree) -> None:
        self.digest = digest
        self.tokens = tokens
        self.page = page  # -1 once it has left the index, and for roots
        self.parent = parent
        self.tree = tree
        self.depth: int = -1 if parent is None else parent.depth + 1  # pages before it
        self.children = 0
        self.pins = 0
        self.kept = False
        self.used = 0  # tick of the last unpin of a path through it
        self.uses = 0  # unpins of paths through it
        self.value = 0.0  # what the policy says that it is worth, from when its last pin went
        self.entry = 0  # number of its latest entry in the heaps of leaves
        self.sides: list[Side | None] | None = None  # its page in each sliding group; None where it has none

    @property
    def alive(self) -> bool:
        """False once it has left the index."""
        return self.page >= 0


class Tree:
    """All pages below one root digest: a tenant's, or those that it has with an adapter. `leaves` is None where a
    tenant may have the whole pool."""

    __slots__ = ("adapter", "evictable", "keep", "keep_sides", "leaves", "root")

    def __init__(
        self, chain: PageChain, keep: Iterable[bytes], leaves: Leaves[Node] | None, windows: Sequence[WindowIndex]
    ) -> None:
        self.root = Node(chain.root, b"", -1, None, self)
        self.adapter = chain.adapter
        self.evictable = 0  # unpinned pages
        self.leaves = leaves
        self.keep: dict[bytes, bytes] = {}  # digests and token ids of the pages that are kept for good once known
        self.keep_sides: list[set[bytes]] = [set() for _ in windows]  # those of them that go on to be seen at their end
        for tokens in keep if chain.adapter is None else ():
            kept = PageChain(chain.root, chain.page_bytes // 4, chain.digest)
            kept.extend(tokens)
            self.keep |= zip(kept.digests, kept.tokens, strict=True)
            for window, digests in zip(windows, self.keep_sides, strict=True):
                digests.update(kept.digests[window.first(len(kept)) :])


class Listener(Protocol):
    """Whoever follows what an index holds (`events`)."""

    def stored(self, node: Node) -> None:
        """It has just been inserted; those before it are known."""

    def removed(self, node: Node) -> None:
        """It has just been taken out."""

    def cleared(self) -> None:
        """The index has just become empty because somebody asked."""


class PrefixIndex:
    """A radix tree whose edges are full pages, found by digest.

    Invariants:

    - A node's page is held once in the pool by the index, however many requests hold it too.
    - A request pins a path: every node from the first page down, and only nodes whose pages are in its block table.
      So a parent's pins are never fewer than a child's, an unpinned node has only unpinned nodes below it, `evictable`
      is simply the number of unpinned nodes, and a request keeps no page from eviction but its own.
    - A page that is kept for good is pinned once more, by the index, and so are all pages before it.
    - Two nodes never have one digest. A digest that is taken by other content (a collision, which only a stubbed hash
      ever produces) is a miss and cannot be inserted; it never is a wrong hit, since a hit compares the token ids and
      the parent, up to the root, which is compared in full.
    - No tenant (root digest) has more than `share` of the pool in unpinned pages once `unpin` has returned.

    Eviction is of the least valued leaf first: a heap of leaves, entered when their last pin or last child goes,
    ordered by what the policy said when they were last used. Entries that are no longer true are skipped when they
    surface, and the heap is rebuilt when they are the majority: an eviction looks at a constant number of entries on
    average, each O(log n). Where tenants have a share, each has a heap of its own besides, under the same rules.

    `keep` are the token ids (int32 bytes, of which full pages count) of prefixes that are kept for good in the tree,
    without an adapter, of every tenant that has computed them, `keep_pages` at most in all.

    `windows` are the sliding groups of layers, which have pages of their own beside a node's (`windows`). A path is
    usable as far as each of them has what its window reaches back to, and `match` gives no more of it.
    """

    def __init__(
        self,
        pool: PagePool,
        policy: Policy | None = None,
        *,
        share: float = 1.0,
        keep: Sequence[bytes] = (),
        keep_pages: int = 0,
        windows: Sequence[WindowIndex] = (),
    ) -> None:
        self.windows = windows
        self._pool = pool
        self._policy: Policy = policy or Lru()
        self._share = int(share * pool.size) if share < 1.0 else None  # most unpinned pages of a tenant
        self._keep = keep
        self._keep_pages = keep_pages
        self._nodes: dict[bytes, Node] = {}
        self._trees: dict[bytes, Tree] = {}
        self._leaves: Leaves[Node] = Leaves()
        self._now = 0.0
        self._tick = 0
        self._entries = 0
        self.evictable = 0
        self.kept = 0  # pages that are kept for good
        self.evictions = dict.fromkeys(CAUSES, 0)  # ever
        self.visited = 0  # heap entries that evictions have looked at, ever
        self.listener: Listener | None = None
        self._forgotten: OrderedDict[bytes, str] = OrderedDict()  # the latest ones, with the cause

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, chain: PageChain, limit: int, before: Sequence[Node] = ()) -> list[Node]:
        """The longest usable path of the chain's first `limit` pages. No side effects: the nodes may be evicted as soon
        as anything else is called but `pin`. `before` is what an earlier match of the chain gave here: as much of it
        as is still known is not looked up again."""
        tree = self._trees.get(chain.root)
        path = list(before[:limit])
        while path and not path[-1].alive:  # leaves go first: those before a page that is known are too
            path.pop()
        if tree is None:
            return path
        parent = path[-1] if path else tree.root
        known, tokens = self._nodes, chain.tokens
        for at, digest in enumerate(chain.digests[len(path) : limit], len(path)):
            node = known.get(digest)
            if node is None or node.parent is not parent or node.tokens != tokens[at]:
                break
            path.append(node)
            parent = node
        if self.windows:
            del path[self._usable(path) :]
        return path

    def why_absent(self, digest: bytes) -> str:
        """Why a page cannot be used that was known (a cause of `CAUSES`, or "window" where it is, but not those that
        layers with windows need with it); "" where it never was, as far as one remembers."""
        return "window" if digest in self._nodes else self._forgotten.get(digest, "")

    def _usable(self, path: Sequence[Node]) -> int:
        """After how many nodes of a path a sequence can go on. Each page that a window lacks rules out every place from
        which it would be seen, so none is looked at twice by the same window but for those of the last place."""
        count, agreed = len(path), 0
        while count and agreed < len(self.windows):
            for window in self.windows:
                found = window.has(path, count)
                agreed = agreed + 1 if found == count else 0
                if found < count:
                    count = found
                    break
        return count

    def follow(self, chain: PageChain, at: int, parent: Node | None) -> Node | None:
        """The node of the chain's page number `at`, below `parent`, where it is known, pinned for a caller that has
        computed an equal page: so that it can give it the sides that it lacks, and insert what comes after it."""
        node = self._nodes.get(chain.digests[at])
        tree = self._trees.get(chain.root)
        if node is None or tree is None:
            return None
        if node.parent is not (parent or tree.root) or node.tokens != chain.tokens[at]:
            return None
        self.pin((node,))
        return node

    def replace(self, node: Node, page: int) -> None:
        """A known page gives way to an equal one, which is complete. Nobody may hold the old one but the index."""
        self._pool.share((page,))
        self._pool.release((node.page,))
        node.page = page

    def pin(self, path: Sequence[Node]) -> None:
        """One more pin on each node of a path that begins at a first page: none of them is evicted until `unpin`. The
        caller shares the pages in the pool itself."""
        count = 0
        for node in path:
            if not node.pins:
                count += 1
                if not node.children:
                    self._no_leaf(node)
            node.pins += 1
        if count:
            self.evictable -= count
            path[0].tree.evictable -= count

    def unpin(self, path: Sequence[Node]) -> None:
        """Takes back one pin from each node of a path (all that the caller pinned, so that parents stay pinned at least
        as often as their children), and marks it as just used. Where that leaves the tenant more unpinned pages than
        its share, the least valued of them are forgotten."""
        if not path:
            return
        self._tick += 1
        count, tree = 0, path[0].tree
        for node in reversed(path):
            node.used = self._tick
            node.uses += 1
            node.pins -= 1
            if not node.pins:
                count += 1
                node.value = self._policy.value(node, self._now)
                if not node.children:
                    self._push(node)
        self.evictable += count
        tree.evictable += count
        if self._share is not None and tree.leaves is not None:
            while tree.evictable > self._share and (leaf := self._pop(tree.leaves)) is not None:
                self._forget(leaf, "quota")

    def insert(self, chain: PageChain, at: int, parent: Node | None, page: int) -> Node | None:
        """Makes the chain's page number `at` known as `page`, below `parent` (None: it is the first), which the caller
        has pinned. Returns its node, pinned for the caller.

        None where an equal page is known already (the first stays; pinning it for one that holds another would cost
        two pages for one), or where the digest is taken by other content. The caller's page then stays the caller's
        alone, to be freed with it, and so do its pages after that. The page is complete when the step that is about to
        be launched ends; later steps may rely on it.
        """
        digest = chain.digests[at]
        if digest in self._nodes:
            return None
        if parent is None:
            tree = self._trees.get(chain.root)
            if tree is None:
                tree = Tree(chain, self._keep, Leaves() if self._share is not None else None, self.windows)
                self._trees[chain.root] = tree
            parent = tree.root
        else:
            tree = parent.tree
        self._pool.share((page,))
        node = Node(digest, chain.tokens[at], page, parent, tree)
        self._nodes[digest] = node
        parent.children += 1
        node.pins = 1
        if tree.keep and tree.keep.get(digest) == node.tokens and self.kept < self._keep_pages:
            node.kept = parent is tree.root or parent.kept
            node.pins += node.kept
            self.kept += node.kept
        if self.listener is not None:
            self.listener.stored(node)
        return node

    def advance(self, now: float) -> int:
        """It is `now` (seconds, never less than before): forgets unpinned pages that the policy calls overdue, and
        returns how many. What is unpinned from here on is used at this time."""
        self._now = now
        for window in self.windows:
            window.advance(now)
        worth, heap, done = self._policy.overdue(now), self._leaves.heap, 0
        while heap and heap[0][0] < worth:
            *_, entry, node = heapq.heappop(heap)
            self.visited += 1
            if is_current(entry, node):
                self._forget(node, "ttl")
                done += 1
        return done

    def evict(self, count: int) -> int:
        """Forgets up to `count` unpinned pages, least valued leaves first, and releases them in the pool. Returns how
        many; fewer only where no unpinned page is left."""
        done = 0
        while done < count and (node := self._pop(self._leaves)) is not None:
            self._policy.evicted(node.value)
            self._forget(node, "pressure")
            done += 1
        return done

    def withdraw(self, nodes: Sequence[Node]) -> None:
        """Takes back inserts whose content was never written. The nodes are in order of insertion and unpinned by now
        (but for those that are kept for good, which may come again); those evicted since are skipped."""
        for node in reversed(nodes):
            if node.page < 0:
                continue
            if node.kept:
                self._unkeep(node)
            assert not node.pins, "withdrawn while in use"
            assert not node.children, "withdrawn with pages below it"
            self._remove(node)

    def reset(self) -> int:
        """Forgets every page that no request pins and that is not kept for good; returns how many."""
        done = 0
        while (node := self._pop(self._leaves)) is not None:
            self._forget(node, "reset")
            done += 1
        for window in self.windows:
            window.reset()
        if self.listener is not None and done and not self._nodes:
            self.listener.cleared()
        return done

    def nodes(self) -> list[Node]:
        """All that it holds, each page after those before it."""
        return list(self._nodes.values())

    def pages(self) -> list[int]:
        """The pages that the index holds."""
        return [node.page for node in self._nodes.values()]

    def check_integrity(self, paths: Iterable[Sequence[Node]]) -> None:
        """AssertionError unless these paths (every running request's) are exactly the pins counted, and the tree, the
        counts and the heaps of leaves agree. O(nodes)."""
        pins: dict[int, int] = {}
        for path in paths:
            above: Node | None = None
            for node in path:
                assert node.alive, "a pinned page was evicted"
                assert above is None or node.parent is above, "a pinned path is broken"
                pins[id(node)] = pins.get(id(node), 0) + 1
                above = node
        children: dict[int, int] = {}
        for digest, node in self._nodes.items():
            assert node.digest == digest
            assert node.alive
            up = node.parent
            assert up is not None
            assert self._nodes.get(up.digest) is up or up is node.tree.root, "an orphan in the index"
            assert self._trees.get(node.tree.root.digest) is node.tree, "a page of a tree that is gone"
            assert node.tree is up.tree, "a page below another tenant's"
            assert node.depth == up.depth + 1, f"page {node.page} is at the wrong depth"
            children[id(up)] = children.get(id(up), 0) + 1
            if node.kept:
                assert node.tree.keep.get(digest) == node.tokens, f"page {node.page} is kept and need not be"
                assert up is node.tree.root or up.kept, f"page {node.page} is kept without those before it"
        for node in self._nodes.values():
            assert node.pins == pins.get(id(node), 0) + node.kept, f"page {node.page} counts {node.pins} pins"
            assert node.children == children.get(id(node), 0), f"page {node.page} counts {node.children} children"
        assert self.kept == sum(node.kept for node in self._nodes.values()) <= self._keep_pages, "kept is miscounted"
        self._leaves.check_integrity(list(self._nodes.values()))
        assert self.evictable == sum(not node.pins for node in self._nodes.values()), "evictable is miscounted"
        members: dict[int, list[Node]] = {}
        for node in self._nodes.values():
            members.setdefault(id(node.tree), []).append(node)
        for tree in self._trees.values():
            nodes = members.get(id(tree), [])
            assert tree.root.children == children.get(id(tree.root), 0) > 0, "an empty tree"
            assert tree.evictable == sum(not node.pins for node in nodes), "a tenant's pages are miscounted"
            assert (tree.leaves is None) is (self._share is None)
            if tree.leaves is not None and self._share is not None:
                assert tree.evictable <= self._share, "a tenant has more than its share"
                tree.leaves.check_integrity(nodes)

    def _push(self, node: Node) -> None:
        """It has just become an evictable leaf."""
        self._entries += 1
        node.entry = self._entries
        self._leaves.push(node)
        if node.tree.leaves is not None:
            node.tree.leaves.push(node)

    def _no_leaf(self, node: Node) -> None:
        """It is no longer an evictable leaf."""
        self._leaves.count -= 1
        if node.tree.leaves is not None:
            node.tree.leaves.count -= 1

    def _pop(self, leaves: Leaves[Node]) -> Node | None:
        """The least valued leaf, which leaves this heap; None where there is none."""
        heap = leaves.heap
        while heap:
            *_, entry, node = heapq.heappop(heap)
            self.visited += 1
            if is_current(entry, node):
                return node
        return None

    def _forget(self, node: Node, cause: str) -> None:
        """An unpinned leaf is evicted."""
        self.evictions[cause] += 1
        self._forgotten[node.digest] = cause
        if len(self._forgotten) > REMEMBERED:
            self._forgotten.popitem(last=False)
        self._remove(node)

    def _remove(self, node: Node) -> None:
        """Takes an unpinned leaf out; its parent may become one, in its place in the order of what pages are worth."""
        parent, tree = node.parent, node.tree
        assert parent is not None
        del self._nodes[node.digest]
        self._pool.release((node.page,))
        if node.sides is not None:
            for window, side in zip(self.windows, node.sides, strict=True):
                if side is not None:
                    window.drop(side, "parent")
        self._no_leaf(node)
        self.evictable -= 1
        tree.evictable -= 1
        node.page = -1
        parent.children -= 1
        if parent is tree.root:
            if not parent.children:
                del self._trees[parent.digest]
        elif not parent.children and not parent.pins:
            self._push(parent)
        if self.listener is not None:
            self.listener.removed(node)

    def _unkeep(self, node: Node) -> None:
        """The index takes back its own pin."""
        node.kept = False
        self.kept -= 1
        node.pins -= 1
        if not node.pins:
            self.evictable += 1
            node.tree.evictable += 1
            if not node.children:
                self._push(node)
