"""One request from the moment it is due until its record is closed."""

from __future__ import annotations

import asyncio
import time

import msgspec

from tailrace.measure.events import Reader, message
from tailrace.measure.http import Broken, Pool
from tailrace.measure.record import Outcome, Record

MOST_ERROR = 2000
"""Bytes of an error's body that are looked at."""


class Exchange:
    """Fills a record while an answer comes. `start` is the run's beginning on `time.perf_counter`; `marked`: the answer
    is complete with [DONE], else with a finish reason."""

    def __init__(self, record: Record, start: float, *, keep_text: bool = False, marked: bool = True) -> None:
        self.record = record
        self._marked = marked
        self.reader = Reader(keep_text=keep_text)
        self._start = start
        self._refusal = b""
        record.chunks = self.reader.chunks

    @property
    def text(self) -> str:
        """What was said, where it is kept."""
        return "".join(self.reader.text or ())

    async def run(self, pool: Pool, request: bytes, timeout: float) -> None:
        """Sends it and waits for its end, at most `timeout` seconds; the record says how that was. Where this is
        cancelled the record stays as it is: stopped."""
        record = self.record
        record.began = time.perf_counter() - self._start
        try:
            async with asyncio.timeout(timeout):
                await pool.ask(request, self)
            self.reader.end(time.perf_counter() - self._start)
            self._close()
        except TimeoutError:
            record.outcome, record.error = Outcome.TIMEOUT, f"no end within {timeout:g} s"
        except Broken as error:
            self._failed(error)
        record.ended = time.perf_counter() - self._start
        self._usage()

    def wrote(self, at: float, connecting: float) -> None:
        self.record.sent, self.record.connecting = at - self._start, connecting

    def head(self, status: int, at: float) -> None:
        self.record.status = status

    def body(self, data: bytes, at: float) -> None:
        if self.record.status == 200:
            self.reader.feed(data, at - self._start)
        elif len(self._refusal) < MOST_ERROR:
            self._refusal += data

    def _failed(self, error: Broken) -> None:
        record = self.record
        if record.status is not None and record.status != 200:
            self._close()
            return
        record.outcome = Outcome.CUT if error.connected else Outcome.UNREACHABLE
        record.error = str(error)

    def _close(self) -> None:
        record, reader = self.record, self.reader
        if record.status != 200:
            record.outcome = Outcome.REFUSED if record.status in (429, 503) else Outcome.ERROR
            record.error = f"{record.status}: {_told(self._refusal)}"
        elif reader.error is not None:
            record.outcome, record.error = Outcome.ERROR, reader.error
        elif reader.malformed is not None:
            record.outcome, record.error = Outcome.MALFORMED, reader.malformed
        elif not (reader.done if self._marked else reader.finish):
            end = "[DONE]" if self._marked else "a finish reason"
            record.outcome, record.error = Outcome.CUT, f"the stream ended without {end}"
        elif not reader.chunks and not (reader.usage and reader.usage.completion_tokens):
            record.outcome, record.error = Outcome.MALFORMED, "an answer with nothing in it"
        else:
            record.outcome = Outcome.OK

    def _usage(self) -> None:
        record, usage = self.record, self.reader.usage
        record.finish, record.phases = self.reader.finish, self.reader.phases
        if usage is not None:
            record.input_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
            details = usage.prompt_tokens_details
            record.cached_tokens = details.cached_tokens if details is not None else None


def _told(body: bytes) -> str:
    """The error's own words."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip()[:200] or "(nothing said)"
    return message(answer.get("error", answer) if isinstance(answer, dict) else answer)[:200]
