"""Records a model's forward pass once, fuses what can be fused, and writes it as a native program.

The model calls `Recorder` as its `Ops`; nothing is computed. `Recorder.compile` then walks the recorded nodes:
linears that share an input become one operation, a residual add becomes part of the linear before it, norms round
their output to int8 on the way where an integer kernel reads it, and rotations happen in place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import Attention, Format, Rope, Weight
from tailrace.backends.kvdtype import BF16, KvDtype
from tailrace.native import _kernels
from tailrace.terms import ModelError

FLOATS = frozenset({Format.F32, Format.F16, Format.BF16})
MAX_HEAD_DIM, MAX_GROUP = 512, 64


@dataclass(eq=False)
class Node:
    """One recorded operation; it is also the value that it gives."""

    op: str
    inputs: tuple[Node, ...]
    width: int
    weight: Weight | None = None
    bias: Weight | None = None
    eps: float = 0.0
    head_dim: int = 0
    rope: Rope | None = None
    attention: Attention | None = None


class Recorder:
    """`Ops` whose values are nodes of a graph."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def embed(self, table: Weight) -> Node:
        return self._add(Node("embed", (), table.shape[1], weight=table))

    def linear(self, x: Node, weight: Weight, bias: Weight | None = None) -> Node:
        if weight.shape[1] != x.width:
            raise ModelError(f"{weight.name}: has {weight.shape[1]} inputs, but its input is {x.width} wide")
        return self._add(Node("linear", (x,), weight.shape[0], weight=weight, bias=bias))

    def rms_norm(self, x: Node, weight: Weight, eps: float) -> Node:
        return self._add(Node("norm", (x,), x.width, weight=weight, eps=eps))

    def head_norm(self, x: Node, weight: Weight, eps: float) -> Node:
        return self._add(Node("head_norm", (x,), x.width, weight=weight, eps=eps, head_dim=weight.shape[-1]))

    def rope(self, x: Node, rope: Rope, head_dim: int) -> Node:
        return self._add(Node("rope", (x,), x.width, rope=rope, head_dim=head_dim))

    def attention(self, q: Node, k: Node, v: Node, spec: Attention) -> Node:
        if spec.head_dim > MAX_HEAD_DIM or spec.heads // spec.kv_heads > MAX_GROUP:
            raise ModelError(
                f"layer {spec.layer}: the cpu backend has attention for heads of up to {MAX_HEAD_DIM} and groups of up "
                f"to {MAX_GROUP}, not {spec.head_dim} and {spec.heads // spec.kv_heads}"
            )
        return self._add(Node("attention", (q, k, v), spec.heads * spec.head_dim, attention=spec))

    def silu_mul(self, gate: Node, up: Node) -> Node:
        return self._add(Node("silu_mul", (gate, up), gate.width))

    def add(self, a: Node, b: Node) -> Node:
        return self._add(Node("add", (a, b), a.width))

    def wanted(self, x: Node) -> Node:
        """Rows are taken as early as they can be: whatever follows the last attention is computed for wanted rows only,
        since every operation but attention gives a row from that row alone."""
        last = next((n for n in reversed(self.nodes) if n.op == "attention"), None)
        after: set[Node] = set() if last is None else {last}
        for node in self.nodes:
            if any(i in after for i in node.inputs):
                after.add(node)
        taken: dict[Node, Node] = {}

        def take(node: Node) -> Node:
            if node not in taken:
                if node in after and node is not last:
                    taken[node] = self._add(replace(node, inputs=tuple(take(i) for i in node.inputs)))
                else:
                    taken[node] = self._add(Node("wanted", (node,), node.width))
            return taken[node]

        found = take(x)
        self.nodes = [n for n in self.nodes if n not in after or n is last]
        return found


@dataclass(frozen=True)
class Place:
    """Where a value lives: columns of a buffer."""

    buffer: int
    column: int = 0


@dataclass
class Compiler:
    """Writes recorded nodes into a native program. `packed` gives the tiles of a matrix, `floats` a vector's values,
    `groups` each layer's group and the number of its pages; `matrices` are
    the numbers that matrices have got, by name."""

    program: _kernels.Program
    packed: Callable[[Weight], NDArray[np.uint8]]
    floats: Callable[[Weight], NDArray[np.float32]]
    groups: Mapping[int, tuple[int, int]]
    max_context: int
    kv_dtype: KvDtype = BF16
    matrices: dict[str, int] = field(default_factory=dict)
    _places: dict[Node, Place] = field(default_factory=dict)
    _uses: Counter[Node] = field(default_factory=Counter)
    _vectors: dict[str, int] = field(default_factory=dict)
    _ropes: dict[int, int] = field(default_factory=dict)
    _free: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _widths: dict[int, int] = field(default_factory=dict)
    _holders: Counter[int] = field(default_factory=Counter)
    _rounded: set[Node] = field(default_factory=set)

    def compile(self, nodes: list[Node], logits: Node) -> None:
        """`logits` must be the last node's value, on wanted rows; sampling reads it."""
        followers: defaultdict[Node, list[Node]] = defaultdict(list)
        consumers: defaultdict[Node, list[Node]] = defaultdict(list)
        for node in nodes:
            for x in node.inputs:
                self._uses[x] += 1
                consumers[x].append(node)
            if node.op == "linear":
                followers[node.inputs[0]].append(node)
        self._uses[logits] += 1
        integer = {x for x, group in followers.items() if any(_matrix_of(n).format not in FLOATS for n in group)}
        residual = self._residuals(nodes, consumers)
        gated = gated_linears(nodes)
        done: set[Node] = set()
        for node in nodes:
            if node in done:
                continue
            if node in gated:
                gate, up = gated[node].inputs
                self._gate(gate, up, gated[node], integer)
                done.update((gate, up, gated[node]))
            elif node.op == "linear":
                group = [n for n in followers[node.inputs[0]] if n not in residual and n not in gated]
                group = [node] if node in residual else group
                self._linear(node.inputs[0], group, residual, integer, consumers)
                done.update(group)
                done.update(residual[n] for n in group if n in residual)
            else:
                self._other(node, integer)
                done.add(node)
        self.program.sample(self._places[logits].buffer)

    @staticmethod
    def _residuals(nodes: list[Node], consumers: dict[Node, list[Node]]) -> dict[Node, Node]:
        """Linears that only feed an add whose other side ends there: they may add in place. Linear to its add."""
        order = {n: i for i, n in enumerate(nodes)}
        found: dict[Node, Node] = {}
        for node in nodes:
            if node.op != "add":
                continue
            a, b = node.inputs
            if b.op != "linear" or a is b or len(consumers[b]) != 1:
                continue
            # every other reader of `a` must have been emitted before the linear that overwrites it
            if all(order[c] < order[b] for c in consumers[a] if c is not node):
                found[b] = node
        return found

    def _buffer(self, width: int) -> int:
        rows = -(-width // 32) * 32
        buffer = self._free[rows].pop() if self._free[rows] else self.program.buffer(width)
        self._widths[buffer] = rows
        return buffer

    def _put(self, node: Node, place: Place) -> None:
        self._places[node] = place
        self._holders[place.buffer] += 1

    def _read(self, node: Node) -> Place:
        return self._places[node]

    def _release(self, *nodes: Node) -> None:
        """One use of each is over; a buffer whose values are all over is free again."""
        for node in nodes:
            self._uses[node] -= 1
            if self._uses[node] == 0:
                buffer = self._places[node].buffer
                self._holders[buffer] -= 1
                if self._holders[buffer] == 0:
                    self._free[self._widths[buffer]].append(buffer)

    def _matrix(self, weight: Weight) -> int:
        if weight.name not in self.matrices:
            n, k = weight.shape
            self.matrices[weight.name] = self.program.weight(weight.format.value, n, k, self.packed(weight))
        return self.matrices[weight.name]

    def _vector(self, weight: Weight | None) -> int:
        if weight is None:
            return -1
        if weight.name not in self._vectors:
            self._vectors[weight.name] = self.program.vector(self.floats(weight))
        return self._vectors[weight.name]

    def _rope(self, rope: Rope) -> int:
        if id(rope) not in self._ropes:
            angle = np.arange(self.max_context, dtype=np.float32)[:, None] * rope.inv_freq[None, :].astype(np.float32)
            scale = np.float32(rope.scale)
            self._ropes[id(rope)] = self.program.rope(np.cos(angle) * scale, np.sin(angle) * scale)
        return self._ropes[id(rope)]

    def _linear(
        self,
        x: Node,
        group: list[Node],
        residual: dict[Node, Node],
        integer: set[Node],
        consumers: dict[Node, list[Node]],
    ) -> None:
        source = self._read(x)
        self._round(x, integer)
        first = group[0]
        if first in residual:
            add = residual[first]
            target = self._read(add.inputs[0])
            segment = (self._matrix(_matrix_of(first)), target.buffer, target.column, self._vector(first.bias))
            self.program.linear(source.buffer, [segment], True)
            self._put(add, target)
            self._release(add.inputs[0], x)
            return
        alone = [n for n in group if any(c.op == "linear" for c in consumers[n])]
        shared = [n for n in group if n not in alone]
        places = {n: Place(self._buffer(n.width)) for n in alone}
        if shared:
            columns = np.cumsum([0] + [-(-n.width // 16) * 16 for n in shared])
            buffer = self._buffer(int(columns[-1]))
            places |= {n: Place(buffer, int(c)) for n, c in zip(shared, columns[:-1], strict=True)}
        segments = [
            (self._matrix(_matrix_of(n)), places[n].buffer, places[n].column, self._vector(n.bias)) for n in group
        ]
        self.program.linear(source.buffer, segments, False)
        for n in group:
            self._put(n, places[n])
        self._release(*[x] * len(group))

    def _gate(self, gate: Node, up: Node, node: Node, integer: set[Node]) -> None:
        x = gate.inputs[0]
        self._round(x, integer)
        place = Place(self._buffer(node.width))
        first, second = ((self._matrix(_matrix_of(n)), self._vector(n.bias)) for n in (gate, up))
        self.program.gate(self._read(x).buffer, first, second, place.buffer)
        self._rounded.add(node)
        self._put(node, place)
        self._release(x, x)

    def _round(self, x: Node, integer: set[Node]) -> None:
        if x in integer and x not in self._rounded:
            self.program.quantise(self._read(x).buffer)
            self._rounded.add(x)

    def _other(self, node: Node, integer: set[Node]) -> None:
        inputs = [self._read(x) for x in node.inputs]
        rounds = node in integer
        match node.op:
            case "embed":
                place = Place(self._buffer(node.width))
                self.program.embed(self._matrix(_matrix_of(node)), place.buffer, node.width)
            case "norm":
                place = Place(self._buffer(node.width))
                weight = self._vector(node.weight)
                self.program.norm(inputs[0].buffer, weight, node.eps, node.width, place.buffer, rounds)
                if rounds:
                    self._rounded.add(node)
            case "head_norm":
                place, heads = inputs[0], node.width // node.head_dim
                weight = self._vector(node.weight)
                self.program.head_norm(place.buffer, place.column, weight, node.eps, heads, node.head_dim)
            case "rope":
                place, heads = inputs[0], node.width // node.head_dim
                assert node.rope is not None
                self.program.rotate(place.buffer, place.column, self._rope(node.rope), heads, node.head_dim)
            case "attention":
                place = Place(self._buffer(node.width))
                self._attention(node, inputs, place)
            case "silu_mul":
                place = Place(self._buffer(node.width))
                gate, up = inputs
                self.program.silu_mul(gate.buffer, gate.column, up.buffer, up.column, node.width, place.buffer, rounds)
                if rounds:
                    self._rounded.add(node)
            case "add":
                place = Place(self._buffer(node.width))
                self.program.add(inputs[0].buffer, inputs[1].buffer, node.width, place.buffer)
            case "wanted":
                self._free.clear()  # buffers of all tokens are not for wanted rows
                place = Place(self.program.select(inputs[0].buffer, node.width))
                self._widths[place.buffer] = -(-node.width // 32) * 32
            case _:
                raise AssertionError(node.op)
        self._put(node, place)
        self._release(*node.inputs)
        if node.op == "wanted":
            self._free.clear()

    def _attention(self, node: Node, inputs: list[Place], place: Place) -> None:
        spec = node.attention
        assert spec is not None
        q, k, v = inputs
        key, value = self.kv_dtype.of(spec.layer)
        group, pages = self.groups[spec.layer]
        pool = self.program.add_pool(pages, spec.kv_heads, spec.head_dim, str(key), str(value), group)
        self.program.attention(
            q.buffer,
            q.column,
            k.buffer,
            k.column,
            v.buffer,
            v.column,
            place.buffer,
            pool,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.scale,
            spec.window or 0,
        )


def gated_linears(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Linears whose values exist only to be gated, and then only to be rounded: each to its silu_mul. The two and what
    follows them are one operation."""
    consumers: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        for x in node.inputs:
            consumers[x].append(node)
    found: dict[Node, Node] = {}
    for node in nodes:
        if node.op != "silu_mul" or node.width % 32:
            continue
        gate, up = node.inputs
        pair = gate is not up and gate.op == up.op == "linear" and gate.inputs == up.inputs
        rounded = all(n.op == "linear" and _matrix_of(n).format not in FLOATS for n in consumers[node])
        if pair and rounded and len(consumers[gate]) == len(consumers[up]) == 1:
            found |= {gate: node, up: node}
    return found


def _matrix_of(node: Node) -> Weight:
    assert node.weight is not None
    return node.weight
