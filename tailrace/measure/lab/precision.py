"""The same model with its weights in fewer or more bits: memory, speed, quality."""

from __future__ import annotations

from tailrace.measure import statistics
from tailrace.measure.lab.experiment import Belief, Finding, Lesson, Needs, Table, judge
from tailrace.measure.lab.inside import Precision, Precisions, Speed
from tailrace.measure.lab.stand import Stand
from tailrace.measure.report import page
from tailrace.measure.report.svg import Plot, axis, lengths
from tailrace.measure.report.words import ms, rate, size
from tailrace.terms import TailraceError


class Experiment:
    """See `experiment.Experiment`."""

    name = "precision"
    question = "What do fewer bits for the weights save, and what do they cost in quality?"
    does = "The model as it is stored, in bf16, int8 and int4: bytes, timed steps in turn, and quality on real text."
    needs: Needs = "local"
    ours = ""

    async def run(self, stand: Stand) -> Precisions:
        """In this process, on the backend that would serve: the same steps with each, right after each other."""
        if stand.inside is None:
            raise TailraceError(f"the files of {stand.model} are not here")
        return stand.inside.precisions(stand.budget, stand.say)

    def teach(self, found: Precisions) -> Lesson:
        """Everything against the weights as they are stored."""
        base = found.kept[0]
        rows = [
            [one.name, size(one.weight_bytes), f"{one.bits:.2f}", f"{one.quality.perplexity:.2f}",
             *([""] * 3 if one is base else _quality(one))]
            for one in found.kept
        ]  # fmt: skip
        heads = ("weights", "bytes", "bits a weight", "perplexity", "change", "mean KL", "same choice")
        speeds = [
            [_step(step), *(_speed(one, at) for one in found.kept)] for at, step in enumerate(base.speeds)
        ]  # fmt: skip
        origins = "; ".join(f"{one.name}: {one.origin}" for one in found.kept)
        return Lesson(
            did=f"{len(found.kept)} kinds of weights on {found.threads} threads ({found.kernels} kernels); quality on "
            f"{base.quality.tokens:,} tokens of {found.text}; {base.speeds[0].pairs} pairs of each timed step.",
            tables=[Table(heads, rows), Table(("step", *(one.name for one in found.kept)), speeds)],
            findings=_findings(found), beliefs=_beliefs(found), figures=_figures(found),
            notes=[
                f"Where the weights come from. {origins}.",
                "Times are medians; in brackets the time beside that of the stored weights, median of pairs and "
                "quartiles. KL is the divergence of the next token's distribution from that of the stored weights, "
                "in nats.",
                *(f"{name} is not in it: {why}." for name, why in found.missing.items()),
            ],
        )  # fmt: skip


def _quality(one: Precision) -> list[str]:
    quality = one.quality
    low, high = quality.change_interval
    least, most = quality.kl_interval
    few, many = statistics.share(round(quality.same_choice * quality.tokens), quality.tokens)
    return [
        f"{quality.change:+.1%} ({low:+.1%} to {high:+.1%})",
        f"{quality.mean_kl:.4f} ({least:.4f} to {most:.4f})",
        f"{quality.same_choice:.1%} ({few:.1%} to {many:.1%})",
    ]


def _step(one: Speed) -> str:
    if one.phase == "prefill":
        return f"prefill, {one.tokens:,} tokens" + (f" behind {one.context:,}" if one.context else "")
    users = "1 sequence" if one.sequences == 1 else f"{one.sequences} sequences"
    return f"decode, {users} of {one.context:,} tokens"


def _speed(one: Precision, at: int) -> str:
    step = one.speeds[at]
    shown = f"{ms(step.seconds)}, {rate(step.tokens / step.seconds)} tokens/s"
    return shown if step.ratio == step.low == step.high == 1.0 else (
        f"{shown} ({step.ratio:.2f} x, {step.low:.2f} to {step.high:.2f})"
    )  # fmt: skip


def alone(one: Precision, phase: str) -> Speed | None:
    """Its first step of one sequence in that phase."""
    return next((step for step in one.speeds if step.phase == phase and step.sequences == 1), None)


def _findings(found: Precisions) -> list[Finding]:
    base, others = found.kept[0], found.kept[1:]
    made = []
    for one in others:
        words = [f"{one.name}: {one.weight_bytes / base.weight_bytes:.2f} times the bytes of the stored weights"]
        for phase in ("decode", "prefill"):
            step = alone(one, phase)
            if step is not None:
                sure = "" if step.low > 1 or step.high < 1 else ", not surely different"
                words.append(f"{phase} of one sequence takes {step.ratio:.2f} times as long{sure}")
        words.append(
            f"perplexity {one.quality.change:+.1%}, and {one.quality.same_choice:.1%} of the next tokens are the same"
        )
        made.append(Finding("; ".join(words) + "."))
        moved = alone(one, "decode")
        if moved is not None:
            made.append(Finding(_why(one, base, moved)))
    if not others:
        made.append(Finding("There is no second kind of weights to hold against those that are stored."))
    return made


def _why(one: Precision, base: Precision, step: Speed) -> str:
    """Whether the time of decode follows the bytes."""
    ratio = one.weight_bytes / base.weight_bytes
    followed = abs(step.ratio - ratio) <= 0.15 * max(ratio, step.ratio)
    if followed:
        return (
            f"With {one.name}, decode follows the bytes ({ratio:.2f} times the bytes, {step.ratio:.2f} times the "
            "time), as it does where a step waits for nothing but all weights to be read once."
        )
    return (
        f"Decode does not follow the bytes ({ratio:.2f} times the bytes, {step.ratio:.2f} times the time): with "
        f"{one.name} it is not reading the weights alone that a step of one sequence waits for; unpacking, "
        "arithmetic and what is the same for all kinds may have their part."
    )


def _beliefs(found: Precisions) -> list[Belief]:
    if len(found.kept) < 2:
        return []
    small, large = min(found.kept, key=_bytes), max(found.kept, key=_bytes)
    made = []
    quick, slow = alone(small, "decode"), alone(large, "decode")
    if quick is not None and slow is not None and small is not large:
        low, high = slow.low / quick.high, slow.high / quick.low
        made.append(
            Belief(
                "Fewer bits make decode quicker.", judge(low, high, 1.0),
                f"{large.name} took {slow.ratio / quick.ratio:.2f} times as long as {small.name} (quartiles "
                f"{low:.2f} to {high:.2f}), with {large.weight_bytes / small.weight_bytes:.2f} times the bytes.",
            )
        )  # fmt: skip
    worst = max(found.kept[1:], key=_divergence)
    lost = worst.quality
    low, high = lost.change_interval
    made.append(
        Belief(
            "Rounding weights costs quality.",
            judge(low, high, 0.0),
            f"The largest divergence is that of {worst.name}: perplexity {lost.change:+.1%} ({low:+.1%} to "
            f"{high:+.1%}). All is against the stored weights, so what was lost before is not seen.",
        )
    )
    return made


def _bytes(one: Precision) -> int:
    return one.weight_bytes


def _divergence(one: Precision) -> float:
    return one.quality.mean_kl


def _figures(found: Precisions) -> list[str]:
    most = max(one.weight_bytes for one in found.kept)
    bars = [
        (one.name, one.weight_bytes / most, size(one.weight_bytes), f"c{at}") for at, one in enumerate(found.kept)
    ]  # fmt: skip
    made = [page.figure("Bytes of the weights", lengths(bars), "As they are computed with. Exact, not measured.")]
    points = [(one.name, step, at) for at, one in enumerate(found.kept) if (step := alone(one, "decode")) is not None]
    if points:
        speeds = [step.tokens / step.seconds for _, step, _ in points]
        quality = [found.kept[at].quality.perplexity for _, _, at in points]
        plot = Plot(
            axis("decode, tokens/s of one sequence", speeds, lambda v: f"{v:g}"),
            axis("perplexity", [*quality, min(quality) * 0.98, max(quality) * 1.02], lambda v: f"{v:.4g}", zero=False),
            "Speed and quality",
        )
        for (name, _, at), x, y in zip(points, speeds, quality, strict=True):
            plot.scatter([(x, y)], f"c{at}", name, size=5.0)
        made.append(page.figure("Speed and quality", str(plot), "Right is quicker, down is better. Measured."))
    return made
