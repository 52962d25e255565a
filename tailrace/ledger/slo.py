"""What a request was promised, and whether it got it: bounds on its own TTFT, TPOT and E2E, in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from tailrace.terms import InvalidInput, slo_bounds

Metric = Literal["ttft", "tpot", "e2e"]
METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2e")


class Slo(msgspec.Struct, frozen=True):
    """Bounds; None where there is none."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in METRICS)

    def verdicts(self, ttft: float | None, tpot: float | None, e2e: float, *, whole: bool) -> dict[str, bool]:
        """Whether each bound was kept. One that there is nothing to judge by (the TPOT of an answer of one token) is
        left out; what is not `whole`, because it failed or was refused, has kept none."""
        known = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
        verdicts: dict[str, bool] = {}
        for name in METRICS:
            bound, value = getattr(self, name), known[name]
            if bound is not None and (value is not None or not whole):
                verdicts[name] = whole and value is not None and value <= bound
        return verdicts


NONE = Slo()


def parse(text: str) -> Slo:
    """Bounds of "ttft=500ms,tpot=0.05". Raises InvalidInput."""
    return Slo(**slo_bounds([text], METRICS))


def asked(header: Callable[[bytes], bytes | None], usual: Slo) -> Slo:
    """The bounds of a request: those of its headers (x-slo-ttft-ms and so on, in milliseconds), else the usual ones.
    Raises InvalidInput, which names the header."""
    bounds: dict[str, float] = {}
    for name in METRICS:
        given = header(b"x-slo-%b-ms" % name.encode())
        if given is not None:
            named = f"x-slo-{name}-ms"
            bounds[name] = _bound(given.decode("latin-1"), named) / 1000
    return msgspec.structs.replace(usual, **bounds) if bounds else usual


def _bound(text: str, named: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise InvalidInput(f"{named} is a number above 0, not {text[:40]!r}", param=named)
    return value
