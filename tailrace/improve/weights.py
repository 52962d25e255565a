"""What weights in other formats cost and give, against those that are stored: bytes, speed of both phases, quality.

Two models are held at a time, the stored one and another, so that memory is bounded by two.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tailrace.backends import PAGE_SIZE, Format
from tailrace.backends.cpu import CpuBackend
from tailrace.backends.cpu.machine.attained import touch_pages
from tailrace.backends.cpu.memory import available_memory
from tailrace.improve.compare import CHUNK, PREFILL, Quality, Report, Speed, qualities, steps, timed
from tailrace.improve.text import Passage
from tailrace.models import Model
from tailrace.models.files.mapped import stored_bytes
from tailrace.models.quantise import KINDS, quantise, rounded
from tailrace.models.widen import widened

FEWEST, MOST = 3, 15
"""Timed pairs of a step."""
SPARE = 1.5
"""Times the bytes of a kind's weights that must be free: they are read, and kept in another order."""
STORED = "stored"


@dataclass(frozen=True)
class Kind:
    """A model in one precision. `origin` says in words where its weights come from."""

    name: str
    model: Model
    origin: str

    @property
    def weight_bytes(self) -> int:
        """As they are computed with."""
        return sum(stored_bytes(weight.format, weight.shape) for weight in self.model.weights())

    @property
    def bits(self) -> float:
        """A weight, on average."""
        return 8 * self.weight_bytes / sum(int(np.prod(weight.shape)) for weight in self.model.weights())


@dataclass(frozen=True)
class Weighed:
    """What a kind came to. The stored one is beside itself: it diverges by nothing."""

    kind: Kind
    quality: Quality
    speeds: tuple[Speed, ...]


@dataclass(frozen=True)
class Setting:
    """What is measured: `seconds` that it may take in all, about; tokens behind a timed step, and the sequences of one;
    how the stored weights are kept (`cache_dir`)."""

    seconds: float = 60.0
    context: int = 512
    sequences: int = 8
    threads: int | None = None
    kernels: str | None = None
    cache_dir: Path | None = None


def kinds(stored: Model, threads: int) -> tuple[list[Kind], dict[str, str]]:
    """The stored model, then in bf16, int8 and int4, each from the best that there is; and which of these there are
    not, with the reason."""
    formats = _formats(stored)
    named = max(formats, key=lambda form: formats[form])
    found = [Kind(f"{STORED} ({named})", stored, "the checkpoint's own weights")]
    missing: dict[str, str] = {}
    quantised = any(form not in (Format.F32, Format.F16, Format.BF16) for form in formats)
    wide = widened(stored)
    if wide is stored:
        missing["bf16"] = "the stored weights are that"
    else:
        origin = (
            "the stored weights, written out: no better than these" if quantised else "rounded from the stored ones"
        )
        found.append(Kind("bf16", wide, origin))
    source = wide if quantised else stored
    for name, (inner, outer) in KINDS.items():
        made = quantise(source, name, threads=threads)
        if set(formats) == {inner, outer}:
            missing[name] = "the stored weights are that already"
        elif not any(rounded(made)):
            missing[name] = "no matrix has rows of whole blocks of 32"
        else:
            found.append(
                Kind(name, made, f"rounded from {'bf16, and so rounded twice' if quantised else 'the stored ones'}")
            )
    return found, missing


def _formats(model: Model) -> dict[Format, int]:
    """Bytes of matrices by their format."""
    sizes: dict[Format, int] = {}
    for weight in model.weights():
        if len(weight.shape) == 2:
            sizes[weight.format] = sizes.get(weight.format, 0) + stored_bytes(weight.format, weight.shape)
    return sizes


def evaluate(
    stored: Model, texts: Sequence[Passage], setting: Setting, report: Report
) -> tuple[list[Weighed], dict[str, str]]:
    """Each kind against the stored one, in turn, on the same texts (as far as the time allows) and the same steps; and
    which kinds are not in it. The model must have been loaded for the longest passage."""
    threads = setting.threads or 1
    found, missing = kinds(stored, threads)
    setting = replace(setting, context=min(setting.context, stored.config.max_context - PREFILL))
    report("the stored weights")
    plain = _backend(found[0], texts, setting)
    share = setting.seconds / max(1, len(found) - 1)
    texts = _within(plain, texts, share / 3)
    made: list[Weighed] = []
    for kind in found[1:]:
        needed = int(SPARE * kind.weight_bytes)
        if needed > available_memory():
            missing[kind.name] = f"it needs {needed >> 20} MiB of memory, more than is free"
            continue
        report(kind.name)
        both = [plain, _backend(kind, texts, setting)]
        base, quality = qualities(both, texts, report)
        report(f"steps with {kind.name}")
        speeds = _timed(both, setting, share / 2, stored.vocab)
        if not made:
            made.append(Weighed(found[0], base, tuple(pair[0] for pair in speeds)))
        made.append(Weighed(kind, quality, tuple(pair[1] for pair in speeds)))
    if not made:
        (base,) = qualities([plain], texts, report)
        speeds = _timed([plain], setting, share / 2, stored.vocab)
        made.append(Weighed(found[0], base, tuple(pair[0] for pair in speeds)))
    return made, missing


def _backend(kind: Kind, texts: Sequence[Passage], setting: Setting) -> CpuBackend:
    longest = max(len(passage.ids) for passage in texts)
    reach = max(longest, setting.context + PREFILL)
    pages = max(-(-longest // PAGE_SIZE), setting.sequences * -(-(setting.context + PAGE_SIZE) // PAGE_SIZE))
    stored = kind.origin.startswith("the checkpoint")
    made = CpuBackend(
        kind.model,
        pages=max(pages, -(-reach // PAGE_SIZE)),
        max_context=reach,
        step_tokens=max(CHUNK, PREFILL),
        max_running=max(1, setting.sequences),
        threads=setting.threads,
        kernels=setting.kernels,
        cache_dir=setting.cache_dir if stored else None,
        variant=kind.model.variant,
    )
    made.settle(wait=True)
    touch_pages(made, pages, setting.sequences)
    return made


def _within(backend: CpuBackend, texts: Sequence[Passage], seconds: float) -> list[Passage]:
    """As much of the texts as two models can read in so many seconds, at least a chunk."""
    first = [Passage(texts[0].name, texts[0].ids[: CHUNK + 1])]
    begin = time.perf_counter()
    qualities([backend], first, lambda _: None)
    left = max(CHUNK + 1, int(CHUNK * seconds / 2 / max(time.perf_counter() - begin, 1e-6)))
    kept = []
    for passage in texts:
        if left > 1:
            kept.append(Passage(passage.name, passage.ids[:left]))
            left -= len(passage.ids)
    return kept


def _timed(backends: Sequence[CpuBackend], setting: Setting, seconds: float, vocab: int) -> list[list[Speed]]:
    """Of each step the speed of each backend, of as many pairs as fit the step's share of the seconds."""
    every = steps(setting.context, setting.sequences, vocab)
    made = []
    for step in every:
        begin = time.perf_counter()
        for backend in backends:
            backend.run(step[2])
        took = time.perf_counter() - begin
        pairs = max(FEWEST, min(MOST, int(seconds / len(every) / max(took, 1e-6))))
        made.append(timed(backends, step, pairs))
    return made
