"""What the turns show: each metric of each two engines as pairs, and which engine that speaks for.

An engine is judged by one number, which the question names: goodput where there is an SLO, else throughput (a closed
loop) or the time that a user waits (an open one, which gives every engine the same work); with a price, its cost.
What it is better or worse in beside that is said, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec
import numpy as np

from tailrace.measure import result, statistics
from tailrace.measure.bench import COMPARED
from tailrace.measure.report.words import amount
from tailrace.measure.result import Decision, Difference, Measured, Side, Turn
from tailrace.measure.slo import Slo

Value = Callable[[Side, Turn, Measured], float | None]

PER_MILLION = "$ a million output tokens"
PER_GOOD = "$ a thousand good requests"
MOST_FAILURES = 0.01
"""Share of the requests that may fail before an engine is set aside."""
LEAST = 0.01
"""A difference of less than that share is none that an engine is chosen for, however sure it is."""
LENGTH = 0.02
"""By how much answers may be shorter or longer than wanted, as a share, before it is said."""


def _cost(good: bool) -> Value:
    def value(side: Side, _turn: Turn, run: Measured) -> float | None:
        if side.price is None:
            return None
        found = result.cost(run.summary, side.price)
        return found.per_thousand_good if good else found.per_million_output

    return value


def _summary(of: Callable[..., float | None]) -> Value:
    return lambda _side, _turn, run: of(run.summary)


METRICS: dict[str, tuple[bool, Value]] = {
    **{name: (less, _summary(of)) for name, (less, of) in COMPARED.items()},
    PER_MILLION: (True, _cost(False)),
    PER_GOOD: (True, _cost(True)),
    "CPU seconds a token": (True, lambda _side, turn, _run: turn.cpu_per_token),
    "memory": (True, lambda _side, turn, _run: turn.rss),
    "start to ready": (True, lambda _side, turn, _run: turn.ready),
    "start to first token": (True, lambda _side, turn, _run: turn.first_token),
}
"""Whether less is better, and the value of a turn."""


def values(side: Side, runs: Sequence[Measured], metric: str) -> list[float | None]:
    """One for each turn; None for one that did not run, or not to its end."""
    value = METRICS[metric][1]
    return [
        None if turn.run is None or runs[turn.run].summary.interrupted else value(side, turn, runs[turn.run])
        for turn in side.turns
    ]


def median(side: Side, runs: Sequence[Measured], metric: str) -> float | None:
    """Of the turns that have one."""
    known = [one for one in values(side, runs, metric) if one is not None]
    return float(np.median(known)) if known else None


def differences(sides: Sequence[Side], runs: Sequence[Measured]) -> list[Difference]:
    """Every metric of every two engines, from the turns that both have it of. A metric that was 0 in one of them has no
    ratio, and is left out."""
    made = []
    for metric, (less, _) in METRICS.items():
        found = []
        for a, b in combinations(sides, 2):
            both = zip(values(a, runs, metric), values(b, runs, metric), strict=False)
            pairs = [(first, second) for first, second in both if first is not None and second is not None]
            if pairs and all(min(pair) > 0 for pair in pairs):
                one, other = ([pair[place] for pair in pairs] for place in (0, 1))
                ratio = statistics.ratio(one, other)
                medians = float(np.median(one)), float(np.median(other))
                found.append(Difference(metric, less, *medians, ratio, (a.label, b.label)))
        adjusted = statistics.holm([one.ratio.p for one in found])
        made += [msgspec.structs.replace(one, adjusted=p) for one, p in zip(found, adjusted, strict=True)]
    return made


def shown(one: Difference | None) -> bool:
    """Whether the runs show a difference that is worth a word."""
    return one is not None and one.sure and abs(one.ratio.ratio - 1) >= LEAST


def between(found: Sequence[Difference], metric: str, first: str, second: str) -> Difference | None:
    """The difference of `second` over `first`, whichever way round it was made."""
    for one in found:
        if one.metric == metric and set(one.sides) == {first, second}:
            return one if one.sides == (first, second) else _turned(one)
    return None


def _turned(one: Difference) -> Difference:
    low, high = one.ratio.interval
    ratio = msgspec.structs.replace(one.ratio, ratio=1 / one.ratio.ratio, interval=(1 / high, 1 / low))
    return msgspec.structs.replace(one, a=one.b, b=one.a, ratio=ratio, sides=(one.sides[1], one.sides[0]))


@dataclass(frozen=True)
class _Record:
    """How one engine did, over all turns. `kept`: requests that kept the SLO."""

    side: Side
    requests: int
    failures: int
    kept: int
    value: float | None

    @property
    def sound(self) -> bool:
        return not any(turn.died for turn in self.side.turns) and self.failures <= MOST_FAILURES * self.requests


def decide(
    sides: Sequence[Side], runs: Sequence[Measured], found: Sequence[Difference], slo: Slo | None = None
) -> Decision:
    """Which engine, judged by what, and why."""
    goal = _goal(sides, runs, slo)
    records = [_record(side, runs, goal, slo) for side in sides]
    ran = [one for one in records if one.requests]
    reasons = [text for one in records for text in _troubles(one, runs)]
    if not ran:
        return Decision(chosen=None, goal=goal, reasons=[*reasons, "Nothing was measured."])
    able = [one for one in ran if one.failures < one.requests]
    sound = [one for one in able if one.sound]
    if able and not sound:
        reasons.append("None answered without failures: the choice is among those that failed.")
    candidates = sound or able
    if slo is not None:
        candidates, words = _keepers(candidates, slo)
        reasons = words + reasons
    candidates = [one for one in candidates if one.value is not None]
    if not candidates:
        return Decision(chosen=None, goal=goal, reasons=[*reasons, f"None has {goal} to be judged by."])
    less = METRICS[goal][0]
    ranked = sorted(candidates, key=lambda one: (one.value or 0.0) * (1 if less else -1))
    ties, words = _against(ranked, found, goal)
    best = ranked[0].side.label
    reasons = words + reasons + _trades(best, [one.side.label for one in ranked[1:]], found, goal)
    reasons += _caveats([one.side for one in ran], runs)
    return Decision(chosen=None if ties else best, goal=goal, reasons=reasons, ties=[best, *ties] if ties else [])


def _goal(sides: Sequence[Side], runs: Sequence[Measured], slo: Slo | None) -> str:
    measured = [side for side in sides if any(turn.run is not None for turn in side.turns)]
    priced = bool(measured) and all(side.price is not None for side in measured)
    if slo is not None:
        return PER_GOOD if priced else "goodput"
    if runs and runs[0].open_loop:
        return "E2E, median"
    if any(run.summary.rates.output_tokens is None for run in runs if run.summary.outcomes.get("ok")):
        return "requests/s"
    return PER_MILLION if priced else "output tokens/s"


def _record(side: Side, runs: Sequence[Measured], goal: str, slo: Slo | None) -> _Record:
    own = [runs[turn.run] for turn in side.turns if turn.run is not None]
    kept = 0
    if slo is not None:
        kept = sum(round(run.summary.goodput.attainment * run.summary.requests) for run in own if run.summary.goodput)
    requests, failures = (sum(numbers) for numbers in ([run.summary.requests for run in own],
                                                       [run.summary.failures for run in own]))  # fmt: skip
    return _Record(side, requests, failures, kept, median(side, runs, goal))


def _troubles(one: _Record, runs: Sequence[Measured]) -> list[str]:
    """Why it was not measured, what failed, and when it ended."""
    side, said = one.side, []
    if side.absent:
        return [f"{side.label} was not measured: {side.absent}"]
    if one.failures:
        errors: dict[str, int] = {}
        for turn in side.turns:
            for error, count in (runs[turn.run].summary.errors if turn.run is not None else {}).items():
                errors[error] = errors.get(error, 0) + count
        worst = max(errors, key=lambda error: errors[error], default="no reason given")
        only = "only failed" if one.failures == one.requests else "failed"
        said.append(f"{side.label} {only}: {one.failures:,} of {one.requests:,} requests, most often with “{worst}”.")
    for number, turn in enumerate(side.turns):
        if turn.died:
            said.append(f"{side.label} ended in the middle of turn {number + 1}.")
        elif turn.run is None:
            said.append(f"{side.label} could not be measured in turn {number + 1}: {turn.failed.splitlines()[0]}")
    return said


def _keepers(candidates: Sequence[_Record], slo: Slo) -> tuple[list[_Record], list[str]]:
    """Those that kept it; where none did, the one that came nearest."""
    said, keepers = [], []
    for one in candidates:
        low, high = statistics.share(one.kept, one.requests)
        held = one.kept >= slo.share * one.requests
        if held:
            keepers.append(one)
        word = "kept" if held else "did not keep"
        said.append(
            f"{one.side.label} {word} {slo}: {one.kept / one.requests:.1%} of its requests did "
            f"({low:.1%} to {high:.1%})."
        )
    if keepers or not candidates:
        return keepers, said
    return [max(candidates, key=lambda one: one.kept / one.requests)], [*said, "None kept it; the nearest is named."]


def _against(ranked: Sequence[_Record], found: Sequence[Difference], goal: str) -> tuple[list[str], list[str]]:
    """Those that cannot be told from the first, and how it stands to each."""
    best = ranked[0].side.label
    ties, said = [], []
    if len(ranked) == 1:
        return [], [f"{best} is the only one left to choose: {amount(goal, ranked[0].value or 0.0)} ({goal})."]
    for one in ranked[1:]:
        other = one.side.label
        difference = between(found, goal, other, best)
        agrees = difference is None or (difference.ratio.ratio < 1) == difference.less_is_better
        if not shown(difference) or not agrees:  # medians are of all turns, ratios of those that both have
            ties.append(other)
            said.append(f"No difference that these runs can show between {best} and {other}{_shown(difference, goal)}.")
        else:
            said.append(f"{best} is better than {other} in {goal}{_shown(difference, goal)}.")
    return ties, said


def _shown(one: Difference | None, goal: str) -> str:
    if one is None:
        return ": no turn has both"
    low, high = one.ratio.interval
    p = one.ratio.p if one.adjusted is None else one.adjusted
    return (
        f": {amount(goal, one.b)} against {amount(goal, one.a)}, {one.ratio.ratio:.2f} times as much "
        f"({low:.2f} to {high:.2f}, p = {p:.2g}, {one.ratio.pairs} pairs)"
    )


def _trades(best: str, others: Sequence[str], found: Sequence[Difference], goal: str) -> list[str]:
    """In what others are surely better than the first."""
    said = []
    for other in others:
        better = []
        for metric in METRICS:
            one = between(found, metric, best, other)
            if metric == goal or one is None or not shown(one):
                continue
            if (one.ratio.ratio < 1) == one.less_is_better:
                better.append(f"{metric} ({amount(metric, one.b)} against {amount(metric, one.a)})")
        if better:
            said.append(f"{other} is better than {best} in {', '.join(better)}.")
    return said


def _caveats(ran: Sequence[Side], runs: Sequence[Measured]) -> list[str]:
    """What a reader has to know before believing it."""
    said = []
    weights = {side.weights for side in ran if side.weights}
    if len(weights) > 1:
        told = "; ".join(f"{side.label}: {side.weights}" for side in ran)
        said.append(f"They did not run the same weights ({told}): this compares engine and weights together.")
    turns = min((sum(turn.run is not None for turn in side.turns) for side in ran), default=0)
    least = statistics.least_pairs(max(1, len(ran) * (len(ran) - 1) // 2))
    if len(ran) > 1 and turns < least:
        said.append(
            f"With {turns} turn{'s' if turns > 1 else ''} of {len(ran)} engines no difference can be sure; {least} are "
            "the fewest."
        )
    for side in ran:
        own = [runs[turn.run] for turn in side.turns if turn.run is not None]
        shapes = [run.summary.shape for run in own if run.summary.shape.output is not None]
        wanted = sum(shape.wanted_output for shape in shapes)
        got = sum(shape.output or 0.0 for shape in shapes)
        if wanted and abs(got / wanted - 1) > LENGTH:
            said.append(
                f"{side.label} gave answers of {got / len(shapes):,.0f} tokens where {wanted / len(shapes):,.0f} were "
                "asked for: its times and rates are of other work."
            )
        held = sum(bool(run.summary.client.reasons) for run in own)
        if held:
            said.append(f"In {held} of {len(own)} turns of {side.label} the load generator may have been the limit.")
    return said
