"""KV events of a whole server: what a router hears, through the death of the engine; and what is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tailrace.api.server import run
from tailrace.api.settings import Settings
from tailrace.terms import InvalidInput
from tests.api.conftest import Running, serving, until
from tests.engine.follower import Follower


def free_address(stack: ExitStack) -> str:
    """One that nobody else gets as long as the stack is open; a listener with SO_REUSEADDR may still bind to it."""
    held = stack.enter_context(socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return f"tcp://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def server() -> Iterator[tuple[Running, str, str]]:
    with ExitStack() as stack:
        events, replay = free_address(stack), free_address(stack)
        running = stack.enter_context(serving(loader="tests.api.stand:load", kv_events=events, kv_events_replay=replay))
        yield running, events, replay


def complete(server: Running, text: str) -> None:
    body = {"model": "stand", "prompt": text, "max_tokens": 4}
    assert server.post("/v1/completions", body).status_code == 200


def pages(follower: Follower, count: int) -> None:
    """Hears batches until it knows so many pages."""
    while len(follower.view.pages) < count:
        heard = follower.hear()
        assert heard is not None, f"it knows {len(follower.view.pages)} pages"
        if heard[0] > follower.number:
            if heard[0] != follower.number + 1:
                follower.repair()
            if heard[0] == follower.number + 1:
                follower.view.fold(heard[1])
                follower.number = heard[0]


def test_a_router_follows_a_replica_and_notices_that_its_engine_has_died(server: tuple[Running, str, str]) -> None:
    running, events, replay = server
    with Follower(events, replay) as follower:
        complete(running, "a" * 70)
        pages(follower, 4)
        complete(running, "a" * 70 + "b" * 30)
        pages(follower, 6)
        before = follower.number
        assert running.metric("tailrace_kv_event_batches_published_total") >= 2
        assert running.metric("tailrace_kv_event_batches_dropped_total") == 0
        os.kill(running.engine, signal.SIGKILL)
        heard = follower.hear()
        while heard is not None and heard[0] <= before:
            heard = follower.hear()
        assert heard is not None
        assert heard[0] > before + 1
        follower.repair()
        assert follower.view.pages == {}
        until(lambda: running.get("/health").status_code == 200, "the next engine")
        complete(running, "c" * 70)
        pages(follower, 4)
        assert len(follower.view.pages) == 4


def test_an_idle_engine_answers_for_its_state(server: tuple[Running, str, str]) -> None:
    running, events, replay = server
    complete(running, "a" * 70)
    with Follower(events, replay) as follower:
        follower.take_snapshot()
        assert len(follower.view.pages) == 4


def test_an_address_that_others_reach_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidInput, match="--kv-events-key"):
        run(Settings("m", port=0, kv_events="tcp://0.0.0.0:5557", loader="tests.api.stand:load_nothing"))


def test_an_address_that_is_taken_ends_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        from tests.api.conftest import launch

        started = launch(loader="tests.api.stand:load", kv_events=address)
        assert started.wait() == 1
        assert f"KV events cannot be published on {address}" in "".join([*started.lines, *started.log])


def test_without_events_no_process_loads_zeromq() -> None:
    code = (
        "import sys; from tailrace.api.settings import Settings; from tailrace.engine import core, loading, process; "
        "Settings('m').check(); loading.open_publisher(Settings('m').engine()); sys.exit('zmq' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
