"""An agent's loop: step k carries steps 1 to k-1. How long each takes, and what the loop costs against one call."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tailrace.ledger.price import Api, sourced
from tailrace.measure import metrics
from tailrace.measure.lab import caching
from tailrace.measure.lab.experiment import Belief, Finding, Lesson, Mark, Needs, Table, Verdict, judge
from tailrace.measure.lab.stand import Served, Stand, by, defined, done, drive
from tailrace.measure.lab.values import Mean, mean
from tailrace.measure.record import Record
from tailrace.measure.report import page
from tailrace.measure.report.plots import count
from tailrace.measure.report.svg import Plot, axis
from tailrace.measure.report.words import ms
from tailrace.terms import TailraceError
from tailrace.workload.session import Piece, Session, Turn

STEPS = 5
SIZES = ((512, 192, 48), (256, 96, 24), (128, 48, 12), (64, 24, 6))
"""Tokens of the task, of each tool's result, and of each answer: the first that fits context and budget."""
TALK = (10.0, 14.0)
"""What counts as the twelve times of the belief."""


class Step(msgspec.Struct, frozen=True):
    """One step. Tokens as the server counted them (means); seconds from sent to last token, with and without the
    cache. `cached`: of the input, with it."""

    step: int
    tokens_in: int
    tokens_out: int
    cached: int | None
    on: Mean
    off: Mean


class Bill(msgspec.Struct, frozen=True):
    """Dollars at an API's prices: of the loop, of the loop where what was cached is billed so, of its first step
    alone, and of one call that has all of its content once."""

    api: str
    source: str
    loop: float
    loop_cached: float | None
    first: float
    once: float


class Agent(msgspec.Struct, frozen=True):
    """All of it. `once_in`, `once_out`: tokens of the one call with the same content, and how long it took."""

    steps: list[Step]
    once_in: int
    once_out: int
    once: Mean
    bills: list[Bill]
    how: str
    rounds: int
    notes: list[str]


class Experiment:
    """See `experiment.Experiment`."""

    name = "agent"
    question = "What does an agent's loop cost, in time and money, against one call?"
    does = (
        f"A transcript that grows over {STEPS} steps, with the prefix cache and without; and one call with all of it."
    )
    needs: Needs = "server"
    ours = ""

    async def run(self, stand: Stand) -> Agent:
        """The same loop with the cache, without it, and at once, in turn; each round has a task of its own."""
        async with caching.both(stand) as both:
            size = sized(both.on, stand)
            on: list[Record] = []
            off: list[Record] = []
            once: list[Record] = []
            for number in stand.rounds(most=10):
                stand.say(f"round {number + 1}")
                session = loop(number, *size)
                plain = caching.unknown(session) if both.marked else session
                on += done(await drive(both.on, [session], concurrency=1))
                off += done(await drive(both.off, [plain], concurrency=1))
                once += done(await drive(both.on, [at_once(number, *size)], concurrency=1))
            return found(on, off, once, stand.prices, both.how, both.on.notes)

    def teach(self, found: Agent) -> Lesson:
        """Seconds of each step, and the arithmetic of the bill."""
        cached = [one.cached for one in found.steps]
        rows = [
            [str(one.step), f"{one.tokens_in:,}", "not told" if one.cached is None else f"{one.cached:,}",
             f"{one.tokens_out:,}", one.on.shown(ms), one.off.shown(ms)]
            for one in found.steps
        ]  # fmt: skip
        rows.append(
            ["all", f"{total_in(found):,}", "" if None in cached else f"{sum(filter(None, cached)):,}",
             f"{total_out(found):,}", ms(sum(one.on.value for one in found.steps)),
             ms(sum(one.off.value for one in found.steps))]
        )  # fmt: skip
        rows.append(["one call with it all", f"{found.once_in:,}", "", f"{found.once_out:,}",
                     found.once.shown(ms), ""])  # fmt: skip
        heads = ("step", "tokens in", "of these cached", "tokens out", "E2E with the cache", "E2E without")
        return Lesson(
            did=f"{len(found.steps)} steps, from {found.steps[0].tokens_in:,} tokens in to "
            f"{found.steps[-1].tokens_in:,}, {found.rounds} times with a task of its own each, one request at a time.",
            tables=[Table(heads, rows), _bills(found)], findings=_findings(found), beliefs=_beliefs(found),
            figures=_figures(found),
            notes=[f"Without the cache: {found.how}. Means with intervals of 95 %. Tools take no time here.",
                   *found.notes],
        )  # fmt: skip


def sized(served: Served, stand: Stand) -> tuple[int, int, int]:
    """Tokens of the task, of each tool's result and of each answer."""
    for size in SIZES:
        task, tool, answer = size
        grown = sum(task + step * (tool + answer) for step in range(STEPS))
        last = task + (STEPS - 1) * (tool + answer) + answer
        out = STEPS * answer
        seconds = served.pace.seconds(grown + 2 * last, 3 * out)
        if last + out <= served.context * 0.9 and 3 * seconds <= stand.budget * 1.2:
            break
    return size


def loop(number: int, task: int, tool: int, answer: int) -> Session:
    """The session of an agent whose every step is asked with all that came before."""
    pieces: tuple[Piece, ...] = (Piece(f"agent/{number}", task),)
    turns = []
    for step in range(STEPS):
        turns.append(Turn(pieces, answer, (step - 1,) if step else ()))
        said = Piece(f"agent/{number}/{step}/answer", answer, "assistant", answer_of=step)
        pieces = (*pieces, said, Piece(f"agent/{number}/{step}/tool", tool))
    return Session(number, tuple(turns))


def at_once(number: int, task: int, tool: int, answer: int) -> Session:
    """One call that reads the task and all results of tools once, and writes as much as all steps."""
    pieces = [Piece(f"once/{number}", task)]
    pieces += [Piece(f"once/{number}/{step}/tool", tool) for step in range(STEPS - 1)]
    return Session(number, (Turn(tuple(pieces), STEPS * answer),))


def found(
    on: Sequence[Record], off: Sequence[Record], once: Sequence[Record], prices: dict[str, Api], how: str,
    notes: Sequence[str],
) -> Agent:  # fmt: skip
    """Folds the records of all rounds."""
    without = dict(by(off, lambda record: record.turn))
    steps = [_step(turn, group, without[turn]) for turn, group in by(on, lambda record: record.turn)]
    whole = mean(defined(map(metrics.e2e, once)))
    assert whole is not None
    once_in, once_out = _counted(once)
    bills = [bill(name, api, steps, once_in, once_out) for name, api in prices.items()]
    return Agent(steps, once_in, once_out, whole, bills, how, len(once), list(notes))


def _step(turn: int, on: Sequence[Record], off: Sequence[Record]) -> Step:
    tokens_in, tokens_out = _counted(on)
    times = [mean(defined(map(metrics.e2e, side))) for side in (on, off)]
    assert times[0] is not None
    assert times[1] is not None
    told = [record.cached_tokens for record in on if record.cached_tokens is not None]
    cached = round(sum(told) / len(told)) if len(told) == len(on) else None
    return Step(turn + 1, tokens_in, tokens_out, cached, times[0], times[1])


def _counted(records: Sequence[Record]) -> tuple[int, int]:
    if any(record.input_tokens is None or record.output_tokens is None for record in records):
        raise TailraceError("the server says no usage: without counted tokens there is no bill")
    n = len(records)
    return round(sum(r.input_tokens or 0 for r in records) / n), round(sum(r.output_tokens or 0 for r in records) / n)


def bill(name: str, api: Api, steps: Sequence[Step], once_in: int, once_out: int) -> Bill:
    """What an API would ask for the same tokens."""
    usd = api.usd
    told = api.usd_per_million_cached is not None and all(one.cached is not None for one in steps)
    return Bill(
        api=name, source=sourced(api.source, api.date),
        loop=sum(usd(one.tokens_in, 0, one.tokens_out) for one in steps),
        loop_cached=sum(usd(one.tokens_in, one.cached or 0, one.tokens_out) for one in steps) if told else None,
        first=usd(steps[0].tokens_in, 0, steps[0].tokens_out), once=usd(once_in, 0, once_out),
    )  # fmt: skip


def total_in(found: Agent) -> int:
    """Tokens that all steps send."""
    return sum(one.tokens_in for one in found.steps)


def total_out(found: Agent) -> int:
    """Tokens that all steps write."""
    return sum(one.tokens_out for one in found.steps)


def _bills(found: Agent) -> Table:
    def usd(value: float | None) -> str:
        return "not known" if value is None else f"${value * 1000:.3f}"

    rows = [
        [one.api, usd(one.loop), usd(one.loop_cached), usd(one.first), usd(one.once), f"{one.loop / one.first:.1f} x",
         f"{one.loop / one.once:.1f} x"]
        for one in found.bills
    ]  # fmt: skip
    heads = ("$ for a thousand, at the price of", "the loop", "cached part at its price", "first step alone",
             "all in one call", "loop / first step", "loop / one call")  # fmt: skip
    return Table(heads, rows, Mark.PREDICTED)


def _findings(found: Agent) -> list[Finding]:
    first, last = found.steps[0], found.steps[-1]
    sent, wrote = total_in(found), total_out(found)
    terms = " + ".join(f"{one.tokens_in:,}" for one in found.steps)
    made = [
        Finding(
            f"The loop sent {terms} = {sent:,} tokens, {sent / first.tokens_in:.1f} times those of its first "
            f"step, and {sent / found.once_in:.1f} times what there is to read once ({found.once_in:,}): every "
            "step sends again all that came before it."
        ),
        Finding(
            f"Its last step took {ms(last.on.value)} with the prefix cache and {ms(last.off.value)} without; its first "
            f"{ms(first.on.value)} and {ms(first.off.value)}."
        ),
    ]
    on, off = (sum(getattr(one, side).value for one in found.steps) for side in ("on", "off"))
    made.append(
        Finding(
            f"All {len(found.steps)} steps took {ms(on)} with the cache and {ms(off)} without it; one call that "
            f"reads the same once and writes as much ({found.once_out:,} tokens) took {ms(found.once.value)}."
        )
    )
    for one in found.bills[:1]:
        made.append(
            Finding(
                f"At the price of {one.api}, the loop ({sent:,} in, {wrote:,} out) comes to ${one.loop:.6f} and the "
                f"first step ({first.tokens_in:,} in, {first.tokens_out:,} out) to ${one.first:.6f}: "
                f"{one.loop / one.first:.1f} times."
                + (
                    f" With what was cached at its lower price it is {one.loop_cached / one.first:.1f} times."
                    if one.loop_cached is not None
                    else ""
                ),
                Mark.PREDICTED,
            )
        )
    made += [Finding(f"The prices of {one.api}: {one.source}.", Mark.ASSUMED) for one in found.bills]
    return made


def _beliefs(found: Agent) -> list[Belief]:
    made = []
    if found.bills:
        one = found.bills[0]
        ratio = one.loop / one.first
        made.append(
            Belief(
                "A five-step agent costs twelve times one call.",
                Verdict.HOLDS if TALK[0] <= ratio <= TALK[1] else Verdict.FAILS,
                f"{ratio:.1f} times its first call here. The number follows from the tokens alone: how long the task "
                "is beside what each step adds.",
            )
        )
    first, last = found.steps[0], found.steps[-1]
    for says, side in (
        ("Without a prefix cache, each step is slower than the one before.", "off"),
        ("With it, they stay about as quick as the first.", "on"),
    ):
        a: Mean = getattr(first, side)
        b: Mean = getattr(last, side)
        low, high = b.low / a.high, b.high / a.low
        verdict = judge(low, high, 1.0) if side == "off" else judge(low, high, 1.25, above=False)
        bar = "" if side == "off" else "; about begins to end at 1.25"
        made.append(
            Belief(
                says,
                verdict,
                f"The last took {b.value / a.value:.2f} times as long as the first ({low:.2f} to {high:.2f}){bar}.",
            )
        )
    return made


def _figures(found: Agent) -> list[str]:
    steps = [float(one.step) for one in found.steps]
    x = axis("step", steps, count, zero=False)
    times = [value for one in found.steps for value in (one.on.high, one.off.high)]
    plot = Plot(x, axis("E2E", times, ms), "Time of each step")
    for colour, name, side in (("c6", "without the cache", "off"), ("c2", "with the cache", "on")):
        values = [getattr(one, side) for one in found.steps]
        plot.band([(s, v.low) for s, v in zip(steps, values, strict=True)],
                  [(s, v.high) for s, v in zip(steps, values, strict=True)], colour)  # fmt: skip
        plot.line([(s, v.value) for s, v in zip(steps, values, strict=True)], colour, name, dots=True)
    tokens = Plot(x, axis("tokens in", [float(total_in(found))], count), "Tokens sent")
    sums = [float(sum(one.tokens_in for one in found.steps[: at + 1])) for at in range(len(steps))]
    tokens.line([*zip(steps, sums, strict=True)], "c1", "billed so far", dots=True)
    tokens.line(
        [(s, one.tokens_in) for s, one in zip(steps, found.steps, strict=True)], "c0", "of this step", dots=True
    )
    if all(one.cached is not None for one in found.steps):
        tokens.line([(s, one.cached or 0.0) for s, one in zip(steps, found.steps, strict=True)], "c2",
                    "of these cached", dots=True)  # fmt: skip
    return [
        page.figure("How long each step takes", str(plot), "From sent to the last token; bands are of 95 %. Measured."),
        page.figure(
            "What each step sends",
            str(tokens),
            "As the server counted. The bill is the sum of all steps.",
        ),
    ]
