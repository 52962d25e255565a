"""Servers, stands and models that experiments can be tested on without any."""

from __future__ import annotations

from tailrace.measure.http import Pool
from tailrace.measure.lab.inside import Inside, KvPool, Precisions, Roofline
from tailrace.measure.lab.stand import Pace, Served
from tailrace.measure.target import Target


def served(pace: Pace = Pace(1000.0, 100.0), context: int = 8192) -> Served:  # noqa: B008  # frozen
    """A server that is never asked."""
    return Served(Pool("http://127.0.0.1:9"), Target("mock"), pace, context, None)


def nothing(*_: object) -> Precisions:
    raise AssertionError


def no_roof(*_: object) -> Roofline:
    raise AssertionError


INSIDE = Inside(
    name="mock", context=4096, weight_bytes=4_000_000, kv_bytes_per_token=1000, page_tokens=16,
    pools=(KvPool(None, 16_000),), pages=lambda tokens: (-(-tokens // 16),), precisions=nothing, roofline=no_roof,
)  # fmt: skip
"""A model with pages of 16 tokens of 1,000 bytes each."""
