"""What a request has to keep to be a good one, and the share of requests that must be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import msgspec

from tailrace.measure import metrics
from tailrace.measure.record import Outcome, Record
from tailrace.terms import InvalidInput


def _worst_gap(record: Record) -> float | None:
    return max(metrics.gaps(record), default=None)


METRICS: dict[str, Callable[[Record], float | None]] = {
    "ttft": metrics.ttft,
    "tpot": metrics.tpot,
    "e2e": metrics.e2e,
    "gap": _worst_gap,
}
"""What can be bounded: `gap` is the longest chunk gap of a request."""


class Slo(msgspec.Struct, frozen=True):
    """Bounds in seconds by metric, and the share of requests, 0 to 1, that must keep all of them."""

    bounds: dict[str, float]
    share: float = 0.95

    def good(self, record: Record) -> bool:
        """Whether it is complete and kept every bound. One on what is not defined (TPOT of one token) is kept."""
        if record.outcome is not Outcome.OK:
            return False
        values = ((METRICS[name](record), bound) for name, bound in self.bounds.items())
        return all(value is None or value <= bound for value, bound in values)

    def __str__(self) -> str:
        return ", ".join(
            f"{name} <= {bound:g} s" for name, bound in self.bounds.items()
        ) + f" for {self.share:.4%}".replace(".0000%", "%")


def parse(texts: Sequence[str], share: float = 0.95) -> Slo | None:
    """Bounds as in "ttft=500ms,tpot=0.05": seconds, or with a unit. None where there are none. Raises InvalidInput."""
    bounds: dict[str, float] = {}
    for part in filter(None, (part.strip() for text in texts for part in text.split(","))):
        found = re.fullmatch(r"(\w+)=([0-9.]+)(ms|s)?", part)
        value = _number(found[2]) if found else math.nan
        if not found or found[1] not in METRICS or found[1] in bounds or not 0 < value < math.inf:
            raise InvalidInput(
                f"--slo is as in ttft=500ms,tpot=50ms,e2e=20s, of {', '.join(METRICS)}; not {part!r}", param="slo"
            )
        bounds[found[1]] = value / 1000 if found[3] == "ms" else value
    if not 0 < share <= 1:
        raise InvalidInput(f"the share that must be good is above 0 and at most 1, not {share:g}", param="attain")
    return Slo(bounds, share) if bounds else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
