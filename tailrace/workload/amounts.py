"""Amounts that vary: tokens of a prompt, seconds of a pause. A plain number is always itself."""

from __future__ import annotations

import math
import random
from typing import Annotated

import msgspec

from tailrace.terms import InvalidInput

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Uniform(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="uniform", tag_field="kind"):
    """Anything from `low` to `high`, as likely."""

    low: NotNegative
    high: NotNegative


class Lognormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="lognormal", tag_field="kind"):
    """Half are below `median`; `sigma` is the standard deviation of the logarithm. What falls outside of `low` to
    `high` is moved to the nearer one."""

    median: Positive
    sigma: Positive
    low: NotNegative = 0.0
    high: Positive = math.inf


class Exponential(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="exponential", tag_field="kind"):
    """Memoryless, as the time until something that may happen at any moment."""

    mean: Positive


class Empirical(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="empirical", tag_field="kind"):
    """One of `values`, each as likely unless `weights` says otherwise."""

    values: Annotated[list[NotNegative], msgspec.Meta(min_length=1)]
    weights: list[NotNegative] = []


Amount = NotNegative | Uniform | Lognormal | Exponential | Empirical


def draw(amount: Amount, rng: random.Random) -> float:
    """One value."""
    match amount:
        case Uniform(low, high):
            return rng.uniform(low, high)
        case Lognormal(median, sigma, low, high):
            return min(max(rng.lognormvariate(math.log(median), sigma), low), high)
        case Exponential(mean):
            return rng.expovariate(1 / mean)
        case Empirical(values, weights):
            return rng.choices(values, weights or None)[0]
        case _:
            return amount


def tokens(amount: Amount, rng: random.Random) -> int:
    """One value as a number of tokens: whole, and at least 1."""
    return max(1, round(draw(amount, rng)))


def check(amount: Amount, name: str) -> None:
    """Raises InvalidInput where an amount contradicts itself; `name` says where it stands."""
    match amount:
        case Uniform(low, high) | Lognormal(_, _, low, high) if low > high:
            raise InvalidInput(f"{name}: low ({low:g}) is above high ({high:g})", param=name)
        case Empirical(values, weights) if weights and (len(weights) != len(values) or not sum(weights)):
            raise InvalidInput(f"{name}: there must be a weight for each value, and one above 0", param=name)
