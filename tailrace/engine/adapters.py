"""The adapters of an engine: read on a thread of their own, put into the backend between steps, taken out when the last
request that has one has ended.

The engine's thread asks (`load`, `unload`) and, when no step runs, does what is due (`settle`); a step never waits for
a file. A file that never comes (a file system on a server that is gone) costs its thread, which nobody can end, and the
adapter's number; the next adapter has another thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.backends import Backend, PackedAdapter
from tailrace.engine.protocol import Adapted
from tailrace.engine.spec import AdapterSpec
from tailrace.terms import TailraceError

if TYPE_CHECKING:
    from tailrace.models.adapters import ReadAdapter

AFTER_A_LATE_ONE = 5.0
"""Seconds that a start waits for an adapter when it has waited in vain for another."""


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter that requests can have. `number` is the backend's."""

    id: int
    number: int
    digest: bytes
    requests: int = 0  # that have it and have not ended
    leaving: bool = False


class Adapters:
    """At most `most` of them. `read` reads one, on the thread; `notify` is called on it whenever one has been read.
    Whoever unloads one that is being read has waited long enough: `seconds` is how long a start waits. Without `thread`
    whoever calls `work` is the thread."""

    def __init__(
        self,
        backend: Backend,
        read: Callable[[Path], ReadAdapter],
        most: int,
        *,
        seconds: float = 60.0,
        thread: bool = True,
    ) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._backend = backend
        self._read = read
        self._most = most
        self._seconds = seconds
        self._free = list(range(most - 1, -1, -1))
        self._held: dict[int, LoadedAdapter] = {}
        self._threaded = thread
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._later: deque[AdapterSpec] = deque()  # they get the numbers of those that are about to go
        self._asked: deque[tuple[AdapterSpec, int]] = deque()
        self._done: deque[tuple[Adapted, int, PackedAdapter | None]] = deque()
        self._unwanted: set[int] = set()  # unloaded before they had been read
        self._reading: set[int] = set()
        self._current = 0  # what the thread reads
        self._closing = False

    # --- the engine's thread

    @property
    def due(self) -> bool:
        """Whether `settle` has something to do."""
        return bool(self._done) or any(held.leaving and not held.requests for held in self._held.values())

    @property
    def held(self) -> dict[int, LoadedAdapter]:
        """Those that there are, by id."""
        return self._held

    def load(self, spec: AdapterSpec) -> None:
        """Begins to read one; `settle` tells what has become of it."""
        gone = sum(held.leaving and not held.requests for held in self._held.values())
        self._reading.add(spec.id)
        if len(self._free) + gone > len(self._later):
            self._later.append(spec)
            self._begin()
            return
        error = f"there are {self._most} adapters already, and that is the most (--max-loras): unload one"
        leaving = sum(held.leaving for held in self._held.values()) - gone
        if leaving:
            error += f"; {leaving} go when their requests have ended"
        self._done.append((Adapted(spec.id, error=error), -1, None))

    def _begin(self) -> None:
        """Has those read that there is a number for."""
        if not (self._later and self._free):
            return
        with self._wake:
            while self._later and self._free:
                self._asked.append((self._later.popleft(), self._free.pop()))
            self._wake.notify_all()
        self._work_aside()

    def _work_aside(self) -> None:
        if self._threaded and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()

    def load_now(self, specs: Sequence[AdapterSpec]) -> list[Adapted]:
        """The same of several, at once: for a start, while nobody waits for anything else. After one that came too late
        the others, which mostly lie beside it, are not waited for as long."""
        late: list[Adapted] = []
        for spec in specs:
            self._reading.add(spec.id)
            with self._wake:
                self._asked.append((spec, self._free.pop()))
                self._wake.notify_all()
            if not self._threaded:
                self.work()
                continue
            self._work_aside()
            seconds = min(self._seconds, AFTER_A_LATE_ONE) if late else self._seconds
            if not self._done_within(spec, seconds):
                late.append(Adapted(spec.id, error=too_late(spec.path, seconds)))
                self.unload(spec.id)
        return [*self.settle(), *late]

    def _done_within(self, spec: AdapterSpec, seconds: float) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: any(news.id == spec.id for news, _, _ in self._done), seconds)

    def unload(self, adapter: int) -> None:
        """Nobody new gets it; its memory is free when those that have it have ended. Unknown ones are ignored."""
        if adapter in self._held:
            self._held[adapter].leaving = True
        elif adapter in self._reading:
            self._unwanted.add(adapter)
            with self._wake:
                if self._current == adapter:
                    self._thread = None  # it may never end; when it does, it finds that it is not wanted
                    asked = bool(self._asked)
                else:
                    asked = False
            if asked:
                self._work_aside()

    def find(self, adapter: int) -> LoadedAdapter | None:
        """The adapter with this id that a request can have; None where there is none."""
        held = self._held.get(adapter)
        return None if held is None or held.leaving else held

    def settle(self) -> list[Adapted]:
        """No step runs: what has been read is there from now on, what nobody has any more is gone. Returns what has
        become of those that were to be loaded."""
        for held in [held for held in self._held.values() if held.leaving and not held.requests]:
            self._backend.set_adapter(held.number, None)
            self._free.append(held.number)
            del self._held[held.id]
        self._begin()
        told = []
        while self._done:
            news, number, packed = self._done.popleft()
            self._reading.discard(news.id)
            if packed is None or news.id in self._unwanted:
                self._unwanted.discard(news.id)
                if number >= 0:
                    self._free.append(number)
            else:
                self._backend.set_adapter(number, packed)
                self._held[news.id] = LoadedAdapter(news.id, number, bytes.fromhex(news.digest))
            told.append(news)
        return told

    def close(self) -> None:
        """Ends the thread once it is done with what it reads; nobody waits for it."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def check_integrity(self, requests: dict[int, int]) -> None:
        """AssertionError unless these are the requests that have each, by id, and no number is lost."""
        assert {held.id: held.requests for held in self._held.values() if held.requests} == requests
        numbers = [held.number for held in self._held.values()]
        assert len({*numbers, *self._free}) == len(numbers) + len(self._free) <= self._most, "an adapter's number twice"

    # --- the thread

    def work(self) -> bool:
        """Reads one; False where there is none to read."""
        with self._wake:
            asked = self._asked.popleft() if self._asked else None
            self._current = asked[0].id if asked is not None else 0
        if asked is None:
            return False
        spec, number = asked
        self._hand_in(*self._outcome(spec, number))
        return True

    def _hand_in(self, news: Adapted, number: int, packed: PackedAdapter | None) -> None:
        with self._wake:
            self._done.append((news, number, packed))
            if self._current == news.id:
                self._current = 0
            self._wake.notify_all()
        self.notify()

    def _outcome(self, spec: AdapterSpec, number: int) -> tuple[Adapted, int, PackedAdapter | None]:
        try:
            found = self._read(Path(spec.path))
            packed = self._backend.pack_adapter(found.adapter)
            news = Adapted(spec.id, digest=found.digest, rank=found.rank, bytes=packed.nbytes)
            return news, number, packed
        except TailraceError as error:
            return Adapted(spec.id, error=str(error)), number, None
        except Exception as error:  # noqa: BLE001 - whatever it was (memory, most likely), it is this adapter's alone
            return Adapted(spec.id, error=f"{type(error).__name__}: {error}"), number, None

    def _run(self) -> None:
        own = threading.current_thread()
        while not self._closing and self._thread is own:
            if not self.work():
                with self._wake:
                    if not self._asked and not self._closing and self._thread is own:
                        self._wake.wait()


def too_late(path: str, seconds: float) -> str:
    """Says so."""
    return f"{path}: its files could not be read within {seconds:g} s (--lora-timeout)"
