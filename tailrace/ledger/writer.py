"""How records get into the ledger beside the server: a thread, a bounded queue, a spool on disk.

What is promised. A record that was handed over is in the spool within `FLUSH_SECONDS`, or as long as the database takes
to answer, which is bounded too (`store`). From then on it is written once, whatever happens to this process: killing it
loses at most what came since. Where the disk is full and the database does not answer either, `MOST_HELD` records are
held in memory; what comes beyond that is counted and lost. The server goes on in every case.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.ledger import fingerprints
from tailrace.ledger.record import Note, Record, Refusal, record_of, refusal_of, us
from tailrace.ledger.run import Run
from tailrace.ledger.spool import Spool, SpoolFull, left_behind
from tailrace.ledger.timeline import Timeline
from tailrace.terms import TailraceError

if TYPE_CHECKING:
    from tailrace.ledger.store import Ledger

FLUSH_SECONDS = 0.25
MOST_HELD = 10_000
BATCH = 1000
FIRST_RETRY, LAST_RETRY = 1.0, 30.0
BEAT_SECONDS = 30.0
PRUNE_SECONDS = 600.0
SPOOL_BYTES = 256 << 20

Report = Callable[[str], object]


class Writer:
    """`add` and `refused` are called on one thread, the server's; `close` once, at its end."""

    def __init__(
        self,
        open_ledger: Callable[[], Ledger],
        run: Run,
        spool: Path,
        *,
        keep_seconds: float = 0.0,
        keep_rows: int = 0,
        prints: bool = True,
        report: Report = lambda _line: None,
        clock: Callable[[], float] = time.time,
        most_held: int = MOST_HELD,
        spool_bytes: int = SPOOL_BYTES,
        first_retry: float = FIRST_RETRY,
    ) -> None:
        """`open_ledger` is called on the thread, since what it imports takes long. `spool`: a directory. `keep_seconds`
        and `keep_rows`: what ended before, and what is more, is deleted; 0 keeps all. `prints`: whether rows have
        fingerprints of their prompts, under a key that lies in `spool`."""
        self.run = run
        self.written = self.dropped = self.failures = 0
        self.safe = 0  # records that outlive this process: all up to this number
        self._open_ledger = open_ledger
        self._ledger: Ledger | None = None
        self._folder = spool
        self._spool = Spool(spool, run, spool_bytes)
        self._keep = (keep_seconds, keep_rows)
        self._prints = prints
        self._key: bytes | None = None
        self._report = report
        self._clock = clock
        self._most = most_held
        self._first_retry = first_retry
        self._queue: deque[tuple[Timeline, Note]] = deque()
        self._refusals: dict[tuple[str | int, ...], tuple[Refusal, int]] = {}
        self._lock = threading.Lock()  # of the refusals
        self._held: list[tuple[int, Record]] = []  # taken from the queue, and nowhere else yet
        self._serial = 0
        self._news = threading.Event()
        self._closing = threading.Event()
        self._retry_at = 0.0
        self._retry_after = first_retry
        self._adopted = False
        self._told: set[type[Exception]] = set()  # kinds of what does not work now, which were said
        self._beaten = self._pruned = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)

    def start(self) -> None:
        """Begins to write."""
        self._thread.start()

    def add(self, timeline: Timeline, note: Note) -> None:
        """A request has ended."""
        if len(self._queue) + len(self._held) >= self._most:
            self.dropped += 1
            return
        self._queue.append((timeline, note))
        if not self._news.is_set():
            self._news.set()

    def refused(self, refusal: Refusal) -> None:
        """A request was refused. Those that differ in nothing but time become one row."""
        note = refusal.note
        group = (refusal.status, refusal.code, note.key, note.tenant, note.endpoint, note.workload)
        with self._lock:
            first, count = self._refusals.get(group, (refusal, 0))
            if not count and len(self._refusals) >= self._most:
                self.dropped += 1
                return
            self._refusals[group] = (first, count + 1)
        self._news.set()

    def close(self, seconds: float = 5.0) -> None:
        """Writes what is left, and ends. Returns after so long whatever happens: what is in the spool is written by the
        next server."""
        self._closing.set()
        self._news.set()
        self._thread.join(seconds)

    def numbers(self) -> dict[str, int]:
        """For metrics."""
        waiting = len(self._queue) + len(self._held) + self._spool.rows
        return {"rows": self.written, "dropped": self.dropped, "failures": self.failures, "waiting": waiting}

    # On the thread

    def _work(self) -> None:
        while not self._closing.is_set():
            self._news.wait(self._patience())
            if self._closing.wait(FLUSH_SECONDS if self._news.is_set() else 0):
                break
            self._news.clear()
            self._once()
        self._retry_at = 0.0
        self._once(last=True)
        with suppress(TailraceError):
            if self._ledger is not None and not self._spool.rows:
                self._ledger.write(self.run, [], us(self._clock()))
        self._spool.close()
        if self._ledger is not None:
            self._ledger.close()

    def _patience(self) -> float:
        """Until there is something to do without news."""
        now = time.monotonic()
        due = self._beaten + BEAT_SECONDS
        if self._spool.rows or self._held:
            due = min(due, self._retry_at)
        return max(0.0, due - now)

    def _once(self, *, last: bool = False) -> None:
        while True:
            fresh = self._take()
            try:
                self._forward(fresh, last=last)
            except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on, and so does the ledger
                self._failed(error)
            if not self._queue or not fresh:
                break

    def _take(self) -> list[tuple[int, Record]]:
        """What has come, as rows with numbers; `_held` has them until they are somewhere else."""
        usd = self.run.usd_per_hour
        key = self._print_key()
        now = self._clock()
        offset = now - time.monotonic()
        fresh: list[tuple[int, Record]] = []
        for _ in range(min(BATCH, len(self._queue))):
            timeline, note = self._queue.popleft()
            self._serial += 1
            fresh.append((self._serial, record_of(timeline, note, clock=offset, usd_per_hour=usd, key=key)))
        with self._lock:
            refusals, self._refusals = self._refusals, {}
        for refusal, count in refusals.values():
            self._serial += 1
            fresh.append((self._serial, refusal_of(refusal, now=now, count=count)))
        self._held += fresh
        return fresh

    def _print_key(self) -> bytes | None:
        if self._prints and self._key is None:
            with suppress(OSError):  # the spool, which lies beside it, says what is wrong
                self._key = fingerprints.key_in(self._folder)
        return self._key

    def _forward(self, fresh: list[tuple[int, Record]], *, last: bool) -> None:
        """From memory into the spool, and from there into the database, where that is to be tried now."""
        direct: list[tuple[int, Record]] | None = None
        if self._held:
            direct = self._held if not self._spool.rows else None  # all that there is: it need not be read again
            try:
                self._spool.append(self._held)
            except SpoolFull as error:
                self._tell(error)
            else:
                self.safe = self._held[-1][0]
                self._held = []
        if time.monotonic() >= self._retry_at:
            self._drain(direct)
            if not last:
                self._housekeeping()

    def _drain(self, direct: list[tuple[int, Record]] | None) -> None:
        """Everything into the database. Raises what keeps it from there."""
        ledger = self._opened()
        now = us(self._clock())
        if not self._adopted:
            for path, run, batches in left_behind(self._folder):
                for batch in batches:
                    self.written += self._write(ledger, run, batch, 0)
                path.unlink(missing_ok=True)
            self._adopted = True
        if direct is not None:
            self.written += self._write(ledger, self.run, direct, now)
            self.safe = direct[-1][0]
            self._held = []
        elif self._spool.rows:
            for batch in self._spool.read(BATCH):
                self.written += self._write(ledger, self.run, batch, now)
        self._spool.clear()
        self._retry_after = self._first_retry
        if self._told:
            self._report("tailrace: the ledger is written again")
            self._told.clear()

    def _write(self, ledger: Ledger, run: Run, batch: list[tuple[int, Record]], now: int) -> int:
        """Rows that the database will never take are dropped, each by itself."""
        from tailrace.ledger.store import BadRows

        try:
            return ledger.write(run, batch, now)
        except BadRows as error:
            if len(batch) == 1:
                self.dropped += 1
                self._tell(error)
                return 0
            half = len(batch) // 2
            return self._write(ledger, run, batch[:half], now) + self._write(ledger, run, batch[half:], now)

    def _housekeeping(self) -> None:
        now = time.monotonic()
        ledger = self._opened()
        if now >= self._beaten + BEAT_SECONDS:
            ledger.write(self.run, [], us(self._clock()))
            self._beaten = now
        if now >= self._pruned + PRUNE_SECONDS:
            self._pruned = now
            seconds, rows = self._keep
            before = us(self._clock() - seconds) if seconds else 0
            while ledger.prune(before, rows) and not self._news.is_set() and not self._closing.is_set():
                pass

    def _opened(self) -> Ledger:
        if self._ledger is None:
            self._ledger = self._open_ledger()
        return self._ledger

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self._spool.sync()
        self._retry_at = time.monotonic() + self._retry_after
        self._retry_after = min(LAST_RETRY, 2 * self._retry_after)
        self._tell(error)

    def _tell(self, error: Exception) -> None:
        """Once for each kind of thing that does not work, until everything does."""
        if type(error) not in self._told:
            self._told.add(type(error))
            said = str(error) if isinstance(error, TailraceError) else f"{type(error).__name__}: {error}"
            self._report(f"tailrace: {said}; requests are served, and what the ledger lacks is kept for it")
