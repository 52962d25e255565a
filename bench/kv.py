"""The prefix index on one core: pages a second that it matches, inserts and evicts, and what an eviction looks at.

The tree has 100,000 pages: prompts of 40, of which the first four are common to all. A third of them has been used once
more, which leaves entries in the heap of leaves that are no longer true. Matching, inserting and evicting are timed as
requests cause them: with the pins, the unpins and the pool's counts that go with them, but for evicting alone.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Sequence

from tailrace.backends import PAGE_SIZE
from tailrace.kv.pages import PagePool
from tailrace.kv.prefix import PageChain, PrefixIndex, root_digest
from tailrace.kv.retention import POLICIES, make_policy

PAGES = 100_000
PROMPT, STEM = 40, 4
"""Pages of a prompt, and how many of them all prompts have in common."""
EVICTED = 50_000
SINGLE = 2_000
"""Evictions that are looked at one by one."""
BAR = 30_000
"""Pages a second that are asked for."""


def prompts() -> list[PageChain]:
    """As many as fill the pool, to the page or nearly so."""
    root = root_digest({"tenant": b"", "model": b"bench"})
    stem = array("i", [7] * STEM * PAGE_SIZE)
    own = (PROMPT - STEM) * PAGE_SIZE
    made = []
    for number in range((PAGES - STEM) // (PROMPT - STEM)):
        chain = PageChain(root, PAGE_SIZE)
        chain.extend((stem + array("i", range(number * own, (number + 1) * own))).tobytes())
        made.append(chain)
    return made


class Filled:
    """An index over a pool of its own, with all prompts in it. `seconds` is what inserting them took."""

    def __init__(self, policy: str, chains: Sequence[PageChain]) -> None:
        self.pool = PagePool(PAGES)
        ttl = 600.0 if policy == "ttl" else 0.0
        self.index = PrefixIndex(self.pool, make_policy(policy, page_tokens=PAGE_SIZE, ttl=ttl))
        self.seconds = timed(lambda: [self.serve(chain) for chain in chains])

    def serve(self, chain: PageChain) -> None:
        """A request from its admission to its end."""
        index, pool = self.index, self.pool
        path = index.match(chain, len(chain))
        index.pin(path)
        pages = [node.page for node in path]
        pool.share(pages)
        pages += pool.take(len(chain) - len(path))
        for at in range(len(path), len(chain)):
            node = index.insert(chain, at, path[-1] if path else None, pages[at])
            assert node is not None
            path.append(node)
        index.unpin(path)
        pool.release(pages)


def timed(work: Callable[[], object]) -> float:
    """Seconds of this thread."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def one_by_one(index: PrefixIndex) -> list[int]:
    """Entries that each of some single evictions looked at."""
    looked = []
    for _ in range(SINGLE):
        before = index.visited
        index.evict(1)
        looked.append(index.visited - before)
    return looked


def run(repeats: int) -> None:
    """Prints the table: medians of `repeats` rounds."""
    chains = prompts()
    fresh = len(chains) * (PROMPT - STEM) + STEM
    hashing = statistics.median(timed(prompts) for _ in range(repeats))
    print(f"{fresh} pages of {PAGE_SIZE} tokens; identifying them: {len(chains) * PROMPT / hashing:,.0f} pages/s")
    print(f"at least {BAR:,} pages/s are asked for; processor time of one thread, medians of {repeats}\n")
    print(f"{'policy':8}{'insert/s':>12}{'match/s':>12}{'evict/s':>12}   entries an eviction looked at: mean, most")
    for policy in POLICIES:
        rates: list[tuple[float, float, float]] = []
        looked: list[int] = []
        for _ in range(repeats):
            filled = Filled(policy, chains)
            again = chains[::3]
            matching = timed(lambda filled=filled, again=again: [filled.serve(chain) for chain in again])
            looked += one_by_one(filled.index)
            evicting = timed(lambda filled=filled: filled.index.evict(EVICTED))
            rates.append((fresh / filled.seconds, len(again) * PROMPT / matching, EVICTED / evicting))
        insert, match, evict = (statistics.median(column) for column in zip(*rates, strict=True))
        mean = statistics.mean(looked)
        print(f"{policy:8}{insert:12,.0f}{match:12,.0f}{evict:12,.0f}   {mean:.2f}, {max(looked)}")
