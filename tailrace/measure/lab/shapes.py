"""Short and long, in and out: where a request's time goes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tailrace.measure import metrics
from tailrace.measure.lab.experiment import Belief, Finding, Lesson, Mark, Needs, Table, Verdict, judge
from tailrace.measure.lab.stand import Served, Stand, alone, by, defined, done, drive
from tailrace.measure.lab.values import Mean, mean
from tailrace.measure.record import Record
from tailrace.measure.report import page
from tailrace.measure.report.plots import share
from tailrace.measure.report.svg import legend, stack
from tailrace.measure.report.words import ms, rate

LONGEST = ((2048, 256), (1024, 128), (512, 64), (256, 32), (128, 16))
"""Tokens in and out that are long, the longest first: the first that fits the context and the budget is taken."""
SHORTER = 16, 8
"""What is short is so many times shorter."""
NAMES = {
    "A": "short in, short out",
    "B": "long in, short out (RAG)",
    "C": "short in, long out (generation)",
    "D": "long in, long out",
}
TIMELINE, CLIENT = "the server's own timeline", "the client's TTFT and E2E"


class Shape(msgspec.Struct, frozen=True):
    """One shape's requests. Seconds; shares are of the whole request. `prefill_rate`: tokens of the prompt that were
    not cached, a second."""

    letter: str
    tokens_in: int
    tokens_out: int
    e2e: Mean
    ttft: Mean
    tpot: Mean | None
    prefill: Mean
    decode: Mean
    prefill_rate: Mean | None


class Shapes(msgspec.Struct, frozen=True):
    """All of them. `source`: where shares come from."""

    shapes: list[Shape]
    source: str
    notes: list[str]


class Experiment:
    """See `experiment.Experiment`."""

    name = "shapes"
    question = "The same model on the same machine: why does one request take so much longer than another?"
    does = "Requests of four shapes, one at a time in turn: short and long prompts, short and long answers."
    needs: Needs = "server"
    ours = ""

    async def run(self, stand: Stand) -> Shapes:
        """Measures the four shapes in turn, so that a machine's mood falls on all alike."""
        async with stand.server() as served:
            sizes = sized(served, stand)
            records: list[Record] = []
            for number in stand.rounds():
                for letter, size in sizes.items():
                    stand.say(f"round {number + 1}, shape {letter}")
                    records += done(await drive(served, [alone(number, f"shapes/{letter}", *size)], concurrency=1))
            return found(records, sizes, served.notes)

    def teach(self, found: Shapes) -> Lesson:
        """Shares of prefill and decode, and what a token in and a token out take."""
        sizes = ", ".join(f"{one.letter} {one.tokens_in:,}/{one.tokens_out:,}" for one in found.shapes)
        rows = [
            [f"{one.letter}: {NAMES[one.letter].partition(' (')[0]}", f"{one.tokens_in:,} / {one.tokens_out:,}",
             one.e2e.shown(ms), one.ttft.shown(ms), one.tpot.shown(ms) if one.tpot else "not defined",
             one.prefill.shown(share), one.decode.shown(share), str(one.e2e.n)]
            for one in found.shapes
        ]  # fmt: skip
        return Lesson(
            did=f"Tokens in/out: {sizes}; {found.shapes[0].e2e.n} requests of each, one at a time, in turn.",
            tables=[Table(("shape", "in / out", "E2E", "TTFT", "TPOT", "prefill", "decode", "n"), rows)],
            findings=[*_findings(found)],
            beliefs=[*_beliefs(found)],
            figures=[_figure(found)],
            notes=[f"Shares are from {found.source}. Means, with their intervals of 95 % in brackets.", *found.notes],
        )


def sized(served: Served, stand: Stand) -> dict[str, tuple[int, int]]:
    """Tokens in and out of each shape."""
    for long_in, long_out in LONGEST:
        short_in, short_out = max(16, long_in // SHORTER[0]), max(4, long_out // SHORTER[1])
        sizes = {
            "A": (short_in, short_out), "B": (long_in, short_out), "C": (short_in, long_out), "D": (long_in, long_out)
        }  # fmt: skip
        seconds = sum(served.pace.seconds(*size) for size in sizes.values())
        fits = long_in + long_out <= served.context * 0.9 and 3 * seconds <= stand.budget
        if fits or (long_in, long_out) == LONGEST[-1]:
            break
    return sizes


def found(records: Sequence[Record], sizes: dict[str, tuple[int, int]], notes: Sequence[str]) -> Shapes:
    """Folds the records, each of the shape that was asked for."""
    timeline = all(record.phases for record in records)
    letters = {size: letter for letter, size in sizes.items()}
    groups = by(records, lambda record: letters[record.wanted_input, record.wanted_output])
    return Shapes(
        [_shape(letter, group, timeline=timeline) for letter, group in groups],
        TIMELINE if timeline else CLIENT, list(notes),
    )  # fmt: skip


def _shape(letter: str, records: Sequence[Record], *, timeline: bool) -> Shape:
    shares = [_shares(record, timeline=timeline) for record in records]
    rates = [
        (record.input_tokens - (record.cached_tokens or 0)) / spent
        for record in records
        if record.input_tokens and (spent := record.phases.get("prefill", metrics.ttft(record) or 0.0))
    ]
    means = [mean(defined(map(metric, records))) for metric in (metrics.e2e, metrics.ttft)]
    prefill, decode = (mean([pair[side] for pair in shares]) for side in (0, 1))
    assert means[0] is not None
    assert means[1] is not None
    assert prefill is not None
    assert decode is not None
    return Shape(
        letter=letter, tokens_in=round(sum(r.input_tokens or r.wanted_input for r in records) / len(records)),
        tokens_out=round(sum(r.output_tokens or r.wanted_output for r in records) / len(records)),
        e2e=means[0], ttft=means[1], tpot=mean(defined(map(metrics.tpot, records))), prefill=prefill, decode=decode,
        prefill_rate=mean(rates),
    )  # fmt: skip


def _shares(record: Record, *, timeline: bool) -> tuple[float, float]:
    """Of prefill and of decode. At the client, all until the first token is taken for prefill."""
    if timeline:
        whole = sum(record.phases.values()) or 1.0
        return record.phases.get("prefill", 0.0) / whole, record.phases.get("decode", 0.0) / whole
    whole = metrics.e2e(record) or 1.0
    first = (metrics.ttft(record) or 0.0) / whole
    return first, 1 - first


def _findings(found: Shapes) -> list[Finding]:
    slow, quick = (choose(found.shapes, key=_seconds) for choose in (max, min))
    made = [
        Finding(
            f"The same model on the same machine: {quick.letter} took {ms(quick.e2e.value)}, {slow.letter} "
            f"{ms(slow.e2e.value)}, {slow.e2e.value / quick.e2e.value:.1f} times as long. The shape of a request, how "
            "many tokens go in and come out, decides."
        )
    ]
    long_in, long_out = _of(found, "B"), _of(found, "C")
    if long_in.prefill_rate is None or long_out.tpot is None:
        return made
    ratio = long_out.tpot.value * long_in.prefill_rate.value
    made.append(
        Finding(
            f"A prompt was read at {rate(long_in.prefill_rate.value)} tokens a second (B), an answer written at "
            f"{rate(1 / long_out.tpot.value)} (C): a token out took as long as {ratio:.1f} tokens in, since a prompt's "
            "tokens are computed together and an answer's one after the other."
        )
    )
    made.append(
        Finding(
            f"So decode takes more of a request than prefill as soon as the answer has more than {1 / ratio:.1%} as "
            f"many tokens as the prompt: for {long_in.tokens_in:,} tokens in, from about "
            f"{long_in.tokens_in / ratio:,.0f} out on.",
            Mark.PREDICTED,
        )
    )
    return made


def _seconds(one: Shape) -> float:
    return one.e2e.value


def _of(found: Shapes, letter: str) -> Shape:
    return next(one for one in found.shapes if one.letter == letter)


def _beliefs(found: Shapes) -> list[Belief]:
    made = []
    for says, letter, phase in (
        ("RAG (long in, short out) spends its time in prefill.", "B", "prefill"),
        ("Generation (short in, long out) spends its time in decode.", "C", "decode"),
    ):
        value: Mean = getattr(_of(found, letter), phase)
        verdict = judge(value.low, value.high, 0.5)
        made.append(Belief(says, verdict, f"{phase} was {value.shown(share)} of {letter}; the bar is half."))
    both = _of(found, "D")
    larger = "decode" if both.decode.value > both.prefill.value else "prefill"
    value = getattr(both, larger)
    verdict = Verdict.OPEN if value.low <= 0.5 else Verdict.HOLDS if larger == "decode" else Verdict.FAILS
    made.append(
        Belief(
            "Where both are long, decode dominates.",
            verdict,
            f"{larger} was {value.shown(share)} of D, which has "
            f"{both.tokens_in:,} tokens in and {both.tokens_out:,} out.",
        )
    )
    return made


def _figure(found: Shapes) -> str:
    bars = []
    for one in found.shapes:
        rest = max(0.0, 1 - one.prefill.value - one.decode.value)
        parts = [("c0", one.prefill.value, "prefill"), ("c2", one.decode.value, "decode"), ("c5", rest, "all else")]
        bars.append(
            (
                f"{one.letter}: {NAMES[one.letter]}, {one.tokens_in:,}/{one.tokens_out:,} tokens: {ms(one.e2e.value)}",
                [(colour, part, f"{name}: {part:.1%}") for colour, part, name in parts],
            )
        )
    names = [("c0", "prefill: reading the prompt"), ("c2", "decode: writing the answer"), ("c5", "all else")]
    return page.figure(
        "Prefill and decode by shape", stack(bars) + legend(names),
        f"The mean request's shares, from {found.source} (measured). Bars are of one length; the times are beside "
        "them.",
    )  # fmt: skip
