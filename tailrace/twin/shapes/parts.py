"""The vocabulary that models are described in: mixers, feed-forwards, and the layers that they make.

Each part says which tensors it has and what it keeps of a request. Names of tensors are those of most checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from tailrace.twin.shapes.caches import Cache, CacheKind
from tailrace.twin.shapes.tensors import Part, Split, Tensor, vector


class Mixer(Protocol):
    """What mixes a layer's tokens with each other."""

    def tensors(self, hidden: int) -> Iterator[Tensor]: ...

    def caches(self) -> tuple[Cache, ...]: ...


class Feed(Protocol):
    """What works on each token alone."""

    def tensors(self, hidden: int) -> Iterator[Tensor]: ...


@dataclass(frozen=True)
class Index:
    """A small attention that chooses which tokens (or blocks) the large one reads: DeepSeek Sparse Attention (V3.2,
    section 2.1) and its kin. It keeps one key of `dim` a token, in `key_bytes`, or as the KV is kept where that is
    None. `query_rank`: of the latent that its queries come from; 0: from the layer's input. `weighted`: it has
    weights of heads. `norms`: parameters of its norms. `every`: tokens a key (compressed attention)."""

    heads: int
    dim: int
    query_rank: int = 0
    key_bytes: int | None = None
    weighted: bool = True
    norms: int = 0
    every: int = 1

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        part = Part.INDEXER
        yield Tensor(part, "self_attn.indexer.wq_b", self.heads * self.dim, self.query_rank or hidden)
        yield Tensor(part, "self_attn.indexer.wk", self.dim, hidden)
        if self.weighted:
            yield Tensor(part, "self_attn.indexer.weights_proj", self.heads, hidden, rounded=False)
        if self.norms:
            yield vector(part, "self_attn.indexer.k_norm", self.norms)

    def cache(self) -> Cache:
        return Cache(CacheKind.INDEX, 0, self.dim, every=self.every, fixed_bytes=self.key_bytes)


@dataclass(frozen=True)
class Attention:
    """Multi-head, grouped-query or multi-query attention: heads that share `kv_heads` keys of `key` and values of
    `value`. `norm_q` and `norm_k` are the parameters of norms on queries and keys; `gate` the outputs of a projection
    that gates what was attended; `borrows`: it reads an earlier layer's keys and values, and keeps none. `keyed`: there
    is no value projection, values are made of keys (and kept)."""

    heads: int
    kv_heads: int
    key: int
    value: int
    window: int | None = None
    chunk: int | None = None
    q_bias: bool = False
    kv_bias: bool = False
    o_bias: bool = False
    norm_q: int = 0
    norm_k: int = 0
    gate: int = 0
    sinks: int = 0
    keyed: bool = False
    borrows: bool = False
    index: Index | None = None

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield from self._matrix("q_proj", self.heads * self.key, hidden, Split.ROWS, self.heads, self.q_bias)
        if not self.borrows:
            yield from self._matrix("k_proj", self.kv_heads * self.key, hidden, Split.KV, self.kv_heads, self.kv_bias)
            if not self.keyed:
                rows = self.kv_heads * self.value
                yield from self._matrix("v_proj", rows, hidden, Split.KV, self.kv_heads, self.kv_bias)
        yield from self._matrix("o_proj", hidden, self.heads * self.value, Split.COLUMNS, self.heads, self.o_bias)
        if self.gate:
            yield from self._matrix("g_proj", self.gate, hidden, Split.ROWS, self.heads, False)
        if self.norm_q:
            yield vector(Part.ATTENTION, "self_attn.q_norm", self.norm_q)
        if self.norm_k and not self.borrows:
            yield vector(Part.ATTENTION, "self_attn.k_norm", self.norm_k)
        if self.sinks:
            yield vector(Part.ATTENTION, "self_attn.sinks", self.sinks, Split.ROWS, self.heads)
        if self.index:
            yield from self.index.tensors(hidden)

    def _matrix(self, name: str, rows: int, columns: int, split: Split, units: int, bias: bool) -> Iterator[Tensor]:
        yield Tensor(Part.ATTENTION, f"self_attn.{name}", rows, columns, split, units=units)
        if bias:
            divided = split if split is not Split.COLUMNS else Split.WHOLE
            yield vector(Part.ATTENTION, f"self_attn.{name}.bias", rows, divided, units)

    def caches(self) -> tuple[Cache, ...]:
        if self.borrows:
            return ()
        kind, width, bound = CacheKind.FULL, self.key + self.value, None
        if self.window is not None:
            kind, bound = CacheKind.SLIDING, self.window
        elif self.chunk is not None:
            kind, bound = CacheKind.CHUNKED, self.chunk
        own = Cache(kind, self.kv_heads, width, bound)
        return (own, self.index.cache()) if self.index else (own,)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads come from a latent of
    `kv_rank`, which alone is kept, with the one key of `rope` that positions turn. Every rank of tensor parallelism
    keeps all of it. `q_rank` None: queries are projected at once."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    bias: bool = False
    gate: int = 0
    index: Index | None = None
    """`gate`: outputs of a projection that gates what was attended."""

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        part, queries = Part.ATTENTION, self.heads * (self.nope + self.rope)
        if self.q_rank is None:
            yield Tensor(part, "self_attn.q_proj", queries, hidden, Split.ROWS, units=self.heads)
        else:
            yield Tensor(part, "self_attn.q_a_proj", self.q_rank, hidden)
            yield vector(part, "self_attn.q_a_layernorm", self.q_rank)
            yield Tensor(part, "self_attn.q_b_proj", queries, self.q_rank, Split.ROWS, units=self.heads)
        yield Tensor(part, "self_attn.kv_a_proj_with_mqa", self.kv_rank + self.rope, hidden)
        yield vector(part, "self_attn.kv_a_layernorm", self.kv_rank)
        wide = self.heads * (self.nope + self.value)
        yield Tensor(part, "self_attn.kv_b_proj", wide, self.kv_rank, Split.ROWS, units=self.heads)
        yield Tensor(part, "self_attn.o_proj", hidden, self.heads * self.value, Split.COLUMNS, units=self.heads)
        if self.gate:
            yield Tensor(part, "self_attn.g_proj", self.gate, hidden, Split.ROWS, units=self.heads)
        if self.bias:
            biased = (self.q_rank or 0) + self.kv_rank + self.rope + hidden
            yield vector(part, "self_attn.bias", biased)
        if self.index:
            yield from self.index.tensors(hidden)

    def caches(self) -> tuple[Cache, ...]:
        own = Cache(CacheKind.LATENT, 0, self.kv_rank + self.rope)
        return (own, self.index.cache()) if self.index else (own,)

    @property
    def unfolded(self) -> Attention:
        """The multi-head attention that keeps what this one computes from its latent: every head's keys and values."""
        return Attention(self.heads, self.heads, self.nope + self.rope, self.value)


@dataclass(frozen=True)
class State:
    """A mixer that keeps a state of fixed size: linear attention, state space, short convolution. `parts` are its
    tensors; `states` the bytes that it keeps of a request, each with the number of heads (or groups) that it is of."""

    parts: tuple[Tensor, ...]
    states: tuple[tuple[int, int], ...]

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield from self.parts

    def caches(self) -> tuple[Cache, ...]:
        return tuple(Cache(CacheKind.STATE, units, state_bytes=size) for units, size in self.states if size)


@dataclass(frozen=True)
class Dense:
    """A feed-forward of `width`: two matrices in where it is gated, else one, and one out."""

    width: int
    gated: bool = True
    bias: bool = False
    part: Part = Part.DENSE
    name: str = "mlp"

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        for name in ("gate_proj", "up_proj") if self.gated else ("up_proj",):
            yield Tensor(self.part, f"{self.name}.{name}", self.width, hidden, Split.ROWS)
            if self.bias:
                yield vector(self.part, f"{self.name}.{name}.bias", self.width, Split.ROWS)
        yield Tensor(self.part, f"{self.name}.down_proj", hidden, self.width, Split.COLUMNS)
        if self.bias:
            yield vector(self.part, f"{self.name}.down_proj.bias", hidden)


@dataclass(frozen=True)
class Experts:
    """A mixture of `count` experts of which a token uses `used`, chosen by a router, and what is computed beside
    them: `shared`, an expert that all tokens use, and `beside`, a dense feed-forward. `latent`: the size that experts
    work in, where that is not the model's width. `empty`: experts that only the router knows, and that compute
    nothing."""

    count: int
    used: int
    width: int
    gated: bool = True
    bias: bool = False
    shared: int = 0
    shared_gated: bool = True
    shared_gate: bool = False
    router_bias: bool = False
    correction: bool = False
    latent: int = 0
    latent_norm: int = 0
    empty: int = 0
    beside: Dense | None = None
    router_extra: int = 0
    """`correction`: a value an expert that balances their load; `router_extra`: other parameters of the router."""
    name: str = "mlp."
    fitted: bool = False
    """Whether `correction` counts as parameters, as some architectures have it."""
    shared_bias: bool = False

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        inner, part = self.latent or hidden, Part.EXPERTS
        choices = self.count + self.empty
        yield Tensor(Part.ROUTER, f"{self.name}gate", choices, hidden, rounded=False)
        if self.router_bias:
            yield vector(Part.ROUTER, f"{self.name}gate.bias", choices)
        if self.correction:
            fitted = vector(Part.ROUTER, f"{self.name}gate.e_score_correction_bias", choices)
            yield replace(fitted, buffer=not self.fitted)
        if self.router_extra:
            yield vector(Part.ROUTER, f"{self.name}gate.scale", self.router_extra)
        for name in ("gate_proj", "up_proj") if self.gated else ("up_proj",):
            yield self._routed(name, self.width, inner)
            if self.bias:
                yield replace(self._routed(f"{name}.bias", self.width, 1), rounded=False)
        yield self._routed("down_proj", inner, self.width)
        if self.bias:
            yield replace(self._routed("down_proj.bias", inner, 1), rounded=False)
        if self.latent:
            yield Tensor(part, f"{self.name}fc1_latent_proj", self.latent, hidden)
            yield Tensor(part, f"{self.name}fc2_latent_proj", hidden, self.latent)
        if self.latent_norm:
            yield vector(part, f"{self.name}latent_norm", self.latent_norm)
        if self.shared:
            yield from Dense(
                self.shared, self.shared_gated, self.shared_bias, Part.SHARED, f"{self.name}shared_experts"
            ).tensors(hidden)
        if self.shared_gate:
            yield Tensor(Part.SHARED, f"{self.name}shared_expert_gate", 1, hidden, rounded=False)
        if self.beside:
            yield from self.beside.tensors(hidden)

    def _routed(self, name: str, rows: int, columns: int) -> Tensor:
        return Tensor(
            Part.EXPERTS,
            f"{self.name}experts.{name}",
            rows,
            columns,
            Split.EXPERTS,
            self.count,
            self.used,
            units=self.width,
        )


@dataclass(frozen=True)
class Layer:
    """One layer: its mixers (side by side where there are several), its feed-forward, the parameters of its norms, and
    tensors that only this architecture has."""

    mixers: tuple[Mixer, ...]
    feed: Feed | None
    norms: int
    more: tuple[Tensor, ...] = ()

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        for mixer in self.mixers:
            yield from mixer.tensors(hidden)
        if self.feed is not None:
            yield from self.feed.tensors(hidden)
        if self.norms:
            yield vector(Part.NORM, "norms", self.norms)
        yield from self.more

    def caches(self) -> tuple[Cache, ...]:
        return tuple(cache for mixer in self.mixers for cache in mixer.caches())
