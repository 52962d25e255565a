"""Products of one matrix in each weight format, held against what the machine reads and multiplies at most.

Weights are read from whatever cache holds a matrix of that size, and so is the memory of the ceiling beside it: as many
bytes, on as many threads. All rates are of one thread's share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tailrace.backends import BLOCK, Format, Weight
from tailrace.backends.cpu import available_kernels
from tailrace.backends.cpu.machine.attained import Products
from tailrace.backends.cpu.machine.work import Product, Shape
from tailrace.backends.cpu.record import FLOATS
from tailrace.backends.cpu.store import pack
from tailrace.native import _kernels

ROWS = (1, 4, 8, 16, 64, 512)
OUTPUTS, INPUTS = 8192, 4096
SECONDS = 0.5
"""Of each measurement, at least."""


class Rates(NamedTuple):
    """Of one format, a second and thread: multiply-adds in the median and in the best round, bytes of weights in the
    median one."""

    rows: int
    multiply_adds: float
    best_multiply_adds: float
    bytes: float


def random_weight(form: Format, outputs: int, inputs: int) -> Weight:
    """Random bytes, the two highest bits of each clear, so that a float among them is finite wherever it lies; random
    values in formats of floats."""
    rng = np.random.default_rng(0)
    values, size = BLOCK[form]
    if form in FLOATS:
        x = rng.standard_normal((outputs, inputs), np.float32)
        data = x.astype(np.float16) if form is Format.F16 else x if form is Format.F32 else x.view(np.uint16)[:, 1::2]
        return Weight("w", form, (outputs, inputs), np.ascontiguousarray(data).view(np.uint8))
    data = rng.integers(0, 64, (outputs, inputs // values * size), np.uint8)
    return Weight("w", form, (outputs, inputs), data)


def measure(weight: Weight, kernels: str, threads: int, rows: tuple[int, ...], seconds: float) -> list[Rates]:
    """Rates of the product with each number of rows."""
    tiles = pack(weight, threads)
    products = Products(
        [Product((weight,), wanted=False, adds=False)],
        lambda _: tiles,
        kernels=kernels,
        threads=threads,
        most_rows=max(rows),
    )
    found = []
    for n in rows:
        took = products.time(Shape(1, n, 0), seconds, lambda: None)
        done = n * weight.shape[0] * weight.shape[1] / threads
        found.append(Rates(n, done / took.median, done / took.best, tiles.nbytes / threads / took.median))
    return found


def run(threads: int | None, kernels: str | None) -> None:
    """Prints the table."""
    kernels, threads = kernels or available_kernels()[0], threads or 1
    peaks = {
        kind: _kernels.multiply_add_rate(kernels, kind, threads, SECONDS)[0] / threads
        for kind, _ in _kernels.peaks(kernels)
    }
    print(f"{kernels} kernels, {threads} threads, a matrix of {OUTPUTS:,} outputs and {INPUTS:,} inputs\n")
    print(f"{'':8}{'bits a':>7}{'':6}{'multiply-adds, G/s':>22}{'of their':>10}{'weights,':>10}{'of':>9}")
    print(f"{'format':8}{'weight':>7}{'rows':>6}{'median':>13}{'best':>9}{'ceiling':>10}{'GB/s':>10}{'reading':>9}")
    for form in Format:
        weight = random_weight(form, OUTPUTS, INPUTS)
        kind, _, _, size = _kernels.packed_shape(form.value, OUTPUTS, INPUTS)
        reading = _kernels.read_rate(kernels, size // threads, threads, SECONDS)[0] / threads
        for rates in measure(weight, kernels, threads, ROWS, SECONDS):
            print(
                f"{form.value:8}{8 * size / OUTPUTS / INPUTS:7.2f}{rates.rows:6}{rates.multiply_adds / 1e9:13.1f}"
                f"{rates.best_multiply_adds / 1e9:9.1f}{rates.multiply_adds / peaks[kind]:10.0%}"
                f"{rates.bytes / 1e9:10.1f}{rates.bytes / reading:9.0%}",
                flush=True,
            )
