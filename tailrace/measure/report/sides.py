"""Engines side by side, in words: the same in the terminal and on the page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tailrace.measure import statistics
from tailrace.measure.engines import judge
from tailrace.measure.report.words import amount
from tailrace.measure.result import Bench, Decision, Difference, Side


def measured(bench: Bench) -> list[Side]:
    """Those that there are runs of."""
    return [side for side in bench.sides if any(turn.run is not None for turn in side.turns)]


def title(bench: Bench) -> str:
    """What was run, in a line."""
    first, turns = bench.runs[0], max(len(side.turns) for side in bench.sides)
    return f"{first.workload}, {first.load}, {turns} turn{'s' if turns > 1 else ''}"


def headline(decision: Decision) -> str:
    """The choice in a line."""
    if decision.chosen is not None:
        return f"{decision.chosen}, judged by {decision.goal}"
    if decision.ties:
        names = " or ".join(decision.ties)
        return f"{names}: no difference that these runs can show in {decision.goal}"
    return "None can be chosen"


def reference(bench: Bench) -> str:
    """The engine that the others are compared with: the first of the choice, else the first that was measured."""
    decision, sides = bench.decision, measured(bench)
    if decision is not None and (decision.chosen or decision.ties):
        return decision.chosen or decision.ties[0]
    return sides[0].label if sides else ""


def table(bench: Bench) -> tuple[list[str], list[list[str]]]:
    """A line for each metric, a column for each engine: medians of the turns."""
    sides = measured(bench)
    rows = [["failed", *(_failed(bench, side) for side in sides)]]
    if bench.slo is not None:
        rows.append(["kept the SLO", *(_kept(bench, side) for side in sides)])
    for metric in judge.METRICS:
        found = [judge.median(side, bench.runs, metric) for side in sides]
        if any(value is not None for value in found):
            rows.append([metric, *("" if value is None else amount(metric, value) for value in found)])
    for name, of in (("prompt cached", _cached), ("KV in use, most", _kv), ("waiting, most", _waiting)):
        cells = [of(bench, side) for side in sides]
        if any(cells):
            rows.append([name, *cells])
    return ["", *(side.label for side in sides)], rows


def _failed(bench: Bench, side: Side) -> str:
    own = [bench.runs[turn.run].summary for turn in side.turns if turn.run is not None]
    died = sum(turn.died for turn in side.turns)
    failures, requests = sum(one.failures for one in own), sum(one.requests for one in own)
    return f"{failures:,} of {requests:,}" + (f", ended {died} times" if died else "")


def _kept(bench: Bench, side: Side) -> str:
    own = [bench.runs[turn.run].summary for turn in side.turns if turn.run is not None]
    requests = sum(one.requests for one in own)
    kept = sum(round(one.goodput.attainment * one.requests) for one in own if one.goodput is not None)
    low, high = statistics.share(kept, requests)
    return f"{kept / requests:.1%} ({low:.0%} to {high:.0%})" if requests else ""


def _cached(bench: Bench, side: Side) -> str:
    """As the engine's counters say, else as its answers do."""
    told = [turn.cached for turn in side.turns if turn.cached is not None]
    if not told:
        own = [bench.runs[turn.run].summary.shape.cached for turn in side.turns if turn.run is not None]
        told = [one for one in own if one is not None]
    return f"{sum(told) / len(told):.0%}" if told else ""


def _kv(_bench: Bench, side: Side) -> str:
    told = [turn.kv_use for turn in side.turns if turn.kv_use is not None]
    return f"{max(told):.0%}" if told else ""


def _waiting(_bench: Bench, side: Side) -> str:
    told = [turn.waiting for turn in side.turns if turn.waiting is not None]
    return f"{max(told):g}" if told else ""


def against(bench: Bench) -> list[Difference]:
    """Every other engine over the reference, in each metric."""
    base = reference(bench)
    others = [side.label for side in measured(bench) if side.label != base]
    pairs = ((metric, other) for metric in judge.METRICS for other in others)
    found = (judge.between(bench.differences, metric, base, other) for metric, other in pairs)
    return [one for one in found if one is not None]


def ratios(bench: Bench) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of those."""
    rows = []
    for one in against(bench):
        low, high = one.ratio.interval
        first, second = one.sides
        p = one.ratio.p if one.adjusted is None else one.adjusted
        better = second if (one.ratio.ratio < 1.0) == one.less_is_better else first
        rows.append([
            one.metric, second, f"{one.ratio.ratio:.3f}", f"{low:.3f} to {high:.3f}", f"{p:.2g}", str(one.ratio.pairs),
            f"{better} is better" if judge.shown(one) else "no sure difference",
        ])  # fmt: skip
    return ["", "", f"over {reference(bench)}", "95 % interval", "p", "pairs", ""], rows


def configurations(bench: Bench) -> list[tuple[str, str, str]]:
    """Of each engine: its name, its version and weights or why it was not measured, its command line."""
    made = []
    for side in bench.sides:
        told = ", ".join(filter(None, (side.version, side.weights)))
        changed = " ".join(
            f"{name}={shlex.quote(value)}" for name, value in side.environment.items() if value is not None
        )
        command = " ".join(filter(None, (changed, shlex.join(side.command))))
        made.append((side.label, f"{told}. {side.absent}".strip(". ") if side.absent else told, command))
    return made


def turns_of(bench: Bench, side: Side, metric: str) -> Sequence[tuple[int, float]]:
    """Number and value of each turn that has one."""
    found = judge.values(side, bench.runs, metric)
    return [(number + 1, value) for number, value in enumerate(found) if value is not None]
