"""Servers that are started here: they get ready or say why not, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.deploy import local, ports, processes
from tailrace.deploy.engines import tailrace
from tailrace.deploy.engines.driver import Command, NotFound, Options
from tailrace.deploy.local import Replica, StartFailed
from tailrace.deploy.processes import Member
from tailrace.terms import InvalidInput
from tests.deploy import standin

SCRIPT = str(Path(standin.__file__))


def command(*flags: str) -> Callable[[int], Command]:
    def made(port: int) -> Command:
        return Command("standin", (sys.executable, "-I", "-S", SCRIPT, str(port), *flags), port, "model")

    return made


def started(tmp_path: Path, *flags: str, limit: float = 60.0) -> Replica:
    return Replica.start(command(*flags), log=tmp_path / "log", limit=limit)


def gone(members: list[Member]) -> bool:
    """Within a while: a process that was killed takes a moment to end."""
    end = time.monotonic() + 20
    while processes.alive(members) and time.monotonic() < end:
        time.sleep(0.01)
    return not processes.alive(members)


def tree(replica: Replica, least: int = 1) -> list[Member]:
    """Its processes, once there are so many."""
    end = time.monotonic() + 20
    while len(found := processes.tree(processes.member(replica.pid))) < least and time.monotonic() < end:
        time.sleep(0.01)
    assert len(found) >= least
    return found


def test_a_server_is_ready_answers_and_ends(tmp_path: Path) -> None:
    with started(tmp_path) as replica:
        with urllib.request.urlopen(f"{replica.url}/v1/models") as response:
            assert response.status == 200
        assert replica.ready_after is not None
        assert 0 < replica.ready_after < 60
        assert replica.model == "model"
        members = tree(replica)
        assert replica.rss() > 2**20  # type: ignore[operator]  # Linux tells
        assert replica.cpu_seconds() > 0  # type: ignore[operator]
        assert f"listening on {replica.command.port}" in replica.last_lines()
    assert gone(members)
    assert not replica.alive
    replica.stop()  # once more is no harm


def test_all_that_it_started_ends_with_it_also_what_left_its_group_and_what_heeds_no_sigterm(tmp_path: Path) -> None:
    replica = started(tmp_path, "children=1", "stubborn=1")
    members = tree(replica, 5)  # two shells and what these run
    replica.suspend()
    replica.stop(patience=0.05)
    assert gone(members)


def test_what_is_suspended_takes_no_time_and_goes_on_afterwards(tmp_path: Path) -> None:
    with started(tmp_path, "children=1") as replica:
        members = tree(replica, 5)
        replica.suspend()
        assert {_state(member) for member in members} == {"T"}
        replica.resume()
        with urllib.request.urlopen(f"{replica.url}/health") as response:
            assert response.status == 200
        assert "T" not in {_state(member) for member in members}


def _state(member: Member) -> str:
    return Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_one_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"standin ended with status 3 before it was ready.*\n  no such weights"):
        started(tmp_path, "says=no such weights", "ends=3")
    with pytest.raises(StartFailed, match=r"standin ended with status 4 before.*is empty"):
        started(tmp_path, "ends=4")
    long = "\n".join(["ValueError: no memory", *["and so on"] * 30])
    with pytest.raises(StartFailed, match=r"before it was ready \(ValueError: no memory\)"):
        started(tmp_path, f"says={long}", "ends=3")


def test_one_that_never_gets_ready_is_ended_and_says_what_it_answered(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(StartFailed, match=r"was not ready within 0.5 s \(/health answers 503\).*\n  .*listening"):
        started(tmp_path, "health=503", limit=0.5)
    assert time.monotonic() - begun < 30


def test_a_peer_that_accepts_and_says_nothing_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PROBE", 0.05)
    silent = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"
    made = lambda port: Command("silent", (sys.executable, "-I", "-S", "-c", silent, str(port)), port, "model")  # noqa: E731
    with pytest.raises(StartFailed, match=r"silent was not ready within 1 s \(/health gives no answer"):
        Replica.start(made, log=tmp_path / "log", limit=1.0)


def test_a_port_that_another_takes_meanwhile_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PROBE", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        held = other.getsockname()[1]
        offered = iter([held, ports.free()])
        monkeypatch.setattr(ports, "free", lambda: next(offered))
        with started(tmp_path) as replica:
            assert replica.command.port != held


def test_what_another_program_answers_at_its_port_is_not_taken_for_its_own_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one started here is slow to bind: the other answers first."""
    with started(tmp_path / "other") as other:
        monkeypatch.setattr(ports, "free", lambda: other.command.port)
        slow = lambda port: Command("slow", ("/bin/sleep", "600"), port, "model")  # noqa: E731
        with pytest.raises(StartFailed, match=r"not ready within 0.3 s .another program answers at its port"):
            Replica.start(slow, log=tmp_path / "log", limit=0.3)
        with pytest.raises(StartFailed, match="found its port taken by others, again and again"):
            started(tmp_path)


def test_a_log_that_cannot_be_written_and_a_command_that_cannot_be_run_are_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="the log /dev/full cannot be written: No space left on device"):
        Replica.start(command(), log=Path("/dev/full"))
    with pytest.raises(InvalidInput, match="cannot be written: Not a directory"):
        Replica.start(command(), log=Path("/dev/null/log"))
    missing = lambda port: Command("absent", ("/no/such/engine",), port, "model")  # noqa: E731
    with pytest.raises(StartFailed, match="absent cannot be run: /no/such/engine: No such file"):
        Replica.start(missing, log=tmp_path / "log")


def test_ctrl_c_between_the_start_and_its_guard_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members: list[Member] = []
    real = local._guard

    def guard(group: int) -> subprocess.Popen[bytes]:
        members.append(processes.member(group))
        signal.raise_signal(signal.SIGINT)
        return real(group)

    monkeypatch.setattr(local, "_guard", guard)
    with pytest.raises(KeyboardInterrupt):
        started(tmp_path)
    assert len(members) == 1
    assert gone(members)


def test_ctrl_c_during_the_end_waits_for_it_and_twice_makes_it_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = started(tmp_path, "stubborn=1")
    members = tree(replica)
    real = processes.send

    def send(found: list[Member], number: signal.Signals) -> None:
        if number is signal.SIGCONT:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        real(found, number)

    begun = time.monotonic()
    monkeypatch.setattr(processes, "send", send)
    with pytest.raises(KeyboardInterrupt):
        replica.stop(patience=300)
    assert time.monotonic() - begun < 60
    assert gone(members)


PARENT = """
import sys, time
from pathlib import Path
from tests.deploy.test_local import command, tree
from tailrace.deploy.local import Replica
with Replica.start(command("children=1"), log=Path(sys.argv[1])) as replica:
    print(*(f"{one.pid},{one.started}" for one in tree(replica, 5)), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_who_started_it_is_interrupted_or_killed(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as one:
        assert one.stdout is not None
        members = [Member(*map(int, words.split(","))) for words in one.stdout.readline().split()]
        one.send_signal(number)
        one.wait()
    leader = members[0]
    in_group = members if number is signal.SIGINT else [each for each in members if _group(each) == leader.pid]
    assert gone(in_group)
    processes.send(members, signal.SIGKILL)


def _group(member: Member) -> int:
    try:
        return os.getpgid(member.pid)
    except ProcessLookupError:
        return 0


def test_our_own_server(smollm2: Path, tmp_path: Path) -> None:
    options = Options(str(smollm2), "mine", context=64, parallel=2, threads=1, prefix_cache=False,
                      extra=("--kv-tokens", "256"))  # fmt: skip
    with local.serve(tailrace.DRIVER, options, log=tmp_path / "log") as replica:
        members = tree(replica, 2)  # its engine leads a group of its own
        with urllib.request.urlopen(f"{replica.url}/v1/models") as response:
            assert b'"mine"' in response.read()
        with urllib.request.urlopen(f"{replica.url}/metrics") as response:
            told = response.read().decode()
        gauges = tailrace.DRIVER.gauges
        assert all(f"\n{name}{{" in told for names in (gauges.running, gauges.waiting, gauges.kv_use, gauges.cache_hits,
                                                     gauges.cache_queries) for name in names)  # fmt: skip
    assert gone(members)


def test_what_our_own_server_cannot_serve_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="tailrace cannot serve that model: There is no"):
        local.serve(tailrace.DRIVER, Options("no/such.gguf"))
    with pytest.raises(NotFound, match="/no/such is no file that can be run"):
        local.serve(tailrace.DRIVER, Options("tests/golden/models/llama"), given="/no/such")
