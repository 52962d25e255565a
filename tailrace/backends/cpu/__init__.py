"""The native backend: a model's operations are recorded once and replayed by C++ kernels without Python between layers.

Called by `engine` through the `Backend` interface. Never knows of requests or text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import (
    Adapter,
    Batch,
    Ends,
    Format,
    Forward,
    Masks,
    PackedAdapter,
    Pages,
    Result,
    Weight,
)
from tailrace.backends.cpu.adapters import CpuAdapter, pack_adapter
from tailrace.backends.cpu.nodes import Node, find, place, spread
from tailrace.backends.cpu.record import Compiler, Recorder
from tailrace.backends.cpu.store import VERSION, TileStore
from tailrace.backends.cpu.threads import usable_cores
from tailrace.backends.groups import PageGroup, layer_groups
from tailrace.backends.kvdtype import Kept, KvDtype, parse
from tailrace.terms import ModelError

NUMERICS = f"cpu-{VERSION}"
"""Changes whenever the same input may give other bits."""


class Weighted(Forward, Protocol):
    """A model that can name all its weights."""

    def weights(self) -> Iterable[Weight]: ...


def available_kernels() -> list[str]:
    """Kernel builds that this machine can run, best first: of avx512, avx2, dotprod, neon, portable."""
    from tailrace.native import _kernels

    return _kernels.available()


def as_floats(weight: Weight) -> NDArray[np.float32]:
    """Values of a vector (norms, biases), stored as F32, F16 or BF16: float32 [n]."""
    data = np.ascontiguousarray(weight.data).reshape(-1)
    match weight.format:
        case Format.F32:
            return data.view(np.float32).copy()
        case Format.F16:
            return data.view(np.float16).astype(np.float32)
        case Format.BF16:
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case other:
            raise ModelError(f"{weight.name}: a vector in format {other} has no kernel")


class CpuBackend:
    """Runs batches of a model on this machine's cores. Bitwise batch-invariant.

    `pages`: size of the KV pool; one for each of `groups` where there are several. `step_tokens`: most tokens of one
    batch. `max_running`: most sequences of one batch. `kernels`: one of `available_kernels()`; None takes the best.
    `kv_dtype`, or its name: how keys and values are kept. `cache_dir`: where repacked weights are kept; None keeps
    none, and `variant` is part of the file's name where the weights are not as the model's files have them.
    `vocab_limit`: token ids at or past it are never drawn (padding rows of the head). `nodes`: the NUMA nodes to use,
    by default those that the calling thread is allowed on; that thread is bound to the first one if they are several
    (`nodes.place`), and is to be the one that calls `wait`.
    """

    name = "cpu"
    batch_invariant = True

    def __init__(
        self,
        model: Weighted,
        *,
        pages: Pages,
        max_context: int,
        step_tokens: int,
        max_running: int,
        threads: int | None = None,
        kernels: str | None = None,
        kv_dtype: KvDtype | str = "bf16",
        cache_dir: Path | None = None,
        variant: str = "",
        vocab_limit: int | None = None,
        nodes: Sequence[Node] | None = None,
        groups: Sequence[PageGroup] | None = None,
    ) -> None:
        from tailrace.native import _kernels

        kv_dtype = parse(kv_dtype) if isinstance(kv_dtype, str) else kv_dtype
        if Kept.F32 in (kv_dtype.key, kv_dtype.value):
            raise ModelError("the cpu backend keeps KV in 16 bits or less, not as f32")
        kv_dtype.check(len(model.attentions))
        names = _kernels.available()
        if kernels is not None and kernels not in names:
            raise ModelError(f"kernels {kernels!r} cannot run on this machine; it can run: {', '.join(names)}")
        count = threads or usable_cores()
        nodes = find() if nodes is None else nodes
        self.kernels = kernels or names[0]
        self.threads = count
        self._vocab = model.vocab
        self._kept = kv_dtype.name
        name = f"tiles-{VERSION}-{variant}.bin" if variant else f"tiles-{VERSION}.bin"
        path = cache_dir / name if cache_dir is not None else None
        self._store = TileStore(model.weights(), path, count, own=len(nodes) > 1)
        self._program = _kernels.Program(
            self.kernels, count, step_tokens, max_running, model.vocab, vocab_limit or model.vocab
        )
        # after the program, so that its threads have ended before these arrays go
        self.chained = False
        self._flying: tuple[Batch, Result] | None = None
        self._armed: tuple[Batch, Result] | None = None
        recorder = Recorder()
        logits = model.forward(recorder)
        layers = layer_groups(groups, model.attentions, pages)
        self._groups = range(len(groups or (None,)))
        compiler = Compiler(self._program, self._store, as_floats, layers, max_context, kv_dtype)
        compiler.compile(recorder.nodes, logits)
        self._numbers = compiler.matrices
        self._sizes = [self._program.page_bytes(group) for group in self._groups]
        if len(nodes) > 1:
            place(self._program, nodes, self._store.copy)
        else:
            spread(self._program)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices as the kernels read them."""
        return self._store.nbytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self._program.kv_bytes

    @property
    def page_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def work(self) -> int:
        """Tasks of the threads; a step has hundreds."""
        return self._program.worked

    @property
    def numerics(self) -> str:
        """The kernels and the layout are in the extension, so its bytes stand for both."""
        from tailrace.native import _kernels

        with open(_kernels.__file__, "rb") as file:
            build = hashlib.file_digest(file, "sha256").hexdigest()
        return f"{NUMERICS} {self.kernels} {self._kept} {build}"

    def read_page(self, page: Pages, out: bytearray | memoryview | None = None) -> bytearray | memoryview:
        out = bytearray(self.page_bytes) if out is None else out
        if isinstance(page, int):
            self._program.read_page(page, out, 0)
            return out
        begin, view = 0, memoryview(out)
        for group, (one, size) in enumerate(zip(page, self._sizes, strict=True)):
            if size:
                self._program.read_page(one, view[begin : begin + size], group)
            begin += size
        return out

    def write_page(self, page: Pages, data: bytes | bytearray | memoryview) -> None:
        if isinstance(page, int):
            self._program.write_page(page, data, 0)
            return
        if len(data) != self.page_bytes:
            raise ValueError(f"a page takes {self.page_bytes} bytes, not {len(data)}")
        begin, view = 0, memoryview(data)
        for group, (one, size) in enumerate(zip(page, self._sizes, strict=True)):
            if size and one >= 0:
                self._program.write_page(one, view[begin : begin + size], group)
            begin += size

    @property
    def mapped(self) -> bool:
        """Whether the repacked weights are mapped from the cache file."""
        return self._store.from_file

    def tiles(self, weight: Weight) -> NDArray[np.uint8]:
        """A matrix of the model as the kernels read it: uint8 [packed bytes]."""
        return self._store(weight)

    def profile(self, on: bool) -> None:
        """Starts or stops counting the time of each kind of operation."""
        self._program.profile(on)

    @property
    def redone(self) -> int:
        """Tasks that were computed again because the thread that held them had lost its core."""
        return self._program.redone

    def profiled(self) -> dict[str, float]:
        """Seconds that one thread spent in each kind of operation since the last call."""
        return {name: ns / 1e9 for name, ns in self._program.profiled()}

    def pack_adapter(self, adapter: Adapter) -> CpuAdapter:
        return pack_adapter(adapter, self._numbers)

    def set_adapter(self, number: int, adapter: PackedAdapter | None) -> None:
        assert adapter is None or isinstance(adapter, CpuAdapter), "another backend's adapter"
        self._program.set_adapter(number, list(adapter.parts) if adapter is not None else [])

    def settle(self, *, wait: bool = False) -> None:
        """Start-up is over: gets the weights into huge pages, in the background unless told to wait for it."""
        self._store.settle(wait=wait)

    def launch(self, batch: Batch) -> None:
        """Begins a step on the other threads and returns at once. `wait` ends it."""
        result = self._room(batch)
        self._program.launch(*_inputs(batch), *_outputs(result), result.logits)
        self._flying = (batch, result)  # the kernels use their arrays

    def chain(self, batch: Batch, ends: Ends) -> None:
        """The step that the threads begin by themselves when the running one has ended, unless that drew an end."""
        result = self._room(batch)
        self._program.chain(*_inputs(batch), *_outputs(result), ends.start, ends.tokens)
        self._armed = (batch, result)

    def hold(self, on: bool) -> None:
        self._program.hold(on)

    def release(self, masks: Masks) -> None:
        self._program.release(masks.ready)

    def wait(self) -> Result:
        """The launched step's result; the calling thread computes too, without the interpreter lock."""
        if self._flying is None:
            raise ValueError("no step was launched")
        self.chained = self._program.wait()
        (_, result), self._flying = self._flying, self._armed if self.chained else None
        self._armed = None
        return result

    def run(self, batch: Batch) -> Result:
        self.launch(batch)
        return self.wait()

    def _room(self, batch: Batch) -> Result:
        rows = len(batch.wanted)
        width = max(0, int(batch.sampling.logprobs.max(initial=0)))
        return Result(
            tokens=np.empty(rows, np.int32),
            logprobs=np.empty(rows, np.float32),
            top_tokens=np.empty((rows, width), np.int32),
            top_logprobs=np.empty((rows, width), np.float32),
            logits=np.empty((rows, self._vocab), np.float32) if batch.want_logits else None,
        )


Ints: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]


def _inputs(batch: Batch) -> tuple[Ints, Ints, Ints, Ints, Ints, dict[str, NDArray[Any]], Ints | None]:
    sampling = vars(batch.sampling)
    return batch.tokens, batch.starts, batch.context, batch.tables, batch.wanted, sampling, batch.adapters


def _outputs(result: Result) -> tuple[Ints, Floats, Ints, Floats]:
    return result.tokens, result.logprobs, result.top_tokens, result.top_logprobs
