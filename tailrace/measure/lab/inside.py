"""What only rooms that the load generator must not know can tell of a model and this machine, as plain numbers.

`cli` fills it: the experiments ask here, and so need neither models nor backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec


class KvPool(msgspec.Struct, frozen=True):
    """Layers whose pages live equally long. `window`: tokens that they look back on, None for all."""

    window: int | None
    page_bytes: int


class Speed(msgspec.Struct, frozen=True):
    """One kind of step. `ratio`: its time over the baseline's, median of pairs with the quartiles `low` and `high`."""

    phase: str
    context: int
    sequences: int
    tokens: int
    seconds: float
    ratio: float
    low: float
    high: float
    pairs: int


class Quality(msgspec.Struct, frozen=True):
    """On `tokens` tokens of real text, `same` of which have the baseline's likeliest next token. KL divergence in nats
    from the baseline's next-token distribution. Intervals are of 95 %, over tokens."""

    tokens: int
    perplexity: float
    change: float
    change_interval: tuple[float, float]
    mean_kl: float
    kl_interval: tuple[float, float]
    p99_kl: float
    same_choice: float


class Precision(msgspec.Struct, frozen=True):
    """The model with its weights kept in one way. `origin`: where they come from, in words."""

    name: str
    origin: str
    weight_bytes: int
    bits: float
    quality: Quality
    speeds: tuple[Speed, ...]


class Precisions(msgspec.Struct, frozen=True):
    """All that could be measured, the baseline first; `missing` says of the others why not."""

    kept: tuple[Precision, ...]
    missing: dict[str, str]
    text: str
    kernels: str
    threads: int


class Operation(msgspec.Struct, frozen=True):
    """One kind of operation of a step: operations a byte moved, operations a second, and what holds it back."""

    name: str
    intensity: float
    rate: float
    ceiling: float
    seconds: float
    bound: str
    by_memory: bool


class Step(msgspec.Struct, frozen=True):
    """A step of a model: what it computes and moves, how long that takes, and which operations it is made of."""

    name: str
    phase: str
    sequences: int
    tokens: int
    operations: float
    moved_bytes: float
    seconds: float
    share_of_ceiling: float
    parts: tuple[Operation, ...]


class Roof(msgspec.Struct, frozen=True):
    """What a machine gives at most: bytes a second of one level of memory, or operations a second of one kind."""

    name: str
    rate: float


class Roofline(msgspec.Struct, frozen=True):
    """Steps under a machine's ceilings. `memory` in bytes a second, `arithmetic` in operations a second."""

    machine: str
    kernels: str
    threads: int
    weight_bytes: int
    memory: tuple[Roof, ...]
    arithmetic: tuple[Roof, ...]
    steps: tuple[Step, ...]
    others_cores: float | None
    cores: int


Say = Callable[[str], None]


@dataclass(frozen=True)
class Inside:
    """A model whose files are here. `pages(n)`: pages that a sequence of n tokens holds at most, in each pool of
    `pools`. `precisions` and `roofline` measure: seconds that they may take, and who is told how it goes."""

    name: str
    context: int
    weight_bytes: int
    kv_bytes_per_token: int
    page_tokens: int
    pools: tuple[KvPool, ...]
    pages: Callable[[int], tuple[int, ...]]
    precisions: Callable[[float, Say], Precisions]
    roofline: Callable[[float, Say], Roofline]
