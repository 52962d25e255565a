"""An engine process that starts before it is known what it will serve."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tailrace.engine import early
from tailrace.engine.protocol import Fatal, FromEngine
from tailrace.engine.spec import EngineSpec
from tailrace.engine.wire import Line


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )


def test_it_ends_by_itself_when_nothing_is_handed_over() -> None:
    waiting = early.begin()
    waiting.connection.close()
    assert waiting.process.wait(60) == 0


def test_it_can_be_given_up() -> None:
    waiting = early.begin()
    early.give_up(waiting)
    assert waiting.process.returncode == -9


def test_it_becomes_an_engine_that_reports_what_is_wrong(tmp_path: Path) -> None:
    """Without a model there is no engine; that it says so on its own line is its supervisor's proof of life."""
    handed = early.hand_over(early.begin(), EngineSpec(model=str(tmp_path / "nothing.gguf")))
    try:
        handed.connection.settimeout(60)
        line = Line(handed.connection)
        said = line.receive()
        assert said is not None
        news: FromEngine = msgspec.msgpack.decode(said, type=FromEngine)
        assert isinstance(news, Fatal)
        assert "nothing.gguf" in news.error
        assert line.receive() is None
        assert handed.process.wait(60) == 1
    finally:
        handed.kill()


def test_handing_over_to_a_process_that_has_ended_is_left_to_the_supervisor() -> None:
    waiting = early.begin()
    waiting.process.kill()
    waiting.process.wait(60)
    handed = early.hand_over(waiting, EngineSpec(model="x"))
    assert handed.exit_code() == -9
    handed.kill()
