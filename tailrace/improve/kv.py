"""What KV in fewer bits costs and gives, against bf16: divergence and perplexity, memory and users, speed.

Everything is measured on the cpu backend that would serve: the same passages and the same steps with each type of KV,
one right after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import PAGE_SIZE, Backend, Batch
from tailrace.backends.cpu import CpuBackend
from tailrace.backends.cpu.machine.attained import touch_pages
from tailrace.backends.greedy import greedy
from tailrace.backends.kvdtype import BF16, KvDtype
from tailrace.backends.reference import ReferenceBackend
from tailrace.improve.text import Passage
from tailrace.models import Model

CHUNK = 128
"""Tokens of a step while logits are compared."""
PREFILL = 256
"""Tokens of a step whose prefill is timed."""

Report = Callable[[str], None]
Logs = NDArray[np.float64]


@dataclass(frozen=True)
class Quality:
    """Over all tokens but the first of each passage. KL divergence is in nats, of bf16's next-token distribution from
    this one's: KL(bf16 || this)."""

    tokens: int
    perplexity: float
    perplexity_change: float
    """Of bf16's: 0.01 is one per cent more."""
    mean_kl: float
    p99_kl: float
    max_kl: float
    same_choice: float
    """Share of tokens whose likeliest next token is bf16's."""


@dataclass(frozen=True)
class Speed:
    """One kind of step. `ratio` is the median of what pairs with bf16, run one right after the other, took: below 1 is
    quicker than bf16."""

    phase: str  # "prefill" or "decode"
    context: int  # tokens before the step
    sequences: int
    seconds: float  # median
    bf16_seconds: float
    ratio: float
    low: float
    """Quartiles of the ratio."""
    high: float
    pairs: int


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
    timed = setting.context + PAGE_SIZE if setting.pairs else 0
    pages = max(-(-longest // PAGE_SIZE), setting.sequences * -(-timed // PAGE_SIZE))
    context = max(longest, setting.context + PREFILL)
    backends = [_backend(model, kind, pages, context, setting) for kind in kinds]
    compared: Sequence[Backend] = backends
    if setting.exact:
        compared = [ReferenceBackend(model, pages=-(-longest // PAGE_SIZE), kv_dtype=kind) for kind in kinds]
    qualities = _qualities(kinds, compared, texts, report)
    speeds: list[list[Speed]] = [[] for _ in kinds]
    if setting.pairs:
        for backend in backends:
            touch_pages(backend, pages, setting.sequences)
        for phase, at, batch in _steps(setting, model.vocab):
            report(f"{phase} at {at}")
            for found, took in zip(speeds, _timed(backends, batch, setting.pairs), strict=True):
                found.append(took(phase, at, len(batch.context)))
    return [
        _outcome(backend, backends[0], kind, quality, speed, setting)
        for backend, kind, quality, speed in zip(backends, kinds, qualities, speeds, strict=True)
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


def _qualities(
    kinds: Sequence[KvDtype], backends: Sequence[Backend], texts: Sequence[Passage], report: Report
) -> list[Quality]:
    losses: list[list[float]] = [[] for _ in kinds]
    divergences: list[list[float]] = [[] for _ in kinds]
    same: list[list[bool]] = [[] for _ in kinds]
    for number, passage in enumerate(texts):
        report(f"text {number + 1} of {len(texts)}")
        ids = np.asarray(passage.ids, np.int32)
        for at in range(0, len(ids) - 1, CHUNK):
            tokens = ids[at : min(at + CHUNK, len(ids) - 1)]
            batch, following = _scored(tokens, at), ids[at + 1 : at + 1 + len(tokens)]
            truth = _log_probabilities(backends[0], batch)
            expected, choice = np.exp(truth), truth.argmax(axis=1)
            for index, backend in enumerate(backends):
                found = truth if index == 0 else _log_probabilities(backend, batch)
                losses[index].extend(-found[np.arange(len(tokens)), following])
                divergences[index].extend((expected * (truth - found)).sum(axis=1))
                same[index].extend(found.argmax(axis=1) == choice)
    base = float(np.mean(losses[0]))
    return [
        Quality(
            tokens=len(loss),
            perplexity=float(np.exp(np.mean(loss))),
            perplexity_change=float(np.exp(np.mean(loss) - base)) - 1.0,
            mean_kl=float(np.mean(kl)),
            p99_kl=float(np.percentile(kl, 99)),
            max_kl=float(np.max(kl)),
            same_choice=float(np.mean(equal)),
        )
        for loss, kl, equal in zip(losses, divergences, same, strict=True)
    ]


def _log_probabilities(backend: Backend, batch: Batch) -> Logs:
    logits = backend.run(batch).logits
    assert logits is not None  # the batch asks for them
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    result: Logs = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return result


def _scored(tokens: NDArray[np.int32], at: int) -> Batch:
    """A chunk of a passage on the pool's first pages, with logits of every row."""
    return _batch(np.asarray(tokens), [at], len(tokens), logits=True)


def _batch(tokens: NDArray[np.int32], contexts: Sequence[int], each: int, *, logits: bool = False) -> Batch:
    """`each` tokens of sequences that lie one after the other in the pool."""
    pages = -(-(max(contexts) + each) // PAGE_SIZE)
    starts = np.arange(len(contexts) + 1, dtype=np.int32) * np.int32(each)
    wanted = np.arange(len(tokens), dtype=np.int32) if logits else starts[1:] - np.int32(1)
    return Batch(
        tokens=tokens,
        starts=starts,
        context=np.asarray(contexts, np.int32),
        tables=np.arange(len(contexts) * pages, dtype=np.int32).reshape(len(contexts), pages),
        wanted=wanted,
        sampling=greedy(len(wanted)),
        want_logits=logits,
    )


def _steps(setting: Setting, vocab: int) -> list[tuple[str, int, Batch]]:
    """What is timed: prefill at the beginning and at the end of the context, decode of one sequence and of all."""
    rng = np.random.default_rng(0)
    some = min(PREFILL, setting.context)
    prompt = rng.integers(0, vocab, some).astype(np.int32)
    late = (setting.context - some) // PAGE_SIZE * PAGE_SIZE
    steps = [("prefill", at, _batch(prompt, [at], some)) for at in dict.fromkeys((0, late))]
    for contexts in dict.fromkeys((max(1, setting.context // 4), setting.context)):
        for sequences in dict.fromkeys((1, setting.sequences)):
            tokens = rng.integers(0, vocab, sequences).astype(np.int32)
            steps.append(("decode", contexts, _batch(tokens, [contexts] * sequences, 1)))
    return steps


def _timed(backends: Sequence[CpuBackend], batch: Batch, pairs: int) -> list[Callable[[str, int, int], Speed]]:
    """Each backend's times of a step, in rounds in which each runs it once; in every other round in reverse order."""
    took: list[list[float]] = [[] for _ in backends]
    for number in range(-1, pairs):
        order = list(enumerate(backends))
        for index, backend in order if number % 2 else reversed(order):
            begin = time.perf_counter()
            backend.run(batch)
            if number >= 0:
                took[index].append(time.perf_counter() - begin)

    def made(index: int) -> Callable[[str, int, int], Speed]:
        ratios = sorted(mine / plain for mine, plain in zip(took[index], took[0], strict=True))
        low, high = np.percentile(ratios, (25, 75))
        return lambda phase, context, sequences: Speed(
            phase=phase,
            context=context,
            sequences=sequences,
            seconds=statistics.median(took[index]),
            bf16_seconds=statistics.median(took[0]),
            ratio=statistics.median(ratios),
            low=float(low),
            high=float(high),
            pairs=pairs,
        )

    return [made(index) for index in range(len(backends))]
