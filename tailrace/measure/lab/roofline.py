"""Both phases under the machine's roofs: memory and arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.measure.lab.experiment import Belief, Finding, Lesson, Needs, Table, Verdict
from tailrace.measure.lab.inside import Roof, Roofline, Step
from tailrace.measure.lab.stand import Stand
from tailrace.measure.report import page
from tailrace.measure.report.svg import Plot, axis, legend, stack
from tailrace.measure.report.words import ms, rate
from tailrace.terms import TailraceError

MOST = 0.5
"""Share of a step's time from which on its bound is called that of the step."""
NEAR = 0.4
"""Share of what its ceilings allow from which on a step is called bound by them."""
OTHERS = 0.1
"""Share of the cores that others may use before it is said."""


class Experiment:
    """See `experiment.Experiment`."""

    name = "roofline"
    question = "What holds each phase back: the memory, or the arithmetic?"
    does = "This machine's ceilings are measured, then the model's steps, and each operation is held against them."
    needs: Needs = "local"
    ours = ""

    async def run(self, stand: Stand) -> Roofline:
        """In this process, as `tailrace machine` does."""
        if stand.inside is None:
            raise TailraceError(f"the files of {stand.model} are not here")
        return stand.inside.roofline(stand.budget, stand.say)

    def teach(self, found: Roofline) -> Lesson:
        """Where each step lies, and what its operations wait for."""
        rows = [
            [one.name, f"{one.operations / one.moved_bytes:.1f}", ms(one.seconds), rate(one.tokens / one.seconds),
             f"{one.operations / one.seconds / 1e9:,.1f}", f"{one.moved_bytes / one.seconds / 1e9:.1f}",
             f"{by_memory(one):.0%}", f"{one.share_of_ceiling:.0%}"]
            for one in found.steps
        ]  # fmt: skip
        heads = ("step", "op/byte", "time", "tokens/s", "Gop/s", "GB/s", "held by memory", "of what ceilings allow")
        roofs = [[roof.name, f"{roof.rate / 1e9:,.1f} GB/s"] for roof in found.memory]
        roofs += [[f"multiply-adds, {roof.name}", f"{roof.rate / 1e9:,.1f} Gop/s"] for roof in arithmetic(found)]
        notes = [
            "Two operations a multiply-add. An operation is held by memory where its bytes need longer than its "
            "arithmetic at this machine's ceilings; the column has the share of a step's time in such operations. "
            "Times are of the best round.",
        ]  # fmt: skip
        if found.others_cores is not None and found.others_cores > OTHERS * found.cores:
            notes.append(
                f"Other programs used {found.others_cores:.1f} of {found.cores} cores meanwhile: this machine is "
                "better than these numbers."
            )
        return Lesson(
            did=f"{found.machine}, {found.threads} threads, {found.kernels} kernels; {len(found.steps)} steps.",
            tables=[Table(heads, rows), Table(("ceiling", "measured"), roofs)], findings=_findings(found),
            beliefs=_beliefs(found), figures=_figures(found), notes=notes,
        )  # fmt: skip


def arithmetic(found: Roofline) -> list[Roof]:
    """The kinds of multiply-add that hold something here, fastest first; the fastest of all where none does."""
    holding = {part.bound for step in found.steps for part in step.parts}
    ordered = sorted(found.arithmetic, key=lambda roof: -roof.rate)
    return [roof for roof in ordered if roof.name in holding] or ordered[:1]


def by_memory(step: Step) -> float:
    """The share of its operations' time in those that memory holds."""
    whole = sum(part.seconds for part in step.parts) or 1.0
    return sum(part.seconds for part in step.parts if part.by_memory) / whole


def phases(found: Roofline) -> tuple[Step, Step | None]:
    """Decode of the fewest sequences, and the longest prefill."""
    decode = min((one for one in found.steps if one.phase == "decode"), key=lambda one: one.sequences)
    return decode, max((one for one in found.steps if one.phase == "prefill"), key=lambda one: one.tokens, default=None)


def _findings(found: Roofline) -> list[Finding]:
    made = []
    for one in found.steps:
        share = by_memory(one)
        held = "memory" if share > MOST else "arithmetic"
        made.append(
            Finding(
                f"{one.name}: {one.operations / one.moved_bytes:.1f} operations for each byte moved, "
                f"{ms(one.seconds)}, {rate(one.tokens / one.seconds)} tokens a second. {max(share, 1 - share):.0%} "
                f"of the time is in operations whose lower ceiling is {held}; the step attained "
                f"{one.share_of_ceiling:.0%} of what the ceilings allow."
            )
        )
    decode, prefill = phases(found)
    if prefill is not None:
        times = prefill.tokens / prefill.seconds / (decode.tokens / decode.seconds)
        made.append(
            Finding(
                f"A token of a prompt took {prefill.seconds / prefill.tokens * 1e3:.3g} ms, one of an answer "
                f"{decode.seconds / decode.tokens * 1e3:.3g} ms, {times:.0f} times as long: {prefill.tokens} tokens "
                f"together read the weights once, {found.weight_bytes / 1e6:,.0f} MB, which a single one has to read "
                "as well."
            )
        )
    many = max((one for one in found.steps if one.phase == "decode"), key=lambda one: one.sequences)
    if many is not decode:
        gain = many.tokens / many.seconds / (decode.tokens / decode.seconds)
        made.append(
            Finding(
                f"{many.sequences} sequences in a step take {many.seconds / decode.seconds:.1f} times as long as "
                f"{decode.sequences}, and give {gain:.1f} times the tokens; {by_memory(many):.0%} of the time is in "
                "operations whose lower ceiling is memory."
            )
        )
    return made


def _beliefs(found: Roofline) -> list[Belief]:
    decode, prefill = phases(found)
    made = []
    for says, step, memory in (
        ("Decode is bound by memory bandwidth.", decode, True), ("Prefill is bound by arithmetic.", prefill, False)
    ):  # fmt: skip
        if step is None:
            continue
        share = by_memory(step) if memory else 1 - by_memory(step)
        kind = "memory" if memory else "arithmetic"
        near = step.share_of_ceiling >= NEAR
        verdict = Verdict.FAILS if share <= MOST else Verdict.HOLDS if near else Verdict.OPEN
        because = (
            f"{share:.0%} of the time of {step.name} is in operations whose lower ceiling is {kind}; the bar is half."
        )
        if share > MOST and not near:
            because += (
                f" But the step attains only {step.share_of_ceiling:.0%} of what the ceilings allow: something else "
                "than either costs most of its time."
            )
        made.append(Belief(says, verdict, because))
    return made


def _figures(found: Roofline) -> list[str]:
    return [_roofs(found), _bars(found.steps)]


def _roofs(found: Roofline) -> str:
    intensities = [one.operations / one.moved_bytes for one in found.steps]
    kinds = arithmetic(found)
    slowest, best = found.memory[-1], kinds[0]
    ridge = best.rate / slowest.rate
    x = axis("operations a byte", [min(intensities) / 2, max(*intensities, ridge) * 2], lambda v: f"{v:g}", log=True)
    rates = [one.operations / one.seconds for one in found.steps]
    y = axis("Gop/s", [min(rates) / 2 / 1e9, best.rate / 1e9], lambda v: f"{v:g}", log=True)
    plot = Plot(x, y, "Roofline")
    for at, roof in enumerate(found.memory):
        points = [(x.low, x.low * roof.rate / 1e9), (best.rate / roof.rate, best.rate / 1e9)]
        plot.line(_within(points, y.low), f"c{(5, 7, 4, 6)[at % 4]}", f"{roof.name}, {roof.rate / 1e9:.3g} GB/s")
    for at, roof in enumerate(kinds):
        colour = "c5" if at else "c3"
        plot.line([(roof.rate / slowest.rate, roof.rate / 1e9), (x.high, roof.rate / 1e9)], colour,
                  f"{roof.name}, {roof.rate / 1e9:,.0f} Gop/s")  # fmt: skip
    for one, intensity, attained in zip(found.steps, intensities, rates, strict=True):
        colour = "c0" if one.phase == "prefill" else "c2"
        plot.scatter([(intensity, attained / 1e9)], colour, one.phase, size=5.0)
        plot.text(intensity, attained / 1e9, one.name)
    return page.figure(
        "Roofline of both phases", str(plot),
        "A step under the slope is held by memory, one under the flat part by arithmetic. All measured; both axes are "
        "logarithmic.",
    )  # fmt: skip


def _within(points: Sequence[tuple[float, float]], low: float) -> list[tuple[float, float]]:
    """A slope through two points, from where it is above `low` on."""
    (x0, y0), (x1, y1) = points
    return [(x0, y0) if y0 >= low else (x0 * low / y0, low), (x1, y1)]


def _bars(steps: Sequence[Step]) -> str:
    names = list(dict.fromkeys(part.name for step in steps for part in step.parts))
    colours = {name: f"c{at % 8}" for at, name in enumerate(names)}
    bars = []
    for step in steps:
        whole = sum(part.seconds for part in step.parts) or 1.0
        bars.append(
            (f"{step.name}: {ms(step.seconds)}",
             [(colours[part.name], part.seconds / whole, f"{part.name}: {ms(part.seconds)}, held by {part.bound}")
              for part in step.parts])
        )  # fmt: skip
    return page.figure(
        "Where a step's time goes", stack(bars) + legend([(colours[name], name) for name in names]),
        "Products with weights are timed alone, the rest within the step. Measured.",
    )  # fmt: skip
