"""`tailrace bench`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.cli import app
from tailrace.terms import InvalidInput
from tests.cli.conftest import Run
from tests.measure import mock
from tests.measure.mock import Mock, running

SMALL = ("--input", "8", "--output", "4")


@pytest.fixture
def server() -> Iterator[Mock]:
    with running(mock.steady(0.005, 0.002)) as server:
        yield server


def test_a_person_gets_a_summary(run: Run, server: Mock) -> None:
    ended = run("bench", server.url, *SMALL, "-n", "20", "-c", "2", "--slo", "ttft=2s,tpot=1s", "--price", "2")
    assert ended.returncode == 0, ended.stderr
    for said in ("chat on mock at http://127.0.0.1", "2 at a time", "20 requests in", "none failed", "TTFT",
                 "95 % interval", "output tokens/s (peak",
                 "100.0% (83.9% to 100.0%) kept all of ttft <= 2 s, tpot <= 1 s for 95%",
                 "$", "8 tokens in and 4 out wanted, 8 and 4 counted"):  # fmt: skip
        assert said in ended.stdout, said
    assert ended.stderr == ""
    assert {body["max_tokens"] for body in server.requests} == {1, 4}


def test_programs_get_json_and_files(run: Run, server: Mock, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "a.csv", "a.html")]
    outs = [word for file in files for word in ("--out", str(file))]
    ended = run("bench", server.url, *SMALL, "-n", "6", "-r", "40", "--even", "--json", *outs)
    found = json.loads(ended.stdout)
    assert found["runs"][0]["records"] == []
    assert found["runs"][0]["summary"]["outcomes"] == {"ok": 6}
    assert found["setting"]["arrivals"] == {"kind": "constant", "rate": 40.0}
    kept = json.loads(files[0].read_text())
    assert len([record for record in kept["runs"][0]["records"] if record["measured"]]) == 6
    rows = list(csv.DictReader(files[1].read_text().splitlines()))
    assert {row["output_tokens"] for row in rows if row["measured"] == "1"} == {"4"}
    assert "Time to first token" in files[2].read_text()
    again = run("bench", "--import", str(files[0]))
    assert again.returncode == 0
    assert "6 requests in" in again.stdout


def test_a_sweep_a_search_and_a_comparison(run: Run, server: Mock) -> None:
    ended = run("bench", server.url, *SMALL, "-n", "4", "--sweep", "1,2")
    assert "1 at a time" in ended.stdout
    assert "2 at a time" in ended.stdout
    ended = run("bench", server.url, *SMALL, "-n", "4", "-r", "1", "--find", "20:40", "--slo", "ttft=5s", "--json")
    assert json.loads(ended.stdout)["found"]["level"] == 40
    ended = run("bench", server.url, *SMALL, "-n", "2", "--against", server.url, "--pairs", "2")
    assert ended.returncode == 0, ended.stderr
    assert "B / A" in ended.stdout
    assert "no sure difference" in ended.stdout


def test_a_server_that_refuses_all_is_a_failure(run: Run) -> None:
    answers = iter([mock.steady()] * 3)
    with running(lambda body: next(answers, mock.refuse(503, "no room"))(body)) as server:
        ended = run("bench", server.url, *SMALL, "-n", "3", "-c", "1", "--warmup", "0")
    assert ended.returncode == 1
    assert "3 of 3 failed" in ended.stdout
    assert "503: no room" in ended.stdout


def test_headers_keys_and_parameters_are_sent(run: Run, server: Mock) -> None:
    run("bench", server.url, *SMALL, "-n", "1", "-c", "1", "--header", "x-team: blue", "--body", '{"temperature": 0.5}',
        "--model", "other", "--no-exact", TAILRACE_API_KEY="secret")  # fmt: skip
    assert {body["model"] for body in server.requests} == {"other"}
    assert {body["temperature"] for body in server.requests} == {0.5}
    assert not any("ignore_eos" in body for body in server.requests)
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    assert {headers["x-team"] for headers in server.headers} == {"blue"}
    assert {headers["x-tailrace-timeline"] for headers in server.headers} == {"1"}


def test_an_interrupted_measurement_shows_what_it_has(environment: dict[str, str]) -> None:
    with running(mock.steady(0.01)) as server:
        command = [sys.executable, "-m", "tailrace.cli", "bench", server.url, *SMALL, "-n", "1000000", "-c", "1"]
        ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of what a shell runs in the background
        try:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
        finally:
            signal.signal(signal.SIGINT, ignored)
        limit = time.monotonic() + 60
        while len(server.requests) < 10 and time.monotonic() < limit:
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGINT)
        try:
            said, errors = child.communicate(timeout=60)
        finally:
            child.kill()  # or the server would wait for it
    assert child.returncode == 130
    assert "(interrupted)" in said
    assert "Traceback" not in errors


def test_workloads_are_listed(run: Run) -> None:
    listed = run("bench", "--list").stdout
    assert "rag" in listed
    assert "8,000 and 100 tokens" in listed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-w", "nonsense"), "no workload 'nonsense'"),
        (("-c", "2", "-r", "3"), "--concurrency and --rate exclude each other"),
        (("--even",), "--even and --burstiness are for --rate"),
        (("-r", "0"), "--rate must be above 0"),
        (("-r", "nan"), "--rate must be above 0"),
        (("--ramp", "1:2"), "--ramp is as in"),
        (("--speed", "2"), "--speed is for a trace"),
        (("-n", "5", "-d", "5"), "--requests and --duration exclude each other"),
        (("--warmup", "5m"), "--warmup is a number"),
        (("--timeout", "0"), "--timeout must be above 0"),
        (("--slo", "itl=5"), "--slo is as in"),
        (("--slo", "ttft=1", "--attain", "0"), "the share that must be good"),
        (("--body", "{"), "--body is no JSON"),
        (("--body", "[]"), "--body is an object"),
        (("--header", "x"), "--header is as in"),
        (("--sweep", "1,x"), "--sweep is as in"),
        (("--find", "5:1", "--slo", "ttft=1"), "--find is as in"),
        (("--find", "1:5"), "--find needs --slo"),
        (("--sweep", "1", "--against", "http://x"), "exclude each other"),
        (("--prompts", "ids"), "--prompts ids is for --api completions"),
        (("--out", "x.pdf"), "its name ends in .json, .csv or .html"),
        (("--import", "nowhere.json"), "cannot be read"),
    ],
)
def test_what_is_wrong_is_said_by_name(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        app.run(["bench", "http://127.0.0.1:9", *arguments])
    assert said in str(caught.value)


def test_nobody_there_is_said(run: Run) -> None:
    ended = run("bench", "http://127.0.0.1:9")
    assert ended.returncode == 1
    assert "No server answers at http://127.0.0.1:9" in ended.stderr
