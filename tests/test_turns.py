"""Tests run beside each other, but for those that measure."""

from __future__ import annotations

import fcntl
import threading
from functools import partial
from pathlib import Path

import pytest

from tests import turns


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("door", "room")}
    for place in found.values():
        place.touch()
    return found


def test_tests_run_beside_each_other(places: dict[str, Path]) -> None:
    with turns.turn(alone=False, **places), turns.turn(alone=False, **places):
        pass


def test_one_that_measures_waits_for_those_that_run_and_those_that_come_wait_for_it(places: dict[str, Path]) -> None:
    order: list[str] = []
    at_the_door = threading.Event()

    def take(name: str, alone: bool) -> None:
        at_the_door.set()
        with turns.turn(alone=alone, **places):
            order.append(name)

    def start(name: str, *, alone: bool) -> threading.Thread:
        at_the_door.clear()
        thread = threading.Thread(target=partial(take, name, alone))
        thread.start()
        assert at_the_door.wait(30)
        return thread

    with turns.turn(alone=False, **places):
        first = start("measures", alone=True)
        while True:  # until it waits inside the door
            with places["door"].open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    break
        second = start("does not", alone=False)
        order.append("ran before")
    for thread in (first, second):
        thread.join(30)
    assert order == ["ran before", "measures", "does not"]
