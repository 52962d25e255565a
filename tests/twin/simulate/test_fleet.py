"""Fleets under load: everything ends, no time is lost, turns follow each other, and prefixes are found."""

from __future__ import annotations

from collections import Counter

import pytest

from tailrace.engine.config import EngineConfig
from tailrace.fleet.placement import PLACEMENTS
from tailrace.measure.counting import Plan
from tailrace.workload.arrivals import Closed, Constant, Poisson
from tests.twin.simulate.support import COST, ran

AGENT = "input = 150\noutput = 20\n[shared]\ntokens = 100\n[turns]\ncount = 4\nadded = 40\npause = 0.5\nbranches = 2"
GROUPS = "input = 20\noutput = 8\n[shared]\ntokens = 320\ngroups = 24"
SMALL = EngineConfig(kv_tokens=16 * 160, step_tokens=64, max_running=8, draft_tokens=0)


@pytest.mark.parametrize("place", PLACEMENTS)
def test_every_request_ends_and_no_time_is_lost(place: str) -> None:
    plan = Plan(Poisson(3.0), sessions=20, sustain=False)
    answered, fleet, _ = ran(AGENT, plan, replicas=3, place=place, config=SMALL)
    turns = Counter(one.asked.session.number for one in answered)
    assert len(turns) == 20
    assert all(turns[one.asked.session.number] == len(one.asked.session.turns) for one in answered)
    for one in answered:
        timeline = one.timeline
        assert timeline.finish == "length"
        assert timeline.output_tokens == one.asked.turn.output == len(timeline.token_times)
        assert timeline.computed_tokens + timeline.cached_tokens >= one.asked.turn.input
        assert sum(timeline.phases.values()) == pytest.approx(timeline.e2e)
        assert timeline.covered > 0.99
    busy = sum(replica.busy for replica in fleet.replicas)
    assert sum(one.timeline.device for one in answered) == pytest.approx(busy)
    assert all(not replica.held for replica in fleet.replicas)


@pytest.mark.parametrize("place", ["load", "prefix"])
def test_a_fleet_that_goes_through_steps_at_once_does_the_same(place: str) -> None:
    """Though what one replica does depends on what the others have ended."""
    plan = Plan(Closed(6), sessions=20, sustain=False)
    quick, slow = (ran(AGENT, plan, replicas=2, place=place, config=SMALL, at_once=on)[0] for on in (True, False))
    assert [(one.asked.id, one.replica, one.timeline) for one in quick] == [
        (one.asked.id, one.replica, one.timeline) for one in slow
    ]


def test_a_turn_is_sent_its_pause_after_the_last_of_those_that_it_follows() -> None:
    answered, _, _ = ran(AGENT, Plan(Constant(0.1), sessions=2, sustain=False))
    ends = {(one.asked.session.number, one.asked.number): one.asked.at + one.timeline.e2e for one in answered}
    following = [one.asked for one in answered if one.asked.turn.after]
    assert following
    for asked in following:
        assert asked.at == pytest.approx(max(ends[asked.session.number, before] for before in asked.turn.after) + 0.5)


def test_a_turn_finds_what_was_said_before_it_in_the_cache() -> None:
    """Prompt and answer as far as they fill pages, the answer's last token apart: nobody computed that."""
    text = "input = 100\noutput = 30\n[turns]\ncount = 2\nadded = 50"
    answered, _, _ = ran(text, Plan(Closed(1), sessions=3, sustain=False))
    for one in answered:
        assert one.timeline.cached_tokens == (0 if one.asked.number == 0 else (100 + 30 - 1) // 16 * 16)


def test_equal_sources_are_equal_tokens_and_others_are_not() -> None:
    text = "input = 64\noutput = 4\n[shared]\ntokens = 160"
    answered, _, _ = ran(text, Plan(Closed(1), sessions=4, sustain=False))
    assert [one.timeline.cached_tokens for one in answered] == [0, 160, 160, 160]


def test_a_closed_loop_keeps_so_many_going_and_no_more() -> None:
    answered, _, _ = ran("input = 50\noutput = 20", Plan(Closed(3), sessions=12, sustain=False))
    spans = [(round(one.asked.at, 9), round(one.asked.at + one.timeline.e2e, 9)) for one in answered]
    for at, _ in spans:
        assert sum(begin <= at < end for begin, end in spans) <= 3
    assert sum(begin == 0.0 for begin, _ in spans) == 3
    assert {begin for begin, _ in spans if begin} <= {end for _, end in spans}


def test_requests_that_find_the_queue_full_are_refused_and_the_rest_goes_on() -> None:
    config = EngineConfig(kv_tokens=16 * 64, step_tokens=64, max_running=1, max_waiting=1, draft_tokens=0)
    answered, _, _ = ran("input = 50\noutput = 20", Plan(Constant(50.0), sessions=12, sustain=False), config=config)
    finishes = Counter((one.timeline.finish, one.timeline.cause) for one in answered)
    assert finishes["error", "overloaded"] > 0
    assert finishes["length", "length"] == 12 - finishes["error", "overloaded"]


def test_what_outlasts_those_that_count_is_told_as_still_running() -> None:
    plan = Plan(Constant(20.0), sessions=5, warmup=2)
    answered, fleet, counting = ran("input = 50\noutput = 20", plan)
    counted = [one for one in answered if one.asked.counts]
    assert [one.asked.session.number for one in counted] == [2, 3, 4, 5, 6]
    assert all(one.ended for one in counted)
    assert any(not one.ended for one in answered)
    assert counting.window(fleet.now) == (counted[0].asked.at, fleet.now)


def test_placement_by_prefix_finds_more_than_turns_and_starves_nobody() -> None:
    """Prefixes of 24 groups do not fit one pool together, but a third of them does."""
    plan = Plan(Poisson(6.0), sessions=240, sustain=False)
    found, shares = {}, {}
    for place in ("turns", "prefix"):
        answered, _, _ = ran(GROUPS, plan, replicas=3, place=place, config=SMALL, cost=COST)
        found[place] = sum(one.timeline.cached_tokens for one in answered)
        shares[place] = Counter(one.replica for one in answered)
    assert found["prefix"] > 1.5 * found["turns"]
    assert min(shares["prefix"].values()) > 240 / 3 / 2
