"""Loading or computing: what was measured says what each should take."""

from __future__ import annotations

import pytest

from tailrace.kv.cost import MeasuredCost

PAGE = 100_000
"""Bytes."""


def test_a_server_that_has_computed_nothing_yet_loads() -> None:
    cost = MeasuredCost()
    assert cost.load_seconds("disk", 1 << 20, PAGE) < cost.compute_seconds(16)


def test_it_follows_what_was_measured() -> None:
    cost = MeasuredCost()
    cost.computed(1000, 0.5)
    for _ in range(30):
        cost.loaded("disk", 10, PAGE, 1.0, 0.001)
    assert cost.load_seconds("disk", 10, PAGE) == pytest.approx(1.0, rel=0.01)
    assert cost.compute_seconds(160) == cost.compute_seconds(160, after=4096) == pytest.approx(0.08)


def test_pages_that_go_before_count() -> None:
    cost = MeasuredCost()
    alone = cost.load_seconds("disk", 10, PAGE)
    assert cost.load_seconds("disk", 10, PAGE, before=10) == pytest.approx(2 * alone - cost.of("disk").latency)


def test_each_tier_has_rates_of_its_own() -> None:
    cost = MeasuredCost()
    before = cost.load_seconds("valkey", 10, PAGE)
    cost.loaded("disk", 10, PAGE, 30.0, 2.0)
    cost.declined("disk")
    assert cost.load_seconds("valkey", 10, PAGE) == before < cost.load_seconds("disk", 10, PAGE)


def test_a_disk_that_was_slow_once_is_tried_again() -> None:
    cost = MeasuredCost()
    cost.computed(1000, 0.5)
    cost.loaded("disk", 10, PAGE, 30.0, 2.0)
    tries = 0
    while cost.load_seconds("disk", 10, PAGE) >= cost.compute_seconds(160):
        cost.declined("disk")
        tries += 1
        assert tries < 100
    assert tries > 3


def test_questions_teach_nothing_nor_does_what_took_no_time_or_computed_nothing() -> None:
    cost = MeasuredCost()
    before = cost.load_seconds("disk", 1, 1000)
    for _ in range(5):
        assert cost.load_seconds("disk", 1, 1000) == before
    cost.computed(0, 1.0)
    cost.computed(10, 0.0)
    cost.loaded("disk", 0, 1000, 1.0, 1.0)
    assert cost.load_seconds("disk", 1, 1000) == before
    assert cost.compute_seconds(1) == float("inf")
