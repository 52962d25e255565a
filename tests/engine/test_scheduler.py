"""The scheduler by itself: a plan is a value until it is launched, and another loop than the core's can drive it."""

import pytest

from tailrace.engine.config import EngineConfig
from tailrace.engine.plan import Plan
from tailrace.engine.protocol import SamplingParams, Submit
from tailrace.engine.scheduler import Scheduler

CONFIG = EngineConfig(kv_tokens=1024, step_tokens=64, max_running=4)


def submit(name: str, length: int, max_tokens: int = 8, first: int = 1) -> Submit:
    prompt = [(first * 17 + at) % 400 for at in range(length)]
    return Submit(name, prompt, SamplingParams(max_tokens=max_tokens))


def run(scheduler: Scheduler, plan: Plan) -> list[str]:
    """What a simulator does with a plan; returns the requests that ended."""
    scheduler.launch(plan)
    ended = []
    for chunk in list(plan.chunks.values()):
        if chunk.sample:
            chunk.request.tokens.append(len(chunk.request.tokens) % 400)
            if len(chunk.request.tokens) == chunk.request.limit:
                scheduler.finish(chunk.request, None)
                ended.append(chunk.request.id)
    scheduler.check_integrity()
    return ended


def shape(plan: Plan) -> dict[str, tuple[int, int, bool]]:
    return {name: (chunk.begin, chunk.end, chunk.sample) for name, chunk in plan.chunks.items()}


def test_a_loop_without_backend_or_clock_drives_it_to_the_end() -> None:
    scheduler = Scheduler(CONFIG)
    for n in range(10):
        scheduler.take(submit(f"r{n}", 10 + 13 * n, first=n), now=0.0)
    ended: list[str] = []
    for step in range(200):
        plan = scheduler.plan(float(step))
        if not plan.chunks:
            break
        assert plan.tokens == sum(chunk.count for chunk in plan.chunks.values()) <= CONFIG.step_tokens
        ended += run(scheduler, plan)
    assert sorted(ended) == sorted(f"r{n}" for n in range(10))
    assert scheduler.pool.free + scheduler.index.evictable == scheduler.pool.size


def test_planning_ahead_assumes_that_everybody_goes_on() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.take(submit("a", 20, max_tokens=3), now=0.0)
    first = scheduler.plan(0.0)
    scheduler.launch(first)
    second = scheduler.plan(0.0)
    assert shape(first) == {"a": (0, 20, True)}
    assert shape(second) == {"a": (20, 21, True)}
    scheduler.launch(second)
    third = scheduler.plan(0.0)
    assert shape(third) == {"a": (21, 22, True)}
    scheduler.launch(third)
    assert scheduler.plan(0.0).chunks == {}  # the last token needs no computing


def test_bringing_a_plan_up_to_date_without_news_changes_nothing() -> None:
    scheduler = Scheduler(CONFIG)
    for n in range(6):
        scheduler.take(submit(f"r{n}", 10 + 30 * n, first=n), now=0.0)
    for step in range(12):
        plan = scheduler.plan(float(step))
        before = shape(plan), plan.tokens, plan.decodes, scheduler.pool.free
        again = scheduler.plan(float(step), plan)
        assert again is plan
        assert (shape(plan), plan.tokens, plan.decodes, scheduler.pool.free) == before
        run(scheduler, plan)


def test_an_arrival_shares_in_a_plan_that_is_not_launched_yet() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.take(submit("long", 500), now=0.0)
    plan = scheduler.plan(0.0)
    assert shape(plan) == {"long": (0, 64, False)}
    scheduler.take(submit("short", 20, first=9), now=0.0)
    scheduler.plan(0.0, plan)
    assert shape(plan) == {"short": (0, 20, True), "long": (0, 44, False)}


def test_what_ends_is_out_of_the_plan_and_its_pages_are_free() -> None:
    scheduler = Scheduler(CONFIG)
    requests = [scheduler.take(submit(f"r{n}", 20, first=n), now=0.0) for n in range(2)]
    plan = scheduler.plan(0.0)
    scheduler.finish(requests[0], plan)
    assert list(plan.chunks) == ["r1"]
    assert plan.admitted == [requests[1]]
    assert plan.tokens == 20
    assert scheduler.pool.size - scheduler.pool.free == 2
    scheduler.check_integrity()


def test_a_request_preempted_before_its_first_step_has_only_not_been_admitted() -> None:
    scheduler = Scheduler(CONFIG)
    request = scheduler.take(submit("a", 20), now=0.0)
    plan = scheduler.plan(0.0)
    scheduler.preempt(request, plan, "error")
    assert plan.chunks == {}
    assert plan.admitted == []
    assert scheduler.preempted == []
    assert request.preemptions == scheduler.preemptions == 0
    assert (request.computed, request.expected) == (0, 20)
    scheduler.check_integrity()
    assert shape(scheduler.plan(0.0, plan)) == {"a": (0, 20, True)}


def test_a_deadline_is_reported_once_and_only_for_who_still_waits() -> None:
    scheduler = Scheduler(CONFIG)
    requests = [
        scheduler.take(Submit(f"r{n}", [1, 2], SamplingParams(max_tokens=1), deadline=5.0 + n), now=0.0)
        for n in range(3)
    ]
    scheduler.finish(requests[0], None)
    assert scheduler.overdue(4.9) == []
    assert scheduler.overdue(6.0) == [requests[1]]
    assert scheduler.overdue(6.5) == []


@pytest.mark.parametrize("lose", ["slot", "page", "pin"])
def test_what_is_lost_is_noticed(lose: str) -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.take(submit("a", 40), now=0.0)
    plan = scheduler.plan(0.0)
    run(scheduler, plan)
    (request,) = scheduler.running
    if lose == "slot":
        scheduler._slots.pop()
    elif lose == "page":
        request.pages.pop()
    else:
        request.path.pop()
    with pytest.raises(AssertionError):
        scheduler.check_integrity()
