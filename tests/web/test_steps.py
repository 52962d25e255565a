"""The engine's last steps, and who was in each."""

from __future__ import annotations

from tailrace.terms import Event, EventKind
from tailrace.web.steps import Part, Recent, Step, Steps

E = EventKind


def decode(name: str, at: float) -> Event:
    return Event(name, E.TOKEN, at, at - 0.1, 1)


def test_a_step_tells_who_was_in_it_with_how_many_tokens() -> None:
    recent = Recent()
    recent.add([Event("a", E.QUEUED, 0.9), Event("a", E.ADMITTED, 0.95)])
    recent.add(
        [
            decode("b", 1.1),
            Event("a", E.CHUNK, 1.1, 1.0, 20),
            Event("a", E.TOKEN, 1.1, 1.0, 1),
            Event("c", E.STALLED, 1.1, 1.0, cause="pages"),
            Event("d", E.CHUNK, 1.1, 1.0, rows=3),
            Event("b", E.FINISHED, 1.1, cause="stop"),
        ]
    )
    told = recent.after(0, clock=1000.0)
    assert told.names == ["b", "a", "c", "d"]
    (step,) = told.steps
    assert (step.begin, step.seconds) == (1001.0, 0.1)
    assert step.parts == [Part(0, 0, 1), Part(1, 20, 1), Part(2, 0, 0, "pages"), Part(3, 0, 3)]


def test_only_what_came_after_is_told_again() -> None:
    recent = Recent()
    recent.add([decode("a", 1.0)])
    last = recent.after(0, 0.0).last
    assert recent.after(last, 0.0).steps == []
    recent.add([decode("a", 1.1)])
    told = recent.after(last, 0.0)
    assert [step.number for step in told.steps] == [told.last] == [last + 1]


def test_no_more_than_the_last_are_kept() -> None:
    recent = Recent(kept=3)
    for at in range(10):
        recent.add([decode("a", float(at))])
    assert [step.begin for step in recent.after(0, 0.1).steps] == [7.0, 8.0, 9.0]


def test_a_snapshot_stays_as_it_is() -> None:
    recent = Recent()
    recent.add([decode("a", 1.0)])
    taken = recent.snapshot()
    recent.add([decode("b", 1.1)])
    assert taken.after(0, 0.0) == Steps([Step(1, 0.9, 0.1, [Part(0, 0, 1)])], ["a"], 1)
    assert (taken.knows("b"), recent.knows("b")) == (False, True)


def test_one_requests_steps_are_told_from_when_it_came() -> None:
    recent = Recent()
    recent.add([Event("a", E.CHUNK, 5.5, 5.0, 16), decode("b", 5.5)])
    recent.add([decode("b", 5.6)])
    recent.add([Event("a", E.TOKEN, 5.7, 5.6, 1)])
    assert recent.of("a", 4.0) == [(1.0, 1.5, Part(0, 16, 0)), (1.6, 1.7, Part(0, 0, 1))]
    assert recent.of("nobody", 4.0) == []
    recent.add([decode("c.1", 6.0)])
    assert [recent.knows(name) for name in ("a", "c", "c.1", "c.", "")] == [True, True, True, False, False]
