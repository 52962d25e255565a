"""How long a cached page is kept: what each policy says that a page is worth.

The prefix index evicts the least valued leaf first, and of equals the least recently used one. A policy gives a page
its value at the moment when the last request that holds it lets it go, and never looks at it again, so an eviction
costs no more under one policy than under another. Policies age pages by raising the value of what is used later, not by
lowering what is there. Times are seconds on whatever clock the caller of the index has.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from tailrace.terms import InvalidInput

POLICIES = ("lru", "lfu", "ttl", "cost")
"""The names that `make_policy` knows."""
ATTENTION_PARITY = 24_576
"""Tokens before a token at which attention costs it as much as the rest of a model with 4096 channels does (six times
the channels, where a layer has twelve weights for each of its channels squared)."""


class Used(Protocol):
    """A page, as a policy sees it."""

    used: int  # tick of its last use
    uses: int
    depth: int  # pages before it


class Policy(Protocol):
    """What the prefix index asks. Higher is worth more."""

    def value(self, node: Used, now: float) -> float:
        """The page's worth from now on. Its `used`, `uses` and `depth` are up to date."""

    def evicted(self, value: float) -> None:
        """A page of this value, the least of all, had to leave because room was needed."""

    def overdue(self, now: float) -> float:
        """Pages worth less than this are forgotten now, though there is room; -inf where none ever is."""


class Lru:
    """Least recently used first: a page is worth when it was used last."""

    def value(self, node: Used, now: float) -> float:
        return node.used

    def evicted(self, value: float) -> None:
        """What goes next does not depend on what has gone."""

    def overdue(self, now: float) -> float:
        return -inf


class Ttl:
    """Least recently used first, and whatever has not been used for more than `seconds` is forgotten anyway."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def value(self, node: Used, now: float) -> float:
        return now

    def evicted(self, value: float) -> None:
        """What goes next does not depend on what has gone."""

    def overdue(self, now: float) -> float:
        return now - self._seconds


class Lfu:
    """Least frequently used first, with dynamic ageing: a page is worth the number of its uses, plus the worth that the
    last page had that had to leave. So a page that was popular once goes when the pages that are used now have caught
    up, and no parameter says when. (LFU-DA: Arlitt et al., Evaluating content management techniques for Web proxy
    caches, 2000.) Uses are counted while a page is held; whoever comes back begins at one."""

    def __init__(self) -> None:
        self._level = 0.0

    def value(self, node: Used, now: float) -> float:
        return self._level + node.uses

    def evicted(self, value: float) -> None:
        self._level = value  # never less than before: a page is worth more than the level at its last use

    def overdue(self, now: float) -> float:
        return -inf


class Cost:
    """What a page costs to keep against what it saves (GreedyDual-Size-Frequency: Cherkasova, Improving WWW proxies
    performance with greedy-dual-size-frequency caching policy, 1998).

    To keep a page costs its bytes for as long as it stays, and each use of it saves its prefill. All pages have the
    same number of bytes, so their price is one level that rises as time goes by: to the worth of each page that has to
    leave. A page used `uses` times is worth `level + uses * prefill`, and so it stays until the level has risen by what
    it saves, however long that takes.

    The prefill of a page is counted in the work that a page at the very beginning is without attention, the products
    with the weights; attention adds `position / parity` to it, where `position` is that of the middle of the page: a
    late page of a long context costs more to compute again than an early one. The early ones stay all the same, for as
    long as pages are known that come after them: those alone can never be used.
    """

    def __init__(self, page_tokens: int, parity: float = ATTENTION_PARITY) -> None:
        self._level = 0.0
        self._slope = page_tokens / parity

    def value(self, node: Used, now: float) -> float:
        return self._level + node.uses * (1.0 + (node.depth + 0.5) * self._slope)

    def evicted(self, value: float) -> None:
        self._level = max(self._level, value)

    def overdue(self, now: float) -> float:
        return -inf


def make_policy(name: str, *, page_tokens: int, ttl: float = 0.0, parity: float = ATTENTION_PARITY) -> Policy:
    """The policy called so. `ttl` (seconds) is for "ttl" alone; `parity` (tokens) is that of `Cost`. Raises
    InvalidInput where they do not go together."""
    check_policy(name, ttl)
    if name == "ttl":
        return Ttl(ttl)
    if name == "cost":
        return Cost(page_tokens, parity)
    return Lfu() if name == "lfu" else Lru()


def check_policy(name: str, ttl: float) -> None:
    """Raises InvalidInput unless there is such a policy, and it has a time to live exactly where it needs one."""
    if name not in POLICIES:
        raise InvalidInput(f"kv_policy must be one of {', '.join(POLICIES)}, not {name!r}", param="kv_policy")
    if name == "ttl" and not 0.0 < ttl < inf:
        raise InvalidInput(
            f"the policy ttl needs a time to live, in seconds above 0 (--kv-ttl), not {ttl:g}", param="kv_ttl"
        )
    if name != "ttl" and ttl != 0.0:
        raise InvalidInput(f"a time to live (--kv-ttl {ttl:g}) is for the policy ttl, not for {name}", param="kv_ttl")
