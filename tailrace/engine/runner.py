"""Runs a backend's steps beside the engine loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from tailrace.backends import Backend, Batch, Result

Outcome = Result | Exception


class Runner(Protocol):
    """At most one step at a time: `launch`, then `wait`."""

    def launch(self, batch: Batch) -> None:
        """Begins a step."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> Outcome:
        """The launched step's result, or what it raised; blocks until there is one."""
        ...

    def close(self) -> None:
        """Ends the runner; a step that runs is waited for."""
        ...


class ThreadRunner:
    """Runs steps in a worker thread; the backend lets go of the interpreter lock while it computes. `on_done` is called
    from that thread whenever a step has ended."""

    def __init__(self, backend: Backend, on_done: Callable[[], None] | None = None) -> None:
        self._backend = backend
        self._on_done = on_done
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tailrace-step", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                outcome: Outcome = self._backend.run(batch)
            except Exception as error:  # noqa: BLE001 - whatever a backend raises fails its step, and only that
                outcome = error
            self._outcomes.put(outcome)
            if self._on_done is not None:
                self._on_done()

    def launch(self, batch: Batch) -> None:
        """Begins a step."""
        self._batches.put(batch)

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._outcomes.empty()

    def wait(self) -> Outcome:
        """The launched step's result, or what it raised."""
        return self._outcomes.get()

    def close(self) -> None:
        """Ends the thread."""
        self._batches.put(None)
        self._thread.join()


class InlineRunner:
    """Runs each step when it is waited for, in the caller's thread: the same order of events every time, for tests and
    simulations."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._batch: Batch | None = None

    def launch(self, batch: Batch) -> None:
        """Keeps the step until `wait`."""
        self._batch = batch

    def done(self) -> bool:
        """Never known before it is waited for."""
        return False

    def wait(self) -> Outcome:
        """Runs the launched step."""
        batch, self._batch = self._batch, None
        if batch is None:
            raise ValueError("no step was launched")
        try:
            return self._backend.run(batch)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises fails its step, and only that
            return error

    def close(self) -> None:
        """Nothing to end."""
