"""Engine steps without a server: prefill and decode at several sizes, held against what the memory can give."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np

from bench.batches import step
from tailrace.backends import Batch
from tailrace.backends.cpu import CpuBackend
from tailrace.backends.cpu.machine.attained import touch_pages
from tailrace.models import load_model, open_checkpoint
from tailrace.models.entry import prepared_dir
from tailrace.native import _kernels

PAGES, RUNNING = 2048, 32
"""KV pages of the backend, and most sequences of one step."""


def backend_of(model: Path, *, threads: int | None = None, kernels: str | None = None) -> CpuBackend:
    """The cpu backend over a model file, as the server would build it: with the repacked weights from the cache."""
    backend = CpuBackend(
        load_model(open_checkpoint(model), max_context=8192),
        pages=PAGES,
        max_context=8192,
        step_tokens=512,
        max_running=RUNNING,
        threads=threads,
        kernels=kernels,
        cache_dir=prepared_dir(model),
    )
    backend.settle(wait=True)
    return backend


def timed(backend: CpuBackend, batch: Batch, rounds: int) -> tuple[list[float], dict[str, float]]:
    """Wall seconds of each of `rounds` runs, after one that is not counted; and the seconds of each kind of operation
    in all of them, as the calling thread saw them."""
    backend.run(batch)
    backend.profiled()
    backend.profile(True)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        backend.run(batch)
        times.append(time.perf_counter() - begin)
    backend.profile(False)
    return times, backend.profiled()


def run(model: Path, threads: int | None, kernels: str | None) -> None:
    """Prints the table."""
    backend = backend_of(model, threads=threads, kernels=kernels)
    rate, _ = _kernels.read_rate(backend.kernels, backend.weight_bytes // backend.threads, backend.threads, 0.5)
    limit = rate / backend.weight_bytes
    print(f"{backend.kernels} kernels, {backend.threads} threads, weights {backend.weight_bytes / 1e6:.1f} MB")
    print(f"reading as much memory: {rate / 1e9:.1f} GB/s, so at most {limit:.0f} decode steps/s\n")
    print(f"{'step':24}{'median ms':>11}{'best ms':>10}{'tokens/s':>10}   time by operation")
    rng = np.random.default_rng(0)
    cases = [(f"decode {n} at 128", step([([5], 128)] * n), 40) for n in (1, 2, 4, 8, 16, 32)]
    cases += [("decode 1 at 4096", step([([5], 4096)]), 20)]
    cases += [(f"prefill 512 at {at}", step([(rng.integers(200, 48_000, 512), at)]), 4) for at in (0, 1536)]
    touch_pages(backend, max(int(batch.tables.max()) + 1 for _, batch, _ in cases), RUNNING)
    for name, batch, rounds in cases:
        times, kinds = timed(backend, batch, rounds)
        parts = sorted(kinds.items(), key=lambda item: -item[1])[:4]
        shares = ", ".join(f"{op} {took / sum(times):.0%}" for op, took in parts if took > 0)
        middle = statistics.median(times)
        print(f"{name:24}{middle * 1e3:11.2f}{min(times) * 1e3:10.2f}{len(batch.tokens) / middle:10.0f}   {shares}")
