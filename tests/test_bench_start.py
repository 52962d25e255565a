"""The benchmark of starts waits for a token, says what that took, and leaves nothing behind."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from bench import start

SERVER = """
import http.server, os, sys, time
begin = time.monotonic()
open(sys.argv[2], "w").write(str(os.getpid()))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        late = time.monotonic() - begin < 0.3
        self.send_response(503 if late else int(sys.argv[3]))
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
sum(range(3_000_000))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(tmp_path: Path, status: int) -> str:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return f"{shlex.join([sys.executable, str(script)])} {{port}} {tmp_path / 'pid'} {status}"


def test_a_start_lasts_until_the_first_token(tmp_path: Path) -> None:
    begin = time.perf_counter()
    took = start.start(command(tmp_path, 200), "m")
    assert 0.3 <= took.seconds <= time.perf_counter() - begin
    assert took.cpu > 0.01
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_server_that_refuses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="status 400"):
        start.start(command(tmp_path, 400), "m")


def test_a_server_that_ends_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="did not come up"):
        start.start(f"{sys.executable} -c pass {{port}}", "m")


def test_servers_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def started(command: str, _model: str) -> start.Start:
        asked.append(command)
        return start.Start(0.5 if command == "a" else 1.0, 0.25)

    monkeypatch.setattr(start, "start", started)
    start.run(["a", "b"], "m", 3)
    assert "".join(asked) == "ab" + "abbaab"
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["seconds", "0.500", "1.000", "0.50", "(0.50", "to", "0.50)"]
    assert lines[2].split() == ["CPU", "seconds", "0.250", "0.250", "1.00", "(1.00", "to", "1.00)"]
