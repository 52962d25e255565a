"""Sizes and policies of one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.backends import PAGE_SIZE
from tailrace.terms import InvalidInput


@dataclass(frozen=True)
class EngineConfig:
    """Checked when made; InvalidInput names the field. Lengths are in tokens, times in seconds.

    After it is made, `kv_tokens` is whole pages, and `max_context` is what is served: never more than one request alone
    can hold in the pool (0 asks for all of it).
    """

    kv_tokens: int = 32768
    max_context: int = 0
    step_tokens: int = 512
    max_running: int = 32
    max_waiting: int = 256
    prefix_cache: bool = True
    decode_share: float = 0.75
    """Share of a step that decodes are sure of while prompts wait; more decodes than that take turns."""
    prefill_beside_decodes: int = 0
    """Most prompt tokens of a step in which requests decode too, which bounds the gap between their tokens. 0: what the
    decodes leave of `step_tokens`."""
    oldest_share: float = 0.25
    """Share of a step's prompt tokens that the oldest prompt is sure of; the rest goes to the shortest first."""
    scored_rows: int = 64
    """Most prompt tokens of a step whose log-probabilities are asked for (each needs a row of logits)."""
    max_preemptions: int = 2
    """A request preempted this often gets all the pages it can ever need before it runs again, and keeps them. 0: every
    request does from the start."""
    max_passed: int = 8
    """A waiting request that later ones have passed this often is the next to get what is freed."""
    age_seconds: float = 10.0
    """Waiting this long raises a waiting request's priority by one."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Share of a tenant relative to the others; 1 where not named."""

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "step_tokens", "max_running", "max_waiting", "scored_rows", "max_passed"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        if self.step_tokens < 2:
            raise InvalidInput("step_tokens must be at least 2: a prompt beside a decode", param="step_tokens")
        for name in ("max_context", "prefill_beside_decodes", "max_preemptions"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name} cannot be negative ({getattr(self, name)})", param=name)
        for name in ("decode_share", "oldest_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise InvalidInput(f"{name} must be above 0 and at most 1, not {getattr(self, name)}", param=name)
        if not self.age_seconds > 0.0:
            raise InvalidInput(f"age_seconds must be above 0, not {self.age_seconds}", param="age_seconds")
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0.0:
                raise InvalidInput(f"tenant {tenant!r} has weight {weight}, not above 0", param="tenant_weights")
        if self.kv_tokens < PAGE_SIZE:
            raise InvalidInput(f"kv_tokens must hold at least one page of {PAGE_SIZE} tokens", param="kv_tokens")
        pool = self.pages * PAGE_SIZE
        object.__setattr__(self, "kv_tokens", pool)
        object.__setattr__(self, "max_context", min(self.max_context or pool, pool))

    @property
    def pages(self) -> int:
        """Pages of the KV pool."""
        return self.kv_tokens // PAGE_SIZE

    @property
    def max_wanted(self) -> int:
        """Most rows of logits that one step asks for."""
        return self.max_running + self.scored_rows
