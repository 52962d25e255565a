"""What the prefix index would have found of a recorded trace of requests, under each policy and in each size of pool.

A trace is as `trace` reads it. A block is a page here: what an engine with smaller pages finds beyond whole blocks, and
what it finds of its own outputs, a trace does not tell.

The index, the pool and the policies are those of an engine. A request holds all its full pages at once, and is done
before the next one comes; at least one of its tokens is always computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path

from tailrace.kv.pages import PagePool
from tailrace.kv.prefix import PageChain, PrefixIndex
from tailrace.kv.retention import ATTENTION_PARITY, POLICIES, Policy, Used, make_policy
from tailrace.kv.trace import block_tokens, lines

OPTIMAL = "optimal"
REPLAYED = (*POLICIES, OPTIMAL)
"""What can be replayed: every policy, and the bound of them all."""
REPORT_EVERY = 500
"""Requests between reports of progress."""


@dataclass(frozen=True)
class Recorded:
    """One request: when it came (seconds), its prompt's tokens, and the identities of its full pages."""

    at: float
    tokens: int
    chain: PageChain


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they came."""

    requests: Sequence[Recorded]
    block_tokens: int

    @cached_property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.tokens for request in self.requests)

    @cached_property
    def distinct_pages(self) -> int:
        """Different full pages: a pool of as many never has to evict."""
        return len({digest for request in self.requests for digest in request.chain.digests})

    @cached_property
    def next_uses(self) -> list[array[float]]:
        """For each request, and each of its pages: the number of the next request that could find it there, infinite
        where none can."""
        soonest: dict[bytes, int] = {}
        found: list[array[float]] = []
        for number in range(len(self.requests) - 1, -1, -1):
            request = self.requests[number]
            digests = request.chain.digests
            found.append(array("d", [soonest.get(digest, inf) for digest in digests]))
            soonest.update(dict.fromkeys(digests[: (request.tokens - 1) // self.block_tokens], number))
        return found[::-1]


@dataclass(frozen=True)
class Outcome:
    """What one policy did with one pool."""

    policy: str
    pages: int
    hit_tokens: int
    hit_rate: float
    """Share of the prompts' tokens that were found: prefill that was saved, each token as one."""
    work_saved: float
    """The same with each token as what it costs, attention included: what the policy "cost" is after."""
    evictions: int
    """Pages forgotten for want of room, or because they were overdue."""
    most_held: int
    """Most pages that were held at a time."""


class Optimal:
    """The furthest next use goes first (Belady, 1966). Since a page is never used later than those that come after it,
    that is always a leaf. No policy finds more tokens while a request holds all its pages; none can know, either."""

    def __init__(self) -> None:
        self.next_uses: Sequence[float] = ()  # of the pages of the request that is about to be done

    def value(self, node: Used, now: float) -> float:
        return -self.next_uses[node.depth]

    def evicted(self, value: float) -> None:
        """What goes next does not depend on what has gone."""

    def overdue(self, now: float) -> float:
        return -inf


def read(path: Path, block: int | None = None) -> Trace:
    """The trace in a file. `block`: tokens of its blocks, found out where it is None. Raises
    InvalidInput, naming the line, where one is not as it should be."""
    size = block or block_tokens(path)
    requests: list[Recorded] = []
    for line in lines(path, size):
        chain = PageChain(b"", 1)
        chain.extend(array("i", line.hash_ids[: line.input_length // size]).tobytes())
        requests.append(Recorded(line.timestamp / 1000, line.input_length, chain))
    return Trace(requests, size)


def replay(
    trace: Trace,
    name: str,
    pages: int,
    *,
    ttl: float,
    parity: float = ATTENTION_PARITY,
    report: Callable[[int], object] = lambda _: None,
) -> Outcome:
    """Runs the whole trace over an empty index. `name` is one of `REPLAYED`, `ttl` (seconds) is for the policy of that
    name, and `parity` (tokens) says what attention costs (`retention.Cost`). `report` is told now and then how many
    more requests are done."""
    oracle = Optimal() if name == OPTIMAL else None
    policy: Policy = oracle or make_policy(
        name, page_tokens=trace.block_tokens, ttl=ttl if name == "ttl" else 0.0, parity=parity
    )
    pool = PagePool(pages)
    index = PrefixIndex(pool, policy)
    hit_tokens, most_held, work, saved = 0, 0, 0.0, 0.0
    for number, request in enumerate(trace.requests):
        if oracle is not None:
            oracle.next_uses = trace.next_uses[number]
        index.advance(request.at)
        found = _serve(index, pool, request, (request.tokens - 1) // trace.block_tokens) * trace.block_tokens
        hit_tokens += found
        most_held = max(most_held, len(index))
        saved += prefill_work(found, parity)
        work += prefill_work(request.tokens, parity)
        if number % REPORT_EVERY == REPORT_EVERY - 1:
            report(REPORT_EVERY)
    report(len(trace.requests) % REPORT_EVERY)
    evictions = sum(index.evictions.values())
    return Outcome(name, pages, hit_tokens, hit_tokens / trace.input_tokens, saved / work, evictions, most_held)


def _serve(index: PrefixIndex, pool: PagePool, request: Recorded, limit: int) -> int:
    """One request from its admission to its end, as the scheduler does it; returns how many pages it found."""
    chain = request.chain
    path = index.match(chain, limit)
    found = len(path)
    index.pin(path)
    pages = [node.page for node in path]
    pool.share(pages)
    missing = min(len(chain), pool.size) - found
    index.evict(missing - pool.free)
    pages += pool.take(missing)
    for at in range(found, found + missing):
        node = index.insert(chain, at, path[-1] if path else None, pages[at])
        if node is None:
            break
        path.append(node)
    index.unpin(path)
    pool.release(pages)
    return found


def prefill_work(tokens: int, parity: float) -> float:
    """What a prompt's first tokens cost, in tokens without attention (see `retention.Cost`)."""
    return tokens + tokens * tokens / (2 * parity)
