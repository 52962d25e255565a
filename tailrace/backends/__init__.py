"""The operations that models are written in, and the batch that a backend runs.

`reference` (numpy) is the oracle; `cpu` is the native one. Callers: `models` writes forward passes in `Ops`; `engine`
hands `Batch`es to a `Backend`. A backend never knows of requests, schedulers or text.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

PAGE_SIZE = 16
"""Tokens of one KV page."""

Pages: TypeAlias = int | tuple[int, ...]
"""Where one page's KV lies: its number, or one for each group of layers (`groups`)."""


class Format(enum.StrEnum):
    """How a stored tensor's bytes encode its values."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    Q2_K = "Q2_K"
    Q3_K = "Q3_K"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"


BLOCK: dict[Format, tuple[int, int]] = {
    Format.F32: (1, 4),
    Format.F16: (1, 2),
    Format.BF16: (1, 2),
    Format.Q4_0: (32, 18),
    Format.Q4_1: (32, 20),
    Format.Q5_0: (32, 22),
    Format.Q5_1: (32, 24),
    Format.Q8_0: (32, 34),
    Format.Q2_K: (256, 84),
    Format.Q3_K: (256, 110),
    Format.Q4_K: (256, 144),
    Format.Q5_K: (256, 176),
    Format.Q6_K: (256, 210),
}
"""Values and bytes of one block of each format; blocks run along the last axis."""


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor as stored. `shape` is row-major, a matrix is [out, in]; `data` is uint8 [rows, bytes a row]
    (one row for a vector), usually a view of a memory-mapped file."""

    name: str
    format: Format
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def rows(self, index: NDArray[np.int64]) -> Weight:
        """The matrix with its rows taken in this order: exact, since blocks never cross rows. Copies."""
        return Weight(self.name, self.format, (len(index), *self.shape[1:]), np.ascontiguousarray(self.data[index]))


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to the product of x with one weight [out, in]: scale * B (A x), where x is what the product
    itself reads. `a` is [rank, in], `b` [out, rank]."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank adapter of a model: what it adds, by the names of the model's weights."""

    parts: Mapping[str, LowRank]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers as float32."""
        return sum(part.a.nbytes + part.b.nbytes for part in self.parts.values())


class PackedAdapter(Protocol):
    """An adapter as a backend computes with it."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding of one layer kind: angle = float32(position) * inv_freq (float32 product), cos and sin times
    `scale`. Pairs are (i, i + rotated/2), rotated = 2 * len(inv_freq); dimensions past that pass through."""

    inv_freq: NDArray[np.float32]
    scale: float = 1.0


@dataclass(frozen=True)
class Attention:
    """Shape of one attention layer. `window` counts the query's own position: key j is seen by query i when
    i - window < j <= i. None is full causal attention."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


class Ops(Protocol[T]):
    """What a forward pass is made of. Values are [tokens, width]; `reference` computes them at once, `cpu` records."""

    def embed(self, table: Weight) -> T:
        """Rows of the table for the batch's tokens: [tokens, hidden]."""
        ...

    def linear(self, x: T, weight: Weight, bias: Weight | None = None) -> T:
        """x @ weight.T + bias: [tokens, in] to [tokens, out]."""
        ...

    def rms_norm(self, x: T, weight: Weight, eps: float) -> T:
        """x / sqrt(mean(x²) + eps) * weight over the last axis."""
        ...

    def head_norm(self, x: T, weight: Weight, eps: float) -> T:
        """`rms_norm` over each head's vector apart; weight is [head_dim]."""
        ...

    def rope(self, x: T, rope: Rope, head_dim: int) -> T:
        """Rotates each head's vector by its token's position."""
        ...

    def attention(self, q: T, k: T, v: T, spec: Attention) -> T:
        """Stores k and v into the batch's pages, then attends each query to its sequence: [tokens, heads * size]."""
        ...

    def silu_mul(self, gate: T, up: T) -> T:
        """silu(gate) * up."""
        ...

    def add(self, a: T, b: T) -> T:
        """a + b."""
        ...

    def wanted(self, x: T) -> T:
        """Only the rows whose logits are wanted: [len(batch.wanted), width]."""
        ...


class Forward(Protocol):
    """What a backend needs of a model."""

    @property
    def attentions(self) -> tuple[Attention, ...]: ...

    @property
    def hidden(self) -> int: ...

    @property
    def vocab(self) -> int:
        """Rows of the output head (may exceed the tokenizer's ids)."""
        ...

    def forward(self, ops: Ops[Any]) -> Any:
        """Logits of the wanted rows: [wanted, vocab]."""
        ...


@dataclass
class Masks:
    """Which tokens some rows may draw. Bit t % 32 of word t // 32 is token t's; its line of `bits` is known only once
    `Backend.release` has been called, which must be after `launch` or before, but before `wait`."""

    row: NDArray[np.int32]  # [wanted] each row's line of `bits`, or -1
    bits: NDArray[np.uint32]  # [lines, ceil(vocab / 32)]
    ready: NDArray[np.int32]  # [1] 0 until the bits may be read


@dataclass
class Sampling:
    """How to turn each wanted row's logits into a token; arrays have one entry a wanted row.

    `forced` >= 0 scores that token instead of drawing one (prompt log-probabilities). `position` is the position of
    the token being drawn. Sparse per-row lists are CSR: row r owns entries [start[r], start[r+1]).
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    repetition: NDArray[np.float32]
    seed: NDArray[np.uint64]
    position: NDArray[np.int32]
    forced: NDArray[np.int32]
    logprobs: NDArray[np.int32]  # -1 none, 0 chosen, n likeliest
    seen_start: NDArray[np.int32]  # [wanted + 1]
    seen_token: NDArray[np.int32]  # tokens of prompt and output, each once
    seen_count: NDArray[np.int32]  # occurrences in the output (0: in the prompt only)
    bias_start: NDArray[np.int32]  # [wanted + 1]
    bias_token: NDArray[np.int32]
    bias_value: NDArray[np.float32]  # -inf bans
    masks: Masks | None = None


@dataclass
class Batch:
    """One step over a flat batch of tokens. Sequence s owns tokens [starts[s], starts[s+1]), at positions
    context[s], context[s]+1, ...; its KV lives in pages tables[s, :]. Where layers are in several groups (`groups`), a
    row of `tables` has the pages of each in turn, all as wide; those that a sliding group has let go are 0 and are
    never read."""

    tokens: NDArray[np.int32]  # [tokens]
    starts: NDArray[np.int32]  # [sequences + 1]
    context: NDArray[np.int32]  # [sequences] tokens computed before this step
    tables: NDArray[np.int32]  # [sequences, groups * pages] page numbers, padded with 0
    wanted: NDArray[np.int32]  # [wanted] flat token indices, ascending
    sampling: Sampling
    want_logits: bool = False  # tests only: also return the raw logits
    adapters: NDArray[np.int32] | None = None  # [sequences] numbers, -1: none; None: none has one


@dataclass
class Result:
    """`top_tokens`/`top_logprobs` are [wanted, max(sampling.logprobs)] (empty when none asked), most likely first."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    top_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Ends:
    """Token ids that end a row's request, CSR: row r's are tokens[start[r]:start[r + 1]]."""

    start: NDArray[np.int32]  # [rows + 1]
    tokens: NDArray[np.int32]

    def hit(self, drawn: NDArray[np.int32]) -> bool:
        """Whether a row has drawn one of its ends, or nothing at all (-1)."""
        rows = zip(drawn.tolist(), self.start[:-1].tolist(), self.start[1:].tolist(), strict=True)
        return any(token < 0 or token in self.tokens[begin:end] for token, begin, end in rows)


class Backend(Protocol):
    """Runs batches. Log-probabilities are natural, of the softmax of the raw logits (before penalties and filters)."""

    name: str
    kernels: str
    batch_invariant: bool

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_bytes(self) -> int: ...

    @property
    def page_bytes(self) -> int:
        """Bytes that `read_page` gives: PAGE_SIZE tokens' keys and values in every layer of every group."""
        ...

    @property
    def work(self) -> int | None:
        """Pieces of work that have been done, ever: grows within a long step, so that whoever asks sees that it goes
        on. None where that cannot be told. Any thread may ask."""
        ...

    @property
    def numerics(self) -> str:
        """Names all that a page's bytes depend on besides the model and the tokens: their layout, and what computed
        them. Pages that outlive the process are of use only where it is equal."""
        ...

    def read_page(self, page: Pages, out: bytearray | memoryview | None = None) -> bytearray | memoryview:
        """One page of the pool, all layers, as one block; in `out`, where there is one. Where layers are in several
        groups it is a page of each, and the block has them in turn. Any thread may call it beside a running step that
        does not write the page."""
        ...

    def write_page(self, page: Pages, data: bytes | bytearray | memoryview) -> None:
        """Puts back what `read_page` gave, but for groups whose page is -1; ValueError where the size is another. Any
        thread may call it beside a step that neither reads nor writes the page. Steps that are launched after it has
        returned see it."""
        ...

    def pack_adapter(self, adapter: Adapter) -> PackedAdapter:
        """The adapter as `set_adapter` takes it. Any thread may call it, at any time."""
        ...

    def set_adapter(self, number: int, adapter: PackedAdapter | None) -> None:
        """From now on sequences may have it under this number (`Batch.adapters`); None: no longer, and what it took is
        free. Only while no step runs, and in place of an adapter that none is going to have."""
        ...

    def settle(self) -> None:
        """Start-up is over: does what a first answer need not wait for. Returns at once."""
        ...

    def launch(self, batch: Batch) -> None:
        """Begins a step, at most one at a time. The batch stays as it is until `wait` has returned."""
        ...

    def chain(self, batch: Batch, ends: Ends) -> None:
        """Says which step may follow the running one as soon as that has ended, before anybody asks: one token for each
        row that it draws, in the same order, with that token for its input. It does so unless a row has drawn one of
        its ends, or chaining is on hold."""
        ...

    def hold(self, on: bool) -> None:
        """Puts chaining on hold, or no longer. Any thread may call it, at any time."""
        ...

    def release(self, masks: Masks) -> None:
        """The bits are what they should be. A step that runs waits for it before it samples the rows that have some."""
        ...

    @property
    def chained(self) -> bool:
        """Whether the step that `wait` has just returned is followed by the chained one, which runs."""
        ...

    def wait(self) -> Result:
        """The launched step's result, or what it raised. Blocks without holding the interpreter lock while it
        computes."""
        ...

    def run(self, batch: Batch) -> Result:
        """`launch` and `wait`."""
        ...


class Inline:
    """All of that for a backend that has only `run`: it computes when it is waited for."""

    chained = False
    work: int | None = None
    _held = False
    _launched: Batch | None = None
    _next: tuple[Batch, Ends] | None = None

    def settle(self) -> None:
        """Nothing to do."""

    def launch(self, batch: Batch) -> None:
        """Keeps the step until `wait`."""
        self._launched = batch

    def chain(self, batch: Batch, ends: Ends) -> None:
        """Keeps the step that is to follow."""
        self._next = (batch, ends)

    def hold(self, on: bool) -> None:
        """Puts chaining on hold, or no longer."""
        self._held = on

    def release(self, masks: Masks) -> None:
        """Nobody has waited."""
        masks.ready[0] = 1

    def wait(self) -> Result:
        """Runs the launched step."""
        batch, self._launched = self._launched, None
        following, self._next = self._next, None
        self.chained = False
        if batch is None:
            raise ValueError("no step was launched")
        result = self.run(batch)
        if following is not None and not self._held and not following[1].hit(result.tokens):
            following[0].tokens[:] = result.tokens
            self._launched = following[0]
            self.chained = True
        return result

    def run(self, batch: Batch) -> Result:
        """To be defined by the backend."""
        raise NotImplementedError
