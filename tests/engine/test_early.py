"""An engine process that starts before it is known what it will serve."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tailrace.engine import early
from tailrace.engine.protocol import Fatal, FromEngine
from tailrace.engine.spec import EngineSpec
from tailrace.engine.wire import Line
from tailrace.terms import ModelError


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )


def test_it_ends_by_itself_when_nothing_is_handed_over() -> None:
    waiting = early.begin()
    waiting.connection.close()
    assert waiting.process.wait() == 0


def test_it_can_be_given_up() -> None:
    waiting = early.begin()
    early.give_up(waiting)
    assert waiting.process.poll() == -9


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
        assert handed.process.wait() == 1
    finally:
        handed.kill()


def test_handing_over_to_a_process_that_has_ended_is_left_to_the_supervisor() -> None:
    waiting = early.begin()
    waiting.process.send_signal(signal.SIGKILL)
    waiting.process.wait()
    handed = early.hand_over(waiting, EngineSpec(model="x"))
    assert handed.exit_code() == -9
    handed.kill()


def forked(script: str, *, stdin: int | None = subprocess.DEVNULL, blas: bool = False) -> str:
    """What a process prints that forks first thing, as the command line does: the tests' own process has threads."""
    script = f"from tailrace.engine import early\nwaiting = early.fork(blas={blas})\n{script}"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        stdin=stdin,
        preexec_fn=(lambda: os.close(0)) if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_fork_ends_by_itself_when_nothing_is_handed_over() -> None:
    assert forked("waiting.connection.close(); print(waiting.process.wait())") == "0\n"


def test_a_fork_can_be_given_up_and_is_signalled_no_more() -> None:
    script = "early.give_up(waiting); waiting.process.send_signal(9); print(waiting.process.poll())"
    assert forked(script) == "-9\n"


def test_a_fork_is_out_of_a_terminal_s_reach() -> None:
    script = """
import os, time
pid, end = waiting.process.pid, time.monotonic() + 10
while os.getsid(pid) != pid and time.monotonic() < end:
    pass
print(os.getsid(pid) == pid)
early.give_up(waiting)
"""
    assert "True" in forked(script)


def test_a_fork_that_the_system_reaps_has_ended() -> None:
    script = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); early.give_up(waiting)"
    assert forked(f"{script}; print(waiting.process.poll())") == "0\n"


@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, None])
def test_a_fork_becomes_an_engine_whatever_standard_input_is(tmp_path: Path, stdin: int | None) -> None:
    script = f"""
from tailrace.engine.spec import EngineSpec
from tailrace.engine.wire import Line
handed = early.hand_over(waiting, EngineSpec(model={str(tmp_path / "nothing.gguf")!r}))
line = Line(handed.connection)
print(line.receive(), line.receive(), handed.process.wait())
"""
    said = forked(script, stdin=stdin)
    assert "nothing.gguf" in said
    assert said.endswith("None 1\n")


def tell_blas(_spec: EngineSpec) -> None:
    """A loader that says how many threads numpy's BLAS was told to have."""
    raise ModelError(f"told {os.environ.get('OPENBLAS_NUM_THREADS')}")


@pytest.mark.parametrize(("blas", "given", "told"), [(False, None, "1"), (False, "3", "3"), (True, None, "None")])
def test_only_an_engine_that_computes_with_numpy_gets_threads_of_blas(
    blas: bool, given: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", given)
    script = """
from tailrace.engine.spec import EngineSpec
from tailrace.engine.wire import Line
handed = early.hand_over(waiting, EngineSpec(model="x", loader="tests.engine.test_early:tell_blas"))
print(Line(handed.connection).receive(), handed.process.wait())
"""
    assert f"told {told}" in forked(script, blas=blas)
