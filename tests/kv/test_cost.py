"""Loading or computing: what was measured decides."""

from __future__ import annotations

import pytest

from tailrace.kv.cost import LoadCost


def test_a_server_that_has_computed_nothing_yet_loads() -> None:
    assert LoadCost().quicker(1 << 40, 16)


def test_it_computes_where_the_disk_is_slower() -> None:
    cost = LoadCost()
    cost.computed(1000, 0.5)
    for _ in range(30):
        cost.loaded(1_000_000, 1.0, 0.001)
    assert cost.load_seconds(1_000_000) == pytest.approx(1.0, rel=0.01)
    assert cost.compute_seconds(160) == pytest.approx(0.08)
    assert not cost.quicker(1_000_000, 160)
    assert cost.quicker(1_000, 160)


def test_bytes_that_go_before_count() -> None:
    cost = LoadCost()
    cost.computed(1000, 1.0)
    assert cost.quicker(1_000_000, 100)
    assert not cost.quicker(1_000_000, 100, before=1_000_000_000)


def test_a_disk_that_was_slow_once_is_tried_again() -> None:
    cost = LoadCost()
    cost.computed(1000, 0.5)
    cost.loaded(1_000_000, 30.0, 2.0)
    tries = 0
    while not cost.quicker(1_000_000, 160):
        tries += 1
        assert tries < 100
    assert tries > 3


def test_what_took_no_time_or_computed_nothing_teaches_nothing() -> None:
    cost = LoadCost()
    before = cost.load_seconds(1000)
    cost.computed(0, 1.0)
    cost.computed(10, 0.0)
    cost.loaded(0, 1.0, 1.0)
    assert cost.load_seconds(1000) == before
    assert cost.compute_seconds(1) == float("inf")
