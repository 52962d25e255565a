"""The engine core of a model that embeds or scores texts: requests in, numbers out (see `texts` for the order).

It stands where `core.EngineCore` stands for models that generate: the same process, messages, events and limits, but no
pages and no sampling. A text's numbers depend on that text alone, so what is read beside it changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tailrace.backends.encoding import EncoderBackend, TextBatch
from tailrace.engine.protocol import Adapted, Encode, FinishReason, Gauges, Output, Submit, TierGauges, Tokens
from tailrace.engine.spec import AdapterSpec
from tailrace.engine.texts import Part, Reading, TextQueue
from tailrace.terms import Event, EventKind

if TYPE_CHECKING:
    from numpy.typing import NDArray


class EncoderCore:
    """One thread calls it. `vocab`, `kinds` and `longest` bound tokens, segments and the length of a text. `clock` is
    in monotonic seconds.

    Requests that cannot be taken are answered with an `Output` of finish "error", as `EngineCore` does: `overloaded`,
    `draining`, `context_length_exceeded`, `invalid_prompt`, `duplicate_request`, `wrong_task`; one whose step failed:
    `step_failed`.
    """

    def __init__(
        self,
        backend: EncoderBackend,
        *,
        vocab: int,
        kinds: int,
        longest: int,
        step_tokens: int,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = 0
        self.draining = False
        self.wake: Callable[[], None] = lambda: None
        self.on_adapted: Callable[[Adapted], object] = lambda _news: None
        self.queue = TextQueue(step_tokens)
        self._backend = backend
        self._vocab, self._kinds, self._longest = vocab, kinds, longest
        self._max_waiting = max_waiting
        self._clock = clock
        self._outputs: list[Output] = []
        self._events: list[Event] = []

    @property
    def backend(self) -> object:
        """What computes."""
        return self._backend

    @property
    def progress(self) -> int:
        """Tokens read, ever."""
        return self._backend.progress

    @property
    def work(self) -> int | None:
        """As `Backend.work`."""
        return self._backend.work

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to say."""
        return bool(self.queue.requests or self._outputs or self._events)

    @property
    def idle(self) -> bool:
        """Not a request held."""
        return not self.queue.requests

    @property
    def gauges(self) -> Gauges:
        """The state now."""
        return Gauges(running=self.queue.running, waiting=self.queue.waiting, steps=self.steps)

    @property
    def tier_gauges(self) -> dict[str, TierGauges]:
        """There are none."""
        return {}

    def check_integrity(self) -> None:
        """AssertionError where a request that was read to its end is still held."""
        assert all(request.next < request.texts for request in self.queue.requests.values())

    def settle(self) -> None:
        """Start-up is over: nothing to do."""

    def interrupt(self) -> None:
        """News has arrived: the next step looks."""

    def close(self) -> None:
        """What is held is lost."""

    def save(self, seconds: float) -> None:
        """It keeps nothing."""

    def parts(self) -> Sequence[tuple[object, str, str]]:
        """None that a profile tells apart."""
        return ()

    def load_adapter(self, adapter: AdapterSpec) -> None:
        """Refuses."""
        self.on_adapted(Adapted(adapter.id, error="a server for embeddings takes no adapters"))

    def unload_adapter(self, adapter: int) -> None:
        """There is none."""

    def reset_prefix(self) -> None:
        """There is no cache."""

    # --- messages

    def submit(self, request: Submit) -> None:
        """Refuses, in the next news: this engine's model generates nothing."""
        self._refuse(request.request, "wrong_task: the model embeds or scores texts, and generates none")

    def encode(self, request: Encode) -> None:
        """Takes a request in, or refuses it in the next news; never raises."""
        refusal = self._refusal(request)
        if refusal:
            self._refuse(request.request, refusal)
            return
        now = self._clock()
        taken = self.queue.take(request, now)
        self._events.append(Event(taken.id, EventKind.QUEUED, now))

    def abort(self, requests: Iterable[str]) -> None:
        """Their clients have left; unknown ids are ignored."""
        for name in requests:
            request = self.queue.requests.get(name)
            if request is not None:
                self.queue.finish(request)
                self._events.append(Event(name, EventKind.FINISHED, self._clock(), cause="abort"))

    def _refuse(self, name: str, refusal: str) -> None:
        self._outputs.append(Output(name, finish="error", error=refusal))
        self._events.append(Event(name, EventKind.FAILED, self._clock(), cause=refusal.partition(":")[0]))

    def _refusal(self, encode: Encode) -> str:
        """Why a request cannot be taken; "" where it can."""
        lengths = encode.lengths
        if encode.request in self.queue.requests:
            return f"duplicate_request: {encode.request} is already being served"
        if not lengths or min(lengths) < 1 or len(encode.tokens) != 4 * sum(lengths):
            return "invalid_prompt: there are no texts, or one has no tokens"
        if max(lengths) > self._longest:
            return (
                f"context_length_exceeded: a text has {max(lengths)} tokens; this model reads at most {self._longest}"
            )
        if encode.second and (self._kinds < 2 or len(encode.second) != len(lengths)):
            return "invalid_prompt: this model does not tell the texts of a pair apart"
        tokens = np.frombuffer(encode.tokens, np.int32)
        if tokens.min() < 0 or tokens.max() >= self._vocab:
            return f"invalid_prompt: token ids must lie in 0 .. {self._vocab - 1}"
        if self.draining:
            return "draining: the server is shutting down"
        if self.queue.waiting >= self._max_waiting:
            return f"overloaded: {self.queue.waiting} requests are waiting already"
        return ""

    # --- steps

    def step(self, intake: Callable[[], None] | None = None) -> Tokens | None:
        """Takes in what has arrived, reads some texts, and returns the news; None where there is none."""
        if intake is not None:
            intake()
        begin = self._clock()
        for request in self.queue.overdue(begin):
            self._end(request, "timeout")
        parts = self.queue.plan(begin)
        if parts:
            self._events += [Event(part.request.id, EventKind.ADMITTED, begin) for part in parts if part.first == 0]
            try:
                rows = self._backend.encode(batch_of(parts))
            except Exception as error:  # noqa: BLE001 - whatever a backend raises fails its step, and only that
                for request in {part.request.id: part.request for part in parts}.values():
                    self._end(request, "error", f"step_failed: {type(error).__name__}: {error}")
            else:
                self._apply(parts, rows, begin)
            self.steps += 1
        if not self._outputs and not self._events:
            return None
        news = Tokens(self._outputs, self._events, self.gauges)
        self._outputs, self._events = [], []
        return news

    def _apply(self, parts: list[Part], rows: NDArray[np.float32], begin: float) -> None:
        at = self._clock()
        row = 0
        for part in parts:
            request, count = part.request, part.end - part.first
            request.rows.append(rows[row : row + count])
            row += count
            self._events.append(Event(request.id, EventKind.CHUNK, at, begin, part.count))
            if part.end == request.texts:
                self._end(request, "stop")

    def _end(self, request: Reading, finish: FinishReason, error: str = "") -> None:
        self.queue.finish(request)
        vectors = b"".join(np.ascontiguousarray(rows).tobytes() for rows in request.rows) if finish == "stop" else b""
        self._outputs.append(Output(request.id, finish=finish, error=error, vectors=vectors))
        self._events.append(Event(request.id, EventKind.FINISHED, self._clock(), cause=finish))


def batch_of(parts: list[Part]) -> TextBatch:
    """The texts of a step, one after the other."""
    spans = [(part.request, int(part.request.starts[part.first]), int(part.request.starts[part.end])) for part in parts]
    lengths = np.concatenate([part.request.lengths[part.first : part.end] for part in parts])
    return TextBatch(
        tokens=np.concatenate([request.tokens[begin:end] for request, begin, end in spans]),
        kinds=np.concatenate([request.kinds[begin:end] for request, begin, end in spans]),
        starts=np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)]),
    )
