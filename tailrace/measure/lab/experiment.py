"""What an experiment is: a question, a plan, a run, and what its numbers teach."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from tailrace.measure.lab.stand import Stand

Found = TypeVar("Found", bound=msgspec.Struct)
Needs = Literal["server", "local"]


class Mark(enum.StrEnum):
    """Where a number comes from."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    ASSUMED = "assumed"


class Finding(msgspec.Struct, frozen=True):
    """A sentence that this run's numbers say."""

    text: str
    mark: Mark = Mark.MEASURED


class Verdict(enum.StrEnum):
    """What a run says of a belief."""

    HOLDS = "holds here"
    FAILS = "does not hold here"
    OPEN = "not decided"


class Belief(msgspec.Struct, frozen=True):
    """What people say of serving, and whether this run bears it out."""

    says: str
    verdict: Verdict
    because: str


class Table(msgspec.Struct, frozen=True):
    """Rows of words under heads. `mark` is of all its numbers that have none of their own."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    mark: Mark = Mark.MEASURED


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """What a run teaches. `did`: what was done, in numbers; `figures` are HTML of `report.page.figure`."""

    did: str
    tables: list[Table]
    findings: list[Finding]
    beliefs: list[Belief] = []
    figures: list[str] = []
    notes: list[str] = []


class Experiment(Protocol[Found]):
    """One question and its answer. `needs`: a server, which may be anybody's, or this machine alone."""

    name: str
    question: str
    does: str
    """What it does, in a sentence, before it is known on which server."""
    needs: Needs
    ours: str
    """Why it wants a server of Tailrace's own; empty where any server will do."""

    async def run(self, stand: Stand) -> Found:
        """Measures. Raises TailraceError where that is not possible, with the reason."""

    def teach(self, found: Found) -> Lesson:
        """What the numbers say. Pure."""


def judge(low: float, high: float, bar: float, *, above: bool = True) -> Verdict:
    """Whether a value whose interval is `low` to `high` is surely above the bar (or below it)."""
    if low <= bar <= high:
        return Verdict.OPEN
    return Verdict.HOLDS if (low > bar) == above else Verdict.FAILS
