"""`tailrace ui`, and the dashboard of `tailrace serve --ui`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tailrace.cli import options, serve
from tailrace.ledger.store import Ledger
from tests.cli.conftest import Run
from tests.ledger.rows import RUN, record


def test_it_shows_a_ledger_until_it_is_told_to_end(environment: dict[str, str]) -> None:
    place = environment["TAILRACE_LEDGER"]
    ledger = Ledger(place)
    ledger.write(RUN, [(1, record("chatcmpl-1"))], 0)
    ledger.close()
    command = [sys.executable, "-m", "tailrace.cli", "ui", "--ledger", f"sqlite:///{place}", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        said = child.stdout.readline()
        found = re.fullmatch(r"Dashboard of the ledger .*ledger\.db: (http://127\.0\.0\.1:\d+/ui)\n", said)
        assert found is not None, said
        with urllib.request.urlopen(found[1]) as answer:
            assert b"<title>Tailrace" in answer.read()
        with urllib.request.urlopen(f"{found[1]}/api/requests") as answer:
            assert json.load(answer)["rows"][0]["request"] == "chatcmpl-1"
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 0
        assert child.stderr is not None
        assert child.stderr.read() == ""


def test_a_ledger_that_is_not_there_is_said_at_once(run: Run, tmp_path: Path) -> None:
    none = run("ui", "--ledger", str(tmp_path / "none.db"))
    assert (none.returncode, none.stderr) == (
        1,
        f"error: there is no ledger at {tmp_path / 'none.db'} yet: `tailrace serve` writes one\n",
    )


@pytest.mark.parametrize("given", [True, False])
def test_serve_has_a_dashboard_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: bool
) -> None:
    from tailrace.api import server
    from tailrace.engine import early

    told: dict[str, Any] = {}
    monkeypatch.setattr(server, "run", lambda *_given, **named: told.update(named) or 0)
    monkeypatch.setattr(early, "hand_over", lambda *_given: None)
    (tmp_path / "m.gguf").touch()
    values = options.parse([str(tmp_path / "m.gguf"), *(["--ui"] if given else [])], options.SERVE)
    assert values is not None
    assert serve.run(values, engine=object()) == 0  # type: ignore[arg-type]  # nothing looks at it
    assert (told["mount"] is not None) == given
