"""How long a step takes, from what it consists of: the interface, and the form that is linear in its counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import msgspec

from tailrace.terms import InvalidInput

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Step(NamedTuple):
    """The composition of one step. Request i computes `new[i]` tokens at positions `before[i]` and on: it reads the
    keys and values of as many tokens before them. `sampled` requests have their logits computed and their next token
    drawn: those that decode, and those whose prompt ends in this step."""

    new: Sequence[int]
    before: Sequence[int]
    sampled: int


class StepCost(Protocol):
    """What a simulated replica asks before each step."""

    def seconds(self, step: Step) -> float:
        """From its launch until its tokens are known, and the next one can be launched; above 0. The same for equal
        steps: nothing is remembered from one to the next."""
        ...


class Linear(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="linear", tag_field="kind"):
    """A sum of seconds: for a step at all, and for each of what it has. Of what is not named there is none.

    `read`: a token whose keys and values are read, once a request and step (Σ before + new), which is what decoding
    pays for context. `pair`: a new token with one that it attends to (Σ new · before + new · (new + 1) / 2), which is
    what prefill pays.
    """

    step: Seconds
    request: Seconds = 0.0
    token: Seconds = 0.0
    sample: Seconds = 0.0
    read: Seconds = 0.0
    pair: Seconds = 0.0
    about: str = ""
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        for name in ("step", "request", "token", "sample", "read", "pair"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite")
        if not self.step > 0:
            raise ValueError("step must be above 0: no step takes no time")

    def seconds(self, step: Step) -> float:
        """As `StepCost`."""
        new, before, sampled = step
        tokens = sum(new)
        total = self.step + self.request * len(new) + self.token * tokens + self.sample * sampled
        if self.read:
            total += self.read * (sum(before) + tokens)
        if self.pair:
            total += self.pair * sum([n * b + n * (n + 1) // 2 for n, b in zip(new, before, strict=True)])
        return total


def read(path: Path) -> Linear:
    """The cost in a TOML file: `kind = "linear"` and its seconds. Raises InvalidInput."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Linear)
    except OSError as error:
        raise InvalidInput(f"the cost {path} cannot be read: {error.strerror}", param="cost") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidInput(f"the cost {path}: {error}", param="cost") from error
