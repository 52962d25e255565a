"""An encoder backend made of a decoder: texts are read as prompts, and their last hidden rows are pooled.

The decoder runs on a backend of its own (`backends.Backend`) whose "logits" are the rows after the last norm. A long
text is computed in chunks that begin at multiples of the step, whatever is beside it, and rows are added in their
order, so that a text's numbers do not depend on its company where the backend's rows do not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import PAGE_SIZE, Backend, Batch
from tailrace.backends.encoding import Pooling, TextBatch
from tailrace.backends.greedy import greedy


class PooledDecoder:
    """`EncoderBackend` over a decoder's. `backend` has pages for `max_running` texts of `longest` tokens at least where
    they are in one step; a step has at most `step_tokens` tokens and `max_running` texts."""

    def __init__(
        self,
        backend: Backend,
        *,
        width: int,
        vocab: int,
        longest: int,
        pooling: Pooling,
        unit: bool,
        step_tokens: int,
        max_running: int,
        threads: int,
    ) -> None:
        self.name = backend.name
        self.kernels = backend.kernels
        self.threads = threads
        self.width = width
        self.progress = 0
        self._backend = backend
        self._vocab, self._longest = vocab, longest
        self._pooling, self._unit = pooling, unit
        self._step_tokens, self._max_running = step_tokens, max_running

    @property
    def work(self) -> int | None:
        return self._backend.work

    @property
    def weight_bytes(self) -> int:
        return self._backend.weight_bytes

    def encode(self, batch: TextBatch) -> NDArray[np.float32]:
        batch.check(self._vocab, 1, self._longest)
        sums = np.zeros((batch.texts, self.width), np.float64)
        lengths = np.diff(batch.starts)
        for step in self._steps(lengths):
            rows, owners = self._run(batch, step)
            self.progress += sum(end - begin for _, begin, end in step)
            if self._pooling == "mean":
                np.add.at(sums, owners, rows)  # one after the other, in order
            else:
                sums[owners] = rows
        if self._pooling == "mean":
            sums /= lengths[:, None]
        if self._unit:
            sums /= np.maximum(np.sqrt(np.square(sums).sum(axis=1, keepdims=True)), 1e-12)
        return sums.astype(np.float32)

    def _steps(self, lengths: NDArray[np.int32]) -> Iterator[list[tuple[int, int, int]]]:
        """Steps of chunks (text, begin, end). A text of several chunks has steps of its own: its pages are kept from
        one to the next."""
        step: list[tuple[int, int, int]] = []
        room = self._step_tokens
        for text, length in enumerate(lengths.tolist()):
            if length > room or len(step) == self._max_running or length > self._step_tokens:
                if step:
                    yield step
                step, room = [], self._step_tokens
            if length > self._step_tokens:
                for begin in range(0, length, self._step_tokens):
                    yield [(text, begin, min(length, begin + self._step_tokens))]
                continue
            step.append((text, 0, length))
            room -= length
        if step:
            yield step

    def _run(self, batch: TextBatch, step: list[tuple[int, int, int]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Rows of a step that are pooled, and the text of each."""
        spans = [(int(batch.starts[text]) + begin, int(batch.starts[text]) + end) for text, begin, end in step]
        counts = np.array([end - begin for begin, end in spans], np.int32)
        starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
        pages = [-(-end // PAGE_SIZE) for _, _, end in step]
        tables = np.zeros((len(step), max(pages)), np.int32)
        first = 0
        for row, count in enumerate(pages):
            tables[row, :count] = np.arange(first, first + count)
            first += count
        owners = np.repeat(np.array([text for text, _, _ in step]), counts)
        wanted = np.arange(starts[-1], dtype=np.int32)
        if self._pooling != "mean":
            at = starts[1:] - 1 if self._pooling == "last" else starts[:-1]
            which = [row for row, (text, begin, end) in enumerate(step) if self._ends(batch, text, begin, end)]
            wanted = at[which].astype(np.int32)
            owners = np.array([step[row][0] for row in which], np.int64)
        if not len(wanted):
            wanted = np.array([starts[-1] - 1], np.int32)  # only its KV is needed; a step draws something
        result = self._backend.run(
            Batch(
                tokens=np.concatenate([batch.tokens[begin:end] for begin, end in spans]),
                starts=starts,
                context=np.array([begin for _, begin, _ in step], np.int32),
                tables=tables,
                wanted=wanted,
                sampling=greedy(len(wanted)),
                want_logits=True,
            )
        )
        assert result.logits is not None
        return result.logits[: len(owners)], owners

    def _ends(self, batch: TextBatch, text: int, begin: int, end: int) -> bool:
        """Whether the chunk has the row that stands for its text."""
        if self._pooling == "cls":
            return begin == 0
        return end == int(batch.starts[text + 1] - batch.starts[text])
