"""What one change would have given a request: bounds that follow from its own record.

Each is the whole time that the changed thing took of it, so the most that can be gained: what others in the same steps
cost meanwhile, and what the freed time would have been used for, only a simulation of the whole load can tell.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tailrace.ledger.lookup import Story
from tailrace.ledger.record import PAGE
from tailrace.ledger.store import MICRO

WORTH = 0.02
"""Share of the request's time from which on a change is worth telling."""
ROOM = {
    "slots": "a free place among the requests that run when it came (--max-running, or another replica)",
    "pages": "free KV pages when it came (--kv-tokens, or another replica)",
    "budget": "room for its prompt in the first step (--step-tokens, or another replica)",
}
FORGOTTEN = {
    "pressure": "a pool that had kept what it had room for before (--kv-tokens)",
    "ttl": "a cache that keeps for longer (--kv-ttl)",
    "quota": "a larger share of the cache for its key (--kv-tenant-share)",
    "reset": "a cache that had not been reset",
}


class Change(msgspec.Struct, frozen=True):
    """`saves` seconds at most, of its time to the end, by `what`."""

    what: str
    saves: float


def changes(story: Story) -> list[Change]:
    """What would have made a request quicker by at least `WORTH` of its time, the most first."""
    whole = story.record.e2e_us / MICRO
    found = [change for change in _all(story) if change.saves >= WORTH * whole and change.saves > 0]
    return sorted(found, key=lambda change: -change.saves)


def _all(story: Story) -> Iterator[Change]:
    record, detail = story.record, story.detail
    if detail.waited_for in ROOM and record.queued_us is not None:
        yield Change(ROOM[detail.waited_for], record.queue_us / MICRO)
    if detail.missed in FORGOTTEN and record.computed_tokens:
        missing = max(0, (record.prompt_tokens - 1) // PAGE * PAGE - record.cached_tokens)
        share = min(1.0, missing / record.computed_tokens)
        yield Change(FORGOTTEN[detail.missed], share * record.prefill_us / MICRO)
    slowed = sum(detail.slowed.values())
    yield Change("steps without others' prompts (smaller --step-tokens, or another replica)", slowed)
    away = sum(resume.away or 0.0 for resume in detail.resumes if resume.cause == "pages")
    pages = detail.stalls.get("pages", (0, 0.0))[1]
    yield Change("KV pages enough for all that ran (--kv-tokens, fewer --max-running)", away + pages)
