"""Tensors of a model without their numbers: the one list that parameters, bytes and ranks are sums over."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Part(enum.StrEnum):
    """Where in a model a tensor belongs."""

    EMBEDDING = "embedding"
    HEAD = "head"
    ATTENTION = "attention"
    INDEXER = "indexer"  # chooses what a sparse attention reads
    STATE = "state mixer"  # linear attention, state space, convolution
    DENSE = "feed-forward"
    SHARED = "shared experts"
    EXPERTS = "routed experts"
    ROUTER = "router"
    NORM = "norms"
    OTHER = "other"
    VISION = "vision tower"
    AUDIO = "audio tower"
    MTP = "multi-token prediction"


class Split(enum.StrEnum):
    """How tensor parallelism divides a tensor."""

    ROWS = "rows"  # outputs: each rank computes some of them
    COLUMNS = "columns"  # inputs: each rank sums over some of them
    KV = "kv"  # rows that are KV heads: where there are more ranks than heads, several ranks have the same one
    VOCAB = "vocab"  # rows that are tokens, padded
    EXPERTS = "experts"  # whole experts under expert parallelism, else each expert is divided as a dense layer is
    WHOLE = "whole"  # every rank has all of it


@dataclass(frozen=True)
class Tensor:
    """`times` tensors of [rows, columns], of which one token is multiplied with `used`. A vector is [rows, 1].

    `name` is the module's as checkpoints have it, which rules of quantisation go by. `units`: in how many whole pieces
    (heads, groups) the divided axis may be cut; 0 where any divisor of the axis will do. `rounded`: whether formats of
    quantised weights store it in fewer bits. `looked_up`: a row of it is read, nothing is multiplied.
    """

    part: Part
    name: str
    rows: int
    columns: int = 1
    split: Split = Split.WHOLE
    times: int = 1
    used: int = 1
    units: int = 0
    rounded: bool = True
    looked_up: bool = False
    buffer: bool = False
    """Stored and loaded, but nothing that training fits by its gradient: not counted as parameters."""

    @property
    def values(self) -> int:
        return self.times * self.rows * self.columns

    @property
    def parameters(self) -> int:
        return 0 if self.buffer else self.values

    @property
    def active(self) -> int:
        """Parameters that one token needs."""
        return 0 if self.buffer else self.used * self.rows * self.columns


def vector(part: Part, name: str, rows: int, split: Split = Split.WHOLE, units: int = 0) -> Tensor:
    """A norm's weight, a bias: never rounded."""
    return Tensor(part, name, rows, 1, split, units=units, rounded=False)
