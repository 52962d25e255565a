"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tailrace.models import catalogue
from tests import postgres, turns

os.environ["TAILRACE_LEDGER"] = "off"  # no test writes to the tester's own ledger


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Each test in its turn, where there are other processes that run some."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with turns.turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, pulled into the cache if it is not there. Where it cannot be had the test fails: a suite
    that skips what needs a real model proves little."""
    return catalogue.pull(catalogue.DEFAULT)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The embedding model of the catalogue, likewise."""
    return catalogue.pull("minilm")


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback address that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def a_postgresql() -> Iterator[postgres.Server | None]:
    """One server for all tests, where the machine has one."""
    if postgres.why_not():
        yield None
        return
    with postgres.serving() as running:
        yield running
