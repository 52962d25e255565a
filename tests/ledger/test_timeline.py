"""Where a request's time went, from its events."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.book import Book
from tailrace.ledger.log import request_line
from tailrace.ledger.timeline import Fold, Timeline, as_json
from tailrace.terms import Event, EventKind, Phase


def fold_of(*events: tuple[EventKind, float] | tuple[EventKind, float, dict[str, object]], times: bool = False) -> Fold:
    fold = Fold("r", keep_times=times)
    for kind, at, *rest in events:
        fold.add(Event("r", kind, at, **(rest[0] if rest else {})))  # type: ignore[arg-type]
    return fold


E = EventKind
PLAIN = (
    (E.RECEIVED, 100.0),
    (E.SUBMITTED, 100.1),
    (E.QUEUED, 100.2),
    (E.ADMITTED, 100.5, {"cached": 16}),
    (E.CHUNK, 101.5, {"begin": 100.6, "computed": 20}),
    (E.CHUNK, 102.0, {"begin": 101.5, "computed": 5}),
    (E.TOKEN, 102.0, {"begin": 101.5, "computed": 1}),
    (E.TOKEN, 102.5, {"begin": 102.0, "computed": 1}),
    (E.STALLED, 103.0, {"begin": 102.5, "cause": "budget"}),
    (E.TOKEN, 104.0, {"begin": 103.5, "computed": 1}),
    (E.FINISHED, 104.0, {"cause": "stop"}),
    (E.DELIVERED, 104.25),
)


def test_every_second_has_a_phase() -> None:
    timeline = fold_of(*PLAIN, times=True).timeline()
    assert timeline.phases == pytest.approx(
        {
            Phase.PREPARE: 0.1,
            Phase.QUEUE: 0.5,  # 100.1 to 100.6: until its first step began
            Phase.KV_LOOKUP: 0.0,
            Phase.KV_LOAD: 0.0,
            Phase.PREFILL: 1.4,
            Phase.DECODE: 1.0,
            Phase.STALL: 0.5,
            Phase.STREAM: 0.25,
            Phase.OTHER: 0.5,  # 103.0 to 103.5: no step ran
        }
    )
    assert timeline.e2e == pytest.approx(4.25)
    assert timeline.covered == pytest.approx(1 - 0.5 / 4.25)
    assert timeline.ttft == pytest.approx(2.0)
    assert timeline.tpot == pytest.approx(1.0)
    assert timeline.queue == pytest.approx(0.3)
    assert timeline.prefill == pytest.approx(1.5)
    assert timeline.decode == pytest.approx(2.0)
    assert timeline.token_times == pytest.approx([2.0, 2.5, 4.0])
    assert (timeline.computed_tokens, timeline.cached_tokens, timeline.output_tokens) == (25, 16, 3)
    assert (timeline.prefill_steps, timeline.decode_steps, timeline.stalled_steps) == (2, 2, 1)
    assert timeline.finish == "stop"


@pytest.mark.parametrize("gap", [0.0001, 0.02])
def test_what_lies_between_two_steps_has_no_phase_however_short_it_is(gap: float) -> None:
    fold = fold_of(*PLAIN[:8], (E.TOKEN, 103.0, {"begin": 102.5 + gap, "computed": 1}))
    assert fold.timeline().phases[Phase.OTHER] == pytest.approx(gap)
    assert fold.timeline().phases[Phase.DECODE] == pytest.approx(1.0 - gap)


def test_a_preempted_request_queues_again() -> None:
    fold = fold_of(
        *PLAIN[:8],
        (E.PREEMPTED, 102.5),
        (E.ADMITTED, 104.5, {"cached": 32}),
        (E.CHUNK, 105.0, {"begin": 104.5, "computed": 9}),
        (E.TOKEN, 105.0, {"begin": 104.5, "computed": 1}),
        (E.FINISHED, 105.0, {"cause": "length"}),
    )
    timeline = fold.timeline()
    assert timeline.phases[Phase.QUEUE] == pytest.approx(2.5)
    assert timeline.preemptions == 1
    assert timeline.cached_tokens == 16
    assert timeline.queue == pytest.approx(0.3)


def test_a_request_that_is_still_open_is_measured_up_to_now() -> None:
    timeline = fold_of(*PLAIN[:3]).timeline(now=103.2)
    assert timeline.e2e == pytest.approx(3.2)
    assert timeline.phases[Phase.QUEUE] == pytest.approx(3.1)
    assert timeline.ttft is None
    assert timeline.tpot is None


def test_one_token_has_no_time_per_output_token() -> None:
    assert fold_of(*PLAIN[:7], (E.FINISHED, 102.0, {"cause": "length"})).timeline().tpot is None


def test_a_crash_closes_what_it_cut_off() -> None:
    closed: list[Timeline] = []
    book = Book(closed.append)
    book.open("r", 1.0)
    book.add([Event("r", E.SUBMITTED, 1.1), Event("r", E.QUEUED, 1.2), Event("r", E.ADMITTED, 1.3)])
    book.add([Event("r", E.TOKEN, 2.0, begin=1.3, computed=1)])
    book.add([Event("r", E.FAILED, 7.0, cause="engine died")])
    assert not closed
    book.add([Event("r", E.DELIVERED, 7.1)])
    assert closed[0].finish == "error"
    assert closed[0].phases[Phase.OTHER] == pytest.approx(5.0)
    assert len(book) == 0


def test_a_client_that_leaves_first_is_closed_by_the_engine() -> None:
    closed: list[Timeline] = []
    book = Book(closed.append)
    book.open("r", 1.0)
    book.add([Event("r", E.SUBMITTED, 1.0), Event("r", E.DELIVERED, 2.0)])
    assert not closed
    book.add([Event("r", E.FINISHED, 2.1, cause="abort")])
    assert closed[0].finish == "abort"


def test_a_book_passes_strangers_over_and_forgets_what_was_never_submitted() -> None:
    book = Book(lambda _timeline: None)
    book.add([Event("warm-up", E.TOKEN, 1.0)])
    book.open("r", 1.0)
    book.discard(["r", "unknown"])
    assert len(book) == 0


def test_the_observer_sees_each_token_with_the_one_before() -> None:
    seen: list[tuple[float, float]] = []
    book = Book(lambda _t: None, lambda _fold, event, before: seen.append((event.at, before)))
    book.open("r", 1.0)
    book.add([Event("r", E.ADMITTED, 1.0), Event("r", E.TOKEN, 2.0, begin=1.0, computed=1)])
    book.add([Event("r", E.TOKEN, 3.0, begin=2.0, computed=1)])
    assert seen == [(2.0, 0.0), (3.0, 2.0)]


def test_a_line_is_json_with_sizes_and_no_text() -> None:
    line = request_line(fold_of(*PLAIN).timeline(), {"endpoint": "chat"}, wall_clock=lambda: 12.0)
    body = json.loads(line)
    assert body["event"] == "request"
    assert body["at"] == 12.0
    assert body["endpoint"] == "chat"
    assert body["phases_ms"]["prefill"] == 1400.0
    assert "\n" not in line
    assert "token_times_ms" not in body
    assert "token_times_ms" in as_json(fold_of(*PLAIN, times=True).timeline())


STEPS = st.lists(
    st.tuples(
        st.sampled_from([E.CHUNK, E.TOKEN, E.STALLED, E.PREEMPTED, E.ADMITTED]), st.floats(0, 5), st.floats(0, 5)
    ),
    max_size=30,
)


@given(STEPS, st.floats(0, 3), st.sampled_from([E.FINISHED, E.FAILED]))
def test_phases_always_sum_to_the_whole(
    steps: list[tuple[EventKind, float, float]], tail: float, end: EventKind
) -> None:
    fold = fold_of((E.RECEIVED, 10.0), (E.SUBMITTED, 10.5), (E.QUEUED, 10.6))
    now = 10.6
    for kind, gap, length in steps:
        fold.add(Event("r", kind, now + gap + length, begin=now + gap, computed=1))
        now += gap + length
    fold.add(Event("r", end, now, cause="stop"))
    fold.add(Event("r", E.DELIVERED, now + tail))
    timeline = fold.timeline()
    assert sum(timeline.phases.values()) == pytest.approx(timeline.e2e)
    assert all(spent >= 0 for spent in timeline.phases.values())
    assert timeline.e2e == pytest.approx(now + tail - 10.0)


@pytest.mark.parametrize("events", [PLAIN[:4], PLAIN[:8]])
def test_what_is_cut_off_in_a_step_was_in_it(events: tuple[tuple[EventKind, float], ...]) -> None:
    """Its client leaves while a step computes its prompt, or its next token."""
    fold = fold_of(*events, (E.FINISHED, 103.0, {"cause": "abort"}), (E.DELIVERED, 103.0))
    timeline = fold.timeline()
    assert timeline.phases[Phase.OTHER] == 0.0
    assert sum(timeline.phases.values()) == pytest.approx(timeline.e2e)


def test_a_client_that_leaves_does_so_in_the_middle_of_something() -> None:
    fold = fold_of(*PLAIN[:8], (E.DELIVERED, 102.6), (E.FINISHED, 102.7, {"cause": "abort"}))
    assert fold.closed
    assert fold.timeline().phases[Phase.OTHER] == 0.0
    assert fold.timeline().phases[Phase.DECODE] == pytest.approx(0.7)
