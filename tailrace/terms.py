"""The words that every room shares: errors, phases of a request, and the events that a request emits.

Times are seconds on the system-wide monotonic clock (`time.monotonic`), which all processes of one machine share.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable

import msgspec


class TailraceError(Exception):
    """Base of every error that Tailrace raises on purpose. The message says what is wrong and what to do."""


class InvalidInput(TailraceError):
    """A caller's value is wrong. `param` names the parameter, `code` is the machine-readable kind."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelError(TailraceError):
    """A model cannot be found, read or run; the message names the file and the tensor or field."""


class Overloaded(TailraceError):
    """The server cannot take the request now. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDied(TailraceError):
    """The engine process ended or hung while it held the request."""


class Phase(enum.StrEnum):
    """Where a request's time goes. Named phases cover at least 99 % of its end-to-end time; the rest is `other`."""

    PREPARE = "prepare"  # received until handed to the engine: checks, template, tokenizing
    QUEUE = "queue"  # handed to the engine until admitted, and again after each preemption
    KV_LOOKUP = "kv_lookup"  # waiting for a tier below the pool to say which pages it has
    KV_LOAD = "kv_load"  # admitted, while pages of its prompt came from a tier below the pool
    PREFILL = "prefill"  # admitted until the first token: steps that computed its prompt
    DECODE = "decode"  # first token until the last
    STALL = "stall"  # admitted, but left out of a step that ran
    STREAM = "stream"  # last token until the last byte was handed to the socket
    OTHER = "other"


class EventKind(enum.StrEnum):
    """What can happen to a request.

    A step is the interval [begin, at]. It begins when the step before it ended, where it follows that one at once:
    planning and launching a step is part of it. Otherwise it begins with its launch. So the steps of an engine that is
    not idle touch each other, and the phases of a request leave no gaps between them.
    """

    RECEIVED = "received"  # api: the request's bytes are complete
    SUBMITTED = "submitted"  # api: handed to the engine
    QUEUED = "queued"  # engine: taken into the waiting queue
    ADMITTED = "admitted"  # engine: has pages; `cached` tokens need no computing; `cause`: what it waited for
    LOOKING = "looking"  # engine: a tier is asked for `cached` tokens; the request waits for the answer
    LOOKED = "looked"  # engine: it waits no more; `cause` "late" where there was no answer
    LOADING = "loading"  # engine: `cached` more tokens are to be loaded from `tier`; `predicted`, `computing` seconds
    LOADED = "loaded"  # engine: so many `cached` tokens were, and need no computing; `cause`: why no more; one a `tier`
    DECLINED = "declined"  # engine: admitted without what a tier may have; `cause` says why, the rest as for LOADING
    CHUNK = "chunk"  # engine: a step [begin, at] computed `computed` of its prompt tokens, or `rows` of forced output
    TOKEN = "token"  # engine: a step [begin, at] gave it `computed` output tokens
    STALLED = "stalled"  # engine: a step [begin, at] left it out; `cause` says why
    PREEMPTED = "preempted"  # engine: lost its pages, with `computed` tokens in them; `cause` says why
    FINISHED = "finished"  # engine: `cause` is the finish reason
    FAILED = "failed"  # whoever noticed: `cause` is the reason
    DELIVERED = "delivered"  # api: the last byte was handed to the socket


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One thing that happened to one request at one time. `predicted` and `computing` are the seconds that loading from
    `tier` and computing the same tokens are expected to take; `computing` is 0 where it is not known. `rows` are tokens
    that a step computed for output, where that is not one (or, beside the CHUNK of the prompt's end, none). `missed`
    says of an ADMITTED why no more of its prompt was cached: it is "new", it was forgotten (see
    `kv.prefix.PrefixIndex.why_absent`), "scoring", or the cache is "off"; "" where all was that can be."""

    request: str
    kind: EventKind
    at: float
    begin: float = 0.0
    computed: int = 0
    cached: int = 0
    cause: str = ""
    predicted: float = 0.0
    computing: float = 0.0
    tier: str = ""
    rows: int = 0
    missed: str = ""


def slo_bounds(texts: Iterable[str], metrics: Collection[str]) -> dict[str, float]:
    """Bounds in seconds of texts such as "ttft=500ms,tpot=0.05": in seconds, or with a unit (ms, s), for each metric at
    most one. Raises InvalidInput."""
    bounds: dict[str, float] = {}
    for part in filter(None, (part.strip() for text in texts for part in text.split(","))):
        found = re.fullmatch(r"(\w+)=([0-9.]+(?:e-?[0-9]+)?)(ms|s)?", part)
        try:
            value = float(found[2]) / (1000 if found[3] == "ms" else 1) if found else 0.0
        except ValueError:
            value = 0.0
        if not found or found[1] not in metrics or found[1] in bounds or not 0 < value < 1e9:
            raise InvalidInput(
                f"--slo is as in ttft=500ms,tpot=0.05,e2e=20s, of {', '.join(metrics)}; not {part!r}", param="slo"
            )
        bounds[found[1]] = value
    return bounds
