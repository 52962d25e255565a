"""The client's supervision of an engine process, without HTTP; and what is pure about it."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.engine.client import EngineClient
from tailrace.engine.protocol import Gauges, Heartbeat, Output, SamplingParams, Submit
from tailrace.engine.spec import EngineSpec
from tailrace.engine.supervisor import Backoff, Bounds, Pulse, death_notice, spawn
from tailrace.terms import EngineDied, Event, EventKind, Overloaded

SPEC = EngineSpec("stand", loader="tests.api.stand:load_slow", max_running=2, max_waiting=4)
BOUNDS = Bounds(heartbeat=3.0, hang=10.0, start=30.0)


def test_the_first_restart_is_at_once_and_later_ones_back_off_to_a_bound() -> None:
    backoff = Backoff(first=1.0, most=8.0, stable=60.0)
    assert [backoff.died(0.0) for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert backoff.died(61.0) == 0.0


def sign(at: float, progress: int = 0, work: int = -1, turns: int = 0, *, busy: bool = True) -> Heartbeat:
    return Heartbeat(at, progress, Gauges(), work=work, turns=turns, busy=busy)


def test_a_pulse_says_what_is_wrong() -> None:
    bounds = Bounds(heartbeat=3.0, hang=10.0, start=30.0)
    pulse = Pulse(spawned_at=100.0)
    assert pulse.verdict(129.0, bounds, held=False) is None
    assert "not ready" in (pulse.verdict(131.0, bounds, held=False) or "")
    pulse.ready_at = 110.0
    pulse.beat(110.0, sign(110.0, 5))
    assert pulse.verdict(112.9, bounds, held=True) is None
    assert "heartbeat" in (pulse.verdict(113.1, bounds, held=False) or "")
    for now in range(111, 130):
        pulse.beat(float(now), sign(now, 5))
    pulse.beat(129.5, sign(129.5, 5))
    assert pulse.verdict(129.5, bounds, held=False) is None
    assert "progress" in (pulse.verdict(129.5, bounds, held=True) or "")
    pulse.beat(129.5, sign(129.6, 6))
    assert pulse.verdict(129.6, bounds, held=True) is None


STUCK = Bounds(stuck=4.0, hang=30.0)


def beating(signs: Iterable[Heartbeat], pulse: Pulse | None = None) -> tuple[Pulse, str | None, float]:
    """A pulse after these heartbeats, or the first verdict that there was and when."""
    pulse = pulse or Pulse(spawned_at=0.0, ready_at=0.0)
    now = 0.0
    for one in signs:
        now = one.at
        pulse.beat(now, one)
        wrong = pulse.verdict(now, STUCK, held=True)
        if wrong is not None:
            return pulse, wrong, now
    return pulse, None, now


def test_a_step_without_a_sign_of_work_is_noticed_within_five_seconds() -> None:
    busy = [sign(at / 2, 7, 100 + at, 5) for at in range(20)]
    hung = [sign(10 + at / 2, 7, 119, 5) for at in range(40)]
    _, wrong, at = beating(busy + hung)
    assert "no progress in a step" in (wrong or "")
    assert at - 9.5 <= 4.5  # half a second more until somebody looks


@pytest.mark.parametrize(
    "signs",
    [
        [sign(at / 2, 7, 100 + at, 5) for at in range(56)],  # one long step that goes on
        [sign(at / 2, 7, 100, 5 + at) for at in range(56)],  # nothing to compute, but the loop looks: grammars, tiers
        [sign(at / 2, 7, 100, 5, busy=False) for at in range(56)],  # waits for news
        [sign(at / 2, 7, -1, 5) for at in range(56)],  # a backend that cannot tell
    ],
)
def test_what_takes_long_is_not_stuck(signs: list[Heartbeat]) -> None:
    assert beating(signs)[1] is None


def test_time_in_which_the_machine_or_the_engine_stood_still_is_not_counted() -> None:
    stopped = [sign(0.0, 7, 100, 5), sign(0.5, 7, 100, 5), sign(900.5, 7, 100, 5), sign(901.0, 7, 101, 5)]
    pulse = beating(stopped)[0]
    assert pulse.verdict(901.0, STUCK, held=True) is None
    assert pulse.longest < 2.0  # nor learned from


def test_a_machine_whose_pieces_of_work_take_seconds_is_given_more_and_in_time_less_again() -> None:
    slow = [sign(at / 2, 7, 100 + at // 6, 5) for at in range(60)]  # 3 s each
    pulse, wrong, at = beating(slow)
    assert wrong is None
    assert 9.0 < pulse.patience(STUCK) <= 12.0
    hung = [sign(at + n / 2, 7, 110, 5) for n in range(1, 60)]
    assert 8.0 < beating(hung, pulse)[2] - at < 12.5
    quick = [sign(at + n / 2, 7, 200 + n, 5) for n in range(1, 2400)]
    assert beating(quick, beating(slow)[0])[0].patience(STUCK) == STUCK.stuck


def test_an_engine_that_was_ended_for_it_has_a_more_patient_successor() -> None:
    hung = [sign(at / 2, 7, 119, 5) for at in range(40)]
    pulse, wrong, _ = beating(hung)
    assert wrong
    following = pulse.successor(50.0)
    assert following.patience(STUCK) == 16.0
    following.ready_at = 50.0
    again = [sign(50 + at / 2, 7, 0, 5) for at in range(100)]
    assert 15.0 < beating(again, following)[2] - 50.0 < 18.0
    assert following.successor(99.0).patience(STUCK) == STUCK.hang  # and never more than that


def test_deaths_are_told_in_words() -> None:
    assert death_notice(-9) == "it was ended by SIGKILL"
    assert death_notice(3) == "it exited with status 3"


def submit(name: str, tokens: int = 3) -> Submit:
    return Submit(name, [10, 11, 12], SamplingParams(max_tokens=tokens, ignore_eos=True))


def with_client(test: Callable[[EngineClient], Awaitable[None]], spec: EngineSpec = SPEC) -> list[Event]:
    """Runs a test with a client whose engine is ready; returns every event that was heard."""
    events: list[Event] = []

    async def main() -> None:
        client = EngineClient(spec, bounds=BOUNDS)
        client.listen(events.extend)
        client.spawn()
        await client.start()
        try:
            async with asyncio.timeout(60):
                await client.wait_ready()
                await test(client)
        finally:
            await client.close()

    asyncio.run(main())
    return events


async def collect(client: EngineClient, request: Submit) -> list[Output]:
    return [output async for output in client.generate(request)]


def test_tokens_come_one_message_a_step_and_events_before_them() -> None:
    async def test(client: EngineClient) -> None:
        assert client.healthy
        assert client.ready is not None
        assert {"imports", "warm_up"} <= set(client.ready.phases)
        assert Path(f"/proc/{client.pid}/comm").read_text() == "tailrace-engine\n"
        outputs = await asyncio.gather(*(collect(client, submit(f"r{i}")) for i in range(3)))
        for one in outputs:
            assert [len(output.tokens) for output in one] == [1, 1, 1]
            assert one[-1].finish == "length"
        assert client.held == 0

    events = with_client(test)
    kinds = [event.kind for event in events if event.request == "r0"]
    assert kinds[0] is EventKind.QUEUED
    assert kinds[-1] is EventKind.FINISHED
    assert not [event for event in events if event.request.startswith("warm")]


def test_leaving_an_iterator_aborts_and_an_abort_is_heard_of() -> None:
    async def test(client: EngineClient) -> None:
        async for _ in client.generate(submit("left", 500)):
            break
        while client.held:
            await asyncio.sleep(0.01)
        assert client.gauges.running == 0

    events = with_client(test)
    assert events[-1].kind is EventKind.FINISHED
    assert events[-1].cause == "abort"


def test_a_drained_client_takes_nothing_and_ends_what_it_holds() -> None:
    async def test(client: EngineClient) -> None:
        running = asyncio.create_task(collect(client, submit("last", 10)))
        await asyncio.sleep(0)
        await client.drain()
        assert (await running)[-1].finish == "length"
        with pytest.raises(Overloaded):
            client.submit(submit("late"), None)  # type: ignore[arg-type]  # never reached

    with_client(test)


def test_an_engine_killed_while_idle_is_replaced() -> None:
    async def test(client: EngineClient) -> None:
        before = client.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        while client.ready is not None:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDied):
            client.submit(submit("too early"), None)  # type: ignore[arg-type]  # never reached
        await client.wait_ready()
        assert client.gauges.pages > 0  # whoever asks at once is told what there is
        assert client.pid != before
        assert client.restarts == 1
        assert (await collect(client, submit("after")))[-1].finish == "length"

    with_client(test)


def test_requests_that_the_engine_does_not_take_yet_wait_and_the_loop_does_not() -> None:
    async def test(client: EngineClient) -> None:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        try:
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            prompts = [[10 + i % 400 for i in range(length)] for length in range(1990, 1996)]
            few = [Submit(f"big{i}", prompt, params) for i, prompt in enumerate(prompts)]
            asking = [asyncio.create_task(collect(client, one)) for one in few]
            many = [Submit(f"huge{i}", prompts[0] * 60, params) for i in range(2)]  # refused, but they fill the line
            refused = [asyncio.create_task(collect(client, one)) for one in many]
            while client.held < len(few) + len(many):
                await asyncio.sleep(0)
            assert client._peer is not None
            assert client._peer._waiting
        finally:
            os.kill(client.pid, signal.SIGCONT)
        for one in await asyncio.gather(*asking):
            assert one[-1].finish == "length"
        for one in await asyncio.gather(*refused):
            assert one[-1].error.startswith("context_length_exceeded")

    with_client(test, replace(SPEC, max_waiting=16))


def test_sigterm_lets_an_engine_finish_and_sigint_does_nothing() -> None:
    async def test(client: EngineClient) -> None:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGINT)
        running = asyncio.create_task(collect(client, submit("held", 30)))
        while not client.gauges.running:
            await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGTERM)
        assert (await running)[-1].finish == "length"

    with_client(test)


def test_an_engine_leaves_nothing_behind_and_no_other_process_can_reach_its_line() -> None:
    before = set(Path(tempfile.gettempdir()).iterdir())
    process = spawn(SPEC)
    try:
        assert process.connection.getsockname() == ""  # a pair has no name to connect to
        assert not [one for one in set(Path(tempfile.gettempdir()).iterdir()) - before if "tailrace" in one.name]
    finally:
        process.kill()
    assert process.exit_code() == -signal.SIGKILL
    assert process.connection.fileno() == -1


def test_an_engine_whose_first_start_fails_says_why() -> None:
    async def main() -> None:
        client = EngineClient(EngineSpec("stand", loader="tests.api.stand:load_nothing"), bounds=BOUNDS)
        await client.start()
        try:
            with pytest.raises(EngineDied, match="not a model"):
                await asyncio.wait_for(client.wait_ready(), 30)
            assert client.state == "failed"
        finally:
            await client.close()

    asyncio.run(main())
