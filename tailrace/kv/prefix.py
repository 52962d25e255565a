"""The prefix index: which full pages are known, by what they hold and everything before it.

Verbs: `match`, `pin`, `unpin`, `insert`, `evict`, `reset`, `check_integrity`; and `withdraw`, which takes back inserts
whose content was never written. Their contracts are in their docstrings.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

from tailrace.kv.pages import PagePool

Digest = Callable[[bytes, bytes], bytes]


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

    __slots__ = ("_digest", "digests", "page_bytes", "root", "tokens")

    def __init__(self, root: bytes, page_size: int, digest: Digest = page_digest) -> None:
        self.root = root
        self.page_bytes = 4 * page_size
        self.tokens: list[bytes] = []  # each full page's token ids
        self.digests: list[bytes] = []
        self._digest = digest

    def __len__(self) -> int:
        return len(self.digests)

    def extend(self, tokens: bytes) -> None:
        """Appends the full pages in `tokens`: int32 bytes that begin where the last full page ended."""
        size = self.page_bytes
        parent = self.digests[-1] if self.digests else self.root
        for begin in range(0, len(tokens) - size + 1, size):
            page = tokens[begin : begin + size]
            parent = self._digest(parent, page)
            self.tokens.append(page)
            self.digests.append(parent)


class Node:
    """One full page in the index. `pins` counts the requests whose path runs through it."""

    __slots__ = ("children", "digest", "entry", "page", "parent", "pins", "tokens", "used")

    def __init__(self, digest: bytes, tokens: bytes, page: int, parent: Node | None) -> None:
        self.digest = digest
        self.tokens = tokens
        self.page = page  # -1 once it has left the index, and for roots
        self.parent = parent
        self.children = 0
        self.pins = 0
        self.used = 0  # tick of the last unpin of a path through it; orders evictions
        self.entry = 0  # number of its latest entry in the leaf heap

    @property
    def alive(self) -> bool:
        """False once it has left the index."""
        return self.page >= 0


class PrefixIndex:
    """A radix tree whose edges are full pages, found by digest.

    Invariants:

    - A node's page is held once in the pool by the index, however many requests hold it too.
    - A request pins a path: every node from the first page down, and only nodes whose pages are in its block table.
      So a parent's pins are never fewer than a child's, an unpinned node has only unpinned nodes below it, `evictable`
      is simply the number of unpinned nodes, and a request keeps no page from eviction but its own.
    - Two nodes never have one digest. A digest that is taken by other content (a collision, which only a stubbed hash
      ever produces) is a miss and cannot be inserted; it never is a wrong hit, since a hit compares the token ids and
      the parent, up to the root, which is compared in full.

    Eviction is least recently used first: a heap of leaves, entered when their last pin or last child goes, ordered by
    when they were last used. Entries that are no longer true are skipped when they surface, and the heap is rebuilt
    when they are the majority: an eviction looks at a constant number of entries on average, each O(log n).
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []  # (last used, entry number, node); numbers are unique
        self._leaf_count = 0  # nodes that are evictable leaves now
        self._tick = 0
        self._entries = 0
        self.evictable = 0
        self.visited = 0  # heap entries that evictions have looked at, ever

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, chain: PageChain, limit: int) -> list[Node]:
        """The longest known path of the chain's first `limit` pages. No side effects: the nodes may be evicted as soon
        as anything else is called but `pin`."""
        parent = self._roots.get(chain.root)
        path: list[Node] = []
        if parent is None:
            return path
        known, tokens = self._nodes, chain.tokens
        for at, digest in enumerate(chain.digests[:limit] if limit < len(chain.digests) else chain.digests):
            node = known.get(digest)
            if node is None or node.parent is not parent or node.tokens != tokens[at]:
                break
            path.append(node)
            parent = node
        return path

    def pin(self, path: Iterable[Node]) -> None:
        """One more pin on each node of a path that begins at a first page: none of them is evicted until `unpin`. The
        caller shares the pages in the pool itself."""
        for node in path:
            if not node.pins:
                self.evictable -= 1
                if not node.children:
                    self._leaf_count -= 1
            node.pins += 1

    def unpin(self, path: Sequence[Node]) -> None:
        """Takes back one pin from each node of a path (all that the caller pinned, so that parents stay pinned at least
        as often as their children), and marks it as just used."""
        self._tick += 1
        for node in reversed(path):
            node.used = self._tick
            node.pins -= 1
            if not node.pins:
                self.evictable += 1
                if not node.children:
                    self._push(node)

    def insert(self, chain: PageChain, at: int, parent: Node | None, page: int) -> Node | None:
        """Makes the chain's page number `at` known as `page`, below `parent` (None: it is the first), which the caller
        has pinned. Returns its node, pinned for the caller.

        None where an equal page is known already (the first stays; pinning it for one that holds another would cost
        two pages for one), or where the digest is taken by other content. The caller's page then stays the caller's
        alone, to be freed with it, and so do its pages after that. The page is complete when the step that is about to
        be launched ends; later steps may rely on it.
        """
        if parent is None:
            parent = self._roots.get(chain.root) or Node(chain.root, b"", -1, None)
        digest = chain.digests[at]
        if digest in self._nodes:
            return None
        self._pool.share((page,))
        node = Node(digest, chain.tokens[at], page, parent)
        self._nodes[digest] = node
        if parent.parent is None:
            self._roots[parent.digest] = parent
        parent.children += 1
        node.pins = 1
        return node

    def evict(self, count: int) -> int:
        """Forgets up to `count` unpinned pages, least recently used leaves first, and releases them in the pool.
        Returns how many; fewer only where no unpinned page is left."""
        done = 0
        while done < count and self._leaves:
            _, entry, node = heapq.heappop(self._leaves)
            self.visited += 1
            if entry != node.entry or node.page < 0 or node.pins or node.children:
                continue
            self._leaf_count -= 1
            self._remove(node)
            done += 1
        return done

    def withdraw(self, nodes: Sequence[Node]) -> None:
        """Takes back inserts whose content was never written. The nodes are in order of insertion and unpinned by now;
        those evicted since are skipped."""
        for node in reversed(nodes):
            if node.page < 0:
                continue
            assert not node.pins, "withdrawn while in use"
            assert not node.children, "withdrawn with pages below it"
            self._leaf_count -= 1
            self._remove(node)

    def reset(self) -> int:
        """Forgets every page that no request pins; returns how many."""
        return self.evict(self.evictable)

    def pages(self) -> list[int]:
        """The pages that the index holds."""
        return [node.page for node in self._nodes.values()]

    def check_integrity(self, paths: Iterable[Sequence[Node]]) -> None:
        """AssertionError unless these paths (every running request's) are exactly the pins counted, and the tree, the
        counts and the leaf heap agree. O(nodes)."""
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
            assert node.parent is not None
            up = node.parent
            assert self._nodes.get(up.digest) is up or self._roots.get(up.digest) is up, "an orphan in the index"
            children[id(up)] = children.get(id(up), 0) + 1
        heads = {entry: node for _, entry, node in self._leaves}
        leaves = 0
        for node in self._nodes.values():
            assert node.pins == pins.get(id(node), 0), f"page {node.page} counts {node.pins} pins"
            assert node.children == children.get(id(node), 0), f"page {node.page} counts {node.children} children"
            if not node.pins and not node.children:
                leaves += 1
                assert heads.get(node.entry) is node, f"page {node.page} can never be evicted"
        assert all(root.children == children.get(id(root), 0) > 0 for root in self._roots.values())
        assert leaves == self._leaf_count, "evictable leaves are miscounted"
        assert self.evictable == sum(not node.pins for node in self._nodes.values()), "evictable is miscounted"

    def _push(self, node: Node) -> None:
        """Enters a node that has just become an evictable leaf; rebuilds the heap where stale entries outnumber."""
        self._leaf_count += 1
        self._entries += 1
        node.entry = self._entries
        heapq.heappush(self._leaves, (node.used, node.entry, node))
        if len(self._leaves) > 2 * self._leaf_count + 64:
            self._leaves = [
                (used, entry, leaf)
                for used, entry, leaf in self._leaves
                if entry == leaf.entry and leaf.page >= 0 and not leaf.pins and not leaf.children
            ]
            heapq.heapify(self._leaves)

    def _remove(self, node: Node) -> None:
        """Takes an unpinned leaf out; its parent may become one, in its place in the order of use."""
        parent = node.parent
        assert parent is not None
        del self._nodes[node.digest]
        self._pool.release((node.page,))
        self.evictable -= 1
        node.page = -1
        parent.children -= 1
        if parent.page < 0:
            if not parent.children:
                del self._roots[parent.digest]
        elif not parent.children and not parent.pins:
            self._push(parent)
