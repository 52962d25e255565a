"""Which texts are read in the next step, where the model embeds or scores texts. Pure: state and the time in, plan out.

A request has one or many texts, and a text is read whole, in one step: there is no KV that a later step could go on
from. A step takes texts of several requests up to its budget of tokens; one text alone may be longer than that. The
order is the scheduler's own (`scheduler`): priority raised by age, tenants' fair order, arrival. The first request is
sure of `oldest_share` of a step, or of one text; the rest goes to requests with the fewest tokens left, better priority
before, so that a short one does not wait for one of a thousand texts, and that one goes on all the same.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace.engine.fairness import FairOrder
from tailrace.engine.protocol import Encode


class Reading:
    """One request inside the engine. Texts before `next` have been read, or are in the step that runs."""

    def __init__(self, encode: Encode, *, seq: int, arrived: float) -> None:
        self.id = encode.request
        self.tenant = encode.tenant
        self.priority = encode.priority
        self.deadline = encode.deadline
        self.seq = seq
        self.arrived = arrived
        self.tokens = np.frombuffer(encode.tokens, np.int32)
        self.lengths = np.asarray(encode.lengths, np.int32)
        self.starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(self.lengths, dtype=np.int32)])
        self.kinds = np.zeros_like(self.tokens)
        for start, end, second in zip(self.starts[:-1], self.starts[1:], encode.second, strict=False):
            self.kinds[start + second : end] = 1
        self.next = 0
        self.tag = 0.0
        self.ended = False
        self.rows: list[NDArray[np.float32]] = []

    @property
    def texts(self) -> int:
        return len(self.lengths)

    @property
    def left(self) -> int:
        """Tokens that are not read yet."""
        return int(self.starts[-1] - self.starts[self.next])


@dataclass(frozen=True)
class Part:
    """Texts [first, end) of a request."""

    request: Reading
    first: int
    end: int

    @property
    def count(self) -> int:
        """Tokens."""
        return int(self.request.starts[self.end] - self.request.starts[self.first])


@dataclass
class TextQueue:
    """Requests that are not read to their end. `step_tokens` is the budget of a step, `age_seconds` the time in which
    waiting is worth one level of priority."""

    step_tokens: int
    oldest_share: float = 0.5
    age_seconds: float = 10.0
    requests: dict[str, Reading] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fair = FairOrder({})
        self._arrivals = 0
        self._deadlines: list[tuple[float, int, Reading]] = []

    @property
    def running(self) -> int:
        """Requests of which something has been read."""
        return sum(request.next > 0 for request in self.requests.values())

    @property
    def waiting(self) -> int:
        """Requests of which nothing has been read."""
        return len(self.requests) - self.running

    def take(self, encode: Encode, now: float) -> Reading:
        """Puts a checked request into the queue."""
        self._arrivals += 1
        request = Reading(encode, seq=self._arrivals, arrived=now)
        request.tag = self._fair.tag(request.tenant, request.left)
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, request.seq, request))
        self.requests[request.id] = request
        return request

    def finish(self, request: Reading) -> None:
        """Takes a request out, read to its end or not."""
        del self.requests[request.id]
        self._fair.give_back(request.tenant, request.left)
        request.ended = True

    def overdue(self, now: float) -> list[Reading]:
        """Requests whose deadline has passed and that have not ended; each is returned once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.ended:
                late.append(request)
        return late

    def plan(self, now: float) -> list[Part]:
        """The texts of the next step, which count as read from now; a request has one part or two."""
        order = sorted(self.requests.values(), key=lambda r: (self._level(r, now), r.tag, r.seq))
        order = [request for request in order if request.next < request.texts]
        if not order:
            return []
        sure = self._part(order[0], max(1, int(self.step_tokens * self.oldest_share)), alone=True)
        parts = [sure] if sure is not None else []
        room = self.step_tokens - sum(part.count for part in parts)
        for request in sorted(order, key=lambda r: (self._level(r, now), r.left, r.seq)):
            part = self._part(request, room)
            if part is not None:
                parts.append(part)
                room -= part.count
        return parts

    def _level(self, request: Reading, now: float) -> int:
        return request.priority - int((now - request.arrived) / self.age_seconds)

    def _part(self, request: Reading, room: int, *, alone: bool = False) -> Part | None:
        """As many of the request's next texts as there is room for; `alone`: at least one."""
        first = request.next
        limit = int(request.starts[first]) + room
        end = int(np.searchsorted(request.starts, limit, side="right")) - 1
        end = max(end, first + 1) if alone else end
        if end <= first:
            return None
        if first == 0:
            self._fair.admitted(request.tag)
        request.next = end
        return Part(request, first, end)
