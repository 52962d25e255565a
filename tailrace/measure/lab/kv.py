"""The memory of keys and values: predicted from the model's shape, and what the server's pages take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from tailrace.measure import probe, prometheus
from tailrace.measure.exchange import Exchange
from tailrace.measure.lab.experiment import Belief, Finding, Lesson, Mark, Needs, Table, Verdict
from tailrace.measure.lab.inside import Inside
from tailrace.measure.lab.stand import Served, Stand, alone
from tailrace.measure.record import Outcome, Record
from tailrace.measure.report import page
from tailrace.measure.report.plots import bytes_of, count
from tailrace.measure.report.svg import Plot, axis
from tailrace.measure.report.words import size
from tailrace.terms import TailraceError

CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
USERS = (1, 2, 4, 8)
OUT = 24
FEWEST = 3
"""Lengths, and numbers of users, at least."""
EVERY = 0.04
"""Seconds between two looks at the server's pages."""
AHEAD = 2
"""Tokens that a step which runs, and the one planned behind it, may be ahead of what has been sent."""
DRAFTED = 8
"""More of them where several tokens come at once: a step then has pages for those that it tries."""
USED = "tailrace_kv_pages_used"
SHARE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
CONFIG = "vllm:cache_config_info"


class Sample(msgspec.Struct, frozen=True):
    """One look while all of a wave were writing. `tokens`: those that the users had then; `pages`: as the server said;
    `low`, `high`: what is predicted for the fewest and the most tokens that they can have had in that moment."""

    tokens: int
    pages: int
    low: int
    high: int


class Wave(msgspec.Struct, frozen=True):
    """`users` requests of `tokens_in` each at once, and what was seen of them. `rss`: bytes that the server held
    afterwards."""

    users: int
    tokens_in: int
    samples: list[Sample]
    rss: int | None


class Kv(msgspec.Struct, frozen=True):
    """All of it. `token_bytes`, `page_bytes`: predicted, of all layers; `weight_bytes` likewise. `rss`: before."""

    token_bytes: int
    page_bytes: int
    page_tokens: int
    weight_bytes: int
    contexts: list[Wave]
    users: list[Wave]
    rss: int | None
    windowed: bool
    notes: list[str]


class Experiment:
    """See `experiment.Experiment`."""

    name = "kv"
    question = "How much memory does a conversation take, and can that be told beforehand?"
    does = "Longer and longer prompts, then more and more users, while the server's pages are watched."
    needs: Needs = "server"
    ours = ""

    async def run(self, stand: Stand) -> Kv:
        """Watches pages without a prefix cache, so that each user has all of its own."""
        inside = stand.inside
        if inside is None:
            raise TailraceError(f"the files of {stand.model} are not here, so nothing can be predicted")
        async with stand.server("--no-prefix-cache", api="completions") as served:
            await pages(served)
            rss, waves, users = served.rss(), [], []
            lengths = contexts(served, stand)
            for at in stand.rounds(least=FEWEST, most=len(lengths), share=0.5):
                stand.say(f"a prompt of {lengths[at]:,} tokens")
                waves.append(await wave(served, inside, 1, lengths[at]))
            for at in stand.rounds(least=FEWEST, most=len(USERS), share=0.5):
                stand.say(f"{USERS[at]} users")
                users.append(await wave(served, inside, USERS[at], lengths[len(waves) // 2]))
            pool = inside.pools[0]
            return Kv(
                inside.kv_bytes_per_token, pool.page_bytes, inside.page_tokens, inside.weight_bytes, waves, users, rss,
                len(inside.pools) > 1, list(served.notes),
            )  # fmt: skip

    def teach(self, found: Kv) -> Lesson:
        """Whether pages were as predicted, and what that means for users."""
        every = [*found.contexts, *found.users]
        rows = [
            [f"{one.users} x {one.tokens_in:,}", f"{one.samples[-1].tokens:,}", predicted(one.samples[-1]),
             f"{one.samples[-1].pages:,}", size(one.samples[-1].pages * found.page_bytes),
             "yes" if all(map(agrees, one.samples)) else "no", f"{len(one.samples)}",
             "" if one.rss is None else size(one.rss)]
            for one in every if one.samples
        ]  # fmt: skip
        heads = ("users x tokens in", "tokens held", "pages predicted", "pages measured", "bytes of these", "agree",
                 "looks", "server's memory")  # fmt: skip
        return Lesson(
            did=f"{len(found.contexts)} lengths with one user and {len(found.users)} numbers of users, {OUT} tokens "
            f"out each; the server was asked for its pages every {EVERY * 1000:.0f} ms while all were writing.",
            tables=[Table(heads, rows)], findings=_findings(found), beliefs=_beliefs(found), figures=_figures(found),
            notes=[
                "The table has the last look at each. Predicted pages are for the fewest to the most tokens that "
                f"the users can have had in the moment of the look: steps run up to {AHEAD} tokens ahead of what has "
                "been sent.",
                *(["Layers with a sliding window have pools of their own, which are not in these numbers."]
                  if found.windowed else []), *found.notes,
            ],
        )  # fmt: skip


def contexts(served: Served, stand: Stand) -> list[int]:
    """Lengths that fit: half of the budget is for them."""
    made: list[int] = []
    left = stand.budget / 2
    for tokens in CONTEXTS:
        left -= served.pace.seconds(tokens, OUT)
        if tokens + OUT > served.context * 0.95 or (left < 0 and len(made) >= FEWEST):
            break
        made.append(tokens)
    return made


async def pages(served: Served) -> int:
    """Pages that requests hold now. Raises TailraceError where the server does not tell."""
    status, content = await probe.fetch(served.pool, "/metrics")
    found = prometheus.parse(content.decode(errors="replace"), (USED, *SHARE, CONFIG)) if status == 200 else {}
    if USED in found:
        return round(sum(found[USED].values()))
    share = next((sum(found[name].values()) for name in SHARE if name in found), None)
    blocks = next((prometheus.label(labels, "num_gpu_blocks") for labels in found.get(CONFIG, {})), None)
    if share is None or blocks is None or not blocks.isdecimal():
        raise TailraceError(f"{served.pool.url} does not say how many pages of KV its requests hold (/metrics)")
    return round(share * int(blocks))


async def wave(served: Served, inside: Inside, users: int, tokens: int) -> Wave:
    """So many requests at once, watched until the first of them has ended."""
    start = time.perf_counter()
    records = [Record(place, 0, True, tokens, OUT) for place in range(users)]
    tasks = [asyncio.create_task(_ask(served, record, start, tokens)) for record in records]
    looks: list[tuple[float, float, int]] = []
    try:
        while not any(task.done() for task in tasks):
            begin = time.perf_counter() - start
            held = await pages(served)
            looks.append((begin, time.perf_counter() - start, held))
            await asyncio.sleep(EVERY)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    failed = next((record for record in records if record.outcome is not Outcome.OK), None)
    if failed is not None:
        raise TailraceError(f"a request to {served.pool.url} failed ({failed.outcome}): {failed.error}")
    return Wave(users, records[0].input_tokens or tokens, samples(records, looks, inside), served.rss())


async def _ask(served: Served, record: Record, start: float, tokens: int) -> None:
    turn = alone(record.session, f"kv/{record.wanted_input}/{start}", tokens, OUT).turns[0]
    request = served.pool.request("POST", served.target.path, served.target.body(turn, {}))
    await Exchange(record, start).run(served.pool, request, 600.0)


def samples(records: Sequence[Record], looks: Sequence[tuple[float, float, int]], inside: Inside) -> list[Sample]:
    """The looks (begun, ended, pages) at which all were writing, each with what is predicted for it."""
    begin = max(record.chunks[0] for record in records)
    end = min(record.chunks[-1] for record in records)
    made = []
    for asked, told, held in looks:
        if not begin < asked <= told < end:
            continue
        fewest = [_tokens(record) + _sent(record, asked)[0] - 1 for record in records]
        most = [
            _tokens(record) + min(_sent(record, told)[1] + _ahead(record), record.output_tokens or OUT)
            for record in records
        ]
        low, high = (sum(inside.pages(tokens)[0] for tokens in side) for side in (fewest, most))
        made.append(Sample(sum(fewest) + len(records), held, low, high))
    return made


def _ahead(record: Record) -> int:
    return AHEAD + (DRAFTED if len(record.chunks) < (record.output_tokens or 0) else 0)


def _tokens(record: Record) -> int:
    return record.input_tokens or record.wanted_input


def _sent(record: Record, at: float) -> tuple[int, int]:
    """The fewest and the most tokens that had come by then: each piece, come or still to come, has at least one."""
    pieces, whole = bisect_right(record.chunks, at), record.output_tokens or len(record.chunks)
    return pieces, max(pieces, whole - (len(record.chunks) - pieces))


def agrees(sample: Sample) -> bool:
    """Whether the pages are as predicted."""
    return sample.low <= sample.pages <= sample.high


def predicted(sample: Sample) -> str:
    """In words."""
    return f"{sample.low:,}" if sample.low == sample.high else f"{sample.low:,} to {sample.high:,}"


def _looks(found: Kv) -> list[Sample]:
    return [sample for one in (*found.contexts, *found.users) for sample in one.samples]


def _findings(found: Kv) -> list[Finding]:
    every = _looks(found)
    sure = [sample for sample in every if sample.low == sample.high]
    made = [
        Finding(
            f"A token's keys and values take {found.token_bytes:,} bytes in all layers, a page of "
            f"{found.page_tokens} tokens {size(found.page_bytes)}: from the model's shape, before anything runs.",
            Mark.PREDICTED,
        ),
        Finding(
            f"At {len(every)} looks the server held as many pages as predicted {sum(map(agrees, every))} times; "
            f"where only one number of pages was possible ({len(sure)} looks), the very same "
            f"{sum(map(agrees, sure))} times."
        ),
        Finding(
            f"The weights are {size(found.weight_bytes)}: as much as {found.weight_bytes // found.token_bytes:,} "
            f"tokens of KV, such as {found.weight_bytes / found.token_bytes / 2048:.1f} users with 2,048 tokens each.",
            Mark.PREDICTED,
        ),
    ]
    grown = [one.rss for one in (*found.contexts, *found.users) if one.rss is not None]
    if found.rss is not None and grown:
        most = max((sample.pages for sample in every), default=0) * found.page_bytes
        made.append(
            Finding(
                f"The server's memory grew by {size(max(0, max(grown) - found.rss))} meanwhile; the most pages that "
                f"were held at once are {size(most)}. It grows when a page is first written, and is kept for the "
                "next user."
            )
        )
    return made


def _beliefs(found: Kv) -> list[Belief]:
    every = _looks(found)
    wrong = [sample for sample in every if not agrees(sample)]
    verdict = Verdict.OPEN if not every else Verdict.FAILS if wrong else Verdict.HOLDS
    because = (
        "No look fell while all of them were writing."
        if not every
        else f"All {len(every)} looks agree to the page."
        if not wrong
        else f"{len(wrong)} of {len(every)} looks do not agree; the first: {wrong[0].pages} pages, predicted "
        f"{predicted(wrong[0])}."
    )
    return [
        Belief(
            "KV grows in proportion to tokens and users, by an amount that the model's shape gives.", verdict, because
        )
    ]


def _figures(found: Kv) -> list[str]:
    made = []
    for title, waves, label, caption in (
        ("One user, more context", found.contexts, "tokens held", "Each mark is a look while the answer was written."),
        ("More users", found.users, "tokens held by all", "More and more users with prompts of one length."),
    ):
        points = [
            (float(sample.tokens), float(sample.pages * found.page_bytes)) for one in waves for sample in one.samples
        ]  # fmt: skip
        if not points:
            continue
        last = max(x for x, _ in points)
        plot = Plot(axis(label, [0.0, last], count), axis("bytes of KV", [y for _, y in points], bytes_of), title)
        plot.line([(0.0, 0.0), (last, last * found.token_bytes)], "c5", "predicted")
        plot.scatter(points, "c3", "measured", size=3.5)
        made.append(page.figure(title, str(plot), caption))
    return made
