"""`tailrace keys`: a key is printed once, and nothing that is shown later lets anybody in."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tailrace.api.access import store
from tailrace.api.access.guard import Guard
from tailrace.cli import arguments, keys
from tailrace.cli.main import main
from tailrace.terms import InvalidInput


class Run:
    """Runs `tailrace keys ARGUMENTS` in this process: its status, and what it prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def __call__(self, *words: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as end:
            main(["keys", *words])
        said = self._capsys.readouterr()
        self.err = said.err
        assert end.value.code == status, said.err
        return said.out


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """On a file of the test's own."""
    monkeypatch.setenv("TAILRACE_KEYS", str(tmp_path / "keys.json"))
    monkeypatch.setenv("COLUMNS", "160")
    return Run(capsys)


def test_a_key_is_made_shown_limited_and_revoked(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = run("create", "ada", "--tenant", "t", "--expires", "90d", "--tokens-per-minute", "500").strip()
    assert store.KEY.fullmatch(key)
    assert key not in run.err
    assert Guard(file=str(file)).identify(b"Bearer " + key.encode(), "inference").group == "t"
    (entry,) = store.read(file).keys
    assert entry.expires is not None
    assert timedelta(days=89) < entry.expires - datetime.now(UTC) <= timedelta(days=90)

    assert run("limit", "ada", "--concurrent", "2") == "Key ada: 500 tokens/min, 2 at a time\n"
    assert run("limit", "ada", "--tokens-per-minute", "0") == "Key ada: 2 at a time\n"
    assert run("limit", "ada", "--least-priority", "-30") == "Key ada: 2 at a time, priority from -30\n"
    assert run("limit", "ada", "--concurrent", "3") == "Key ada: 3 at a time, priority from -30\n"
    assert store.read(file).keys[0].least_priority == -30
    assert "priority from -30" in run("list")
    assert json.loads(run("show", "ada", "--json"))["least_priority"] == -30
    run("limit", "--tenant", "t", "--least-priority", "-1", status=2)
    assert "is of a key, not of a tenant" in run.err
    assert run("limit", "ada", "--least-priority", "0") == "Key ada: 3 at a time\n"
    assert run("limit", "--tenant", "t", "--requests-per-minute", "9") == "Tenant t: 9 requests/min\n"
    shown = run("show", "ada") + run("show", entry.id, "--json") + run("list") + run("list", "--json")
    assert entry.id in shown
    assert "9 requests/min" in shown
    assert key.rpartition("_")[2] not in shown
    assert entry.digest not in shown

    assert "was revoked" in run("revoke", entry.id)
    assert entry.id not in run("list")
    listed = json.loads(run("list", "--all", "--json"))["keys"]
    assert [(one["id"], one["state"]) for one in listed] == [(entry.id, "revoked")]
    made = json.loads(run("create", "ops", "--scope", "admin", "--json", "--keys", str(tmp_path / "other.json")))
    assert made["scopes"] == ["admin"]
    assert store.read(tmp_path / "other.json").keys[0].digest == store.digest(made["key"]).hex()


def test_a_second_key_of_a_name_is_made_and_the_first_is_named(run: Run, tmp_path: Path) -> None:
    run("create", "ada")
    assert "had a key" not in run.err
    first = store.read(tmp_path / "keys.json").keys[0].id
    run("create", "ada")
    assert f"ada had a key before, which still works: {first}." in run.err
    assert f"tailrace keys revoke {first}" in run.err
    run("create", "ada", "--json")
    assert run.err.count("had a key before") == 1
    for one in store.read(tmp_path / "keys.json").keys:
        run("revoke", one.id)
    run("create", "ada")
    assert "had a key" not in run.err


def test_mistakes_end_with_status_2_and_a_sentence(run: Run, tmp_path: Path) -> None:
    for words, said in (
        (("list",), "tailrace keys create"),
        (("create", "a b"), "letters, digits"),
        (("create", "a", "--expires", "soon"), "--expires is a time from now"),
        (("create", "a", "--concurrent", "-1"), "--concurrent"),
        (("create", "a", "--least-priority", "1"), "--least-priority"),
        (("limit",), "either a key or --tenant"),
        (("revoke", "eve"), "tailrace keys create"),
    ):
        assert run(*words, status=2) == "", words
        assert said in run.err
    assert not (tmp_path / "keys.json").exists()


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("90d", datetime(2026, 4, 1, 12, tzinfo=UTC)),
        ("12h", datetime(2026, 1, 2, tzinfo=UTC)),
        ("2030-01-31", datetime(2030, 1, 31, tzinfo=UTC)),
        ("2030-01-31T10:00+02:00", datetime(2030, 1, 31, 8, tzinfo=UTC)),
    ],
)
def test_an_end_is_a_span_or_a_date(text: str, when: datetime) -> None:
    assert keys._when(text, datetime(2026, 1, 1, 12, tzinfo=UTC)) == when
    for wrong in ("soon", "90", "-1d", "999999d" * 2, "2030-13-01"):
        with pytest.raises(InvalidInput, match="--expires"):
            keys._when(wrong, datetime(2026, 1, 1, tzinfo=UTC))


def test_an_options_values_are_blotted_out() -> None:
    line = b"python\0tailrace\0serve\0--api-key\0secret\0--port\x000\0--api-key=second\0--api-key-file\0keys\0"
    expected = line.replace(b"secret", b"xxxxxx").replace(b"second", b"xxxxxx")
    assert arguments.blotted(line, "--api-key") == expected
    assert len(expected) == len(line)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="only Linux shows command lines there")
def test_no_process_shows_the_key_on_its_command_line(environment: dict[str, str], smollm2: Path) -> None:
    command = [sys.executable, "-m", "tailrace.cli", "serve", str(smollm2), "--port", "0", "--kv-tokens", "1024"]
    command += ["--api-key", "swordfish", "--api-key=sturgeon"]
    environment = {name: value for name, value in environment.items() if name != "TAILRACE_CACHE"}  # a quick start
    shown: set[str] = set()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as serve:
        assert serve.stderr is not None
        try:
            assert any("Ready in" in line for line in serve.stderr)
            found = subprocess.run(["pgrep", "-P", str(serve.pid)], capture_output=True, text=True, check=True)
            children = [int(pid) for pid in found.stdout.split()]
            assert children
            for pid in (serve.pid, *children):
                shown.add(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        finally:
            serve.send_signal(signal.SIGTERM)
            serve.stderr.read()
    assert all("--api-key xxxxxxxxx" in line for line in shown)
    assert not re.search("swordfish|sturgeon", "".join(shown))
