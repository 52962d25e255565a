"""Whether loading pages is quicker than computing them again: what both have taken lately.

Sizes are in bytes, times in seconds, rates in seconds a byte or a token. Who measures tells; nothing here looks at a
clock.
"""

from __future__ import annotations

WEIGHT = 0.25
"""Of the latest measurement in a moving average."""
FORGIVEN = 0.9
"""What the expected time of a load is multiplied by whenever it decides against one: a disk that was slow once is tried
again."""


class LoadCost:
    """Starts from a disk of 200 MB/s that answers after 5 ms, and takes loading to be the quicker one until it is told
    how quick computing is."""

    def __init__(self) -> None:
        self.latency = 0.005
        self.a_byte = 5e-9
        self.a_token = 0.0  # not known

    def loaded(self, size: int, seconds: float, latency: float) -> None:
        """A load of `size` bytes took `seconds`, after it had waited `latency` more."""
        if size > 0:
            self.a_byte += WEIGHT * (seconds / size - self.a_byte)
            self.latency += WEIGHT * (latency - self.latency)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts."""
        if tokens > 0 and seconds > 0.0:
            rate = seconds / tokens
            self.a_token += (WEIGHT if self.a_token else 1.0) * (rate - self.a_token)

    def load_seconds(self, size: int, before: int = 0) -> float:
        """What a load of `size` bytes is expected to take behind others of `before` bytes."""
        return self.latency + (size + before) * self.a_byte

    def compute_seconds(self, tokens: int) -> float:
        """What computing so many tokens is expected to take; infinite where that is not known yet."""
        return tokens * self.a_token if self.a_token else float("inf")

    def quicker(self, size: int, tokens: int, before: int = 0) -> bool:
        """Whether loading `size` bytes is expected to be quicker than computing the `tokens` that they stand for."""
        if self.load_seconds(size, before) < self.compute_seconds(tokens):
            return True
        self.a_byte *= FORGIVEN
        self.latency *= FORGIVEN
        return False
