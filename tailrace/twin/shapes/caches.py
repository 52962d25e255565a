"""What a layer keeps of each request: keys and values a token, a latent, an index, or a state of fixed size."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CacheKind(enum.StrEnum):
    """How what is kept grows with the context."""

    FULL = "full"
    SLIDING = "sliding window"
    CHUNKED = "chunked"
    LATENT = "latent"
    COMPRESSED = "compressed"
    INDEX = "index"
    STATE = "state"


@dataclass(frozen=True)
class Cache:
    """What one layer keeps. Of each `every` tokens of the last `window` (all where it is None) it keeps `width` values
    for each of `heads` KV heads. `heads` 0: there is nothing to divide, every rank of tensor parallelism keeps all.

    A state has no tokens: it is `state_bytes` a request, divided among `heads`. `fixed_bytes`: of a token's values,
    where the type is the model's own affair whatever the KV is kept as (an index in FP8 with its scale).
    """

    kind: CacheKind
    heads: int
    width: int = 0
    window: int | None = None
    every: int = 1
    state_bytes: int = 0
    fixed_bytes: int | None = None

    def token_bytes(self, value_bytes: float) -> float:
        """Bytes that one more token adds, while it is within the window."""
        each = self.width * value_bytes if self.fixed_bytes is None else self.fixed_bytes
        return max(self.heads, 1) * each / self.every

    def request_bytes(self, context: int, value_bytes: float, tp: int = 1) -> float:
        """Bytes of a request with so many tokens, on the fullest of `tp` ranks."""
        heads = -(-self.heads // tp) if self.heads else 1
        if self.kind is CacheKind.STATE:
            return self.state_bytes * heads / max(self.heads, 1)
        kept = (context if self.window is None else min(context, self.window)) // self.every
        each = self.width * value_bytes if self.fixed_bytes is None else self.fixed_bytes
        return kept * heads * each
