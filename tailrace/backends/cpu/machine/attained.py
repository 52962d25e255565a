"""Times the parts of a step: in real steps where the backend tells them apart, one kind of matrix product at a time
where it does not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import PAGE_SIZE, Batch, Format, Weight
from tailrace.backends.cpu import CpuBackend
from tailrace.backends.cpu.machine.work import Product, Shape
from tailrace.backends.cpu.store import pack
from tailrace.backends.greedy import greedy
from tailrace.native import _kernels

FEWEST, MOST = 5, 40
"""Rounds of one measurement."""

SEEN = 0.9
"""Share of a step that has to be seen by kind for the kinds to be used."""

TABLE_ROWS = 16
"""Different inputs that products are timed with."""


class Timing(NamedTuple):
    """Seconds: of the best round and of the median one."""

    best: float
    median: float


def batch_of(shape: Shape, tokens: NDArray[np.int32]) -> Batch:
    """The step, each sequence in its own pages, the first from page 0. `tokens`: int32 [rows]."""
    pages = pages_of(shape) // shape.sequences
    starts = np.arange(shape.sequences + 1, dtype=np.int32) * np.int32(shape.count)
    return Batch(
        tokens=tokens,
        starts=starts,
        context=np.full(shape.sequences, shape.context, np.int32),
        tables=np.arange(shape.sequences * pages, dtype=np.int32).reshape(shape.sequences, pages),
        wanted=starts[1:] - np.int32(1),
        sampling=greedy(shape.wanted),
    )


def pages_of(shape: Shape) -> int:
    """KV pages that the step's sequences hold."""
    return shape.sequences * -(-(shape.context + shape.count) // PAGE_SIZE)


def touch_pages(backend: CpuBackend, pages: int, sequences: int) -> None:
    """Writes a token into every page, `sequences` pages a step. Memory that nobody has written is one page of zeros,
    which stays in the nearest cache: attention over it would be faster than it ever is."""
    for first in range(0, pages, sequences):
        count = min(sequences, pages - first)
        batch = batch_of(Shape(count, 1, 0), np.zeros(count, np.int32))
        batch.tables = batch.tables + np.int32(first)
        batch.wanted, batch.sampling = batch.wanted[:1], greedy(1)
        backend.run(batch)


def time_step(backend: CpuBackend, batch: Batch, seconds: float) -> tuple[Timing, dict[str, Timing]]:
    """The whole step, and each kind of operation in it, of rounds that take about so many seconds. What is timed by
    kind is what the calling thread sees: a round in which it came late, so that others did its work unseen, is not
    used. The best of a kind is its median in the faster half of the rounds: within a round, what one kind waits for may
    be seen in another."""
    backend.run(batch)
    whole: list[float] = []
    kinds: list[dict[str, float]] = []
    backend.profile(True)
    try:
        backend.profiled()
        begin = time.perf_counter()
        while _goes_on(len(whole), begin, seconds):
            start = time.perf_counter()
            backend.run(batch)
            whole.append(time.perf_counter() - start)
            kinds.append(backend.profiled())
    finally:
        backend.profile(False)
    seen = [sum(kind.values()) / took for kind, took in zip(kinds, whole, strict=True)]
    used = [i for i, share in enumerate(seen) if share >= min(SEEN, max(seen))]
    fast = sorted(used, key=lambda i: whole[i])[: -(-len(used) // 2)]

    def middle(name: str, rounds: Sequence[int]) -> float:
        return statistics.median(kinds[i][name] for i in rounds)

    return _timing(whole), {name: Timing(middle(name, fast), middle(name, used)) for name in kinds[0]}


class Products:
    """All products of one kind as a program of their own, in the model's order, over weights of the model itself."""

    def __init__(
        self,
        products: Sequence[Product],
        tiles: Callable[[Weight], NDArray[np.uint8]],
        *,
        kernels: str,
        threads: int,
        most_rows: int,
    ) -> None:
        self._program = _kernels.Program(kernels, threads, most_rows, 1, 16, 16)
        program, width = self._program, products[0].inputs
        values = np.random.default_rng(0).normal(size=(TABLE_ROWS, width)).astype(np.float32)
        table = Weight("table", Format.F32, values.shape, values.view(np.uint8))
        source = program.buffer(width)
        program.embed(program.weight("F32", TABLE_ROWS, width, pack(table)), source, width)
        self._add([p for p in products if not p.wanted], source, tiles)
        last = program.select(source, width)
        self._add([p for p in products if p.wanted], last, tiles)

    def _add(self, products: Sequence[Product], source: int, tiles: Callable[[Weight], NDArray[np.uint8]]) -> None:
        if not products:
            return
        program = self._program
        program.quantise(source)
        if products[0].gates:
            out = program.buffer(products[0].outputs)
            for product in products:
                gate, up = (
                    (program.weight(w.format.value, w.shape[0], w.shape[1], tiles(w)), -1) for w in product.weights
                )
                program.gate(source, gate, up, out)
            return
        padded = [-(-w.shape[0] // 16) * 16 for w in products[0].weights]
        columns = np.cumsum([0, *padded]).tolist()
        out = program.buffer(columns[-1])
        for product in products:
            segments = [
                (self._weight(w, tiles), out, column, -1)
                for w, column in zip(product.weights, columns[:-1], strict=True)
            ]
            program.linear(source, segments, product.adds)

    def _weight(self, weight: Weight, tiles: Callable[[Weight], NDArray[np.uint8]]) -> int:
        return self._program.weight(weight.format.value, weight.shape[0], weight.shape[1], tiles(weight))

    def time(self, shape: Shape, seconds: float, before: Callable[[], object]) -> Timing:
        """All of them with the rows of a step, in rounds that take about so many seconds. `before` is called ahead of
        each round and not counted."""
        tokens = np.arange(shape.rows, dtype=np.int32) % TABLE_ROWS
        wanted = np.arange(shape.wanted, dtype=np.int32) + np.int32(shape.rows - shape.wanted)
        took: list[float] = []
        unseen: list[float] = []
        self._program.profile(True)
        self._run(tokens, wanted)
        begin = time.perf_counter()
        while _goes_on(len(took), begin, seconds):
            before()
            self._program.profiled()
            start = time.perf_counter()
            self._run(tokens, wanted)
            whole = time.perf_counter() - start
            kinds = {name: ns / 1e9 for name, ns in self._program.profiled()}
            # not the time of the products as profiled: a thread that comes late does not see what others did meanwhile
            took.append(whole - sum(kinds.values()) + kinds["linear"] + kinds["gate"])
            unseen.append(whole - sum(kinds.values()))
        call = min(unseen)  # what it takes to call the program
        return _timing([t - call for t in took])

    def _run(self, tokens: NDArray[np.int32], wanted: NDArray[np.int32]) -> None:
        rows = len(wanted)
        arrays = (
            tokens,
            np.array([0, len(tokens)], np.int32),
            np.zeros(1, np.int32),
            np.zeros((1, -(-len(tokens) // PAGE_SIZE)), np.int32),
            wanted,
            vars(greedy(rows)),
            None,
            np.empty(rows, np.int32),
            np.empty(rows, np.float32),
            np.empty((rows, 0), np.int32),
            np.empty((rows, 0), np.float32),
        )
        self._program.launch(*arrays, None)
        self._program.wait()


def summed(kinds: Mapping[str, Timing], names: Sequence[str]) -> Timing:
    """The kinds' times together."""
    found = [kinds[name] for name in names if name in kinds]
    return Timing(sum(t.best for t in found), sum(t.median for t in found))


def _goes_on(rounds: int, begin: float, seconds: float) -> bool:
    return rounds < FEWEST or (rounds < MOST and time.perf_counter() - begin < seconds)


def _timing(took: Sequence[float]) -> Timing:
    return Timing(min(took), statistics.median(took))
