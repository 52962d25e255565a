"""The engine of models that read texts: whose texts come first, and that every request ends."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailrace.backends.encoding import TextBatch
from tailrace.engine.encoder import EncoderCore
from tailrace.engine.protocol import Encode, Output, SamplingParams, Submit
from tailrace.engine.texts import TextQueue
from tailrace.terms import EventKind


class Fake:
    """Gives the sum of a text's tokens and its length."""

    name = kernels = "fake"
    threads = 1
    weight_bytes = 0
    width = 2
    progress = 0
    work: int | None = None
    broken = False

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def encode(self, batch: TextBatch) -> NDArray[np.float32]:
        if self.broken:
            raise RuntimeError("no")
        lengths = np.diff(batch.starts)
        self.steps.append(lengths.tolist())
        self.progress += int(lengths.sum())
        sums = np.add.reduceat(batch.tokens + 100 * batch.kinds, batch.starts[:-1])
        return np.stack([sums, lengths], axis=1).astype(np.float32)


def encode(name: str, *lengths: int, **options: Any) -> Encode:
    tokens = array("i", [at % 50 for length in lengths for at in range(length)])
    return Encode(name, tokens.tobytes(), list(lengths), **options)


def core(backend: Fake | None = None, **options: Any) -> EncoderCore:
    made = {"vocab": 50, "kinds": 2, "longest": 64, "step_tokens": 32, "max_waiting": 8, **options}
    return EncoderCore(backend or Fake(), **made)


def drain(engine: EncoderCore) -> tuple[dict[str, Output], list[Any]]:
    outputs: dict[str, Output] = {}
    events = []
    while engine.has_work:
        news = engine.step()
        assert news is not None
        engine.check_integrity()
        for output in news.outputs:
            assert output.request not in outputs
            outputs[output.request] = output
        events += news.events
    return outputs, events


def numbers(output: Output) -> list[list[float]]:
    return np.frombuffer(output.vectors, np.float32).reshape(-1, 2).tolist()


def test_a_request_gets_its_numbers_in_the_order_of_its_texts() -> None:
    engine = core()
    engine.encode(encode("a", 3, 40, 5, 30, 1))
    outputs, events = drain(engine)
    assert outputs["a"].finish == "stop"
    assert numbers(outputs["a"]) == [[sum(range(n)), n] for n in (3, 40, 5, 30, 1)]
    kinds = [event.kind for event in events]
    assert kinds[:2] == [EventKind.QUEUED, EventKind.ADMITTED]
    assert kinds[-1] is EventKind.FINISHED
    assert sum(event.computed for event in events if event.kind is EventKind.CHUNK) == 79 == engine.progress


def test_the_second_text_of_a_pair_is_told_apart() -> None:
    engine = core()
    engine.encode(encode("a", 4, 2, second=[3, 1]))
    assert numbers(drain(engine)[0]["a"]) == [[6 + 100, 4], [1 + 100, 2]]


def test_a_short_request_does_not_wait_for_a_long_one() -> None:
    backend = Fake()
    engine = core(backend)
    engine.encode(encode("long", *[8] * 100))
    engine.step()
    engine.encode(encode("short", 4))
    news = engine.step()
    assert news is not None
    assert [output.request for output in news.outputs] == ["short"]
    assert backend.steps[1].count(8) == 3  # and the long one goes on


def test_better_priority_goes_first_and_age_catches_up() -> None:
    queue = TextQueue(8)
    queue.take(encode("late", 8, 8, priority=1), 0.0)
    queue.take(encode("first", 8, 8, priority=0), 1.0)
    assert [part.request.id for part in queue.plan(1.0)] == ["first"]
    queue.take(encode("later", 8, priority=0), 25.0)
    order = []
    for _ in range(3):
        (part,) = queue.plan(30.0)
        order.append(part.request.id)
    assert order == ["late", "late", "first"]


def test_tenants_share_the_engine_however_many_requests_one_sends() -> None:
    queue = TextQueue(8)
    for at in range(6):
        queue.take(encode(f"greedy{at}", 8, tenant="greedy"), 0.0)
    queue.take(encode("modest", 8, tenant="modest"), 0.0)
    order = []
    for _ in range(3):
        for part in queue.plan(0.0):
            order.append(part.request.id)
            queue.finish(part.request)
    assert "modest" in order[:2]


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (encode("x"), "invalid_prompt"),
        (encode("x", 65), "context_length_exceeded"),
        (Encode("x", array("i", [50]).tobytes(), [1]), "invalid_prompt"),
        (Encode("x", array("i", [1, 2]).tobytes(), [1]), "invalid_prompt"),
        (encode("x", 3, 3, second=[1]), "invalid_prompt"),
    ],
)
def test_what_cannot_be_read_is_refused(asked: Encode, code: str) -> None:
    engine = core()
    engine.encode(asked)
    output = drain(engine)[0]["x"]
    assert (output.finish, output.error.partition(":")[0]) == ("error", code)


def test_a_full_queue_a_drain_and_a_prompt_are_refused() -> None:
    engine = core(max_waiting=1)
    engine.encode(encode("a", 3))
    engine.encode(encode("b", 3))
    engine.submit(Submit("c", [1], SamplingParams(max_tokens=1)))
    engine.draining = True
    engine.encode(encode("d", 3))
    engine.encode(encode("a", 3))
    news = engine.step()
    assert news is not None
    said = [(output.request, output.error.partition(":")[0]) for output in news.outputs]
    assert said == [("b", "overloaded"), ("c", "wrong_task"), ("d", "draining"), ("a", "duplicate_request"), ("a", "")]


def test_a_failed_step_ends_its_requests_and_nothing_else() -> None:
    backend = Fake()
    engine = core(backend)
    engine.encode(encode("a", 3))
    backend.broken = True
    assert drain(engine)[0]["a"].error.startswith("step_failed")
    backend.broken = False
    engine.encode(encode("b", 3))
    assert drain(engine)[0]["b"].finish == "stop"


def test_a_deadline_and_a_hang_up_end_a_request() -> None:
    now = [0.0]
    engine = core(clock=lambda: now[0])
    engine.encode(encode("a", *[32] * 4, deadline=5.0))
    engine.encode(encode("b", *[32] * 4))
    engine.step()
    engine.abort(["b", "unknown"])
    now[0] = 6.0
    outputs, events = drain(engine)
    assert outputs["a"].finish == "timeout"
    assert "b" not in outputs
    assert [event.cause for event in events if event.kind is EventKind.FINISHED] == ["abort", "timeout"]
    assert engine.idle


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 64), min_size=1, max_size=12), st.integers(-2, 2), st.integers(0, 3)),
        max_size=12,
    ),
    st.integers(2, 80),
)
def test_every_request_is_read_to_its_end_in_steps_within_the_budget(
    asked: list[tuple[list[int], int, int]], budget: int
) -> None:
    backend = Fake()
    engine = core(backend, step_tokens=budget, max_waiting=100)
    for at, (lengths, priority, tenant) in enumerate(asked):
        engine.encode(encode(str(at), *lengths, priority=priority, tenant=str(tenant)))
    outputs, _ = drain(engine)
    for at, (lengths, _, _) in enumerate(asked):
        assert numbers(outputs[str(at)]) == [[sum(token % 50 for token in range(n)), n] for n in lengths]
    assert all(sum(step) <= budget or len(step) == 1 for step in backend.steps)
