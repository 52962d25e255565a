"""One model kept in several ways, held against each other: how far their next tokens diverge, how long steps take.

Everything is measured side by side: the same passages and the same steps with each, one right after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import PAGE_SIZE, Backend, Batch
from tailrace.backends.greedy import greedy
from tailrace.improve.text import Passage
from tailrace.measure.statistics import mean_interval

CHUNK = 128
"""Tokens of a step while logits are compared."""
PREFILL = 256
"""Tokens of a step whose prefill is timed."""

Report = Callable[[str], None]
Logs = NDArray[np.float64]


@dataclass(frozen=True)
class Quality:
    """Over all tokens but the first of each passage. KL divergence is in nats, of the baseline's next-token
    distribution from this one's: KL(baseline || this)."""

    tokens: int
    perplexity: float
    perplexity_change: float
    """Of the baseline's: 0.01 is one per cent more."""
    change_interval: tuple[float, float]
    """Of that, 95 %: tokens drawn anew, each with its loss in both."""
    mean_kl: float
    kl_interval: tuple[float, float]
    p99_kl: float
    max_kl: float
    same_choice: float
    """Share of tokens whose likeliest next token is the baseline's."""


@dataclass(frozen=True)
class Speed:
    """One kind of step. `ratio` is the median of what pairs with the baseline, run one right after the other, took:
    below 1 is quicker than that."""

    phase: str  # "prefill" or "decode"
    context: int  # tokens before the step
    sequences: int
    tokens: int  # that it computes
    seconds: float  # median
    baseline_seconds: float
    ratio: float
    low: float
    """Quartiles of the ratio."""
    high: float
    pairs: int


def qualities(backends: Sequence[Backend], texts: Sequence[Passage], report: Report) -> list[Quality]:
    """Of each backend on the same texts; the first one is the baseline. Each has pages for the longest passage."""
    losses: list[list[float]] = [[] for _ in backends]
    divergences: list[list[float]] = [[] for _ in backends]
    same: list[list[bool]] = [[] for _ in backends]
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
            change_interval=_interval([mine - plain for mine, plain in zip(loss, losses[0], strict=True)], np.expm1),
            mean_kl=float(np.mean(kl)),
            kl_interval=_interval(kl, float),
            p99_kl=float(np.percentile(kl, 99)),
            max_kl=float(np.max(kl)),
            same_choice=float(np.mean(equal)),
        )
        for loss, kl, equal in zip(losses, divergences, same, strict=True)
    ]


def _interval(values: Sequence[float], shown: Callable[[float], float]) -> tuple[float, float]:
    """Of the mean of at least one value."""
    low, high = mean_interval(values)
    return float(shown(low)), float(shown(high))


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


def steps(context: int, sequences: int, vocab: int) -> list[tuple[str, int, Batch]]:
    """What is timed, each with its phase and the tokens before it: prefill at the beginning and at the end of the
    context, decode of one sequence and of all."""
    rng = np.random.default_rng(0)
    some = min(PREFILL, context)
    prompt = rng.integers(0, vocab, some).astype(np.int32)
    late = (context - some) // PAGE_SIZE * PAGE_SIZE
    made = [("prefill", at, _batch(prompt, [at], some)) for at in dict.fromkeys((0, late))]
    for behind in dict.fromkeys((max(1, context // 4), context)):
        for many in dict.fromkeys((1, sequences)):
            tokens = rng.integers(0, vocab, many).astype(np.int32)
            made.append(("decode", behind, _batch(tokens, [behind] * many, 1)))
    return made


def timed(backends: Sequence[Backend], step: tuple[str, int, Batch], pairs: int) -> list[Speed]:
    """Each backend's times of one of `steps`, in rounds in which each runs it once; in every other round in reverse
    order. The first backend is the baseline."""
    phase, context, batch = step
    took: list[list[float]] = [[] for _ in backends]
    for number in range(-1, pairs):
        order = list(enumerate(backends))
        for index, backend in order if number % 2 else reversed(order):
            begin = time.perf_counter()
            backend.run(batch)
            if number >= 0:
                took[index].append(time.perf_counter() - begin)

    def made(index: int) -> Speed:
        ratios = sorted(mine / plain for mine, plain in zip(took[index], took[0], strict=True))
        low, high = np.percentile(ratios, (25, 75))
        return Speed(
            phase=phase,
            context=context,
            sequences=len(batch.context),
            tokens=len(batch.tokens),
            seconds=statistics.median(took[index]),
            baseline_seconds=statistics.median(took[0]),
            ratio=statistics.median(ratios),
            low=float(low),
            high=float(high),
            pairs=pairs,
        )

    return [made(index) for index in range(len(backends))]
