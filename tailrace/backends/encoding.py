"""The operations that text encoders are written in, and the batch of texts that an encoder backend runs.

An encoder reads whole texts: there is no KV and no next token, every token attends to all of its text, and a text gives
one row of numbers (an embedding, or the scores of a classifier). Texts lie one after the other without padding.
`reference.encoder` (numpy) is the oracle; `cpu.encoder` is the native one; `pooled` makes one of a decoder. Callers:
`models` writes forward passes in `EncoderOps`; `engine` hands `TextBatch`es to an `EncoderBackend`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import Weight

T = TypeVar("T")

Pooling = Literal["mean", "cls", "last"]
"""How the rows of a text become one: their mean, the first, or the last."""
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last")


@dataclass
class TextBatch:
    """Whole texts, one after the other: text t owns tokens [starts[t], starts[t + 1]), at positions 0, 1, ...; every
    text has at least one token. `kinds` is each token's segment: 0, or 1 in the second text of a pair."""

    tokens: NDArray[np.int32]  # [tokens]
    kinds: NDArray[np.int32]  # [tokens]
    starts: NDArray[np.int32]  # [texts + 1]

    @property
    def texts(self) -> int:
        return len(self.starts) - 1

    def check(self, vocab: int, kinds: int, longest: int) -> None:
        """Raises ValueError unless every token, segment and length is one that the model has."""
        lengths = np.diff(self.starts)
        if not len(lengths) or self.starts[0] != 0 or lengths.min() < 1:
            raise ValueError("a batch has texts, and a text has tokens")
        if len(self.tokens) != self.starts[-1] or len(self.kinds) != self.starts[-1]:
            raise ValueError("tokens and segments must be those of the texts")
        if lengths.max() > longest:
            raise ValueError(f"a text has {lengths.max()} tokens; this model reads at most {longest}")
        for name, values, most in (("token", self.tokens, vocab), ("segment", self.kinds, kinds)):
            if values.min() < 0 or values.max() >= most:
                raise ValueError(f"a {name} is outside 0 .. {most - 1}")


class EncoderOps(Protocol[T]):
    """What an encoder's forward pass is made of. Values are [tokens, width], and [texts, width] once pooled."""

    def embed(self, words: Weight, positions: Weight, kinds: Weight | None, first: int) -> T:
        """The sum of each token's row of `words`, the row of its position plus `first`, and that of its segment."""
        ...

    def linear(self, x: T, weight: Weight, bias: Weight | None) -> T:
        """x @ weight.T + bias."""
        ...

    def layer_norm(self, x: T, weight: Weight, bias: Weight, eps: float) -> T:
        """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al. 2016)."""
        ...

    def gelu(self, x: T) -> T:
        """x / 2 * (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel 2016)."""
        ...

    def tanh(self, x: T) -> T: ...

    def attention(self, q: T, k: T, v: T, heads: int, scale: float) -> T:
        """softmax(q k * scale) v in each head, over all tokens of a text."""
        ...

    def add(self, a: T, b: T) -> T: ...

    def pool(self, x: T, how: Pooling) -> T:
        """One row a text."""
        ...

    def unit(self, x: T) -> T:
        """Each row divided by its length (or by 1e-12, if that is more)."""
        ...


class Encoding(Protocol):
    """What a backend needs of an encoder model."""

    @property
    def width(self) -> int:
        """Numbers of one text's result."""
        ...

    @property
    def vocab(self) -> int: ...

    @property
    def kinds(self) -> int:
        """Segments that a token can be of."""
        ...

    @property
    def longest(self) -> int:
        """Most tokens of one text."""
        ...

    def forward(self, ops: EncoderOps[Any]) -> Any:
        """The results: [texts, width]."""
        ...

    def weights(self) -> Iterable[Weight]:
        """Every weight once."""
        ...


class EncoderBackend(Protocol):
    """Runs batches of texts. A text's bits do not depend on the texts beside it."""

    name: str
    kernels: str
    threads: int
    progress: int
    """Tokens read, ever; grows within a long step, so that another thread sees that it goes on."""

    @property
    def work(self) -> int | None:
        """As `Backend.work`."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def width(self) -> int: ...

    def encode(self, batch: TextBatch) -> NDArray[np.float32]:
        """The results: float32 [texts, width]. Raises ValueError for a batch that is none."""
        ...
