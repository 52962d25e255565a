"""What KV in fewer bits costs and gives, against bf16: divergence and perplexity, memory and users, speed.

Everything is measured on the cpu backend that would serve: the same passages and the same steps with each type of KV,
one right after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace.backends import PAGE_SIZE, Backend
from tailrace.backends.cpu import CpuBackend
from tailrace.backends.cpu.machine.attained import touch_pages
from tailrace.backends.kvdtype import BF16, KvDtype
from tailrace.backends.reference import ReferenceBackend
from tailrace.improve.compare import CHUNK, PREFILL, Quality, Report, Speed, qualities, steps, timed
from tailrace.improve.text import Passage
from tailrace.models import Model


@dataclass(frozen=True)
class Outcome:
    """What one type of KV costs and gives."""

    kv_dtype: str
    bytes_per_token: int
    """With scales, in all layers."""
    memory: float
    """Share of bf16's bytes."""
    users: int
    """Sequences of `Setting.context` tokens in `Setting.budget` bytes, in whole pages."""
    users_gained: float
    """Times those of bf16."""
    quality: Quality
    speed: tuple[Speed, ...]


@dataclass(frozen=True)
class Setting:
    """What is measured. `budget`: bytes of KV; `context` and `sequences`: of the users in it, and of timed
    decode steps."""

    budget: int = 4 << 30
    context: int = 2048
    sequences: int = 8
    pairs: int = 9
    """Of timed steps; 0 times nothing."""
    threads: int | None = None
    kernels: str | None = None
    cache_dir: Path | None = None
    exact: bool = False
    """Compares logits in float32 arithmetic, on the reference backend: what KV alone costs. The cpu backend rounds
    activations to 8 bits where weights are quantised, and any change, however small, then moves some of them by a step:
    its divergence has a floor, which is about what fp16 shows."""


def evaluate(
    model: Model, kinds: Sequence[KvDtype], texts: Sequence[Passage], setting: Setting, report: Report
) -> list[Outcome]:
    """One outcome for bf16 and one for each of `kinds`. The model must have been loaded for the longest passage and for
    `setting.context`. Raises ModelError where a kind does not fit the model."""
    kinds = [BF16, *(kind for kind in kinds if kind != BF16)]
    longest = max(len(passage.ids) for passage in texts)
    report("the model")
    reach = setting.context + PAGE_SIZE if setting.pairs else 0
    pages = max(-(-longest // PAGE_SIZE), setting.sequences * -(-reach // PAGE_SIZE))
    context = max(longest, setting.context + PREFILL)
    backends = [_backend(model, kind, pages, context, setting) for kind in kinds]
    compared: Sequence[Backend] = backends
    if setting.exact:
        compared = [ReferenceBackend(model, pages=-(-longest // PAGE_SIZE), kv_dtype=kind) for kind in kinds]
    found = qualities(compared, texts, report)
    speeds: list[list[Speed]] = [[] for _ in kinds]
    if setting.pairs:
        for backend in backends:
            touch_pages(backend, pages, setting.sequences)
        for step in steps(setting.context, setting.sequences, model.vocab):
            report(f"{step[0]} at {step[1]}")
            for own, took in zip(speeds, timed(backends, step, setting.pairs), strict=True):
                own.append(took)
    return [
        _outcome(backend, backends[0], kind, quality, speed, setting)
        for backend, kind, quality, speed in zip(backends, kinds, found, speeds, strict=True)
    ]


def users_of(page_bytes: int, setting: Setting) -> int:
    """Sequences of `setting.context` tokens whose pages fit the budget."""
    return setting.budget // (page_bytes * -(-setting.context // PAGE_SIZE))


def _backend(model: Model, kind: KvDtype, pages: int, context: int, setting: Setting) -> CpuBackend:
    return CpuBackend(
        model,
        pages=pages,
        max_context=context,
        step_tokens=max(CHUNK, PREFILL),
        max_running=max(1, setting.sequences),
        threads=setting.threads,
        kernels=setting.kernels,
        kv_dtype=kind,
        cache_dir=setting.cache_dir,
        variant=model.variant,
    )


def _outcome(
    backend: CpuBackend, plain: CpuBackend, kind: KvDtype, quality: Quality, speed: list[Speed], setting: Setting
) -> Outcome:
    users = users_of(backend.page_bytes, setting)
    return Outcome(
        kv_dtype=kind.name,
        bytes_per_token=backend.page_bytes // PAGE_SIZE,
        memory=backend.page_bytes / plain.page_bytes,
        users=users,
        users_gained=users / max(1, users_of(plain.page_bytes, setting)),
        quality=quality,
        speed=tuple(speed),
    )
