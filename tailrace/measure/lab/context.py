"""Memory, the first token, throughput: against the length of the context, and against how many users there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tailrace.measure import metrics
from tailrace.measure.lab.experiment import Belief, Finding, Lesson, Mark, Needs, Table, judge
from tailrace.measure.lab.stand import Served, Stand, alone, by, defined, done, drive
from tailrace.measure.lab.values import Mean, exponent, mean, slope
from tailrace.measure.record import Record
from tailrace.measure.report import page
from tailrace.measure.report.plots import bytes_of, count
from tailrace.measure.report.svg import Plot, Point, axis
from tailrace.measure.report.words import ms, rate, size
from tailrace.terms import TailraceError

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
USERS = (1, 2, 4, 8)
OUT = 16
FEWEST = 3
"""Lengths and rounds, at least."""
HALF = 0.5
"""Share of the budget for each of the two sweeps."""


class Level(msgspec.Struct, frozen=True):
    """Requests with `tokens_in` tokens, `users` at a time. Seconds; `throughput` in output tokens a second, `reading`
    in prompt tokens a second; `rss` is the server's memory afterwards, of which `kv` bytes are predicted for keys and
    values, None where they are not known."""

    users: int
    tokens_in: int
    ttft: Mean
    tpot: Mean
    throughput: Mean
    reading: Mean
    rss: int | None
    kv: int | None


class Context(msgspec.Struct, frozen=True):
    """Both sweeps. `rss`: before them."""

    lengths: list[Level]
    users: list[Level]
    rss: int | None
    weight_bytes: int | None
    token_bytes: int | None
    notes: list[str]


class Experiment:
    """See `experiment.Experiment`."""

    name = "context"
    question = "What do longer prompts and more users cost in memory, in waiting and in throughput?"
    does = "Longer and longer prompts for one user, then 1, 2, 4 and 8 users at once with prompts of one length."
    needs: Needs = "server"
    ours = ""

    async def run(self, stand: Stand) -> Context:
        """Lengths in turn, round after round, so that a machine's mood falls on all; then users."""
        async with stand.server("--no-prefix-cache") as served:
            before = served.rss()
            lengths = sized(served, stand)
            records: list[Record] = []
            held: dict[int, int | None] = {}
            for number in stand.rounds(least=FEWEST, most=10, share=HALF):
                for tokens in lengths:
                    stand.say(f"round {number + 1}, {tokens:,} tokens")
                    run = await drive(served, [alone(number, f"context/{tokens}", tokens, OUT)], concurrency=1)
                    records += done(run)
                    held.setdefault(tokens, served.rss())
            per_token = stand.inside.kv_bytes_per_token if stand.inside is not None else None
            made = [
                level(1, [[record] for record in group], held[tokens], per_token)
                for tokens, group in by(records, lambda record: record.wanted_input)
            ]
            users = await _users(served, stand, lengths[len(lengths) // 2], per_token)
            weights = stand.inside.weight_bytes if stand.inside is not None else None
            return Context(made, users, before, weights, per_token, list(served.notes))

    def teach(self, found: Context) -> Lesson:
        """How each grows."""
        every = [*found.lengths, *found.users]
        rows = [
            [str(one.users), f"{one.tokens_in:,}", one.ttft.shown(ms), one.reading.shown(rate), one.tpot.shown(ms),
             one.throughput.shown(rate), "" if one.rss is None else size(one.rss),
             "" if one.kv is None else size(one.kv), str(one.throughput.n)]
            for one in every
        ]  # fmt: skip
        heads = ("users", "tokens in", "TTFT", "prompt tokens/s", "TPOT", "output tokens/s", "server's memory",
                 "KV (predicted)", "n")  # fmt: skip
        return Lesson(
            did=f"{len(found.lengths)} lengths with one user, then "
            f"{', '.join(str(one.users) for one in found.users)} users at once; {OUT} tokens out; prompts all "
            "different, without prefix cache on a server of our own.",
            tables=[Table(heads, rows)], findings=_findings(found), beliefs=_beliefs(found), figures=_figures(found),
            notes=[
                "Means with intervals of 95 %; n counts rounds. The server's memory is that of its processes after "
                "the first "
                "round of that level: it never shrinks.", *found.notes,
            ],
        )  # fmt: skip


def sized(served: Served, stand: Stand) -> list[int]:
    """Lengths that fit the context and half of the budget."""
    made: list[int] = []
    seconds = 0.0
    for tokens in LENGTHS:
        more = served.pace.seconds(tokens, OUT)
        full = FEWEST * (seconds + more) > stand.budget * HALF and len(made) >= FEWEST
        if tokens + OUT > served.context * 0.95 or full:
            break
        made.append(tokens)
        seconds += more
    if not made:
        raise TailraceError(f"a context of {served.context} tokens leaves no room for this experiment")
    return made


async def _users(served: Served, stand: Stand, tokens: int, per_token: int | None) -> list[Level]:
    waves: dict[int, list[list[Record]]] = {users: [] for users in USERS}
    held: dict[int, int | None] = {}
    for number in stand.rounds(least=2, most=10, share=HALF):
        for users in USERS:
            stand.say(f"round {number + 1}, {users} users")
            sessions = [alone(place, f"users/{number}/{users}", tokens, OUT) for place in range(users)]
            waves[users].append(done(await drive(served, sessions, concurrency=users)))
            held.setdefault(users, served.rss())
    return [level(users, waves[users], held[users], per_token) for users in USERS]


def level(users: int, waves: Sequence[Sequence[Record]], rss: int | None, per_token: int | None) -> Level:
    """Folds waves of one level, each of requests that were sent at once."""
    records = [record for wave in waves for record in wave]
    begun = [min(record.sent or 0.0 for record in wave) for wave in waves]
    out = [
        sum(record.output_tokens or len(record.chunks) for record in wave)
        / (max(record.chunks[-1] for record in wave) - begin)
        for wave, begin in zip(waves, begun, strict=True)
    ]
    read = [
        sum(record.input_tokens or record.wanted_input for record in wave)
        / (max(record.chunks[0] for record in wave) - begin)
        for wave, begin in zip(waves, begun, strict=True)
    ]
    ttft, tpot = (mean(defined(map(metric, records))) for metric in (metrics.ttft, metrics.tpot))
    throughput, reading = mean(out), mean(read)
    if ttft is None or tpot is None or throughput is None or reading is None:
        raise TailraceError(
            "the server counts no tokens, or sends them in one piece: there is no time of a token to compare"
        )
    tokens = round(sum(record.input_tokens or record.wanted_input for record in records) / len(records))
    kv = None if per_token is None else users * (tokens + OUT) * per_token
    return Level(users, tokens, ttft, tpot, throughput, reading, rss, kv)


def _findings(found: Context) -> list[Finding]:
    first, last = found.lengths[0], found.lengths[-1]
    made = [
        Finding(
            f"A prompt of {first.tokens_in:,} tokens had its first token after {ms(first.ttft.value)}, one of "
            f"{last.tokens_in:,} after {ms(last.ttft.value)}: {last.tokens_in / first.tokens_in:.0f} times the "
            f"tokens, {last.ttft.value / first.ttft.value:.1f} times the wait. Prompts were read at "
            f"{rate(first.reading.value)} and at {rate(last.reading.value)} tokens a second."
        )
    ]
    if len(found.lengths) > 1:
        _, rise = slope([(one.tokens_in, one.tpot.value) for one in found.lengths])
        made.append(
            Finding(
                f"With {last.tokens_in:,} tokens behind it, a token out took {ms(last.tpot.value)} instead of "
                f"{ms(first.tpot.value)}. Each step reads all keys and values so far: "
                + (
                    f"about {ms(rise * 1000)} for a thousand tokens of them."
                    if rise > 0 and last.tpot.low > first.tpot.high
                    else "over these lengths that does not surely show."
                )
            )
        )
    one, many = found.users[0], found.users[-1]
    made.append(
        Finding(
            f"{many.users} users at once waited {ms(many.ttft.value)} for their first token on average, one alone "
            f"{ms(one.ttft.value)}; together they got {rate(many.throughput.value)} tokens a second, "
            f"{many.throughput.value / one.throughput.value:.2f} times those of one. Prompts were read at "
            f"{rate(many.reading.value)} a second for all, {rate(one.reading.value)} for one: computing prompts "
            "together "
            + (
                "made that quicker."
                if many.reading.low > one.reading.high
                else "did not make that surely quicker, so users queue for it."
            )
        )
    )
    return [*made, *_memory(found)]


def _memory(found: Context) -> list[Finding]:
    made = []
    known = [one for one in (*found.lengths, *found.users) if one.rss is not None]
    if found.rss is not None and known:
        grown = max(one.rss or 0 for one in known) - found.rss
        most = max((one.kv or 0 for one in known), default=0)
        said = f" {size(most)} of it are predicted for the most keys and values held at once." if most else ""
        made.append(
            Finding(
                f"The server held {size(found.rss)} when it was ready, and {size(max(0, grown))} more in the end.{said}"
            )
        )
    if found.weight_bytes is not None and found.token_bytes:
        tokens = found.weight_bytes / found.token_bytes
        made.append(
            Finding(
                f"Weights are {size(found.weight_bytes)}, a token's KV {size(found.token_bytes)}: from {tokens:,.0f} "
                "tokens on, of all users together, KV takes more memory than the weights.",
                Mark.PREDICTED,
            )
        )
    return made


def _beliefs(found: Context) -> list[Belief]:
    if len(found.lengths) < 2:
        return []
    first, last = found.lengths[0], found.lengths[-1]
    power = exponent([(one.tokens_in, one.ttft.value) for one in found.lengths])
    low, high = (  # of the ends alone, each at the worst end of its interval
        exponent([(first.tokens_in, begin), (last.tokens_in, end)])
        for begin, end in ((first.ttft.high, last.ttft.low), (first.ttft.low, last.ttft.high))
    )
    said = (
        f"Over these lengths it grew as tokens to the power {power:.2f} ({low:.2f} to {high:.2f}): 1 is in "
        "proportion, 2 the square, and the bar is 1.5. Attention's part of the work grows with the square, that of "
        "the products with weights in proportion."
    )
    return [
        Belief(
            "The wait for the first token grows with the square of the prompt.",
            judge(low, high, 1.5),
            said,
        )
    ]


def _figures(found: Context) -> list[str]:
    made = []
    sweeps: tuple[tuple[Sequence[Level], str, Callable[[Level], float]], ...] = (
        (found.lengths, "tokens in", lambda one: float(one.tokens_in)),
        (found.users, "users", lambda one: float(one.users)),
    )
    for levels, label, of in sweeps:
        if len(levels) < 2:
            continue
        first, last = levels[0].ttft.value, max(one.ttft.value for one in levels)
        wide = of(levels[-1]) > 8 * of(levels[0])
        x = axis(label, [of(one) for one in levels], count, log=wide)
        plot = Plot(
            x, axis("TTFT", [first, last, *(one.ttft.high for one in levels)], ms, log=wide), f"TTFT by {label}"
        )
        if wide:
            plot.line([(of(one), first * of(one) / of(levels[0])) for one in levels], "c5", "in proportion")
        _banded(plot, levels, of, lambda one: one.ttft, "c0")
        made.append(page.figure(f"First token by {label}", str(plot), "Mean with its interval of 95 %. Measured."))
    users = found.users
    plot = Plot(axis("users", [float(one.users) for one in users], count),
                axis("tokens/s", [one.throughput.high for one in users], count), "Throughput by users")  # fmt: skip
    _banded(plot, users, lambda one: float(one.users), lambda one: one.throughput, "c1")
    made.append(page.figure("Output tokens a second by users", str(plot), "Prompts' time included. Measured."))
    return [*made, *_memory_figure(found)]


def _banded(
    plot: Plot, levels: Sequence[Level], of: Callable[[Level], float], value: Callable[[Level], Mean], colour: str
) -> None:
    values = [(of(one), value(one)) for one in levels]
    plot.band([(x, y.low) for x, y in values], [(x, y.high) for x, y in values], colour)
    plot.line([(x, y.value) for x, y in values], colour, "measured", dots=True)


def _memory_figure(found: Context) -> list[str]:
    """The server's memory against the KV that was asked for."""
    known = [one for one in (*found.lengths, *found.users) if one.rss is not None and one.kv is not None]
    if not known or found.rss is None:
        return []
    points: list[Point] = [(float(one.kv or 0), float(one.rss or 0)) for one in known]
    last = max(x for x, _ in points)
    plot = Plot(axis("KV of the level (predicted)", [0.0, last], bytes_of),
                axis("server's memory", [float(found.rss), found.rss + last, *(y for _, y in points)], bytes_of),
                "Memory")  # fmt: skip
    plot.line([(0.0, float(found.rss)), (last, found.rss + last)], "c5", "ready + KV (predicted)")
    plot.scatter(points, "c3", "measured", size=4.0)
    return [
        page.figure(
            "The server's memory", str(plot),
            "Marks above the line are levels after larger ones, or working memory: what was taken once is kept.",
        )
    ]  # fmt: skip
