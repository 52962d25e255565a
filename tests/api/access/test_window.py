"""What was used over the last minute: no minute ever sees more than the limit, and what is given back is there."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.api.access.window import SECONDS, Window

requests = st.lists(
    st.tuples(st.floats(0, 40), st.integers(1, 30), st.floats(0, 1)),  # pause, amount, share that is given back
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(requests, st.integers(1, 100))
def test_no_sixty_seconds_ever_see_more_than_the_limit(asked: list[tuple[float, int, float]], limit: int) -> None:
    window, now = Window(), 1000.0
    booked: list[tuple[float, int]] = []
    for pause, amount, back in asked:
        now += pause
        if window.wait(amount, limit, now) == 0:
            slot = window.add(amount, now)
            unused = int(amount * back)
            window.give_back(slot, unused)
            booked.append((now, amount - unused))
        for begin, _ in booked:
            assert sum(used for at, used in booked if begin <= at < begin + SECONDS) <= limit
        assert 0 <= window.used(now) <= limit


@settings(max_examples=60, deadline=None)
@given(requests, st.integers(1, 100), st.integers(1, 120))
def test_whoever_waits_as_long_as_told_is_let_in_and_not_before(
    asked: list[tuple[float, int, float]], limit: int, more: int
) -> None:
    window, now = Window(), 0.0
    for pause, amount, _ in asked:
        now += pause
        if window.wait(amount, limit, now) == 0:
            window.add(amount, now)
    wait = window.wait(more, limit, now)
    if more > limit:
        assert math.isinf(wait)
        return
    assert 0 <= wait <= SECONDS + 1
    if wait > 0:
        assert window.wait(more, limit, now + wait * 0.999 - 1e-6) > 0
    assert window.wait(more, limit, now + wait + 1e-6) == 0
    assert window.used(now + window.reset(now) + 1e-6) == 0


def test_memory_is_bounded_by_the_minute() -> None:
    window = Window()
    for step in range(100_000):
        window.add(1, step * 0.01)
    assert len(window._slots) <= SECONDS + 1


def test_what_has_passed_cannot_be_given_back() -> None:
    window = Window()
    slot = window.add(5, 0.0)
    window.add(3, 70.0)
    window.give_back(slot, 5)
    assert window.used(70.0) == 3
