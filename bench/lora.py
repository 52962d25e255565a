"""What LoRA adapters cost: decode steps of 1, 8 and 32 streams without one, all with the same, each with one of eight.

Steps of the backend, in turns; rank 16 on all seven projections of every layer (and, for one stream, on queries and
values alone). "more" is the median over the turns of a step's time by that of the one without adapters beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.batches import step
from bench.steps import RUNNING, backend_of
from tailrace.backends import Adapter, Batch, LowRank
from tailrace.backends.cpu import CpuBackend
from tailrace.backends.cpu.machine.attained import touch_pages
from tailrace.models import Model, load_model, open_checkpoint
from tailrace.models.adapters import PROJECTIONS

RANK, MANY, CONTEXT = 16, 8, 128


def adapter(model: Model, seed: int, targets: Iterable[str] = PROJECTIONS) -> Adapter:
    """One with random numbers."""
    rng = np.random.default_rng(seed)

    def half(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.01)

    weights = [getattr(layer, name) for layer in model.layers for name in targets]
    return Adapter({w.name: LowRank(half(RANK, w.shape[1]), half(w.shape[0], RANK), 1.0) for w in weights})


def in_turns(backend: CpuBackend, batches: Sequence[Batch], rounds: int) -> list[list[float]]:
    """Seconds of each batch in each round."""
    for batch in batches:
        backend.run(batch)
    took: list[list[float]] = [[] for _ in batches]
    for _ in range(rounds):
        for batch, times in zip(batches, took, strict=True):
            begin = time.perf_counter()
            backend.run(batch)
            times.append(time.perf_counter() - begin)
    return took


def run(path: Path, threads: int | None, kernels: str | None, repeats: int) -> None:
    """Prints the table."""
    model = load_model(open_checkpoint(path), max_context=8192)
    backend = backend_of(path, threads=threads, kernels=kernels)
    packed = [backend.pack_adapter(adapter(model, seed)) for seed in range(MANY)]
    few = backend.pack_adapter(adapter(model, MANY, ("q", "v")))
    for number, one in enumerate((*packed, few)):
        backend.set_adapter(number, one)
    sizes = f"{packed[0].nbytes / 1e6:.1f} MB an adapter (queries and values alone: {few.nbytes / 1e6:.1f})"
    print(
        f"{backend.kernels} kernels, {backend.threads} threads, weights {backend.weight_bytes / 1e6:.1f} MB, {sizes}\n"
    )
    print(f"{'streams':9}{'adapters':22}{'median ms':>11}{'more':>8}")
    touch_pages(backend, 9 * RUNNING, RUNNING)
    for streams in (1, 8, 32):
        kinds = {"none": None, "the same": [0] * streams, "of eight": [at % MANY for at in range(streams)]}
        if streams == 1:
            kinds = {"none": None, "one": [0], "one, q and v alone": [MANY]}
        batches = []
        for numbers in kinds.values():
            batches.append(step([([5], CONTEXT)] * streams))
            batches[-1].adapters = np.array(numbers, np.int32) if numbers is not None else None
        took = in_turns(backend, batches, 20 * repeats)
        for kind, times in zip(kinds, took, strict=True):
            more = statistics.median(t / plain for t, plain in zip(times, took[0], strict=True)) - 1
            print(f"{streams:<9}{kind:22}{statistics.median(times) * 1e3:11.2f}{more:8.1%}")
