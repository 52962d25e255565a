"""A server that sleeps has given its memory back, and wakes with the same answers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import DEADLINE, Running, serving, until

CHAT = {"model": "stand", "messages": [{"role": "user", "content": "say this again"}], "seed": 7}
LONG = {**CHAT, "ignore_eos": True, "max_tokens": 100}
USER = {"authorization": "Bearer user"}
OPERATOR = {"authorization": "Bearer operator"}
KEYS: dict[str, Any] = {"api_keys": ["user"], "admin_keys": ["operator"], "loader": "tests.api.stand:load_slow"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(**KEYS) as running:
        yield running


def post(server: Running, path: str, body: Any = None, status: int = 200, headers: Any = OPERATOR) -> Any:
    answer = server.post(path, body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def state(server: Running) -> Any:
    return server.get("/admin/state", headers=OPERATOR).json()


def ask(server: Running, **body: Any) -> Any:
    return post(server, "/v1/chat/completions", {**CHAT, **body}, headers=USER)


def memory(pid: int) -> int:
    """Bytes that a process has of its own: its proportional share of all that it maps."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def test_asleep_it_says_so_refuses_with_retry_after_and_wakes_with_the_same_answers(server: Running) -> None:
    before = ask(server)
    engine = server.engine
    assert post(server, "/admin/sleep", {})["state"] == "asleep"
    assert not Path(f"/proc/{engine}").exists()
    assert server.get("/health").json() == {**server.get("/health").json(), "status": "ok", "asleep": True}
    assert server.get("/health/live").status_code == 200
    assert server.get("/health/ready").status_code == 503
    assert server.metric_of(OPERATOR, "tailrace_asleep") == 1
    assert server.metric_of(OPERATOR, "tailrace_engine_restarts_total") == 0
    refused = server.post("/v1/chat/completions", CHAT, headers=USER)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "asleep"
    assert int(refused.headers["retry-after"]) >= 1
    assert server.post("/tokenize", {"prompt": "needs no engine"}, headers=USER).status_code == 200
    assert server.get("/v1/models", headers=USER).status_code == 200
    assert post(server, "/admin/profile", {"steps": 1}, 503)["error"]["code"] == "asleep"
    assert post(server, "/admin/sleep", {})["already"] is True
    woken = post(server, "/admin/wake")
    assert woken["wake_ms"] > 0
    assert server.get("/health/ready").status_code == 200
    after = ask(server)
    assert after["choices"] == before["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask(server, messages=[{"role": "user", "content": "x" * 60}])["usage"]["prompt_tokens"] > 60
    assert server.metric_of(OPERATOR, "tailrace_asleep") == 0
    assert server.metric_of(OPERATOR, "tailrace_wakes_total") == 1
    assert server.metric_of(OPERATOR, "tailrace_engine_steps_total") > 0
    assert post(server, "/admin/wake")["already"] is True
    assert not any("restart" in line for line in server.log)


def test_vllms_names_do_the_same_on_the_admin_key(server: Running) -> None:
    assert server.post("/sleep", None, headers=USER).status_code == 403
    assert server.get("/is_sleeping", headers=USER).status_code == 403
    assert post(server, "/sleep?level=2", None, 400)["error"]["param"] == "level"
    assert post(server, "/sleep?mode=keep", None, 400)["error"]["param"] == "mode"
    assert post(server, "/wake_up?tags=weights", None, 400)["error"]["param"] == "tags"
    post(server, "/sleep?level=1&mode=abort")
    assert server.get("/is_sleeping", headers=OPERATOR).json() == {"is_sleeping": True}
    post(server, "/wake_up")
    assert server.get("/is_sleeping", headers=OPERATOR).json() == {"is_sleeping": False}


def test_streams_hold_a_sleep_up_or_are_aborted_as_the_operator_says(server: Running) -> None:
    for running in ("refuse", "finish", "abort"):
        said: list[Any] = []

        def stream(said: list[Any] = said) -> None:
            body = {**LONG, "stream": True}
            said.append(server.post("/v1/chat/completions", body, headers=USER).text)

        thread = threading.Thread(target=stream)
        thread.start()
        until(lambda: state(server)["running"], "the stream to run")
        if running == "refuse":
            error = post(server, "/admin/sleep", {}, 409)["error"]
            assert error["code"] == "busy"
            assert state(server)["sleep"]["state"] == "awake"
            thread.join(DEADLINE)
            assert "[DONE]" in said[0]
            continue
        post(server, "/admin/sleep", {"running": running})
        thread.join(DEADLINE)
        assert ("[DONE]" in said[0]) == (running == "finish")
        assert ('"code":"aborted"' in said[0]) == (running == "abort")
        post(server, "/admin/wake")
    assert server.metric_of(OPERATOR, "tailrace_kv_pages_used") == 0


def test_two_sleeps_and_two_wakes_at_once_are_one_each(server: Running) -> None:
    before = state(server)["sleep"]
    with ThreadPoolExecutor(4) as pool:
        slept = list(pool.map(lambda _: post(server, "/admin/sleep", {})["already"], range(3)))
        assert sorted(slept) == [False, True, True]
        woken = list(pool.map(lambda _: post(server, "/admin/wake")["already"], range(3)))
        assert sorted(woken) == [False, True, True]
    after = state(server)["sleep"]
    assert (after["sleeps"], after["wakes"]) == (before["sleeps"] + 1, before["wakes"] + 1)


def test_a_standby_that_is_killed_while_the_server_sleeps_is_not_missed(server: Running) -> None:
    said = ask(server)["choices"]
    post(server, "/admin/sleep", {})
    standby = until(lambda: server.engine, "the process that waits")
    os.kill(standby, signal.SIGKILL)
    assert server.get("/health").status_code == 200
    post(server, "/admin/wake")
    assert server.engine not in (0, standby)
    assert ask(server)["choices"] == said


def test_an_engine_that_is_killed_after_it_woke_is_started_again(server: Running) -> None:
    post(server, "/admin/sleep", {})
    post(server, "/admin/wake")
    killed = server.engine
    os.kill(killed, signal.SIGKILL)
    until(lambda: state(server)["restarts"] == 1 and state(server)["engine"] == "ready", "the next engine")
    assert ask(server)["choices"]


def test_an_idle_server_sleeps_by_itself_and_the_official_client_waits_through_its_wake() -> None:
    with serving(**KEYS, timeouts={"sleep_after": 0.2}) as server:
        client = server.client("user")
        said = client.chat.completions.create(**CHAT).choices[0].message.content  # type: ignore[call-overload]
        until(lambda: state(server)["sleep"]["state"] == "asleep", "sleep")
        assert state(server)["sleep"]["cause"] == "idle"
        assert server.get("/health/ready").status_code == 200
        with ThreadPoolExecutor(8) as pool:
            again = list(pool.map(lambda _: client.chat.completions.create(**CHAT), range(8)))  # type: ignore[call-overload]
        assert {one.choices[0].message.content for one in again} == {said}
        now = state(server)["sleep"]  # it may have slept again before the last of them came
        assert 1 <= now["wakes"] <= now["sleeps"]
        until(lambda: state(server)["sleep"]["state"] == "asleep", "sleep again")
        post(server, "/admin/sleep", {})  # from here on it is the operator's
        assert server.post("/v1/chat/completions", CHAT, headers=USER).status_code == 503
        assert server.finish() == 0


def test_pages_of_a_server_that_slept_come_back_from_disk(tmp_path: Path) -> None:
    loader = {"loader": "tests.api.stand:load_eager", "kv_disk": str(tmp_path / "kv")}
    with serving(**{**KEYS, **loader}) as server:
        long = {"messages": [{"role": "user", "content": "many words to keep " * 20}], "max_tokens": 1}
        first = ask(server, **long)
        post(server, "/admin/sleep", {})
        assert list((tmp_path / "kv").rglob("*"))
        post(server, "/admin/wake")
        again = ask(server, **long)
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 300


@pytest.mark.alone
def test_the_real_model_gives_its_memory_back_and_wakes_with_the_same_bits(smollm2: Path) -> None:
    real = {"model": str(smollm2), "served_names": ["stand"], "loader": "", "kv_tokens": 2048}
    with serving(**{**KEYS, **real}) as server:
        wanted = {"temperature": 1.0, "max_tokens": 12, "logprobs": True}
        before = ask(server, **wanted)["choices"]
        awake = memory(server.engine)
        post(server, "/admin/sleep", {})
        asleep = memory(server.engine)
        assert asleep < awake / 2
        assert asleep < 60 << 20
        post(server, "/admin/wake")
        assert ask(server, **wanted)["choices"] == before


def test_a_request_waits_no_longer_for_a_wake_than_it_is_to_and_a_drain_answers_those_that_wait() -> None:
    late = {"loader": "tests.api.stand:load_late", "wake_on_request": "always"}  # takes 1.5 s to start
    with serving(**{**KEYS, **late}, timeouts={"wake": 0.2}) as server:
        post(server, "/admin/sleep", {})
        refused = server.post("/v1/chat/completions", CHAT, headers=USER)
        assert refused.status_code == 503
        assert "did not wake up within 0.2 s" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
        until(lambda: state(server)["sleep"]["state"] == "awake", "the wake to end all the same")
        assert ask(server)["choices"]
    with serving(**{**KEYS, **late}) as server, ThreadPoolExecutor(1) as pool:
        post(server, "/admin/sleep", {})
        waiting = pool.submit(server.post, "/v1/chat/completions", CHAT, headers=USER)
        until(lambda: state(server)["sleep"]["waiting"], "the request to wait")
        server.process.send_signal(signal.SIGTERM)
        assert waiting.result().status_code == 503
        assert server.wait() == 0
