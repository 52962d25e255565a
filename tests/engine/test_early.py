"""An engine process that starts before it is known what it will serve."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tailrace.engine import early
from tailrace.engine.spec import EngineSpec


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )


def test_it_ends_by_itself_when_nothing_is_handed_over() -> None:
    process = early.begin()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


def test_it_can_be_given_up() -> None:
    process = early.begin()
    early.give_up(process)
    assert process.returncode == -9


def test_it_becomes_an_engine_that_reports_what_is_wrong(tmp_path: Path) -> None:
    """Without a model there is no engine; that it says so through its own socket is its supervisor's proof of life."""
    import msgspec
    import zmq

    from tailrace.engine.protocol import Fatal, FromEngine

    process = early.begin()
    handed = early.hand_over(process, EngineSpec(model=str(tmp_path / "nothing.gguf")))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PULL)
    try:
        socket.bind(handed.up)
        assert socket.poll(60_000)
        news: FromEngine = msgspec.msgpack.decode(socket.recv(), type=FromEngine)
        assert isinstance(news, Fatal)
        assert "nothing.gguf" in news.error
        assert process.wait(60) == 1
    finally:
        handed.kill()
        socket.close()
        context.term()


def test_handing_over_to_a_process_that_has_ended_is_left_to_the_supervisor() -> None:
    process = early.begin()
    process.kill()
    process.wait(60)
    handed = early.hand_over(process, EngineSpec(model="x"))
    assert handed.exit_code() == -9
    shutil.rmtree(handed.directory)
