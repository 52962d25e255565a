"""A model's operations under the ceilings of the machine that runs them.

An operation can be no faster than the slowest of what it needs: its multiply-adds at the rate of the machine's fastest
instructions for them, and its bytes at the rate of the level that they come from. That is its bound; how near it comes
to it is its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tailrace.backends.cpu import CpuBackend, Weighted
from tailrace.backends.cpu.machine.attained import (
    Products,
    Timing,
    batch_of,
    pages_of,
    summed,
    time_step,
    touch_pages,
)
from tailrace.backends.cpu.machine.ceilings import Ceilings
from tailrace.backends.cpu.machine.points import Point, Roofline, StepPoints
from tailrace.backends.cpu.machine.probe import Others, Report
from tailrace.backends.cpu.machine.work import INTEGER, PAIRS, Parts, Shape, Work, added, parts_of
from tailrace.backends.cpu.memory import available_memory
from tailrace.native import _kernels
from tailrace.terms import InvalidInput

BATCHES = (1, 16)
"""Sequences that decode at once."""

CONTEXT, PREFILL = 512, 512
"""Tokens that each of them has behind it; tokens of a prompt."""

SECONDS = 6.0
"""About how long all of it takes; longer where a single step does."""

FASTER = dict.fromkeys(INTEGER, "amx_int8")
"""Kinds whose sums are exact, so that a product may take whichever instructions are the fastest. What is there for bf16
rounds differently, and counts only where a kernel build promises just that: see `TILED` and `PAIRED`."""

TILED = {"amx": "amx_bf16"}
"""Instructions that multiply with quantised weights, by the kernel builds that widen those to bf16."""

PAIRED = {"avx512bf16": ("bf16_dot",), "amx": ("bf16_dot", "amx_bf16")}
"""Instructions that multiply pairs of bf16, by the kernel builds that attend so."""

TILE_ROWS = 16
"""Rows that AMX multiplies in the time of one."""

_TOUCHED = 256  # pages that are written in one step
_PRODUCTS, _ATTENTION, _SAMPLING = ("linear", "gate"), ("attend", "merge"), ("sample",)


class Row(NamedTuple):
    """One kind of operation: its name, shape and number, what all of them do in a step, and with how many rows."""

    name: str
    shape: str
    times: int
    work: Work
    rows: int


class Bound(NamedTuple):
    """What holds an operation, and the seconds that it takes at least."""

    name: str
    seconds: float


class Cold(NamedTuple):
    """The bytes of a step that none of its operations has written: weights, and keys and values of earlier tokens; the
    level that they would fit into, and the rate at which as many are read over and over with nothing else to do."""

    size_bytes: int
    level: str
    bytes_per_second: float


class Bounds(NamedTuple):
    """What its bytes need, and what its multiply-adds need."""

    memory: Bound
    arithmetic: Bound

    @property
    def slower(self) -> Bound:
        return max(self, key=lambda bound: bound.seconds)


def bounds_of(row: Row, ceilings: Ceilings, cold: Cold) -> Bounds:
    """What the row's work takes at least, on all threads."""
    work, threads = row.work, ceilings.machine.threads
    near = ceilings.level_of(work.span_bytes, threads)
    memory = [
        Bound(cold.level, work.cold_bytes / cold.bytes_per_second),
        Bound(near, work.warm_bytes / ceilings.bandwidth(near, threads)),
    ]
    needs = [_arithmetic(kind, n / 2, row.rows, ceilings) for kind, n in work.operations.items()]
    longest = max(needs, key=lambda bound: bound.seconds)
    return Bounds(
        max(memory, key=lambda bound: bound.seconds), Bound(longest.name, sum(need.seconds for need in needs))
    )


def _arithmetic(kind: str, multiply_adds: float, rows: int, ceilings: Ceilings) -> Bound:
    """What so many multiply-adds take at least, and the instructions that would do it."""
    threads, there = ceilings.machine.threads, ceilings.kinds(ceilings.machine.threads)
    kernels = ceilings.machine.kernels
    kinds = [kind.removesuffix(PAIRS), *filter(None, [FASTER.get(kind)])]
    if kind in FASTER and kernels in TILED:
        kinds = [TILED[kernels]]
    elif kind.endswith(PAIRS):
        kinds += PAIRED.get(kernels, ())
    whole = -(-rows // TILE_ROWS) * TILE_ROWS / rows
    needs = (
        Bound(k, multiply_adds * (whole if k.startswith("amx_") else 1) / ceilings.multiply_adds(k, threads))
        for k in kinds
        if k in there
    )
    return min(needs, key=lambda bound: bound.seconds)


def measure_roofline(
    model: Weighted,
    ceilings: Ceilings,
    *,
    name: str,
    longest: int,
    batches: Sequence[int] = BATCHES,
    context: int = CONTEXT,
    prefill: int = PREFILL,
    seconds: float = SECONDS,
    cache_dir: Path | None = None,
    report: Report | None = None,
) -> Roofline:
    """Runs the model's steps and products, and holds them against the ceilings. `longest`: the model's context, in
    tokens. Raises InvalidInput where the context is past it, or its KV does not fit into memory."""
    if context >= longest:
        raise InvalidInput(f"the model's context is {longest} tokens: give a --context below that, not {context}",
                           param="context")  # fmt: skip
    say, prefill = report or (lambda _: None), min(prefill, longest)
    machine, parts = ceilings.machine, parts_of(model)
    shapes = [Shape(n, 1, context) for n in batches] + ([Shape(1, prefill, 0)] if prefill else [])
    pages = max(pages_of(shape) for shape in shapes)
    _check_memory(parts, pages)
    say("loading the model")
    backend = CpuBackend(
        model,
        pages=pages,
        max_context=max(context + 1, prefill),
        step_tokens=max(_TOUCHED, *(shape.rows for shape in shapes)),
        max_running=max(_TOUCHED, *batches),
        threads=machine.threads,
        kernels=machine.kernels,
        cache_dir=cache_dir,
    )
    backend.settle(wait=True)
    touch_pages(backend, pages, _TOUCHED)
    most = max(shape.rows for shape in shapes)
    products = [
        Products(group, backend.tiles, kernels=machine.kernels, threads=machine.threads, most_rows=most)
        for group in parts.by_kind().values()
    ]
    others = Others()
    one = batch_of(Shape(1, 1, 0), np.zeros(1, np.int32))
    share = seconds / (len(shapes) * (1.5 + len(products) / 4))
    steps = []
    for shape in shapes:
        rows = rows_of(parts, shape)
        say(f"{title(shape)}")
        tokens = np.random.default_rng(0).integers(0, model.vocab, shape.rows).astype(np.int32)
        whole, kinds = time_step(backend, batch_of(shape, tokens), share)
        cold = read_cold(rows, ceilings, share / 2)
        timings = []
        for row, timed in zip(rows, products, strict=False):  # products are the first rows
            say(f"{title(shape)}, {row.name}")
            # weights lie where a step would find them: a step has read them all
            timings.append(timed.time(shape, share / 4, before=lambda: backend.run(one)))
        if parts.attentions:
            timings.append(summed(kinds, _ATTENTION))
        timings.append(summed(kinds, [k for k in kinds if k not in (*_PRODUCTS, *_ATTENTION, *_SAMPLING)]))
        timings.append(summed(kinds, _SAMPLING))
        bounds = [bounds_of(row, ceilings, cold) for row in rows]
        points = [point(*found) for found in zip(rows, timings, bounds, strict=True) if found[1].median > 0]
        least = sum(found.slower.seconds for found in bounds)
        steps.append(
            StepPoints(
                step=title(shape),
                sequences=shape.sequences,
                tokens=shape.rows,
                context=shape.context,
                cold_bytes=cold.size_bytes,
                cold_bytes_per_second=cold.bytes_per_second,
                seconds=whole.best,
                median_seconds=whole.median,
                tokens_per_second=shape.rows / whole.best,
                ceiling_seconds=least,
                share_of_ceiling=least / whole.best,
                products_seconds=summed(kinds, _PRODUCTS).best,
                products_alone_seconds=sum(t.best for t in timings[: len(products)]),
                points=tuple(points),
            )
        )
    return Roofline(name, machine.kernels, machine.threads, backend.weight_bytes, others.cores(), tuple(steps))


def read_cold(rows: Sequence[Row], ceilings: Ceilings, seconds: float) -> Cold:
    """The cold bytes of a step, and how fast as many are read, of rounds that take about so many seconds."""
    machine, size = ceilings.machine, sum(row.work.cold_bytes for row in rows)
    best, _ = _kernels.read_rate(machine.kernels, max(size // machine.threads, 4096), machine.threads, seconds)
    return Cold(size, ceilings.level_of(size, machine.threads), best)


def title(shape: Shape) -> str:
    """The step's name."""
    return f"decode {shape.sequences} at {shape.context}" if shape.count == 1 else f"prefill {shape.count}"


def rows_of(parts: Parts, shape: Shape) -> list[Row]:
    """The work of a step by kind of operation: products in the model's order, attention, all that handles each row by
    itself, sampling."""
    rows = []
    for (label, formats, sizes), group in parts.by_kind().items():
        # layers whose rows are not all wanted decide: the last one has fewer
        count = max(shape.wanted if p.wanted else shape.rows for p in group)
        work = added(p.work(shape.wanted if p.wanted else shape.rows) for p in group)
        rows.append(Row(label, f"{sum(n for n, _ in sizes)}x{sizes[0][1]} {formats}", len(group), work, count))
    if parts.attentions:
        spec = parts.attentions[0]
        heads = f"{spec.heads}/{spec.kv_heads} heads of {spec.head_dim}"
        count = shape.count * spec.heads // spec.kv_heads  # that see the same keys and values
        rows.append(Row("attention", heads, len(parts.attentions), parts.attention(shape), count))
    rows.append(Row("row by row", "norms, ropes ...", 1, parts.elementwise(shape), shape.rows))
    rows.append(Row("sampling", f"of {parts.vocab}", 1, parts.sampling(shape), shape.wanted))
    return rows


def point(row: Row, took: Timing, bounds: Bounds) -> Point:
    """The row with what it attained. `took.median` is above 0."""
    seconds, work, bound = took.best or took.median, row.work, bounds.slower
    return Point(
        operation=row.name,
        shape=row.shape,
        times=row.times,
        operations=work.total,
        moved_bytes=work.moved_bytes,
        operations_per_byte=work.total / work.moved_bytes,
        seconds=seconds,
        median_seconds=took.median,
        operations_per_second=work.total / seconds,
        memory_ceiling_operations_per_second=work.total / bounds.memory.seconds,
        arithmetic_ceiling_operations_per_second=work.total / bounds.arithmetic.seconds,
        bound=bound.name,
        ceiling_operations_per_second=work.total / bound.seconds,
        share_of_ceiling=bound.seconds / seconds,
    )


def _check_memory(parts: Parts, pages: int) -> None:
    needed = sum(pages * 16 * 2 * 2 * spec.kv_heads * spec.head_dim for spec in parts.attentions)
    free = available_memory()
    if needed > free // 2:
        raise InvalidInput(
            f"the largest step needs {needed >> 20} MiB of KV, more than half of the {free >> 20} MiB of free memory: "
            "give a smaller --context",
            param="context",
        )
