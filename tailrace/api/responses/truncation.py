"""`truncation: "auto"`: what is left out of a conversation that the context cannot hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tailrace.api.schema import Message
from tailrace.terms import InvalidInput

T = TypeVar("T")
Plan = Callable[[Sequence[Message], bool], Awaitable[T]]
"""Plans a conversation; told whether it must leave room for an answer, beside what fits at all."""


async def shortest_cut(messages: Sequence[Message], plan: Plan[T]) -> T:
    """What `plan` makes of the conversation without as few of its oldest turns as possible. A turn begins with a
    user's message; what stands before the first one (instructions) and the last turn always stay. Raises InvalidInput
    where these are too long already."""
    starts = [at for at, message in enumerate(messages) if message.role == "user"] or [0]
    head = list(messages[: starts[0]])
    if await _fits(messages, plan):
        return await plan(messages, False)
    low, high = 1, len(starts) - 1  # turns that are left out
    while low < high:
        middle = (low + high) // 2
        if await _fits([*head, *messages[starts[middle] :]], plan):
            high = middle
        else:
            low = middle + 1
    return await plan([*head, *messages[starts[max(high, 0)] :]], False)


async def _fits(messages: Sequence[Message], plan: Plan[T]) -> bool:
    try:
        await plan(messages, True)
    except InvalidInput as error:
        if error.code != "context_length_exceeded":
            raise
        return False
    return True
