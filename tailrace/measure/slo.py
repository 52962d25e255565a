"""What a request has to keep to be a good one, and the share of requests that must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tailrace.measure import metrics
from tailrace.measure.record import Outcome, Record
from tailrace.terms import InvalidInput, slo_bounds


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
    """Bounds as in "ttft=500ms,tpot=0.05". None where there are none. Raises InvalidInput."""
    bounds = slo_bounds(texts, METRICS)
    if not 0 < share <= 1:
        raise InvalidInput(f"the share that must be good is above 0 and at most 1, not {share:g}", param="attain")
    return Slo(bounds, share) if bounds else None
