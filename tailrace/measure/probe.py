"""What has to be known of a server before it is measured: its model, what it takes, how words become tokens there."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tailrace.measure.exchange import Exchange
from tailrace.measure.http import Broken, Pool
from tailrace.measure.record import Outcome, Record
from tailrace.measure.target import Api, Fit, Form, Target
from tailrace.terms import TailraceError
from tailrace.workload.session import Piece, Turn

WORDS = ((32, 232), (16, 64), (4, 12))
"""Words of the two prompts that are counted: shorter ones where those are longer than the model's context."""
LEAST_VOCABULARY = 64
UNMARKED = "the stream ended without [DONE]"
PATIENCE = 600.0
"""Seconds for one question: a server may have to load its model first."""

EXACT = {"ignore_eos": True}
"""What makes answers as long as they are meant to be, on servers of open models."""


class _Whole:
    """An answer that is not streamed."""

    def __init__(self) -> None:
        self.status, self.content = 0, b""

    def wrote(self, at: float, connecting: float) -> None:
        """Not of interest."""

    def head(self, status: int, at: float) -> None:
        self.status = status

    def body(self, data: bytes, at: float) -> None:
        self.content += data


async def prepare(
    pool: Pool, *, model: str | None, api: Api, form: Form, extra: dict[str, Any], exact: bool
) -> tuple[Target, list[str]]:
    """The target as the server takes it, and what a reader of the results should know. Raises TailraceError, with the
    server's own words, where it does not take a request at all."""
    notes: list[str] = []
    target = Target(model or next(iter(await models(pool))), api, form, extra={**(EXACT if exact else {}), **extra})
    refusal = await _refusal(pool, target)
    if refusal and exact and "ignore_eos" not in extra:
        without = msgspec.structs.replace(target, extra=extra)
        again = await _refusal(pool, without)
        if again != refusal:  # it was that, whatever else there is
            target, refusal = without, again
            notes.append("The server does not take ignore_eos: answers may be shorter than they are meant to be.")
    if refusal == UNMARKED:
        target = msgspec.structs.replace(target, marked=False)
        refusal = await _refusal(pool, target)
        notes.append("The server's streams end without [DONE]: those with a finish reason count as complete.")
    while refusal and form == "ids" and target.vocabulary > LEAST_VOCABULARY:
        target = msgspec.structs.replace(target, vocabulary=target.vocabulary // 2)
        refusal = await _refusal(pool, target)
    if refusal:
        raise TailraceError(f"{pool.url} does not take a request: {refusal}")
    if form == "ids":
        return target, notes
    fit = await _fit(pool, target)
    if fit is None:
        notes.append("The server says no usage: a word of a prompt is taken for a token, and no tokens are counted.")
        return target, notes
    return msgspec.structs.replace(target, fit=fit), notes


async def fetch(pool: Pool, path: str) -> tuple[int, bytes]:
    """Status and body of a GET. Raises Broken."""
    whole = _Whole()
    await pool.ask(pool.request("GET", path), whole)
    return whole.status, whole.content


async def models(pool: Pool) -> dict[str, int | None]:
    """What is served, each with the tokens that a request may have where the server says so. Raises TailraceError."""
    try:
        _, content = await fetch(pool, "/v1/models")
        entries = msgspec.json.decode(content, type=dict[str, Any])["data"]
        found = {str(entry["id"]): entry.get("max_model_len") for entry in entries}
        next(iter(found))
    except Broken as error:
        raise TailraceError(f"No server answers at {pool.url} ({error}).") from error
    except (msgspec.DecodeError, KeyError, AttributeError, StopIteration, TypeError) as error:
        raise TailraceError(f"{pool.url} does not say which models it has: name one with --model") from error
    return {name: most if isinstance(most, int) else None for name, most in found.items()}


async def _refusal(pool: Pool, target: Target) -> str:
    """Why it does not take a request of that kind; empty where it does."""
    record = await _ask(pool, target, 8 if target.form == "text" else 64)
    if record.outcome is Outcome.CUT and record.finish is not None and target.marked:
        return UNMARKED
    return "" if record.outcome is Outcome.OK else record.error


async def _fit(pool: Pool, target: Target) -> Fit | None:
    for few, many in WORDS:
        records = [await _ask(pool, target, words) for words in (few, many)]
        if any(record.outcome is Outcome.ERROR for record in records):
            continue
        short, long = (record.input_tokens for record in records)
        if short is None or long is None or long <= short:
            return None
        slope = (long - short) / (many - few)
        return Fit(slope, short - slope * few)
    return None


async def _ask(pool: Pool, target: Target, tokens: int) -> Record:
    record = Record(0, 0, False, tokens, 1)
    piece = Piece(f"probe/{time.time_ns()}", tokens)
    request = pool.request("POST", target.path, target.body(Turn((piece,), 1), {}))
    await Exchange(record, time.perf_counter(), marked=target.marked).run(pool, request, PATIENCE)
    if record.outcome is Outcome.UNREACHABLE:
        raise TailraceError(f"No server answers at {pool.url} ({record.error}).")
    return record
