"""Whether loading pages is quicker than computing them again: the interface that says what both should take, and what
takes it to be what both have taken lately.

Sizes are in pages, bytes and tokens, times in seconds, rates in seconds a byte or a token. Who measures tells; nothing
here looks at a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

WEIGHT = 0.25
"""Of the latest measurement in a moving average."""
FORGIVEN = 0.9
"""What the expected time of a tier's loads is multiplied by whenever one was declined: a disk that was slow once is
tried again."""


class LoadCost(Protocol):
    """What loading and computing should take, and what it is told of what they did. Questions change nothing. It is
    asked and told by one thread. Tiers are named (`Tier.name`)."""

    def load_seconds(self, tier: str, pages: int, page_bytes: int, before: int = 0) -> float:
        """What loading so many pages of `page_bytes` each should take, behind `before` others of that tier."""
        ...

    def compute_seconds(self, tokens: int, after: int = 0) -> float:
        """What computing so many tokens of a prompt should take, where `after` of it are there already; infinite where
        that is not known."""
        ...

    def loaded(self, tier: str, pages: int, page_bytes: int, seconds: float, latency: float) -> None:
        """A load of so many pages took `seconds`, after it had waited `latency` more."""
        ...

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts."""
        ...

    def declined(self, tier: str) -> None:
        """A load was not made, because computing should be quicker: nobody will know what it would have taken."""
        ...


@dataclass
class Rates:
    """What a tier's loads have taken lately. It starts from a disk of 200 MB/s that answers after 5 ms."""

    latency: float = 0.005
    a_byte: float = 5e-9


class MeasuredCost:
    """A `LoadCost` of moving averages. It takes loading to be the quicker one until it is told how quick computing is,
    and a token to take as long wherever it is."""

    def __init__(self) -> None:
        self.a_token = 0.0  # not known
        self._rates: dict[str, Rates] = {}

    def of(self, tier: str) -> Rates:
        """What is known of that tier."""
        return self._rates.setdefault(tier, Rates())

    def load_seconds(self, tier: str, pages: int, page_bytes: int, before: int = 0) -> float:
        rates = self.of(tier)
        return rates.latency + (pages + before) * page_bytes * rates.a_byte

    def compute_seconds(self, tokens: int, after: int = 0) -> float:
        return tokens * self.a_token if self.a_token else float("inf")

    def loaded(self, tier: str, pages: int, page_bytes: int, seconds: float, latency: float) -> None:
        if pages > 0:
            rates = self.of(tier)
            rates.a_byte += WEIGHT * (seconds / (pages * page_bytes) - rates.a_byte)
            rates.latency += WEIGHT * (latency - rates.latency)

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0.0:
            rate = seconds / tokens
            self.a_token += (WEIGHT if self.a_token else 1.0) * (rate - self.a_token)

    def declined(self, tier: str) -> None:
        rates = self.of(tier)
        rates.a_byte *= FORGIVEN
        rates.latency *= FORGIVEN
