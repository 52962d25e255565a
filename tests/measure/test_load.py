"""The load generator against a server that does what it is told."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import uvloop

from tailrace.measure import load, metrics
from tailrace.measure.counting import Plan
from tailrace.measure.http import Pool
from tailrace.measure.record import Outcome, Record
from tailrace.measure.summary import summarise
from tailrace.measure.target import Fit, Target
from tailrace.measure.watch import Watch
from tailrace.terms import InvalidInput
from tailrace.workload import make, spec
from tailrace.workload.arrivals import Closed, Constant, Recorded
from tests.measure import mock
from tests.measure.mock import DONE, FINISH, ROLE, Body, Script, piece, running, usage
from tests.measure.support import loaded

SLACK = 0.2
"""Seconds by which a busy machine may be late."""


def test_the_role_is_no_token() -> None:
    """Known fault: TTFT stopped at a first chunk that carries nothing."""
    with running(mock.steady(0.3)) as server:
        run = loaded(server)
    for record in run.measured:
        found = metrics.ttft(record)
        assert found is not None
        assert 0.3 <= found < 0.3 + SLACK


def test_what_was_asked_and_what_the_server_counted() -> None:
    with running(mock.steady(0.01, 0.01)) as server:
        run = loaded(server, target=Target("mock", fit=Fit(1.0, 3.0), extra={"temperature": 0, "ignore_eos": True}))
    assert [(r.input_tokens, r.output_tokens, r.finish) for r in run.measured] == [(10, 4, "length")] * 3
    assert all(len(record.chunks) == 4 for record in run.measured)
    (body, *_) = server.requests
    assert (body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == ("mock", 4, 0, True)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert len({json.dumps(body) for body in server.requests}) == 3, "each prompt is another one"
    assert server.connections == 1, "a connection is kept"


def test_token_ids_and_texts_of_completions() -> None:
    for form, kind in (("ids", list), ("text", str)):
        with running() as server:
            run = loaded(server, target=Target("mock", "completions", form))  # type: ignore[arg-type]
        assert {type(body["prompt"]) for body in server.requests} == {kind}
        assert {record.input_tokens for record in run.measured} == {10}


def half_refused() -> Callable[[Body], Script]:
    good, bad, number = mock.steady(), mock.refuse(503, "no room here"), count()
    return lambda body: (bad if next(number) % 2 else good)(body)


def test_refusals_stay_in_the_denominator() -> None:
    """Known fault: failed requests were dropped, so that a server that refuses looked quicker."""
    with running(half_refused()) as server:
        found = summarise(loaded(server, Plan(Closed(1), sessions=20, sustain=False)))
    assert found.outcomes == {"ok": 10, "refused": 10}
    assert found.errors == {"503: no room here": 10}
    assert found.failures == 10


@pytest.mark.parametrize(
    ("script", "outcome", "said"),
    [
        (Script([(0, piece("a")), (0, mock.event({"error": {"message": "lost it"}}) + DONE)]), "error", "lost it"),
        (Script([(0, ROLE + piece("a")), (0, FINISH)]), "cut", "without [DONE]"),
        (Script([(0, ROLE + piece("a")), (0.01, mock.HANG_UP)]), "cut", "the connection broke"),
        (Script([(0, ROLE + piece("a"))], until_close=True), "cut", "without [DONE]"),
        (Script([(0, piece("a") + DONE)], until_close=True), "ok", ""),
        (Script([(0, piece("a") + DONE)]), "ok", ""),
        (Script([(0, ROLE + FINISH + DONE)]), "malformed", "nothing in it"),
        (Script([(0, b"data: nonsense\n\n" + DONE)]), "malformed", "nonsense"),
        (Script([(0, piece("a")), (9, DONE)]), "timeout", "no end within 0.3 s"),
        (Script(status=429, error={"error": {"message": "slow down"}}), "refused", "429: slow down"),
        (Script(status=400, error={"error": {"message": "bad"}}), "error", "400: bad"),
        (Script(status=500, error=b"<html>"), "error", "500: <html>"),
        (Script(status=200, error=b""), "malformed", "nothing in it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_way_to_end_has_a_name(script: Script, outcome: str, said: str) -> None:
    if script.status == 200 and not script.steps:
        script = Script([(0, DONE)])
    with running(lambda _: script) as server:
        run = loaded(server, Plan(Closed(1), sessions=2, timeout=0.3, sustain=False))
    assert [record.outcome for record in run.measured] == [outcome] * 2
    assert all(said in record.error for record in run.measured)


def test_nobody_there_is_a_failure_too() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        run = loaded(url, Plan(Closed(1), sessions=2, sustain=False))
    assert [record.outcome for record in run.measured] == [Outcome.UNREACHABLE] * 2


@pytest.mark.parametrize("url", ["", "ftp://somewhere", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="no address"):
        Pool(url)


def test_a_connection_that_was_closed_meanwhile_is_no_failure() -> None:
    """The mock hangs up after each answer whose length it does not say; its kept connections are cut while idle."""
    with running() as server:

        async def run() -> list[Outcome]:
            pool = Pool(server.url)
            plan = Plan(Closed(1), sessions=1, sustain=False)
            found = []
            for _ in range(3):
                done = await load.run(pool, Target("mock"), make.sessions(spec.parse("input=3\noutput=2", "x")), plan)
                found += [record.outcome for record in done.measured]
                for connection in pool._idle:
                    connection._transport.close()  # type: ignore[union-attr]  # as a server's time-out would
            pool.close()
            return found

        assert uvloop.run(run()) == [Outcome.OK] * 3
    assert server.connections == 3


def test_waiting_counts_from_when_it_was_due() -> None:
    """An open loop goes on while the server stalls: who comes then has waited since. (Coordinated omission.)"""
    stalled = count()

    def answer(body: Body) -> Script:
        return mock.steady(0.8 if next(stalled) == 0 else 0.0)(body)

    with running(answer) as server:
        run = loaded(server, Plan(Constant(20), sessions=10, sustain=False))
    assert run.open_loop
    dues = [record.due for record in run.measured]
    assert dues == pytest.approx([place / 20 for place in range(10)])
    waited = [metrics.ttft(record) or 0.0 for record in run.measured]
    assert 0.8 <= waited[0] < 0.8 + SLACK
    assert max(waited[1:]) < 0.8
    assert run.client.most_in_flight > 1


def test_a_closed_loop_keeps_so_many_going_and_no_more() -> None:
    with running(mock.steady(0.05)) as server:
        run = loaded(server, Plan(Closed(4), sessions=12, warmup=4))
    assert run.client.most_in_flight == 4
    assert all(record.due is None for record in run.records)


def test_warm_up_is_not_measured_and_the_load_lasts_until_the_last_has_ended() -> None:
    """The second measured request is slow. Others go on meanwhile, unmeasured; what runs at the end is hung up on."""
    place = count()

    def answer(body: Body) -> Script:
        return mock.steady({3: 0.5}.get(next(place), 0.02))(body)

    with running(answer) as server:
        run = loaded(server, Plan(Closed(2), sessions=4, warmup=2))
        assert run.window[1] >= max(record.ended or 0 for record in run.measured)
    assert [record.session for record in run.measured] == [2, 3, 4, 5]
    extra = [record for record in run.records if record.session > 5]
    assert len(extra) > 5
    assert all(record.outcome in (Outcome.OK, Outcome.STOPPED) for record in extra)
    assert Counter(record.outcome for record in run.measured) == {Outcome.OK: 4}
    assert run.window[0] == pytest.approx(min(record.sent or 0 for record in run.measured), abs=0.02)


def test_without_sustaining_nothing_more_is_sent() -> None:
    with running(mock.steady(0.01)) as server:
        run = loaded(server, Plan(Closed(2), sessions=4, warmup=2, sustain=False))
    assert len(run.records) == len(server.requests) == 6


def test_a_time_instead_of_a_number() -> None:
    with running(mock.steady(0.01)) as server:
        for arrivals in (Closed(2), Constant(50)):
            run = loaded(server, Plan(arrivals, seconds=0.4, warmup_seconds=0.2))
            assert run.measured
            begun = [record.due if record.due is not None else record.sent or 0.0 for record in run.measured]
            assert min(begun) >= 0.2
            assert max(begun) <= run.window[0] + 0.4 + 0.01
            assert any(not record.measured for record in run.records)


def test_a_closed_loop_over_a_time_ends_though_its_sessions_are_longer() -> None:
    with running(mock.steady(0.5)) as server:
        run = loaded(server, Plan(Closed(2), seconds=0.1))
    assert Counter(record.outcome for record in run.measured) == {Outcome.OK: 2}


def test_a_trace_comes_as_it_was_recorded_only_quicker(tmp_path: Path) -> None:
    lines = [
        {"timestamp": at, "input_length": 600, "output_length": 3, "hash_ids": [0, number]}
        for number, at in enumerate((0, 1000, 1500), 1)
    ]
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with running() as server:
        run = loaded(
            server, Plan(Recorded(5.0)), f'trace = {{ format = "mooncake", path = "{trace}" }}',
            Target("mock", "completions", "ids"),
        )  # fmt: skip
    assert [record.due for record in run.measured] == [0.0, 0.2, 0.3]
    first, second, third = (body["prompt"] for body in server.requests)
    assert first[:512] == second[:512] == third[:512]
    assert first[512:] != second[512:]
    assert [record.input_tokens for record in run.measured] == [600] * 3


AGENT = (
    "input = 10\noutput = 4\nshared = { tokens = 5 }\n[turns]\ncount = 3\npause = 0.1\nbranches = 2\nbranch_every = 2"
)


def test_turns_carry_what_was_really_answered_and_come_after_their_pause() -> None:
    def answer(body: Body) -> Script:
        said = f"answer{len(body['messages'])}"
        return Script([(0.02, piece(said) + FINISH + usage(mock.prompt_tokens(body), 1) + DONE)])

    with running(answer) as server:
        run = loaded(server, Plan(Closed(1), sessions=1, sustain=False), AGENT)
    bodies = [[message["content"] for message in body["messages"]] for body in server.requests]
    roles = [[message["role"] for message in body["messages"]] for body in server.requests]
    assert roles[0] == ["system", "user"]
    assert roles[1] == roles[2] == ["system", "user", "assistant", "user"]
    assert roles[3] == ["system", "user", "assistant", "user", "assistant", "user", "assistant", "user"]
    assert bodies[1][:3] == bodies[2][:3] == [*bodies[0], "answer2"]
    assert bodies[3][4] == bodies[3][6] == "answer4"
    by_turn = {record.turn: record for record in run.measured}
    first, *branches, last = (by_turn[turn] for turn in range(4))
    for record in branches:
        assert (record.sent or 0) - (first.ended or 0) >= 0.1
    assert (last.sent or 0) - max(record.ended or 0 for record in branches) >= 0.1
    assert run.client.most_in_flight == 2


def test_follow_ups_of_an_open_loop_are_due_after_their_pause() -> None:
    with running(mock.steady(0.02)) as server:
        run = loaded(server, Plan(Constant(10), sessions=2, sustain=False), AGENT)
    by_turn = {(record.session, record.turn): record for record in run.measured}
    assert len(by_turn) == 8
    for session in range(2):
        assert by_turn[session, 1].due == (by_turn[session, 0].ended or 0) + 0.1


def test_turns_that_build_on_a_failure_are_failures() -> None:
    with running(mock.refuse()) as server:
        run = loaded(server, Plan(Closed(1), sessions=2, sustain=False), AGENT)
    assert Counter(record.outcome for record in run.measured) == {Outcome.REFUSED: 2, Outcome.ABANDONED: 6}
    assert len(server.requests) == 2


def test_an_interrupted_run_keeps_what_it_has() -> None:
    with running(mock.steady(0.05)) as server:

        async def run() -> load.Run:
            sessions = make.sessions(spec.load("chat"))
            task = asyncio.create_task(
                load.run(Pool(server.url), Target("mock"), sessions, Plan(Closed(1), sessions=99))
            )
            while len(server.requests) < 4:
                await asyncio.sleep(0.01)
            task.cancel()
            return await task

        found = uvloop.run(run())
    assert found.interrupted
    assert len(found.measured) >= 2
    assert {record.outcome for record in found.measured} == {Outcome.OK}


def test_a_slow_client_is_found_out() -> None:
    def dawdle(_: object) -> None:
        end = time.perf_counter() + 0.06
        while time.perf_counter() < end:  # busy, not asleep: as a client that computes
            pass

    with running() as server:
        run = loaded(server, Plan(Constant(50), sessions=20, sustain=False), observe=dawdle)
    assert run.client.reasons


def test_late_is_late_for_who_waits() -> None:
    """18 ms are nothing where the first token takes half a minute, and much where it takes 50 ms."""
    for first, found in ((30.0, False), (0.05, True)):
        watch = Watch()
        client = watch.stop([Record(0, 0, True, 1, 1, due=0.0, sent=0.018, chunks=[first])])
        assert any("sent more than 18 ms late" in reason for reason in client.reasons) == found


@pytest.mark.parametrize("header", [{"x\r\ny": "1"}, {"x": "1\r\nEvil: 2"}, {"x": "ü"}])
def test_headers_cannot_smuggle(header: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="header"):
        Pool("http://127.0.0.1:1", headers=header)
