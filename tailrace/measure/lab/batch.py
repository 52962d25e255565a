"""One request at a time, four, eight: what a batch gives all, and what it takes from each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tailrace.measure import metrics
from tailrace.measure.lab.experiment import Belief, Finding, Lesson, Mark, Needs, Table, Verdict, judge
from tailrace.measure.lab.stand import Served, Stand, alone, defined, done, drive
from tailrace.measure.lab.values import Mean, mean, slope
from tailrace.measure.load import Run
from tailrace.measure.record import Record
from tailrace.measure.report import page
from tailrace.measure.report.plots import count
from tailrace.measure.report.svg import Plot, axis
from tailrace.measure.report.words import ms, rate
from tailrace.terms import TailraceError

BATCHES = (1, 4, 8)
SIZES = ((128, 64), (64, 32), (32, 16))
"""Tokens in and out, the longest that fits the budget."""
LEAST = 0.02
"""Share of a step below which nothing of it counts as shared."""
NEARLY = 0.75
"""Share of the ideal throughput that counts as nearly free."""


class Batch(msgspec.Struct, frozen=True):
    """`size` requests at a time. `throughput`: output tokens a second of a wave, from its start to its end. Times in
    seconds; `step` is that of a token while all of a wave's requests are writing, so that no prompt is computed."""

    size: int
    throughput: Mean
    step: Mean
    tpot: Mean
    ttft: Mean
    requests: int


class Batches(msgspec.Struct, frozen=True):
    """All sizes, for requests of `tokens_in` and `tokens_out`."""

    tokens_in: int
    tokens_out: int
    batches: list[Batch]
    notes: list[str]


class Experiment:
    """See `experiment.Experiment`."""

    name = "batch"
    question = "What do requests gain from being computed together, and what do their users lose?"
    does = "Waves of 1, 4 and 8 equal requests at once, in turn."
    needs: Needs = "server"
    ours = ""

    async def run(self, stand: Stand) -> Batches:
        """Waves of each size in turn; a wave begins when the one before has ended."""
        async with stand.server() as served:
            size = sized(served, stand)
            runs: dict[int, list[Run]] = {batch: [] for batch in BATCHES}
            await _wave(served, "first", BATCHES[-1], SIZES[-1])  # warm-up
            for number in stand.rounds(most=10):
                for batch in BATCHES:
                    stand.say(f"wave {number + 1}, {batch} at once")
                    runs[batch].append(await _wave(served, str(number), batch, size))
            return Batches(*size, [folded(batch, found) for batch, found in runs.items()], list(served.notes))

    def teach(self, found: Batches) -> Lesson:
        """Throughput, the time of a token, and what of a step is shared."""
        first = found.batches[0]
        rows = [
            [str(one.size), one.throughput.shown(rate), f"{one.throughput.value / first.throughput.value:.2f} x",
             one.step.shown(ms), one.tpot.shown(ms), one.ttft.shown(ms), f"{one.throughput.n}"]
            for one in found.batches
        ]  # fmt: skip
        heads = ("at once", "output tokens/s", "of one", "step", "TPOT", "TTFT", "waves")
        return Lesson(
            did=f"{found.tokens_in} tokens in and {found.tokens_out} out each; {first.throughput.n} waves of each "
            "size, in turn, the prompts all different.",
            tables=[Table(heads, rows)], findings=_findings(found), beliefs=_beliefs(found), figures=_figures(found),
            notes=[
                "Means of waves (throughput, step) and of requests, with intervals of 95 %. A step is the time of a "
                "token "
                "while all of a wave are writing; TPOT has the wait for others' prompts in it, too.", *found.notes,
            ],
        )  # fmt: skip


async def _wave(served: Served, name: str, batch: int, size: tuple[int, int]) -> Run:
    return await drive(
        served, [alone(place, f"batch/{name}/{batch}", *size) for place in range(batch)], concurrency=batch
    )


def sized(served: Served, stand: Stand) -> tuple[int, int]:
    """Tokens of a request; a batch is taken to be half as slow as its requests one by one."""
    for size in SIZES:
        seconds = served.pace.seconds(*size) * sum(BATCHES) / 2
        if 4 * seconds <= stand.budget:
            break
    return size


def folded(batch: int, runs: Sequence[Run]) -> Batch:
    """Waves of one size."""
    records = [done(run) for run in runs]
    flat = [record for wave in records for record in wave]
    spans = [
        sum(record.output_tokens or len(record.chunks) for record in wave)
        / (max(record.chunks[-1] for record in wave) - min(record.sent or 0.0 for record in wave))
        for wave in records
    ]
    throughput, tpot = mean(spans), mean(defined(map(metrics.tpot, flat)))
    ttft, step = mean(defined(map(metrics.ttft, flat))), mean(defined(map(step_of, records)))
    if throughput is None or tpot is None or ttft is None:
        raise TailraceError(
            "the server counts no tokens, or sends them in one piece: there is no time of a token to compare"
        )
    return Batch(batch, throughput, step or tpot, tpot, ttft, len(flat))


def step_of(wave: Sequence[Record]) -> float | None:
    """Seconds of a token while all of the wave are writing; None where they never were."""
    begin = max(record.chunks[0] for record in wave)
    end = min(record.chunks[-1] for record in wave)
    taken = []
    for record in wave:
        inside = [at for at in record.chunks if begin <= at <= end]
        if len(inside) > 1:
            tokens = (len(inside) - 1) * (record.output_tokens or len(record.chunks)) / len(record.chunks)
            taken.append((inside[-1] - inside[0]) / tokens)
    return sum(taken) / len(taken) if taken else None


def _gain(found: Batches) -> tuple[Batch, float, float, float]:
    """The largest batch, its throughput over that of one, and the ratio's interval (taken as if ends met)."""
    one, most = found.batches[0].throughput, found.batches[-1]
    many = most.throughput
    return most, many.value / one.value, many.low / one.high, many.high / one.low


def _findings(found: Batches) -> list[Finding]:
    most, gain, low, high = _gain(found)
    first = found.batches[0]
    made = [
        Finding(
            f"{most.size} at once gave {rate(most.throughput.value)} output tokens a second, {gain:.2f} times (at "
            f"least {low:.2f}, at most {high:.2f}) what one alone gets, {rate(first.throughput.value)}."
        ),
        Finding(
            f"While all {most.size} were writing, each got a token every {ms(most.step.value)} instead of "
            f"{ms(first.step.value)}: {most.step.value / first.step.value:.2f} times as long."
        ),
    ]
    start, rise = slope([(one.size, one.step.value) for one in found.batches])
    whole = start + rise
    if start <= LEAST * whole:
        made.append(
            Finding(
                f"A line through the steps' times says that no part of a step is shared: each request more costs "
                f"{ms(abs(rise))}. Steps are held by arithmetic here, or by other programs on this machine."
            )
        )
        return made
    made.append(
        Finding(
            f"A straight line through the times of a token says: {ms(start)} of a step is there for all, "
            f"however many they are, and {ms(max(rise, 0.0))} is added by each request. Of a step with one request "
            f"{start / whole:.0%} is shared."
            + (f" The shared part is half of a step at {start / rise:.1f} requests." if rise > 0 else ""),
            Mark.PREDICTED,
        )
    )
    return made


def _beliefs(found: Batches) -> list[Belief]:
    most, gain, low, high = _gain(found)
    bar = NEARLY * most.size
    verdict = judge(low, high, bar)
    one = found.batches[0].step
    slower = most.step.value / one.value
    apart = most.step.low > one.high or most.step.high < one.low
    return [
        Belief(
            f"Batching is nearly free: {most.size} requests at once give nearly {most.size} times the tokens.", verdict,
            f"They gave {gain:.2f} times; nearly is taken to begin at {bar:g}.",
        ),
        Belief(
            "More throughput makes each user wait longer for a token.",
            Verdict.OPEN if not apart else Verdict.HOLDS if slower > 1 else Verdict.FAILS,
            f"A step of {most.size} took {slower:.2f} times as long as one of a single request"
            + ("." if apart else ", and the intervals overlap."),
        ),
    ]  # fmt: skip


def _figures(found: Batches) -> list[str]:
    sizes = [float(one.size) for one in found.batches]
    x = axis("requests at once", sizes, count)
    first = found.batches[0].throughput.value
    tokens = [one.throughput for one in found.batches]
    ideal = [(size, size * first) for size in sizes]
    plot = Plot(x, axis("output tokens/s", [*(one.high for one in tokens), ideal[-1][1]], count), "Throughput")
    plot.line(ideal, "c5", "if batching were free (predicted)")
    plot.band(_edge(sizes, tokens, "low"), _edge(sizes, tokens, "high"), "c1")
    plot.line([*zip(sizes, (one.value for one in tokens), strict=True)], "c1", "measured", dots=True)
    times = [one.step for one in found.batches]
    slow = Plot(x, axis("time of a token", [one.high for one in times], ms), "Time of a token")
    slow.band(_edge(sizes, times, "low"), _edge(sizes, times, "high"), "c2")
    slow.line([*zip(sizes, (one.value for one in times), strict=True)], "c2", "measured", dots=True)
    return [
        page.figure("What all get", str(plot), "Tokens a second of all requests together."),
        page.figure(
            "What each one waits", str(slow), "Time from one token to the next, for one user, while all are writing."
        ),
    ]


def _edge(sizes: Sequence[float], values: Sequence[Mean], side: str) -> list[tuple[float, float]]:
    return [(size, getattr(value, side)) for size, value in zip(sizes, values, strict=True)]
