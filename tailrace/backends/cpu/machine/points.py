"""What a model's operations attained under a machine's ceilings, as numbers with units."""

from __future__ import annotations

import msgspec


class Point(msgspec.Struct, frozen=True):
    """One kind of operation in one step, `times` over. `shape`: outputs x inputs and format of a product. Two
    operations a multiply-add. `bound`: what holds it, a level of memory or a kind of multiply-add; the ceiling is the
    lower of the two that memory and arithmetic set. Times are of the best round."""

    operation: str
    shape: str
    times: int
    operations: int
    moved_bytes: int
    operations_per_byte: float
    seconds: float
    median_seconds: float
    operations_per_second: float
    memory_ceiling_operations_per_second: float
    arithmetic_ceiling_operations_per_second: float
    bound: str
    ceiling_operations_per_second: float
    share_of_ceiling: float


class StepPoints(msgspec.Struct, frozen=True):
    """A step's operations. `cold_bytes`: weights, and keys and values of earlier tokens; as many can be read at
    `cold_bytes_per_second`. `ceiling_seconds`: what they would take together if each were at its ceiling. Products are
    timed alone, one kind at a time; together they take `products_alone_seconds`, and `products_seconds` in the step."""

    step: str
    sequences: int
    tokens: int
    context: int
    cold_bytes: int
    cold_bytes_per_second: float
    seconds: float
    median_seconds: float
    tokens_per_second: float
    ceiling_seconds: float
    share_of_ceiling: float
    products_seconds: float
    products_alone_seconds: float
    points: tuple[Point, ...]


class Roofline(msgspec.Struct, frozen=True):
    """All steps that were measured. `others_cores`: as in `Ceilings`."""

    model: str
    kernels: str
    threads: int
    weight_bytes: int
    others_cores: float | None
    steps: tuple[StepPoints, ...]
