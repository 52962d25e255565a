"""What the service tells the ledger of each request, and how a server's ledger begins."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.ledger import place, slo
from tailrace.ledger.record import Note, Refusal, label, server_fault

if TYPE_CHECKING:
    from tailrace.api.errors import HttpError
    from tailrace.api.exchange import Exchange
    from tailrace.api.generation import Choice
    from tailrace.api.service import Plan
    from tailrace.api.settings import Settings
    from tailrace.engine.protocol import Ready
    from tailrace.ledger.store import Ledger
    from tailrace.ledger.timeline import Timeline
    from tailrace.ledger.writer import Writer

WORKLOAD = b"x-tailrace-workload"
COUNTED = ("chat", "completions", "messages", "responses", "embeddings", "rerank", "score")
"""Names of the endpoints whose refusals are a row; of anything else nothing is."""
USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0,
         "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}  # fmt: skip


class Accounts:
    """Between the service and the writer. Without a writer it only checks what callers say."""

    def __init__(self, settings: Settings) -> None:
        self.writer: Writer | None = None
        self._model = settings.model_name
        self._slo = slo.parse(settings.slo)
        self._notes: dict[str, Note] = {}
        self._labels: set[str] = {""}

    def bounds(self, exchange: Exchange) -> slo.Slo:
        """The SLO of a request. Raises InvalidInput where its headers have none."""
        return slo.asked(exchange.header, self._slo)

    def submitted(self, plan: Plan, exchange: Exchange, endpoint: str, bounds: slo.Slo) -> None:
        """These requests are about to be handed to the engine."""
        if self.writer is None:
            return
        asked = plan.asked
        params = plan.generation.choices[0].params
        shaping: dict[str, Any] = {n: v for n, usual in USUAL.items() if (v := getattr(params, n)) != usual}
        if asked.n > 1:
            shaping["n"] = asked.n
        if asked.priority:
            shaping["priority"] = asked.priority
        if params.grammar is not None:
            shaping["grammar"] = True
        who = self._of(exchange, endpoint, (asked.metadata or {}).get("workload", ""), bounds)
        for choice in plan.generation.choices:
            self._notes[choice.request] = Note(
                **who, adapter=plan.adapter or "", stream=asked.stream, max_tokens=choice.params.max_tokens,
                params=shaping, prompt=choice.prompt,
            )  # fmt: skip

    def withdrawn(self, requests: list[str]) -> None:
        """They were not handed over after all."""
        for request in requests:
            self._notes.pop(request, None)

    def delivered(self, choices: list[Choice], exchange: Exchange) -> None:
        """The answer's last byte is out."""
        if exchange.waited:
            for choice in choices:
                if (note := self._notes.get(choice.request)) is not None:
                    note.blocked = exchange.waited

    def closed(self, timeline: Timeline) -> None:
        """A request has ended."""
        note = self._notes.pop(timeline.request, None)
        if note is not None and self.writer is not None:
            self.writer.add(timeline, note)

    def refused(self, exchange: Exchange, error: HttpError, endpoint: str) -> None:
        """A request got an error; the ledger has it already where the engine had it. A stranger's is nobody's."""
        if self.writer is None or exchange.booked or exchange.caller is None or endpoint not in COUNTED:
            return
        facts = self._of(exchange, endpoint, "", self._slo)
        if not server_fault(error.status):
            facts["workload"] = ""  # whoever sends nonsense makes few rows of it
        note = Note(**facts)
        seconds = time.monotonic() - exchange.received
        self.writer.refused(Refusal(note, error.status, error.code or "", seconds))

    def _of(self, exchange: Exchange, endpoint: str, workload: str, bounds: slo.Slo) -> dict[str, Any]:
        caller = exchange.caller
        given = exchange.header(WORKLOAD)
        name = given.decode("latin-1") if given is not None else workload
        return {
            "http_request": exchange.id, "key": caller.key if caller is not None else "",
            "tenant": caller.group if caller is not None else "", "model": self._model, "endpoint": endpoint,
            "workload": label(name, self._labels) if name else "", "slo": bounds,
        }  # fmt: skip

    def numbers(self) -> dict[str, int]:
        """For metrics; empty where there is no ledger."""
        return self.writer.numbers() if self.writer is not None else {}


def fresh_name(prefix: str) -> str:
    """An answer's id: nobody guesses it, and those of one kind sort as they came, so that an index of very many grows
    at its end."""
    return f"{prefix}{int(time.time()):08x}{os.urandom(8).hex()}"


def begin(settings: Settings, ready: Ready, started: float, report: Callable[[str], object]) -> Writer | None:
    """The writer of a server's ledger, which runs; None where it is to have none. `started`: when the server began,
    seconds since 1970."""
    given = settings.ledger
    if given is None:
        return None
    from tailrace.ledger.run import Run
    from tailrace.ledger.writer import Writer

    run = Run(
        name=os.urandom(12).hex(),
        started=round(started * 1e6),
        host=socket.gethostname(),
        model=settings.model_name,
        hardware=f"{ready.kernels}, {ready.threads} threads",
        usd_per_hour=settings.usd_per_hour,
    )

    def open_ledger() -> Ledger:
        from tailrace.ledger.store import Ledger  # with SQLAlchemy, for which no start waits

        return Ledger(given)

    keep = (settings.ledger_retention, settings.ledger_rows)
    spool = spool_of(given, settings.ledger_spool)
    writer = Writer(
        open_ledger, run, spool, keep_seconds=keep[0], keep_rows=keep[1], prints=settings.ledger_fingerprints,
        report=report,
    )  # fmt: skip
    writer.start()
    return writer


def spool_of(given: str, folder: str | None) -> Path:
    """Where what a ledger lacks waits for it: beside its file, else in the folder, or where a user's data lies. No two
    ledgers have the same place, since a server takes over what others have left there."""
    path = place.ledger_file(given)
    if folder is None and path is not None:
        return path.with_name(path.name + ".spool")
    name = str(path.absolute()) if path is not None else re.sub(r"://([^:@/]*):[^@/]*@", r"://\1@", given)
    above = place.data_home() / "spool" if folder is None else Path(folder).expanduser()
    return above / hashlib.sha256(name.encode()).hexdigest()[:16]
