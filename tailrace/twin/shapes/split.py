"""What each rank of a parallel deployment holds, and which degrees are valid.

Tensor parallelism (TP) divides heads, widths and the vocabulary; pipeline parallelism (PP) divides layers; data
parallelism (DP) repeats attention; expert parallelism (EP) gives whole experts to groups of the TP x DP ranks, and
what is left of those divides each expert. Without EP, every one of the DP ranks is a replica of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tailrace.terms import InvalidInput
from tailrace.twin.shapes.caches import CacheKind
from tailrace.twin.shapes.model import ModelShape
from tailrace.twin.shapes.precision import Format, Scheme
from tailrace.twin.shapes.tensors import Part, Split, Tensor

VOCAB_PADDING = 64
"""Rows of embedding and head are padded to a multiple of this before they are divided, as vLLM and SGLang do."""


@dataclass(frozen=True)
class Parallel:
    """Degrees of parallelism. EP spans the TP x DP ranks of a stage and divides their number."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that divide one expert."""
        return self.tp * self.dp // self.ep if self.ep > 1 else self.tp

    def __str__(self) -> str:
        said = [f"{name.upper()} {value}" for name, value in vars(self).items() if value > 1]
        return ", ".join(said) or "one device"


@dataclass(frozen=True, eq=False)
class Weights:
    """A model stored in a scheme."""

    shape: ModelShape
    scheme: Scheme

    @cached_property
    def pieces(self) -> tuple[tuple[int | None, Tensor, Format], ...]:
        """Every tensor of the language model and its encoders, with its layer and its format."""
        return tuple((layer, tensor, self.scheme.of(layer, tensor)) for layer, tensor in self.shape.tensors())

    @cached_property
    def kinds(self) -> tuple[tuple[Tensor, Format], ...]:
        """Each tensor that differs from the others, once."""
        return tuple(dict.fromkeys((tensor, form) for _, tensor, form in self.pieces))

    @cached_property
    def stacks(self) -> tuple[tuple[tuple[tuple[Tensor, Format], ...], ...], tuple[int, ...]]:
        """What layers are made of, each that differs once, and which of them each layer is."""
        layers: list[list[tuple[Tensor, Format]]] = [[] for _ in self.shape.layers]
        for layer, tensor, form in self.pieces:
            if layer is not None:
                layers[layer].append((tensor, form))
        found: dict[tuple[tuple[Tensor, Format], ...], int] = {}
        which = tuple(found.setdefault(tuple(layer), len(found)) for layer in layers)
        return tuple(found), which

    @cached_property
    def bytes(self) -> int:
        """Of all of it."""
        return sum(form.bytes(tensor) for _, tensor, form in self.pieces)

    @cached_property
    def by_format(self) -> dict[str, int]:
        """Bytes of each format, most first."""
        sums: dict[str, int] = {}
        for _, tensor, form in self.pieces:
            sums[form.name] = sums.get(form.name, 0) + form.bytes(tensor)
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @cached_property
    def mtp_bytes(self) -> int:
        """Of layers of multi-token prediction, which engines load for speculation only."""
        last = len(self.shape.layers)
        return sum(self.scheme.bytes(last, tensor) for tensor in self.shape.mtp)


def objections(weights: Weights, parallel: Parallel) -> list[str]:
    """Why a model cannot be divided so; nothing where it can."""
    found: dict[str, None] = {}
    shape = weights.shape
    if parallel.ep > 1:
        if not shape.experts:
            found["EP needs experts, and this model has none"] = None
        elif parallel.tp * parallel.dp % parallel.ep:
            found[f"EP {parallel.ep} does not divide TP x DP = {parallel.tp * parallel.dp}"] = None
    if parallel.pp > len(shape.layers):
        found[f"PP {parallel.pp} is more than the {len(shape.layers)} layers"] = None
    if not found:
        for tensor, form in weights.kinds:
            found.update((why, None) for why in _against(tensor, form, parallel))
    return list(found)


def check(weights: Weights, parallel: Parallel) -> None:
    """Raises InvalidInput, which says why, where a model cannot be divided so."""
    found = objections(weights, parallel)
    if found:
        raise InvalidInput(
            f"{weights.shape.name} cannot be divided by {parallel}: {'; '.join(found)}", param="parallel"
        )


def _against(tensor: Tensor, form: Format, parallel: Parallel) -> Iterator[str]:
    """What speaks against dividing one tensor."""
    tp = parallel.tp
    if tensor.split is Split.EXPERTS:
        if parallel.ep > 1 and tensor.times % parallel.ep:
            yield f"EP {parallel.ep} does not divide {tensor.times} experts"
        yield from _widths(tensor, form, parallel.expert_tp)
        return
    if tp == 1 or tensor.split in (Split.WHOLE, Split.VOCAB):
        return
    if tensor.split is Split.KV:
        if tensor.units % tp and tp % tensor.units:
            what = "KV heads" if tensor.part is Part.ATTENTION else "groups of heads"
            yield f"{tensor.units} {what} and TP {tp}: neither divides the other"
        return
    if tensor.units and tensor.units % tp:
        yield f"TP {tp} does not divide {tensor.units} heads"
        return
    yield from _widths(tensor, form, tp) if not tensor.units else ()


def _widths(tensor: Tensor, form: Format, degree: int) -> Iterator[str]:
    """A width divides evenly, and what is left holds whole groups of quantised weights."""
    if degree == 1 or tensor.columns == 1:
        return
    rows, columns = tensor.rows, tensor.columns
    divided = columns if _inward(tensor) else rows
    if divided % degree:
        yield f"{tensor.name} of {divided} cannot be divided by {degree}"
        return
    part = (rows, columns // degree) if _inward(tensor) else (rows // degree, columns)
    if not form.pads and form.whole(rows, columns) and not form.whole(*part):
        group = form.group or form.tile
        yield f"{form.name} has groups of {group}, which {tensor.name} of {divided} by {degree} would cut"


def _inward(tensor: Tensor) -> bool:
    """Whether a tensor is divided by its inputs."""
    if tensor.split is Split.EXPERTS:
        return ".down_proj" in tensor.name
    return tensor.split is Split.COLUMNS


def part_of(tensor: Tensor, form: Format, parallel: Parallel) -> Tensor:
    """The largest part of a tensor that a rank holds. Formats that are padded have whole groups."""
    tp = parallel.tp
    if tensor.split is Split.EXPERTS:
        times = -(-tensor.times // parallel.ep)
        return replace(_cut(tensor, form, parallel.expert_tp), times=times, used=min(tensor.used, times))
    if tp == 1 or tensor.split is Split.WHOLE:
        return tensor
    if tensor.split is Split.VOCAB:
        padded = -(-tensor.rows // VOCAB_PADDING) * VOCAB_PADDING
        return replace(tensor, rows=-(-padded // tp))
    if tensor.split is Split.KV:
        return replace(tensor, rows=tensor.rows // tensor.units * -(-tensor.units // tp))
    return _cut(tensor, form, tp)


def _cut(tensor: Tensor, form: Format, degree: int) -> Tensor:
    if degree == 1 or (_inward(tensor) and tensor.columns == 1):
        return tensor
    step = form.group if form.pads else 1
    size = -(-(tensor.columns if _inward(tensor) else tensor.rows) // degree)
    size = -(-size // step) * step
    return replace(tensor, columns=size) if _inward(tensor) else replace(tensor, rows=size)


def stages(layers: int, pp: int) -> list[range]:
    """Layers of each stage, as even as they can be; where they do not divide, middle stages have one more (the first
    and the last hold embedding and head)."""
    size, more = divmod(layers, pp)
    order = sorted(range(pp), key=lambda stage: (stage in (0, pp - 1), stage == pp - 1, stage))
    sizes = [size + (stage in order[:more]) for stage in range(pp)]
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return [range(start, start + count) for start, count in zip(starts, sizes, strict=True)]


@dataclass(frozen=True)
class Rank:
    """The fullest rank of one stage. KV is a request's: of layers of this stage, with heads divided by TP."""

    stage: int
    layers: range
    weight_bytes: int
    parameters: int


def ranks(weights: Weights, parallel: Parallel) -> tuple[Rank, ...]:
    """What the fullest rank of each stage holds. Raises InvalidInput as `check`. Encoders of images lie whole on every
    rank of the first stage; embeddings are there, heads in the last (both of them where they are one)."""
    check(weights, parallel)
    shape = weights.shape
    spans = stages(len(shape.layers), parallel.pp)
    stage_of = {layer: stage for stage, span in enumerate(spans) for layer in span}
    held = {(tensor, form): part_of(tensor, form, parallel) for tensor, form in weights.kinds}
    sizes, parameters = [0] * parallel.pp, [0] * parallel.pp
    stacks, stack_of = weights.stacks
    stack_bytes = [sum(form.bytes(held[tensor, form]) for tensor, form in stack) for stack in stacks]
    stack_parameters = [sum(held[piece].parameters for piece in stack) for stack in stacks]
    for index, stack in enumerate(stack_of):
        sizes[stage_of[index]] += stack_bytes[stack]
        parameters[stage_of[index]] += stack_parameters[stack]
    for layer, tensor, form in weights.pieces:
        outside: set[int] = _outside(tensor, shape, parallel.pp) if layer is None else set()
        for stage in outside:
            sizes[stage] += form.bytes(held[tensor, form])
            parameters[stage] += held[tensor, form].parameters
    return tuple(Rank(n, spans[n], sizes[n], parameters[n]) for n in range(parallel.pp))


def _outside(tensor: Tensor, shape: ModelShape, pp: int) -> set[int]:
    """Stages that hold what is in no layer."""
    if tensor.part is Part.EMBEDDING:
        return {0, pp - 1} if shape.tied else {0}
    return {pp - 1} if tensor.part in (Part.HEAD, Part.NORM) else {0}


def request_bytes(shape: ModelShape, context: int, value_bytes: float, parallel: Parallel, layers: range) -> float:
    """KV bytes of one request on the fullest rank of a stage with these layers."""
    return sum(
        cache.request_bytes(context, value_bytes, parallel.tp) for layer, cache in shape.caches if layer in layers
    )


def copies(shape: ModelShape, tp: int) -> float:
    """How many times the ranks of tensor parallelism keep the same KV: 1 where heads divide, TP for a latent."""
    whole = sum(c.token_bytes(2) for _, c in shape.caches if c.kind is not CacheKind.STATE)
    if not whole:
        return 1.0
    each = sum(-(-c.heads // tp) * c.token_bytes(2) / c.heads if c.heads else c.token_bytes(2) for _, c in shape.caches
               if c.kind is not CacheKind.STATE)  # fmt: skip
    return tp * each / whole
