"""Where pages of KV go that outlive the pool: one interface, and a file a tier.

A tier is asked by a page's identity and answers with its bytes, or not at all: what it lost, or cannot vouch for, is a
miss. It never knows of requests, of page numbers, or of what the bytes mean.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tailrace.kv.prefix import Node, PageChain


class PageKey(NamedTuple):
    """Which full page: its digest (`prefix.page_digest`), that of the page before it (of the root, for the first), and
    its token ids (native int32 bytes)."""

    digest: bytes
    parent: bytes
    tokens: bytes


def memory(size: int) -> memoryview:
    """So many bytes that begin on a page of the machine's memory, as disks take them without a copy."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def key_at(chain: PageChain, at: int) -> PageKey:
    """The key of a chain's page number `at`."""
    return PageKey(chain.digests[at], chain.digests[at - 1] if at else chain.root, chain.tokens[at])


def key_of(node: Node) -> PageKey:
    """The key of a page in the index."""
    assert node.parent is not None
    return PageKey(node.digest, node.parent.digest, node.tokens)


@dataclass(frozen=True)
class TierStats:
    """Since the tier was opened, but for `pages` and `bytes`, which are what it holds now as far as it knows. `refused`
    are stores that gave nothing, `misses` loads that did, by cause."""

    pages: int = 0
    bytes: int = 0
    loaded: int = 0
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    writable: bool = True
    misses: Mapping[str, int] = field(default_factory=dict)


class Tier(Protocol):
    """`up`, `lookup`, `holds` and `stats` return at once, from any thread. The others may block, for a time that is
    bounded, and are called by one thread. Nothing here raises for what happens to the stored pages. `name` is what
    metrics and timelines call it.

    Where `asked` is true it does not know what it has until it has been asked (`ask`)."""

    @property
    def name(self) -> str: ...

    @property
    def asked(self) -> bool: ...

    @property
    def up(self) -> bool:
        """Whether it answers: nothing is asked of one that does not, nor stored in it."""
        ...

    def lookup(self, chain: PageChain, first: int, limit: int) -> int:
        """How many of the chain's pages first .. limit-1 it has in a row from `first`, as far as it knows; marks the
        chain as just used."""
        ...

    def holds(self, digest: bytes) -> bool:
        """Whether it has that page, as far as it knows."""
        ...

    def ask(self, digests: Sequence[bytes]) -> None:
        """Finds out which of these it has: `lookup` and `holds` know it then."""
        ...

    def prepare(self, keys: Sequence[PageKey]) -> None:
        """These are going to be loaded, in this order, unless another call says otherwise."""
        ...

    def load(self, key: PageKey) -> memoryview | None:
        """The page's bytes, as they were stored, until the next call; None where it cannot vouch for them."""
        ...

    @property
    def batch(self) -> int:
        """How many pages it takes best at a time."""
        ...

    def store_all(self, pages: Sequence[tuple[PageKey, bytes | bytearray | memoryview]]) -> None:
        """Keeps pages, at the cost of others if need be."""
        ...

    def tend(self) -> float | None:
        """Whatever else is to be done, called while there is nothing to do; the seconds after which to call it again,
        None where it need not be."""
        ...

    def close(self) -> None:
        """It is not going to be used any more."""
        ...

    def stats(self) -> TierStats:
        """What has happened so far."""
        ...
