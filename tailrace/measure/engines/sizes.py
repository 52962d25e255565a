"""What a server has to hold for a workload."""

from __future__ import annotations

from itertools import islice

from tailrace.measure.counting import Plan
from tailrace.workload import make
from tailrace.workload.arrivals import Closed
from tailrace.workload.spec import Workload

LOOKED_AT = 500
"""Sessions that are looked at for the longest."""
ROOM, MORE = 64, 1.1
"""Tokens of a chat template, and the share by which prompts of words may be longer than planned."""
PARALLEL = 32
"""Requests at a time that servers are made for in an open loop."""


def context(workload: Workload, plan: Plan, turns: int) -> int:
    """Tokens that one request may have, prompt and answer, in any of the turns' sessions; in the first of them where a
    time bounds the load."""
    count = LOOKED_AT if plan.sessions is None else 2 * (plan.sessions + plan.warmup)
    seen = (
        turn.input + turn.output
        for number in range(turns)
        for session in islice(make.sessions(workload, plan.seed + number), count)
        for turn in session.turns
    )
    return int(max(seen, default=0) * MORE) + ROOM


def parallel(workload: Workload, plan: Plan) -> int:
    """Requests that may run at a time."""
    if not isinstance(plan.arrivals, Closed):
        return PARALLEL
    return plan.arrivals.concurrency * (workload.turns.branches if workload.turns is not None else 1)
