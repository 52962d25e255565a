"""How many operations and bytes the parts of a step are made of, counted from a model's recorded forward pass.

Operations: two a multiply-add; for what is no product, the nominal numbers of `ELEMENTWISE`; the exponentials of
softmax are not counted. Bytes: what has to be moved if every value is moved once. *Cold* ones (weights, and the KV of
earlier steps) come from as far as the whole step's cold bytes reach, *warm* ones (what one operation hands the next)
from as near as they fit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tailrace.backends import Attention, Forward, Weight
from tailrace.backends.cpu.record import Node, Recorder, gated_linears
from tailrace.native import _kernels

INTEGER = ("int8_by_int4", "int8_by_int6", "int8_by_int8")
"""The multiply-adds of quantised matrices, whose input is rounded to int8."""

KINDS = (*INTEGER, "fp32", "bf16", "fp16")
"""All multiply-adds that a packed matrix may be made for."""

ELEMENTWISE = {"embed": 2, "norm": 4, "head_norm": 4, "rope": 3, "silu_mul": 5, "add": 1, "wanted": 0}
"""Nominal operations a value that comes out."""

ROUNDING, SAMPLING = 4, 1
"""Nominal operations a value: rounding activations to int8; finding the largest logit."""

WIDENED_ROWS = 6
"""(query, head) rows above which attention widens keys and values to float32 once for all of them."""

PAIRS = "_pairs"
"""Ends the kind of attention's multiply-adds where builds that multiply pairs of bf16 would do so."""

PAIRED_DIMS = 32
"""They do so for head sizes that are multiples of it."""


@dataclass(frozen=True)
class Shape:
    """A step: so many sequences, each with `count` tokens after `context` earlier ones. One row of each is wanted."""

    sequences: int
    count: int
    context: int

    @property
    def rows(self) -> int:
        return self.sequences * self.count

    @property
    def wanted(self) -> int:
        return self.sequences


@dataclass(frozen=True)
class Work:
    """What one part of a step does. `operations` are by the kind of arithmetic that they need. `span_bytes`: the most
    warm bytes of any one operation in it, which say where they fit."""

    operations: Mapping[str, int]
    cold_bytes: int
    warm_bytes: int
    span_bytes: int

    @property
    def total(self) -> int:
        return sum(self.operations.values())

    @property
    def moved_bytes(self) -> int:
        return self.cold_bytes + self.warm_bytes


def added(parts: Iterable[Work]) -> Work:
    """All of them together."""
    operations: Counter[str] = Counter()
    cold = warm = span = 0
    for part in parts:
        operations.update(part.operations)
        cold += part.cold_bytes
        warm += part.warm_bytes
        span = max(span, part.span_bytes)
    return Work(dict(operations), cold, warm, span)


def single(operations: Mapping[str, int], cold_bytes: int, warm_bytes: int) -> Work:
    """Of one operation."""
    return Work(operations, cold_bytes, warm_bytes, warm_bytes)


@dataclass(frozen=True, eq=False)
class Product:
    """Matrices that one operation multiplies with the same input. `wanted`: with the wanted rows only. `adds`: its
    output is added to what is there. `gates`: it gives silu(first) * second, rounded, and keeps neither product.
    `rounds`: its input has to be rounded first, which is an operation apart."""

    weights: tuple[Weight, ...]
    wanted: bool
    adds: bool
    gates: bool = False
    rounds: bool = False

    @property
    def inputs(self) -> int:
        return self.weights[0].shape[1]

    @property
    def outputs(self) -> int:
        return self.weights[0].shape[0] if self.gates else sum(w.shape[0] for w in self.weights)

    @property
    def label(self) -> str:
        """What it is, from the names of the weights: q+k+v, o, gate+up+silu, down, head."""
        return "+".join([_short(w.name) for w in self.weights] + ["silu"] * self.gates)

    @property
    def kind(self) -> tuple[str, str, tuple[tuple[int, ...], ...]]:
        """What products of one row of the table have in common: label, formats, shapes."""
        formats = "+".join(dict.fromkeys(w.format.value for w in self.weights))
        return self.label, formats, tuple(w.shape for w in self.weights)

    def work(self, rows: int) -> Work:
        """With this many rows."""
        operations: Counter[str] = Counter()
        cold = 0
        for w in self.weights:
            n, k = w.shape
            kind, *_, size = _kernels.packed_shape(w.format.value, n, k)
            operations[kind] += 2 * rows * n * k
            cold += size
        into = rounded_bytes(self.inputs) if any(map(_integer, self.weights)) else 4 * self.inputs
        out = rounded_bytes(self.outputs) if self.gates else 4 * self.outputs * (2 if self.adds else 1)
        if self.gates:
            operations["fp32"] += rows * self.outputs * (ELEMENTWISE["silu_mul"] + ROUNDING)
        return single(dict(operations), cold, rows * (into + out))


def rounded_bytes(values: int) -> int:
    """Of so many rounded activations: a byte each, and 8 bytes (scale and sum) a block of 32."""
    return values + -(-values // 32) * 8


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a model's step."""

    products: tuple[Product, ...]
    attentions: tuple[Attention, ...]
    rows: tuple[tuple[Node, bool], ...]
    """The other operations, and whether each works on wanted rows only."""
    vocab: int

    def by_kind(self) -> dict[tuple[str, str, tuple[tuple[int, ...], ...]], list[Product]]:
        """Products of the same kind, in the order of the model."""
        found: defaultdict[tuple[str, str, tuple[tuple[int, ...], ...]], list[Product]] = defaultdict(list)
        for product in self.products:
            found[product.kind].append(product)
        return dict(found)

    def attention(self, shape: Shape) -> Work:
        """Of all layers: scores and weighted values. The KV of this step's own tokens is warm."""
        return added(_attention(spec, shape) for spec in self.attentions)

    def elementwise(self, shape: Shape) -> Work:
        """All that handles each row by itself: norms, rotations, rounding, activations, storing of keys and values."""
        work = [_elementwise(node, shape.wanted if wanted else shape.rows) for node, wanted in self.rows]
        for product in self.products:
            if product.rounds:
                rows = shape.wanted if product.wanted else shape.rows
                work.append(single({"fp32": ROUNDING * rows * product.inputs}, 0, rows * rounded_bytes(product.inputs)))
        for spec in self.attentions:
            stored = shape.rows * 2 * spec.kv_heads * spec.head_dim
            work.append(single({"fp32": stored}, 0, stored * (4 + 2)))
        return added(work)

    def sampling(self, shape: Shape) -> Work:
        """Greedy choice of a token from each wanted row's logits."""
        logits = shape.wanted * self.vocab
        return single({"fp32": SAMPLING * logits}, 0, 4 * logits)


def parts_of(model: Forward) -> Parts:
    """The parts of the model's step, as the cpu backend runs them. Raises ModelError as recording does."""
    recorder = Recorder()
    model.forward(recorder)
    wanted: set[Node] = set()
    readers: Counter[Node] = Counter(x for node in recorder.nodes for x in node.inputs)
    for node in recorder.nodes:
        if node.op == "wanted" or any(x in wanted for x in node.inputs):
            wanted.add(node)
    added_to = {node.inputs[1] for node in recorder.nodes if node.op == "add"}
    in_place = {x for x in added_to if x.op == "linear" and readers[x] == 1}
    gated = gated_linears(recorder.nodes)
    rounded = set(gated.values())
    groups: defaultdict[tuple[Node, Node | None], list[Node]] = defaultdict(list)
    others, attentions = [], []
    for node in recorder.nodes:
        if node.op == "linear":
            groups[node.inputs[0], gated.get(node)].append(node)
        elif node.attention is not None:
            attentions.append(node.attention)
        elif node not in rounded and not (node.op == "add" and node.inputs[1] in in_place):
            others.append((node, node in wanted))
    products = []
    for (x, silu), nodes in groups.items():
        rounds = x not in rounded and any(_integer(_weight(n)) for n in nodes)
        if rounds:
            rounded.add(x)
        weights = tuple(_weight(n) for n in (nodes if silu is None else silu.inputs))
        products.append(Product(weights, x in wanted, all(n in in_place for n in nodes), silu is not None, rounds))
    return Parts(tuple(products), tuple(attentions), tuple(others), model.vocab)


def _attention(spec: Attention, shape: Shape) -> Work:
    seen = sum(min(shape.context + i + 1, spec.window or shape.context + i + 1) for i in range(shape.count))
    operations = 4 * shape.sequences * spec.heads * spec.head_dim * seen
    token = 2 * 2 * spec.kv_heads * spec.head_dim  # bytes of a token's keys and values, bf16
    earlier = min(shape.context, spec.window - 1) if spec.window else shape.context
    own = shape.rows * (token + 2 * 4 * spec.heads * spec.head_dim)
    rows = shape.count * (spec.heads // spec.kv_heads)
    kind = ("fp32" if rows > WIDENED_ROWS else "bf16") + (PAIRS if spec.head_dim % PAIRED_DIMS == 0 else "")
    return single({kind: operations}, shape.sequences * earlier * token, own)


def _elementwise(node: Node, rows: int) -> Work:
    values = rows * node.width
    inputs = 0 if node.op == "embed" else len(node.inputs)
    cold = 0
    if node.op == "embed":
        table = _weight(node)
        cold = rows * (_kernels.packed_shape(table.format.value, *table.shape)[3] // table.shape[0])
    return single({"fp32": ELEMENTWISE[node.op] * values}, cold, 4 * values * (inputs + 1))


def _integer(weight: Weight) -> bool:
    return _kernels.packed_shape(weight.format.value, *weight.shape)[0] in INTEGER


def _weight(node: Node) -> Weight:
    assert node.weight is not None
    return node.weight


def _short(name: str) -> str:
    last = name.removesuffix(".weight").rsplit(".", 1)[-1].removesuffix("_proj")
    return "head" if last in ("lm_head", "embed_tokens") else last
