"""A step's time is divided among its requests, and whoever held others up is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.book import Book
from tailrace.ledger.timeline import Timeline
from tailrace.terms import Event, EventKind

E = EventKind


def book_of(*requests: str, parity: float = 0.0) -> tuple[Book, dict[str, Timeline]]:
    """A book in which these are admitted, and where its timelines go."""
    closed: dict[str, Timeline] = {}
    book = Book(lambda timeline: closed.update({timeline.request: timeline}))
    book.parity = parity
    for request in requests:
        book.open(request, 0.0)
        book.add([Event(request, E.SUBMITTED, 0.0), Event(request, E.QUEUED, 0.0)])
    book.add([Event(request, E.ADMITTED, 0.0) for request in requests])
    return book, closed


def end(book: Book, *requests: str, at: float) -> None:
    book.add([Event(request, E.FINISHED, at, cause="stop") for request in requests])
    book.add([Event(request, E.DELIVERED, at) for request in requests])


def test_a_steps_time_is_divided_by_the_tokens_that_each_had_computed() -> None:
    book, closed = book_of("a", "b")
    book.add([Event("a", E.CHUNK, 1.0, 0.0, 30), Event("b", E.CHUNK, 1.0, 0.0, 10), Event("b", E.TOKEN, 1.0, 0.0, 1)])
    book.add([Event("b", E.TOKEN, 3.0, 1.0, 1), Event("a", E.CHUNK, 3.0, 1.0, 3)])
    end(book, "a", "b", at=3.0)
    assert closed["a"].device == pytest.approx(0.75 + 1.5)
    assert closed["b"].device == pytest.approx(0.25 + 0.5)
    assert (closed["a"].device_prefill, closed["b"].device_prefill) == pytest.approx((2.25, 0.25))
    assert (closed["a"].prefill_beside, closed["b"].prefill_beside) == (10, 30)
    assert (closed["a"].decode_beside, closed["b"].decode_beside) == (0, 2)


def test_a_token_that_reads_much_context_is_more_work() -> None:
    book, closed = book_of("long", "short", parity=100.0)
    book.add([Event("long", E.CHUNK, 1.0, 0.0, 300)])
    book.add([Event("short", E.CHUNK, 2.0, 1.0, 1)])
    book.add([Event("long", E.TOKEN, 3.0, 2.0, 1), Event("short", E.TOKEN, 3.0, 2.0, 1)])
    end(book, "long", "short", at=3.0)
    share = closed["long"].device - 1.0
    assert 3.9 < share / (closed["short"].device - 1.0) < 4.0  # 1 + 300 / 100 against 1 + 1 / 100


def test_drafts_and_forced_tokens_count_as_they_were_computed() -> None:
    book, closed = book_of("drafts", "plain")
    step = [Event("drafts", E.TOKEN, 1.0, 0.0, 2, rows=4), Event("plain", E.TOKEN, 1.0, 0.0, 1)]
    book.add(step)
    book.add([Event("drafts", E.CHUNK, 2.0, 1.0, rows=64)])
    end(book, "drafts", "plain", at=2.0)
    assert (closed["drafts"].device, closed["plain"].device) == pytest.approx((0.8 + 1.0, 0.2))
    assert closed["drafts"].device_prefill == 0.0
    assert closed["drafts"].prompt_tokens == 0


def test_whose_prompt_slowed_whom_down_is_known() -> None:
    book, closed = book_of("a", "b", "c")
    book.add([Event("a", E.TOKEN, 1.0, 0.0, 1), Event("b", E.TOKEN, 1.0, 0.0, 1)])
    book.add([Event("a", E.TOKEN, 1.1, 1.0, 1), Event("b", E.TOKEN, 1.1, 1.0, 1)])
    book.add(
        [
            Event("c", E.CHUNK, 2.1, 1.1, 9),
            Event("b", E.STALLED, 2.1, 1.1, cause="budget"),
            Event("a", E.TOKEN, 2.1, 1.1, 1),
        ]
    )
    book.add([Event("a", E.TOKEN, 2.2, 2.1, 1), Event("b", E.TOKEN, 2.2, 2.1, 1)])
    end(book, "a", "b", "c", at=2.3)
    assert closed["a"].slowed == pytest.approx({"c": 0.9})
    assert closed["b"].slowed == pytest.approx({"c": 1.0})
    assert closed["b"].stalls == {"budget": (1, pytest.approx(1.0))}
    assert (closed["a"].gap, closed["a"].gap_at, closed["a"].gap_cause) == (pytest.approx(1.0), 1.1, "prompt c")
    assert (closed["b"].gap, closed["b"].gap_cause) == (pytest.approx(1.1), "stall budget prompt c")
    assert closed["c"].slowed == {}


def test_who_waited_and_ran_before_it_is_counted() -> None:
    book, closed = book_of("a", "b")
    for name in ("c", "d"):
        book.open(name, 1.0)
        book.add([Event(name, E.SUBMITTED, 1.0), Event(name, E.QUEUED, 1.0)])
    book.add([Event("a", E.FINISHED, 2.0, cause="stop"), Event("c", E.ADMITTED, 2.0, cause="slots")])
    book.open("e", 2.0)
    book.add([Event("e", E.QUEUED, 2.0)])
    end(book, "b", "c", "d", "e", at=3.0)
    assert (closed["c"].waiting_before, closed["c"].running_before, closed["c"].waited_for) == (0, 2, "slots")
    assert (closed["d"].waiting_before, closed["d"].running_before) == (1, 2)
    assert (closed["e"].waiting_before, closed["e"].running_before) == (1, 2)


@given(
    st.lists(
        st.tuples(st.floats(0.001, 2.0), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 64)), max_size=6)),
        max_size=12,
    ),
    st.sampled_from([0.0, 50.0]),
)
def test_shares_add_up_to_the_steps_whatever_these_are(
    steps: list[tuple[float, list[tuple[int, int]]]], parity: float
) -> None:
    names = [f"r{at}" for at in range(6)]
    book, closed = book_of(*names, parity=parity)
    now = total = 0.0
    for seconds, work in steps:
        events = []
        for number, tokens in dict(work).items():
            kind, count = (E.CHUNK, tokens) if tokens else (E.TOKEN, 1)
            events.append(Event(f"r{number}", kind, now + seconds, now, count))
            if tokens == 7:
                events.append(Event(f"r{number}", E.TOKEN, now + seconds, now, 1))
        book.add(events)
        now += seconds
        total += seconds if events else 0.0
    end(book, *names, at=now)
    assert sum(timeline.device for timeline in closed.values()) == pytest.approx(total)
