"""When sessions begin. An open loop says when each is due, whatever the server does; a closed one keeps some going."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Annotated

import msgspec

from tailrace.workload.amounts import NotNegative, Positive

Many = Annotated[int, msgspec.Meta(ge=1)]


class Closed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="closed", tag_field="kind"):
    """So many sessions at a time: the next one begins when one has ended."""

    concurrency: Many


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="constant", tag_field="kind"):
    """`rate` sessions a second, evenly."""

    rate: Positive


class Poisson(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="poisson", tag_field="kind"):
    """`rate` sessions a second, independent of each other: what many users make together."""

    rate: Positive


class Gamma(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gamma", tag_field="kind"):
    """`rate` sessions a second in bursts: gaps are gamma distributed with shape `burstiness`. 1 is Poisson, less is in
    thicker bursts, more is more even. (vLLM's bench calls it the same.)"""

    rate: Positive
    burstiness: Positive


class Ramp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ramp", tag_field="kind"):
    """Poisson arrivals whose rate goes evenly from `first` to `last` sessions a second in `seconds`, then stays."""

    first: NotNegative
    last: Positive
    seconds: Positive


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="trace", tag_field="kind"):
    """As a trace recorded them, `speed` times as fast."""

    speed: Positive = 1.0


Arrivals = Closed | Constant | Poisson | Gamma | Ramp | Recorded
Open = Constant | Poisson | Gamma | Ramp


def times(arrivals: Open, seed: int) -> Iterator[float]:
    """Seconds from the start at which sessions are due, without end, never decreasing."""
    rng = random.Random(f"{seed}:arrivals")
    at, passed = 0.0, 0.0
    while True:
        match arrivals:
            case Constant(rate):
                yield at
                at += 1 / rate
                continue
            case Poisson(rate):
                at += rng.expovariate(rate)
            case Gamma(rate, burstiness):
                at += rng.gammavariate(burstiness, 1 / (rate * burstiness))
            case Ramp():
                passed += rng.expovariate(1.0)
                at = _when(arrivals, passed)
        yield at


def _when(ramp: Ramp, count: float) -> float:
    """When as many sessions are expected to have come: the inverse of the rate's integral."""
    slope = (ramp.last - ramp.first) / ramp.seconds
    during = (ramp.first + ramp.last) / 2 * ramp.seconds
    if count >= during:
        return ramp.seconds + (count - during) / ramp.last
    if not slope:
        return count / ramp.first
    return (math.sqrt(ramp.first**2 + 2 * slope * count) - ramp.first) / slope


def scaled(arrivals: Arrivals, level: float) -> Arrivals:
    """The same kind of load at another level: sessions at a time, sessions a second, or times the recorded speed."""
    match arrivals:
        case Closed():
            return Closed(max(1, round(level)))
        case Constant():
            return Constant(level)
        case Gamma(_, burstiness):
            return Gamma(level, burstiness)
        case Recorded():
            return Recorded(level)
        case _:
            return Poisson(level)
