"""What the lab may know of a model and this machine from the inside: asked of the rooms that know, told as numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.measure.lab import inside as told

if TYPE_CHECKING:
    from tailrace.backends.cpu.machine import Ceilings, Point, StepPoints
    from tailrace.improve.weights import Weighed
    from tailrace.models import Checkpoint, ModelInfo

CEILINGS = 0.4
"""Share of the time that the roofline takes for the machine's ceilings."""
CONTEXT = 512
"""Tokens behind each sequence of a timed step."""
TOKENS, PASSAGES = 512, 8
"""Of the text that quality is measured on, at most."""


def of(path: Path, threads: int | None, quantize: str | None) -> told.Inside:
    """All of it, for a model's file or folder. Raises ModelError where that cannot be read."""
    from tailrace.backends import PAGE_SIZE
    from tailrace.models import describe, open_checkpoint

    checkpoint = open_checkpoint(path)
    info = describe(checkpoint, quantize=quantize)
    return told.Inside(
        name=checkpoint.name, context=info.config.max_context, weight_bytes=info.weight_bytes,
        kv_bytes_per_token=info.kv_bytes_per_token, page_tokens=PAGE_SIZE,
        pools=tuple(told.KvPool(group.window, group.page_bytes(info.kept)) for group in info.groups),
        pages=_pages(info),
        precisions=lambda seconds, say: _precisions(checkpoint, threads, seconds, say),
        roofline=lambda seconds, say: _roofline(checkpoint, threads, quantize, seconds, say),
    )  # fmt: skip


def _pages(info: ModelInfo) -> Callable[[int], tuple[int, ...]]:
    from tailrace.backends.groups import most_pages
    from tailrace.models.info import STEP_TOKENS

    return lambda tokens: tuple(most_pages(group.window, tokens, STEP_TOKENS) for group in info.groups)


def _precisions(checkpoint: Checkpoint, threads: int | None, seconds: float, say: told.Say) -> told.Precisions:
    from tailrace.backends.cpu.machine import this_machine
    from tailrace.improve.compare import PREFILL
    from tailrace.improve.text import passages
    from tailrace.improve.weights import Setting, evaluate
    from tailrace.models import load_model
    from tailrace.models.entry import prepared_dir
    from tailrace.text import load_text

    machine = this_machine(None, threads)
    model = load_model(checkpoint)
    longest = min(TOKENS, model.config.max_context - 1)
    texts = passages(load_text(checkpoint.text, vocab=model.vocab), None, tokens=longest, count=PASSAGES)
    setting = Setting(
        seconds, min(CONTEXT, model.config.max_context - PREFILL), threads=machine.threads, kernels=machine.kernels,
        cache_dir=prepared_dir(checkpoint.path),
    )  # fmt: skip
    found, missing = evaluate(model, texts, setting, say)
    return told.Precisions(
        tuple(map(_precision, found)), missing, "Python's language reference", machine.kernels, machine.threads
    )


def _precision(one: Weighed) -> told.Precision:
    quality = one.quality
    return told.Precision(
        name=one.kind.name, origin=one.kind.origin, weight_bytes=one.kind.weight_bytes, bits=one.kind.bits,
        quality=told.Quality(
            quality.tokens, quality.perplexity, quality.perplexity_change, quality.change_interval, quality.mean_kl,
            quality.kl_interval, quality.p99_kl, quality.same_choice,
        ),
        speeds=tuple(
            told.Speed(
                step.phase, step.context, step.sequences, step.tokens, step.seconds, step.ratio, step.low, step.high,
                step.pairs,
            )
            for step in one.speeds
        ),
    )  # fmt: skip


def _roofline(
    checkpoint: Checkpoint, threads: int | None, quantize: str | None, seconds: float, say: told.Say
) -> told.Roofline:
    from tailrace.backends.cpu.machine import measure, measure_roofline, this_machine
    from tailrace.backends.cpu.machine.roofline import CONTEXT, PREFILL
    from tailrace.models import load_model
    from tailrace.models.entry import prepared_dir
    from tailrace.models.quantise import quantise

    machine = this_machine(None, threads)
    ceilings = measure(machine, seconds=seconds * CEILINGS, report=say)
    model = load_model(checkpoint)
    if quantize is not None:
        model = quantise(model, quantize, threads=machine.threads)
    longest = model.config.max_context
    found = measure_roofline(
        model, ceilings, name=checkpoint.name, longest=longest, context=min(CONTEXT, longest // 2),
        prefill=min(PREFILL, longest), seconds=seconds * (1 - CEILINGS),
        cache_dir=prepared_dir(checkpoint.path) if not model.variant else None, report=say,
    )  # fmt: skip
    levels = [(one.level, one.bytes_per_second) for one in ceilings.bandwidths if one.threads == machine.threads]
    kinds = [(one.kind, 2 * one.multiply_adds_per_second) for one in ceilings.arithmetics
             if one.threads == machine.threads]  # fmt: skip
    return told.Roofline(
        machine=machine.cpu, kernels=machine.kernels, threads=machine.threads, weight_bytes=found.weight_bytes,
        memory=tuple(told.Roof(*level) for level in levels), arithmetic=tuple(told.Roof(*kind) for kind in kinds),
        steps=tuple(_step(step, ceilings) for step in found.steps), others_cores=found.others_cores,
        cores=machine.cores,
    )  # fmt: skip


def _step(step: StepPoints, ceilings: Ceilings) -> told.Step:
    levels = ceilings.levels(ceilings.machine.threads)
    return told.Step(
        name=step.step, phase=step.step.split()[0], sequences=step.sequences, tokens=step.tokens,
        operations=sum(point.operations for point in step.points),
        moved_bytes=sum(point.moved_bytes for point in step.points), seconds=step.seconds,
        share_of_ceiling=step.share_of_ceiling, parts=tuple(_operation(point, levels) for point in step.points),
    )  # fmt: skip


def _operation(point: Point, levels: list[str]) -> told.Operation:
    return told.Operation(
        point.operation, point.operations_per_byte, point.operations_per_second, point.ceiling_operations_per_second,
        point.seconds, point.bound, point.bound in levels,
    )  # fmt: skip
