"""A server's ledger, through a real socket."""

from __future__ import annotations

import signal
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tailrace.api.accounts import spool_of
from tests import postgres
from tests.api.conftest import Running, serving, until

CHAT: dict[str, Any] = {"model": "stand", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8}


def rows(place: Path, **wanted: Any) -> list[dict[str, Any]]:
    if not place.exists():
        return []
    connection = sqlite3.connect(place)
    connection.row_factory = sqlite3.Row
    try:
        found = [dict(row) for row in connection.execute("SELECT * FROM tailrace_requests ORDER BY seq")]
    except sqlite3.OperationalError:  # it is just being made
        found = []
    finally:
        connection.close()
    return [row for row in found if all(row[name] == value for name, value in wanted.items())]


def when(place: Path, count: int, **wanted: Any) -> list[dict[str, Any]]:
    found = until(lambda: (r := rows(place, **wanted)) and len(r) >= count and r, f"{count} rows")
    assert len(found) == count
    return list(found)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_a_request_is_a_row(place: Path) -> None:
    settings = {"ledger": str(place), "slo": "ttft=5,e2e=60", "usd_per_hour": 36.0, "api_keys": ["secret"]}
    with serving(**settings, served_names=["stand"]) as server:
        headers: Any = {
            "Authorization": "Bearer secret",
            "x-request-id": "mine",
            "x-tailrace-workload": b"chat \xfc\x80",
        }
        body = {**CHAT, "temperature": 0.5, "ignore_eos": True, "metadata": {"workload": "other"}}
        answer = server.post("/v1/chat/completions", body, headers=headers).json()
        [row] = when(place, 1)
        assert server.metric_of(headers, "tailrace_ledger_rows_total") == 1
        assert server.metric_of(headers, "tailrace_ledger_waiting") == 0
    usage = answer["usage"]
    assert row["request"] == answer["id"]
    assert row["http_request"] == "mine"
    assert row["key"]
    assert "secret" not in str(row)
    assert (row["workload"], row["endpoint"], row["model"], row["outcome"]) == ("chat ??", "chat", "stand", "ok")
    assert (row["prompt_tokens"], row["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert row["max_tokens"] == 8
    assert '"temperature":0.5' in row["detail"]
    assert row["slo_met"] == 1
    phases = [value for name, value in row.items() if name.endswith("_us") and name[:-3] in PHASES]
    assert sum(phases) == pytest.approx(row["e2e_us"], abs=9)
    assert 0 < row["device_us"] <= row["e2e_us"]
    assert row["cost_nusd"] == pytest.approx(row["device_us"] * 10, abs=1)


PHASES = ("prepare", "queue", "kv_lookup", "kv_load", "prefill", "decode", "stall", "stream", "other")


def test_what_the_caller_says_of_its_slo_is_what_it_is_judged_by(place: Path) -> None:
    with serving(ledger=str(place), slo="ttft=5") as server:
        wrong = server.post("/v1/chat/completions", CHAT, headers={"x-slo-ttft-ms": "soon"})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "x-slo-ttft-ms"
        server.post("/v1/chat/completions", CHAT, headers={"x-slo-ttft-ms": "0.001"})
        when(place, 1, outcome="ok", slo_met=0)
        server.post("/v1/chat/completions", CHAT)
        when(place, 1, outcome="ok", slo_met=1)
        [refused] = when(place, 1, outcome="refused")
    assert (refused["status"], refused["slo_met"]) == (400, None)


def test_refusals_and_those_who_leave_are_told_apart(place: Path) -> None:
    settings = {"loader": "tests.api.stand:load_slow", "max_running": 1, "max_waiting": 1}
    with serving(ledger=str(place), slo="ttft=60", **settings) as server:
        long = {"model": "stand", "prompt": "abc", "max_tokens": 1000, "ignore_eos": True}

        def leave() -> None:
            with httpx.Client(base_url=server.url, timeout=1.5) as client, pytest.raises(httpx.TimeoutException):
                client.post("/v1/completions", json=long)

        leaving = [threading.Thread(target=leave) for _ in range(2)]
        for thread, series in zip(leaving, ("running", "waiting"), strict=True):
            thread.start()
            until(lambda series=series: server.metric(f"vllm:num_requests_{series}") == 1, f"one to be {series}")
        assert server.post("/v1/completions", {**long, "max_tokens": 1}).status_code == 429
        assert server.post("/v1/completions", {**long, "model": "x"}).status_code == 404
        assert server.get("/v1/nothing").status_code == 404
        for thread in leaving:
            thread.join()
        found = when(place, 4)
    told = {(row["outcome"], row["status"], row["slo_met"]) for row in found}
    assert told == {("gone", 0, None), ("refused", 429, 0), ("refused", 404, None)}


def test_named_phases_cover_nearly_all_of_every_request(place: Path) -> None:
    with serving(ledger=str(place), loader="tests.api.stand:load_slow", max_running=4) as server:
        flood(server, 200, 16)
        found = when(place, 200)
    shares = [row["other_us"] / row["e2e_us"] for row in found]
    assert max(shares) <= 0.01


def test_what_a_grammar_forces_has_a_name_too(place: Path) -> None:
    """Hundreds of forced tokens take several steps, the first of which draw nothing."""
    forced = "the river runs " * 30
    with serving(ledger=str(place), loader="tests.api.stand:load_slow", step_tokens=64) as server:
        body = {**CHAT, "max_tokens": 600, "guided_regex": f"{forced}[a-c]"}
        answer = server.post("/v1/chat/completions", body).json()
        [row] = when(place, 1)
    assert answer["choices"][0]["message"]["content"][:-1] == forced
    assert row["decode_steps"] >= 4
    assert row["other_us"] <= 0.01 * row["e2e_us"]
    assert row["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def flood(server: Running, count: int, together: int) -> None:
    def one(at: int) -> None:
        body = {"model": "stand", "prompt": f"number {at} " * (at % 9), "max_tokens": 1 + at % 12, "stream": at % 2 > 0}
        assert server.post("/v1/completions", {**body, "prompt": body["prompt"] or "x"}).status_code == 200

    with ThreadPoolExecutor(together) as pool:
        list(pool.map(one, range(count)))


def test_a_killed_servers_rows_are_there_once_and_the_next_one_goes_on(place: Path) -> None:
    answered: list[str] = []
    for _ in range(2):
        with serving(ledger=str(place)) as server:
            for _ in range(20):
                answered.append(server.post("/v1/chat/completions", CHAT).json()["id"])
            until(lambda server=server: server.metric("tailrace_ledger_waiting") == 0, "the ledger to have all")
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
    assert sorted(row["request"] for row in rows(place)) == sorted(answered)


def test_no_two_ledgers_have_the_same_spool(tmp_path: Path) -> None:
    places = ["a.db", "b.db", "postgresql://ada@h/db", "postgresql://ada@h/db2", "postgresql://h/db?host=/x"]
    for folder in (None, str(tmp_path)):
        assert len({spool_of(place, folder) for place in places}) == len(places)
    assert spool_of("postgresql://ada:one@h/db", None) == spool_of("postgresql://ada:two@h/db", None)


def test_postgresql_will_do_and_may_come_later(postgresql: postgres.Server, tmp_path: Path) -> None:
    import psycopg

    def ids() -> list[str]:
        with psycopg.connect(postgresql.url) as connection:
            if connection.execute("SELECT to_regclass('tailrace_requests')").fetchone() == (None,):
                return []
            return [row[0] for row in connection.execute("SELECT request FROM tailrace_requests ORDER BY seq")]

    postgresql.stop()
    settings = {"ledger": postgresql.url, "ledger_spool": str(tmp_path / "spool")}
    try:
        with serving(**settings) as server:
            answered = [server.post("/v1/chat/completions", CHAT).json()["id"] for _ in range(5)]
            until(lambda: server.metric("tailrace_ledger_failures_total"), "the ledger to be missed")
            assert server.metric("tailrace_ledger_waiting") == 5
    finally:
        postgresql.start()
    assert ids() == []
    with serving(**settings) as server:
        answered += [server.post("/v1/chat/completions", CHAT).json()["id"]]
        until(lambda: ids() == answered, "all to be there")
        assert server.finish() == 0
    [own] = (tmp_path / "spool").iterdir()
    assert not list(own.glob("*.spool"))


def test_a_ledger_that_cannot_be_is_said_once_and_kept_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with serving(ledger=str(tmp_path / "file" / "ledger.db")) as server:
        for _ in range(3):
            assert server.post("/v1/chat/completions", CHAT).status_code == 200
        until(lambda: server.metric("tailrace_ledger_failures_total") >= 2, "the ledger to be missed")
        assert server.metric("tailrace_ledger_waiting") == 3
    said = [line for line in server.log if "cannot be" in line]
    assert len(said) == 2  # the spool and the ledger
