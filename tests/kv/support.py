"""A prefix index on its own, with requests that compute everything at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from tailrace.kv.pages import PagePool
from tailrace.kv.prefix import Digest, Node, PageChain, PrefixIndex, page_digest, root_digest
from tailrace.kv.retention import Policy

PAGE = 4
ROOT = root_digest({"tenant": b"", "model": b"m"})

Held = tuple[list[Node], list[int]]
"""A request's path in the index, and its pages."""


class Cache:
    """A pool with its index, and whole sequences inserted by one request each."""

    def __init__(self, pages: int, digest: Digest = page_digest, policy: Policy | None = None, **index: Any) -> None:
        self.pool = PagePool(pages)
        self.index = PrefixIndex(self.pool, policy, **index)
        self.digest = digest

    def chain(self, tokens: Sequence[int], root: bytes = ROOT) -> PageChain:
        chain = PageChain(root, PAGE, self.digest)
        chain.extend(array("i", tokens).tobytes())
        return chain

    def match(self, tokens: Sequence[int], root: bytes = ROOT) -> int:
        chain = self.chain(tokens, root)
        return len(self.index.match(chain, len(chain)))

    def hold(self, tokens: Sequence[int], root: bytes = ROOT) -> Held:
        """Matches, pins, takes the missing pages and inserts them, as a request does that computes everything."""
        chain = self.chain(tokens, root)
        path = self.index.match(chain, len(chain))
        self.index.pin(path)
        pages = [node.page for node in path]
        self.pool.share(pages)
        missing = len(chain) - len(path)
        self.index.evict(missing - self.pool.free)
        pages += self.pool.take(missing)
        for at in range(len(path), len(chain)):
            node = self.index.insert(chain, at, path[-1] if path else None, pages[at])
            if node is None:
                break
            path.append(node)
        return path, pages

    def let_go(self, held: Held) -> None:
        self.index.unpin(held[0])
        self.pool.release(held[1])

    def remember(self, tokens: Sequence[int], root: bytes = ROOT) -> None:
        self.let_go(self.hold(tokens, root))

    def check(self, held: Sequence[Held] = ()) -> None:
        self.index.check_integrity([path for path, _ in held])
        self.pool.check_integrity([*(pages for _, pages in held), self.index.pages()])
