"""What a measurement leaves behind: one file with what was done, what came of it, and every request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tailrace.measure import metrics
from tailrace.measure.record import Record
from tailrace.measure.slo import Slo
from tailrace.measure.statistics import Interval, Ratio
from tailrace.measure.summary import Summary
from tailrace.terms import InvalidInput

FORMAT = 1


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `load` says in words how requests came; `level` is the number of it: sessions at a time, or a second.
    `source` is "measured", or whose results were imported. Records may be left out."""

    label: str
    url: str
    model: str
    workload: str
    load: str
    level: float
    open_loop: bool
    summary: Summary
    began: float = 0.0
    window: tuple[float, float] = (0.0, 0.0)
    records: list[Record] = []
    notes: list[str] = []
    source: str = "measured"


class Knee(msgspec.Struct, frozen=True):
    """Where more load begins to cost latency without giving throughput: the level, and the run of the sweep."""

    level: float
    run: int


class Found(msgspec.Struct, frozen=True):
    """The highest load at which the SLO held. Below `interval` it surely held, above it surely did not (95 %)."""

    level: float | None
    goodput: float | None
    interval: Interval
    run: int | None


class Difference(msgspec.Struct, frozen=True):
    """One metric of B over A. `sides` are what these are called. `adjusted`: `p`, where more than this pair of sides is
    compared in the metric (Holm 1979)."""

    metric: str
    less_is_better: bool
    a: float
    b: float
    ratio: Ratio
    sides: tuple[str, str] = ("A", "B")
    adjusted: float | None = None

    @property
    def sure(self) -> bool:
        """Whether these runs show that there is one, at 5 %."""
        low, high = self.ratio.interval
        p = self.ratio.p if self.adjusted is None else self.adjusted
        return p <= 0.05 and not low <= 1.0 <= high


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one engine in one turn. `run`: its number in `Bench.runs`; None where it could not be measured,
    and `failed` says why. `died`: it ended in the middle. Seconds after its start: `ready`, and `first_token` of its
    first request; None where it ran before. `cpu`: processor seconds of its processes over the whole run, in which
    it gave `tokens`. `rss`: bytes at the end. The gauges are its own: the most there was, and the share of the
    prompts' tokens that were cached."""

    run: int | None = None
    failed: str = ""
    died: bool = False
    ready: float | None = None
    first_token: float | None = None
    cpu: float | None = None
    tokens: float | None = None
    rss: int | None = None
    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    cached: float | None = None

    @property
    def cpu_per_token(self) -> float | None:
        """Processor seconds of the server for each output token."""
        return self.cpu / self.tokens if self.cpu is not None and self.tokens else None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a comparison, as it was started. `absent`: why it was not measured. `price`: dollars an hour."""

    label: str
    engine: str
    version: str = ""
    model: str = ""
    weights: str = ""
    """What its model is, in words: format and size."""
    command: list[str] = []
    environment: dict[str, str | None] = {}
    price: float | None = None
    absent: str = ""
    turns: list[Turn] = []


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine for this workload: `chosen` (None where none can be), by what it was judged, and the reasons."""

    chosen: str | None
    goal: str
    reasons: list[str]
    ties: list[str] = []
    """Those that these runs cannot tell from it."""


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """All that a command measured. `price`: dollars an hour of what serves, where it was given."""

    kind: Literal["run", "sweep", "search", "compare", "engines", "import"]
    runs: list[Measured]
    slo: Slo | None = None
    price: float | None = None
    knee: Knee | None = None
    found: Found | None = None
    differences: list[Difference] = []
    sides: list[Side] = []
    decision: Decision | None = None
    setting: dict[str, Any] = {}
    """How it was done: workload, seed, options, machine."""
    version: str = ""
    format: int = FORMAT


class Cost(msgspec.Struct, frozen=True):
    """Dollars, of the whole time that was paid for (amortised). None where there is nothing to divide by."""

    per_million_output: float | None
    per_million_total: float | None
    per_thousand_requests: float | None
    per_thousand_good: float | None


def cost(summary: Summary, price: float) -> Cost:
    """What it costs at `price` dollars an hour, idle time of the window included."""
    second, rates = price / 3600, summary.rates

    def of(rate: float | None, many: float) -> float | None:
        return second / rate * many if rate else None

    good = summary.goodput.per_second if summary.goodput is not None else None
    return Cost(of(rates.output_tokens, 1e6), of(rates.total_tokens, 1e6), of(rates.requests, 1e3), of(good, 1e3))


def save(bench: Bench, path: Path) -> None:
    """As JSON. Raises InvalidInput where the file cannot be written."""
    write(path, msgspec.json.encode(bench))


def write(path: Path, content: bytes) -> None:
    """Raises InvalidInput where that is not possible."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}", param="out") from error


def load(content: bytes) -> Bench:
    """What `save` wrote. Raises InvalidInput."""
    try:
        bench = msgspec.json.decode(content, type=Bench)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"that is no result of tailrace bench: {error}", param="import") from error
    if bench.format != FORMAT:
        raise InvalidInput(f"that result has format {bench.format}; this version reads {FORMAT}", param="import")
    return bench


COLUMNS = ("run", "session", "turn", "measured", "outcome", "status", "due", "sent", "first", "last", "ttft", "tpot",
           "e2e", "longest_gap", "chunks", "input_tokens", "output_tokens", "cached_tokens", "wanted_input",
           "wanted_output", "finish", "error")  # fmt: skip


def csv(runs: Sequence[Measured]) -> bytes:
    """A line a request; seconds. What is not defined is empty."""
    lines = [",".join(COLUMNS)]
    for run in runs:
        lines += [",".join(map(_cell, _row(run.label, record))) for record in run.records]
    return ("\n".join(lines) + "\n").encode()


def _row(label: str, record: Record) -> tuple[object, ...]:
    chunks = record.chunks
    first, last = (chunks[0], chunks[-1]) if chunks else (None, None)
    return (
        label, record.session, record.turn, int(record.measured), record.outcome.value, record.status, record.due,
        record.sent, first, last, metrics.ttft(record), metrics.tpot(record), metrics.e2e(record),
        max(metrics.gaps(record), default=None), len(chunks), record.input_tokens, record.output_tokens,
        record.cached_tokens, record.wanted_input, record.wanted_output, record.finish, record.error,
    )  # fmt: skip


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = f"{value:.6f}" if isinstance(value, float) else str(value)
    if any(mark in text for mark in ',"\n\r'):
        text = '"' + text.replace('"', '""') + '"'
    return text
