"""A profile is a trace that Perfetto opens, and nothing is left of it afterwards."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.api import schema
from tailrace.api.exchange import Exchange
from tailrace.api.profile import Recorder
from tailrace.engine.process import warm_up
from tailrace.engine.profile import Profile
from tailrace.engine.protocol import Spans
from tailrace.engine.spec import EngineSpec
from tests.api.conftest import Running, serving, until
from tests.api.stand import load

CHAT = {"model": "stand", "messages": [{"role": "user", "content": "secretword again"}], "ignore_eos": True}
USER = {"authorization": "Bearer user"}
OPERATOR = {"authorization": "Bearer operator"}
KEYS: dict[str, Any] = {"api_keys": ["user"], "admin_keys": ["operator"], "loader": "tests.api.stand:load_slow"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(**KEYS) as running:
        yield running


def profile(server: Running, **body: Any) -> Any:
    return server.post("/admin/profile", body, headers=OPERATOR)


def check_format(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Chrome's trace event format; the slices by track. Those of one lie one in the other or one after the other."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] == "ms"
    tracks = defaultdict(list)
    named = set()
    for row in trace["traceEvents"]:
        assert row["ph"] in ("X", "M")
        assert isinstance(row["name"], str)
        assert row["name"]
        assert all(isinstance(row[key], int) and row[key] >= 0 for key in ("pid", "tid", "ts"))
        if row["ph"] == "M":
            assert row["name"] in ("process_name", "thread_name")
            assert row["args"]["name"]
            named.add((row["pid"], row["tid"]))
        else:
            assert isinstance(row["dur"], int)
            assert row["dur"] >= 0
            tracks[row["pid"], row["tid"]].append(row)
    for track, rows in tracks.items():
        assert track in named
        assert [row["ts"] for row in rows] == sorted(row["ts"] for row in rows)
        around: list[int] = []
        for row in rows:
            while around and around[-1] <= row["ts"]:
                around.pop()
            end = row["ts"] + row["dur"]
            assert not around or end <= around[-1], (track, row)
            around.append(end)
    return tracks


def test_a_profile_of_steps_has_a_track_for_steps_requests_and_the_api(server: Running) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = pool.submit(profile, server, steps=12)
        until(lambda: server.get("/admin/state", headers=OPERATOR).json()["profiling"], "the profile to run")
        assert profile(server, steps=1).status_code == 409
        bodies = [{**CHAT, "max_tokens": 20, "stream": stream} for stream in (True, False)]
        answers = [pool.submit(server.post, "/v1/chat/completions", body, headers=USER) for body in bodies]
        assert all(answer.result().status_code == 200 for answer in answers)
        answer = made.result()
    assert answer.status_code == 200
    assert "attachment" in answer.headers["content-disposition"]
    assert "secretword" not in answer.text
    trace = answer.json()
    tracks = check_format(trace)
    assert trace["otherData"]["steps"] == 12
    assert trace["otherData"]["cut"] is False
    names = {track: {row["name"] for row in rows} for track, rows in tracks.items()}
    assert names[2, 1] <= {"prefill", "decode", "prefill and decode"}
    assert len(tracks[2, 1]) == 12
    assert all(row["dur"] >= 15_000 for row in tracks[2, 1][1:])  # the stand-in takes 20 ms a step
    assert {"step", "plan", "wait", "apply", "launch"} <= names[2, 2]
    assert {"parse", "send", "engine news"} <= names[1, 1]
    assert any("tokenize" in shown for (pid, _), shown in names.items() if pid == 1)
    requests = [shown for (pid, _), shown in names.items() if pid == 3]
    assert len(requests) == 2
    assert all({"request", "queue", "prefill", "decode"} <= shown for shown in requests)


def test_a_profile_of_seconds_ends_by_itself_and_another_can_follow(server: Running) -> None:
    for _ in range(2):
        answer = profile(server, seconds=0.2)
        assert answer.status_code == 200
        check_format(answer.json())
        assert 0.2 <= answer.json()["otherData"]["seconds"] < 5


def test_a_client_that_leaves_ends_its_profile(server: Running) -> None:
    with server.http(headers=OPERATOR) as client:
        client.timeout = 0.3
        with pytest.raises(Exception, match="timed out"):
            client.post("/admin/profile", json={"steps": 10000})
    until(lambda: profile(server, seconds=0.05).status_code == 200, "the first one's end")


def test_kernels_of_the_real_backend_are_told_apart(smollm2: Path) -> None:
    real = {"model": str(smollm2), "served_names": ["stand"], "loader": "", "kv_tokens": 2048}
    with serving(**{**KEYS, **real}) as server:
        thread = threading.Thread(
            target=lambda: server.post("/v1/chat/completions", {**CHAT, "max_tokens": 60}, headers=USER)
        )
        thread.start()
        until(lambda: server.metric_of(OPERATOR, "tailrace_num_requests_running"), "the request to run")
        trace = json.loads(profile(server, steps=5, seconds=5).text)
        thread.join()
    tracks = check_format(trace)
    assert len({row["name"] for row in tracks[2, 3]}) >= 3
    assert all(row["args"]["measured_us"] > 0 for row in tracks[2, 3])


def test_nothing_is_left_of_a_profile_in_the_engine() -> None:
    loaded = load(EngineSpec("stand"))
    core = loaded.core
    owners = {id(owner): owner for owner, _, _ in core.parts()}
    before = {key: set(vars(owner)) for key, owner in owners.items()}
    pieces: list[Spans] = []
    ended: list[bool] = []
    profile = Profile(core, pieces.append, lambda: ended.append(True), 2)
    assert "step" in vars(core)
    warm_up(loaded)
    assert ended == [True]
    profile.end()
    assert ended == [True]
    assert {key: set(vars(owner)) for key, owner in owners.items()} == before
    assert pieces[-1].done
    assert [span.name for piece in pieces for span in piece.spans if span.track == "steps"] == ["prefill", "decode"]


def test_a_profile_that_gets_too_long_is_cut() -> None:
    loaded = load(EngineSpec("stand"))
    pieces: list[Spans] = []
    Profile(loaded.core, pieces.append, lambda: None, most=5)
    warm_up(loaded)
    assert pieces[-1].done
    assert pieces[-1].cut
    assert sum(len(piece.spans) for piece in pieces) < 20


def test_nothing_is_left_of_a_profile_in_the_api_process() -> None:
    def add(events: Any) -> None: ...

    def handler(*_: Any, **__: Any) -> None: ...

    book = SimpleNamespace(add=add, open=handler)
    text = SimpleNamespace(encode=handler, encode_chat=handler)
    client = SimpleNamespace(_receive=handler, submit=handler)
    service: Any = SimpleNamespace(book=book, text=text, client=client, settle=handler)
    owners = (book, text, client, service, Exchange, schema)
    before = [dict(vars(owner)) for owner in owners]
    recorder = Recorder(service)
    recorder.begin()
    assert vars(Exchange)["write_now"] is not before[4]["write_now"]
    recorder.end()
    recorder.end()
    assert [dict(vars(owner)) for owner in owners] == before


def test_an_engine_that_is_killed_ends_the_profile_with_what_there_is() -> None:
    with serving(**KEYS) as server, ThreadPoolExecutor(1) as pool:
        made = pool.submit(profile, server, seconds=30)
        until(lambda: server.get("/admin/state", headers=OPERATOR).json()["profiling"], "the profile to run")
        os.kill(server.engine, signal.SIGKILL)
        check_format(made.result(10).json())
