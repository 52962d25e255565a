"""What one request was, and what became of it: all that any metric is made of."""

from __future__ import annotations

import enum

import msgspec


class Outcome(enum.StrEnum):
    """How a request ended. Everything but `OK` and `STOPPED` is a failure, and stays in the denominator."""

    OK = "ok"
    REFUSED = "refused"  # 429 or 503: the server had no room
    ERROR = "error"  # another status, or an error in the middle of the answer
    CUT = "cut"  # the answer ended before it was complete
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"  # no connection
    MALFORMED = "malformed"  # what came was no such answer
    ABANDONED = "abandoned"  # never sent: a turn that it builds on has failed
    STOPPED = "stopped"  # still running when the measurement ended; never a measured one


class Record(msgspec.Struct):
    """One request. Times are seconds since the run began; None where it never came to that.

    `due`: when it should have been sent, in an open loop. `began`: when the client got to it. `sent`: its last byte was
    written, of which `connecting` seconds went by for a connection. `chunks`: when each piece that carries text,
    reasoning or tool arguments came. `ended`: the answer was complete, or it was given up. Tokens are as the server's
    usage says (None where it says nothing); `wanted_input` and `wanted_output` are what was asked for.
    """

    session: int
    turn: int
    measured: bool
    wanted_input: int
    wanted_output: int
    due: float | None = None
    began: float | None = None
    connecting: float = 0.0
    sent: float | None = None
    chunks: list[float] = []
    ended: float | None = None
    outcome: Outcome = Outcome.STOPPED
    status: int | None = None
    error: str = ""
    finish: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    phases: dict[str, float] = {}
    """Seconds of each phase as the server's timeline has it, where it gives one."""
