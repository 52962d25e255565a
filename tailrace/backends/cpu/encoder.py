"""The native encoder backend: an encoder's operations are recorded once and replayed by C++ kernels over packed texts.

Products are of 16-bit integers (native/encoder.h says how they are rounded); all else is float32.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import Format, Weight
from tailrace.backends.cpu import as_floats, available_kernels
from tailrace.backends.cpu.threads import usable_cores
from tailrace.backends.encoding import Encoding, Pooling, TextBatch
from tailrace.terms import ModelError

PLAIN = (Format.F32, Format.F16, Format.BF16)


@dataclass(eq=False)
class Node:
    """One recorded operation; it is also the value that it gives."""

    op: str
    inputs: tuple[Node, ...]
    width: int
    weights: tuple[Weight | None, ...] = ()
    eps: float = 0.0
    first: int = 0
    heads: int = 0
    how: str = ""


class Recorder:
    """`EncoderOps` whose values are nodes of a graph."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def embed(self, words: Weight, positions: Weight, kinds: Weight | None, first: int) -> Node:
        return self._add(Node("embed", (), words.shape[1], (words, positions, kinds), first=first))

    def linear(self, x: Node, weight: Weight, bias: Weight | None) -> Node:
        return self._add(Node("linear", (x,), weight.shape[0], (weight, bias)))

    def layer_norm(self, x: Node, weight: Weight, bias: Weight, eps: float) -> Node:
        return self._add(Node("norm", (x,), x.width, (weight, bias), eps=eps))

    def gelu(self, x: Node) -> Node:
        return self._add(Node("gelu", (x,), x.width))

    def tanh(self, x: Node) -> Node:
        return self._add(Node("tanh", (x,), x.width))

    def attention(self, q: Node, k: Node, v: Node, heads: int, scale: float) -> Node:
        return self._add(Node("attention", (q, k, v), q.width, heads=heads, eps=scale))

    def add(self, a: Node, b: Node) -> Node:
        return self._add(Node("add", (a, b), a.width))

    def pool(self, x: Node, how: Pooling) -> Node:
        return self._add(Node("pool", (x,), x.width, how=how))

    def unit(self, x: Node) -> Node:
        return self._add(Node("unit", (x,), x.width))


class CpuEncoder:
    """Runs an encoder on this machine's cores. A text's bits are the same whatever is beside it, on any number of
    threads. `kernels`: one of `available_kernels()`; None takes the best. Raises ModelError for a model whose widths
    the kernels do not have."""

    name = "cpu"

    def __init__(self, model: Encoding, *, threads: int | None = None, kernels: str | None = None) -> None:
        from tailrace.native import _encoder

        names = available_kernels()
        if kernels is not None and kernels not in names:
            raise ModelError(f"kernels {kernels!r} cannot run on this machine; it can run: {', '.join(names)}")
        self._model = model
        self._native = _encoder.Encoder(kernels or names[0], threads or usable_cores(), model.longest)
        recorder = Recorder()
        result = model.forward(recorder)
        compiler = Compiler(self._native, recorder.nodes)
        compiler.compile(result)
        self.kernels = self._native.kernels
        self.threads = self._native.threads
        self.width = model.width
        self.weight_bytes = self._native.nbytes + compiler.table_bytes
        self.progress = 0

    @property
    def work(self) -> int:
        """Tasks of the threads; a batch has hundreds."""
        return self._native.worked

    def encode(self, batch: TextBatch) -> NDArray[np.float32]:
        batch.check(self._model.vocab, self._model.kinds, self._model.longest)
        out = np.empty((batch.texts, self.width), np.float32)
        self._native.run(batch.tokens, batch.kinds, batch.starts, out)
        self.progress += len(batch.tokens)
        return out


class Compiler:
    """Writes recorded nodes into a native encoder: linears of one input become one, with what follows them (a bend, or
    the sum with their residual); values that live within a stage (between two attentions) share memory of a panel of
    rows."""

    def __init__(self, native: object, nodes: Sequence[Node]) -> None:
        from tailrace.native import _encoder

        assert isinstance(native, _encoder.Encoder)
        self._native = native
        self._nodes = nodes
        self._readers: defaultdict[Node, list[Node]] = defaultdict(list)
        for node in nodes:
            for x in node.inputs:
                self._readers[x].append(node)
        self._stages = self._staged()
        self._places: dict[Node, tuple[int, int]] = {}  # buffer and column
        self._uses: Counter[int] = Counter()  # readers to come, of each buffer
        self._free: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        self._kept: dict[int, tuple[int, bool]] = {}
        self.table_bytes = 0

    def compile(self, result: Node) -> None:
        """All operations, in order; `result` is what the encoder gives."""
        for node in self._nodes:
            if node.op == "linear":
                if node not in self._places:
                    self._linear(node)
            elif node not in self._places:
                self._other(node)
        self._native.finish(self._places[result][0])

    def _staged(self) -> dict[Node, int]:
        """The stage of each operation: attention and pooling look at several rows, and have one of their own."""
        stages: dict[Node, int] = {}
        stage = 0
        for node in self._nodes:
            alone = node.op in ("attention", "pool")
            stages[node] = stage = stage + alone
            stage += alone
        return stages

    def _linear(self, node: Node) -> None:
        x = node.inputs[0]
        group = [n for n in self._readers[x] if n.op == "linear" and self._plain(n)] if self._plain(node) else [node]
        last, bend, residual = node, "", -1
        readers = self._readers[node]
        if len(group) == 1 and len(readers) == 1 and readers[0].op in ("gelu", "tanh"):
            last, bend = readers[0], readers[0].op
        elif len(group) == 1 and len(readers) == 1 and self._summed(node) is not None:
            last = readers[0]
            other = self._summed(node)
            assert other is not None
            residual = self._places[other][0]
        width = sum(n.width for n in group)
        if len(group) == 1:
            group = [last]
        readers_to_come = [reader for n in group for reader in self._readers[n]]
        buffer = self._buffer(width, self._stages[node], readers_to_come)
        source = self._places[x][0]
        members = [node] if last is not node else group
        self._native.linear(source, self._matrix(members), self._bias(members), residual, bend, buffer)
        column = 0
        for n in group:
            self._places[n] = (buffer, column)
            column += n.width
        if last is not node:
            self._places[node] = (buffer, 0)
        self._read([x] * len(members))
        if residual >= 0:
            self._release(residual)

    def _plain(self, node: Node) -> bool:
        """Whether nothing can be done to its values on the way."""
        readers = self._readers[node]
        return len(readers) == 1 and readers[0].op == "attention"

    def _summed(self, node: Node) -> Node | None:
        """The other side of the sum that alone reads the linear, where that is known already and of the same width."""
        add = self._readers[node][0]
        if add.op != "add":
            return None
        other = add.inputs[0] if add.inputs[1] is node else add.inputs[1]
        return other if other is not node and other in self._places and self._places[other][1] == 0 else None

    def _other(self, node: Node) -> None:
        native, stage = self._native, self._stages[node]
        readers = self._readers[node]
        match node.op:
            case "embed":
                words, positions, kinds = (-1 if w is None else self._table(w) for w in node.weights)
                buffer = self._buffer(node.width, stage, readers)
                native.embed(words, positions, kinds, node.first, buffer)
            case "norm":
                weight, bias = (native.vector(_floats(w)) for w in node.weights)
                source = self._at(node.inputs[0])
                buffer = self._buffer(node.width, stage, readers)
                native.norm(source, weight, bias, node.eps, buffer)
            case "attention":
                places = [self._places[x] for x in node.inputs]
                if len({place for place, _ in places}) > 1:
                    raise ModelError("queries, keys and values must be of one input")
                q, k, v = (column for _, column in places)
                buffer = self._buffer(node.width, stage, readers)
                head_dim = node.width // node.heads
                native.attention(places[0][0], q, k, v, node.heads, head_dim, node.eps, buffer)
            case "pool":
                source = self._at(node.inputs[0])
                buffer = self._buffer(node.width, stage, readers)
                native.pool(source, node.how, buffer)
            case "unit":
                buffer = self._at(node.inputs[0])
                if len(self._readers[node.inputs[0]]) != 1:
                    raise ModelError("a value is needed after it was scaled to length one")
                native.unit(buffer)
                self._uses[buffer] += len(readers)
            case _:
                raise ModelError(f"the cpu backend has no {node.op} of its own for encoders")
        self._places[node] = (buffer, 0)
        self._read(node.inputs)

    def _at(self, node: Node) -> int:
        buffer, column = self._places[node]
        assert column == 0
        return buffer

    def _buffer(self, width: int, stage: int, readers: Sequence[Node]) -> int:
        """A buffer for a value that is written in this stage and read by these."""
        kind = (width, any(self._stages[reader] != stage for reader in readers))
        buffer = self._free[kind].pop() if self._free[kind] else self._native.buffer(width)
        self._kept[buffer] = kind
        self._uses[buffer] = len(readers)
        return buffer

    def _read(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._release(self._places[node][0])

    def _release(self, buffer: int) -> None:
        self._uses[buffer] -= 1
        if self._uses[buffer] == 0:
            self._free[self._kept[buffer]].append(buffer)

    def _matrix(self, nodes: Sequence[Node]) -> int:
        rows = [_floats(node.weights[0]).reshape(node.width, -1) for node in nodes]
        if rows[0].shape[1] % 16:
            raise ModelError(f"{nodes[0].inputs[0].width} inputs: the cpu backend needs a multiple of 16 for encoders")
        return self._native.matrix(np.concatenate(rows))

    def _bias(self, nodes: Sequence[Node]) -> int:
        parts = [np.zeros(n.width, np.float32) if n.weights[1] is None else _floats(n.weights[1]) for n in nodes]
        padded = -(-sum(map(len, parts)) // 16) * 16
        bias = np.zeros(padded, np.float32)
        bias[: sum(map(len, parts))] = np.concatenate(parts)
        return self._native.vector(bias)

    def _table(self, weight: Weight) -> int:
        if weight.format not in PLAIN:
            raise ModelError(f"{weight.name}: a table in format {weight.format} has no kernel for encoders")
        rows = weight.data.reshape(weight.shape[0], -1)
        self.table_bytes += prod(weight.shape) * (4 if weight.format is Format.F32 else 2)
        return self._native.table(rows, weight.format.value, weight.shape[1])


def _floats(weight: Weight | None) -> NDArray[np.float32]:
    assert weight is not None
    return as_floats(weight)
