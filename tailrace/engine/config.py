"""Sizes and policies of one engine."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tailrace.backends import PAGE_SIZE
from tailrace.backends.groups import first_page, most_pages, plan_pages
from tailrace.kv.prefix import PageChain
from tailrace.kv.retention import ATTENTION_PARITY, check_policy
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
    kv_policy: str = "lru"
    """Which cached page goes first where room is needed (`kv.retention`)."""
    kv_ttl: float = 0.0
    """How long the policy "ttl" keeps a page that nobody uses; 0 for the others."""
    attention_parity: float = ATTENTION_PARITY
    """The policy "cost" takes it that attention over so many tokens costs as much as the rest of the model."""
    kv_tenant_share: float = 1.0
    """Most of the pool that the cached pages of one tenant may be, those apart that its requests hold."""
    kv_pin: tuple[tuple[int, ...], ...] = ()
    """Token ids of prefixes whose full pages are kept for good once they have been computed, for each tenant."""
    tenants: int = 1
    """Tenants that there are room for pinned prefixes for."""
    draft_tokens: int = 7
    """Most tokens of a request that a step computes beside the drawn one because they are likely to follow
    (`engine.lookup`). 0: none ever."""
    draft_rows: int = 8
    """Tokens of a step up to which such guesses are added: more cost more than they give."""
    windows: tuple[int, ...] = ()
    """Windows of the model's sliding groups of layers (`backends.groups`), each with a pool of its own."""
    window_pages: tuple[int, ...] = ()
    """Pages of each of those pools; empty plans them by the served context."""

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "step_tokens", "max_running", "max_waiting", "scored_rows", "max_passed", "tenants"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        if self.step_tokens < 2:
            raise InvalidInput("step_tokens must be at least 2: a prompt beside a decode", param="step_tokens")
        for name in ("max_context", "prefill_beside_decodes", "max_preemptions", "draft_tokens", "draft_rows"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name} cannot be negative ({getattr(self, name)})", param=name)
        for name in ("decode_share", "oldest_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise InvalidInput(f"{name} must be above 0 and at most 1, not {getattr(self, name)}", param=name)
        if not self.age_seconds > 0.0:
            raise InvalidInput(f"age_seconds must be above 0, not {self.age_seconds}", param="age_seconds")
        if not 0.0 < self.kv_tenant_share <= 1.0:
            raise InvalidInput(
                f"kv_tenant_share must be above 0 and at most 1, not {self.kv_tenant_share}", param="kv_tenant_share"
            )
        check_policy(self.kv_policy, self.kv_ttl)
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0.0:
                raise InvalidInput(f"tenant {tenant!r} has weight {weight}, not above 0", param="tenant_weights")
        if self.kv_tokens < PAGE_SIZE:
            raise InvalidInput(f"kv_tokens must hold at least one page of {PAGE_SIZE} tokens", param="kv_tokens")
        pool = self.pages * PAGE_SIZE
        object.__setattr__(self, "kv_tokens", pool)
        object.__setattr__(self, "max_context", min(self.max_context or pool, pool))
        self._check_pins()
        self._check_windows()

    def _check_pins(self) -> None:
        if not self.kv_pin:
            return
        if not self.prefix_cache:
            raise InvalidInput("pinned prefixes (kv_pin) need the prefix cache, which is off", param="kv_pin")
        for prefix in self.kv_pin:
            if len(prefix) < PAGE_SIZE:
                raise InvalidInput(
                    f"a pinned prefix of {len(prefix)} tokens fills no page of {PAGE_SIZE}: nothing of it can be kept",
                    param="kv_pin",
                )
            if not all(0 <= token < 1 << 31 for token in prefix):
                raise InvalidInput("a pinned prefix has a number in it that is no token id", param="kv_pin")
        longest = -(-self.max_context // PAGE_SIZE)
        if self.pinned_pages + longest > self.pages:
            each = f", a copy for each of {self.tenants} API keys" if self.tenants > 1 else ""
            raise InvalidInput(
                f"the pinned prefixes take {self.pinned_pages} pages of {PAGE_SIZE} tokens{each}, and a request of the "
                f"longest context ({self.max_context} tokens) takes {longest}, but the KV pool has {self.pages}: "
                f"raise --kv-tokens to at least {(self.pinned_pages + longest) * PAGE_SIZE}, lower --max-context, "
                "or pin less",
                param="kv_pin",
            )

    def _check_windows(self) -> None:
        if self.window_pages and len(self.window_pages) != len(self.windows):
            raise InvalidInput(
                f"window_pages names {len(self.window_pages)} pools for {len(self.windows)} windows",
                param="window_pages",
            )
        for window, pages, pinned in zip(self.windows, self.sliding_pages, self.pinned_sliding_pages, strict=True):
            if window < 1:
                raise InvalidInput(f"a window of {window} tokens sees nothing", param="windows")
            most = most_pages(window, self.max_context, self.step_tokens)
            if most + pinned > pages:
                raise InvalidInput(
                    f"layers with a window of {window} tokens need {most} pages for one request and {pinned} for "
                    f"pinned prefixes, but their pool has {pages}",
                    param="window_pages",
                )

    @cached_property
    def pinned_prefixes(self) -> tuple[bytes, ...]:
        """Token ids of the pinned prefixes, as int32 bytes."""
        return tuple(array("i", prefix).tobytes() for prefix in self.kv_pin)

    @cached_property
    def pinned_pages(self) -> int:
        """Pages that the pinned prefixes take once all tenants have computed them."""
        digests: set[bytes] = set()
        for tokens in self.pinned_prefixes:
            chain = PageChain(b"", PAGE_SIZE)
            chain.extend(tokens)
            digests.update(chain.digests)
        return len(digests) * self.tenants

    @cached_property
    def pinned_sliding_pages(self) -> tuple[int, ...]:
        """Pages of each sliding group that the pinned prefixes take: those that what comes after a prefix sees."""
        found = []
        for window in self.windows:
            digests: set[bytes] = set()
            for tokens in self.pinned_prefixes:
                chain = PageChain(b"", PAGE_SIZE)
                chain.extend(tokens)
                digests.update(chain.digests[first_page(window, len(chain) * PAGE_SIZE) :])
            found.append(len(digests) * self.tenants)
        return tuple(found)

    @cached_property
    def sliding_pages(self) -> tuple[int, ...]:
        """Pages of each sliding group's pool."""
        if self.window_pages:
            return self.window_pages
        planned = plan_pages(self.windows, self.pages, self.max_context, self.step_tokens)
        return tuple(pages + pinned for pages, pinned in zip(planned, self.pinned_sliding_pages, strict=True))

    @property
    def pages(self) -> int:
        """Pages of the KV pool."""
        return self.kv_tokens // PAGE_SIZE
