"""Sessions out of a workload. Session k depends on the workload, the seed and k alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

from tailrace.workload import amounts, traces
from tailrace.workload.session import Piece, Session, Turn
from tailrace.workload.spec import Shared, Turns, Workload

ONE_TURN = Turns(count=1)


def sessions(workload: Workload, seed: int = 0) -> Iterator[Session]:
    """The sessions in order: without end, or as many as the trace has. Raises InvalidInput for a trace that cannot be
    read."""
    if workload.trace is not None:
        return traces.read(workload.trace, seed)
    return (session(workload, seed, number) for number in count())


def session(workload: Workload, seed: int, number: int) -> Session:
    """One session of a workload that is made, not recorded."""
    assert workload.input is not None
    assert workload.output is not None
    rng = random.Random(f"{seed}:{number}")
    plan = workload.turns or ONE_TURN
    transcript = _front(workload.shared, seed, rng)
    turns: list[Turn] = []
    after: tuple[int, ...] = ()
    for step in range(amounts.tokens(plan.count, rng)):
        pause = amounts.draw(plan.pause, rng) if step else 0.0
        more = plan.added if step and plan.added is not None else workload.input
        width = plan.branches if step % plan.branch_every == plan.branch_every - 1 else 1
        begun = len(turns)
        said: list[Piece] = []
        for place in range(begun, begun + width):
            added = Piece(f"{seed}/{number}/{place}", amounts.tokens(more, rng))
            output = amounts.tokens(workload.output, rng)
            turns.append(Turn((*transcript, added), output, after, pause))
            said += [added, Piece(f"{seed}/{number}/{place}/answer", output, "assistant", answer_of=place)]
        after = tuple(range(begun, len(turns)))
        transcript = (*transcript, *said)
    return Session(number, tuple(turns))


def _front(shared: Shared | None, seed: int, rng: random.Random) -> tuple[Piece, ...]:
    if shared is None:
        return ()
    return (Piece(f"{seed}/shared/{rng.randrange(shared.groups)}", shared.tokens, "system"),)
