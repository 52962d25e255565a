"""Requests that begin alike, with the prefix cache and without."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tailrace.measure import metrics, statistics
from tailrace.measure.lab import caching
from tailrace.measure.lab.experiment import Belief, Finding, Lesson, Needs, Table, Verdict
from tailrace.measure.lab.stand import Served, Stand, defined, done, drive
from tailrace.measure.lab.values import Mean, mean
from tailrace.measure.record import Record
from tailrace.measure.report import page
from tailrace.measure.report.plots import count, share
from tailrace.measure.report.svg import Plot, axis
from tailrace.measure.report.words import ms, rate
from tailrace.measure.statistics import Ratio
from tailrace.workload.session import Piece, Session, Turn

SIZES = ((1536, 64, 32), (768, 48, 24), (384, 32, 16), (160, 16, 8))
"""Shared tokens, tokens of one's own, tokens out: the first that fits context and budget."""
FEWEST = 6
"""Pairs: fewer can never be sure (`statistics.ratio`)."""
WHOLE = 0.9
"""Share of the shared tokens that must have been cached to say that the cache worked."""


class Side(msgspec.Struct, frozen=True):
    """With or without. `wall`: seconds from the first request to the last answer. `cached`: share of the prompts."""

    ttft: Mean
    tpot: Mean | None
    e2e: Mean
    wall: float
    cached: float | None
    firsts: list[float]
    """TTFT of each request, in order; the first finds nothing."""


class Prefix(msgspec.Struct, frozen=True):
    """Both, and the ratios of the same requests, without over with: above 1 the cache was quicker. The first request is
    in neither, since it finds nothing cached."""

    shared: int
    own: int
    out: int
    how: str
    on: Side
    off: Side
    ttft: Ratio
    tpot: Ratio | None
    notes: list[str]


class Experiment:
    """See `experiment.Experiment`."""

    name = "prefix"
    question = "What does a prefix cache save where many prompts begin alike?"
    does = "The same requests behind one system prompt, with the prefix cache and without, in turn."
    needs: Needs = "server"
    ours = ""

    async def run(self, stand: Stand) -> Prefix:
        """Each request once with the cache and once without, one right after the other."""
        async with caching.both(stand) as both:
            size = sized(both.on, stand)
            records: dict[bool, list[Record]] = {True: [], False: []}
            for number in stand.rounds(least=FEWEST + 1, most=25):
                stand.say(f"request {number + 1}")
                session = asked(number, *size)
                for cached in (True, False) if number % 2 else (False, True):
                    served, sent = (both.on, session) if cached else (both.off, session)
                    sent = caching.unknown(sent) if both.marked and not cached else sent
                    records[cached] += done(await drive(served, [sent], concurrency=1))
            return found(records[True], records[False], size, both.how, both.on.notes)

    def teach(self, found: Prefix) -> Lesson:
        """What it saves of the wait for the first token, and of all."""
        n = found.on.ttft.n
        rows = [
            [name, side.ttft.shown(ms), side.tpot.shown(ms) if side.tpot else "not defined", side.e2e.shown(ms),
             ms(side.wall), "not told" if side.cached is None else share(side.cached), str(n)]
            for name, side in (("with the cache", found.on), ("without", found.off))
        ]  # fmt: skip
        return Lesson(
            did=f"{n} requests with {found.shared:,} tokens in common, {found.own} of their own and {found.out} out, "
            "each with the cache and without, right after each other; and one before them, which fills the cache.",
            tables=[Table(("", "TTFT", "TPOT", "E2E", "wall", "of prompts cached", "n"), rows)],
            findings=_findings(found),
            beliefs=_beliefs(found),
            figures=[_figure(found)],
            notes=[
                f"Without the cache: {found.how}. Wall: all of the {n} answers, one after the other. Means with "
                "intervals "
                "of 95 %; ratios are medians of the pairs.",
                *found.notes,
            ],
        )


def sized(served: Served, stand: Stand) -> tuple[int, int, int]:
    """Tokens in common, of one's own, and out."""
    for size in SIZES:
        shared, own, out = size
        seconds = served.pace.seconds(2 * own + shared, 2 * out)
        if shared + own + out <= served.context * 0.9 and (FEWEST + 1) * seconds <= stand.budget:
            break
    return size


def asked(number: int, shared: int, own: int, out: int) -> Session:
    """One user behind the system prompt."""
    pieces = (Piece("prefix/shared", shared, "system"), Piece(f"prefix/{number}", own))
    return Session(number, (Turn(pieces, out),))


def found(
    on: Sequence[Record], off: Sequence[Record], size: tuple[int, int, int], how: str, notes: Sequence[str]
) -> Prefix:
    """Of the records of both sides in the same order; the first of each fills the cache, and is not measured."""
    ttft = [defined(map(metrics.ttft, side)) for side in (on, off)]
    tpot = [(a, b) for a, b in zip(*(map(metrics.tpot, side[1:]) for side in (on, off)), strict=True) if a and b]
    return Prefix(
        *size, how, _side(on), _side(off), ttft=statistics.ratio(ttft[0][1:], ttft[1][1:]),
        tpot=statistics.ratio([a for a, _ in tpot], [b for _, b in tpot]) if tpot else None, notes=list(notes),
    )  # fmt: skip


def _side(records: Sequence[Record]) -> Side:
    counted = records[1:]
    ttft, e2e = mean(defined(map(metrics.ttft, counted))), mean(defined(map(metrics.e2e, counted)))
    assert ttft is not None
    assert e2e is not None
    told = [record for record in counted if record.cached_tokens is not None and record.input_tokens]
    tokens = sum(record.input_tokens or 0 for record in told)
    return Side(
        ttft, mean(defined(map(metrics.tpot, counted))), e2e, sum(defined(map(metrics.e2e, counted))),
        sum(record.cached_tokens or 0 for record in told) / tokens if tokens else None,
        defined(map(metrics.ttft, records)),
    )  # fmt: skip


def _findings(found: Prefix) -> list[Finding]:
    on, off = found.on, found.off
    low, high = found.ttft.interval
    made = [
        Finding(
            f"The first token came after {ms(on.ttft.value)} with the cache and after {ms(off.ttft.value)} without: "
            f"{found.ttft.ratio:.2f} times ({low:.2f} to {high:.2f}) as long without."
        ),
        Finding(
            f"The {on.ttft.n} answers took {ms(on.wall)} with it and {ms(off.wall)} without: "
            f"{1 - on.wall / off.wall:.0%} less."
            if on.wall < off.wall
            else f"The {on.ttft.n} answers took {ms(on.wall)} with it and {ms(off.wall)} without: nothing was gained."
        ),
    ]
    if on.cached is not None:
        most = found.shared / (found.shared + found.own)
        worked = on.cached >= WHOLE * most
        made.append(
            Finding(
                f"{share(on.cached)} of the prompts' tokens came from the cache; {share(most)} are common to all. "
                + (
                    "The rest is each one's own, and is computed."
                    if worked
                    else "So the cache did not find all that it could."
                )
            )
        )
    saved = off.ttft.value - on.ttft.value
    if saved > 0 and on.cached:
        tokens = on.cached * (found.shared + found.own)
        made.append(
            Finding(
                f"{ms(saved)} for about {tokens:,.0f} tokens that need no computing: {rate(tokens / saved)} tokens a "
                "second, the rate of prefill that the cache stands for."
            )
        )
    return made


def _beliefs(found: Prefix) -> list[Belief]:
    def verdict(ratio: Ratio) -> Verdict:
        low, high = ratio.interval
        return Verdict.OPEN if low <= 1 <= high or ratio.p > 0.05 else Verdict.HOLDS if low > 1 else Verdict.FAILS

    low, high = found.ttft.interval
    made = [
        Belief(
            "A prefix cache shortens the wait for the first token.",
            verdict(found.ttft),
            f"Without it TTFT was {found.ttft.ratio:.2f} times as long ({low:.2f} to {high:.2f}), "
            f"p = {found.ttft.p:.2g} of {found.ttft.pairs} pairs.",
        )
    ]
    if found.tpot is not None:
        low, high = found.tpot.interval
        changed = verdict(found.tpot) is not Verdict.OPEN
        close = low > 0.9 and high < 1.1
        made.append(
            Belief(
                "It does nothing for the tokens after the first.",
                Verdict.FAILS if changed and not close else Verdict.HOLDS if close else Verdict.OPEN,
                f"TPOT without it was {found.tpot.ratio:.2f} times as long ({low:.2f} to {high:.2f}); within a tenth "
                "counts as nothing.",
            )
        )
    return made


def _figure(found: Prefix) -> str:
    every = [*found.on.firsts, *found.off.firsts]
    last = len(found.on.firsts) - 1
    wide = max(every) > 20 * min(every)
    plot = Plot(axis("request", [0.0, float(last)], count), axis("TTFT", every, ms, log=wide), "TTFT by request")
    for name, colour, side in (("without the cache", "c6", found.off), ("with the cache", "c2", found.on)):
        plot.line([*enumerate(map(float, side.firsts))], colour, name, dots=True)
        plot.level(float(np.mean(side.firsts[1:])), colour)
    return page.figure(
        "Time to first token, request by request", str(plot),
        "Request 0 fills the cache and is not counted; dashed are the means of those that follow.",
    )  # fmt: skip
