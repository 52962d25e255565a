"""Who goes first: `priority` and `service_tier`, and what a caller may ask for of either."""

from __future__ import annotations

from tailrace.api.errors import HttpError
from tailrace.terms import InvalidInput

MOST_URGENT, LEAST_URGENT = -1000, 1000
"""The bounds of `priority`: lower goes first."""
TIERS = {"auto": 0, "default": 0, "flex": 30, "priority": -30}
"""The scheduler's priority for each `service_tier`. A request that waits goes up by one every ten seconds, so that
"flex" is never put off for more than five minutes by requests that come later, nor "default" by "priority"."""


def permitted(priority: int | None, least: int) -> int:
    """The scheduler's priority of a request with this `priority`, where the caller may ask for `least` and above.
    Raises HttpError 403."""
    if priority is not None and priority < least:
        raise HttpError(
            403,
            f"this API key may ask for a priority of {least} or more, not for {priority}, with which it would go "
            "before others' requests",
            kind="permission_error",
            param="priority",
            code="insufficient_scope",
        )
    return priority or 0


def ranked(tier: str | None, priority: int | None, least: int) -> tuple[int, str | None]:
    """The scheduler's priority of a request with this `service_tier` and `priority`, and the tier that it gets: the
    default one where the caller may not ask for the priority of another. Raises InvalidInput, or HttpError 403."""
    if tier is None:
        return permitted(priority, least), None
    if tier not in TIERS:
        raise InvalidInput(
            f"service_tier can be {', '.join(TIERS)}, not {tier[:40]!r}",
            param="service_tier",
            code="unsupported_parameter",
        )
    if not TIERS[tier]:
        return permitted(priority, least), "default"
    if priority is not None:
        raise InvalidInput(f'service_tier "{tier}" is a priority: give it or priority, not both', param="service_tier")
    return (TIERS[tier], tier) if TIERS[tier] >= least else (0, "default")
