"""Replicas that find each other's pages in a Valkey server, through real servers: what they share, what they do not,
and what happens when the server between them dies, hangs or is not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Running, until
from tests.api.stand import FIRST_BYTE
from tests.api.test_kv_disk import EAGER, SESSION, STORED, ask
from tests.valkey import Server, StandIn, needs_server, running

Fresh = Callable[..., Any]


@pytest.fixture
def key(tmp_path: Path) -> str:
    """The file with the key that all replicas have."""
    file = tmp_path / "secret"
    file.write_bytes(bytes(range(32)))
    file.chmod(0o600)
    return str(file)


def shared(server: Running, pages: int) -> None:
    until(lambda: server.metric("tailrace_kv_valkey_stored_total") >= pages, f"{pages} pages in Valkey")


def is_up(server: Running) -> bool:
    return server.metric("tailrace_kv_valkey_up") == 1


@needs_server
def test_a_session_goes_on_at_another_replica_but_not_under_another_key(fresh: Fresh, key: str, tmp_path: Path) -> None:
    keys = {"api_keys": ["alice", "bob"]}
    with (
        running(Server, tmp_path) as valkey,
        fresh(**EAGER, **keys, kv_valkey=valkey.url, kv_key_file=key) as one,
        fresh(**EAGER, **keys, kv_valkey=valkey.url, kv_key_file=key) as two,
    ):
        one.key = two.key = "alice"
        first, cached = ask(one, SESSION)
        assert cached == 0
        assert f"KV pages are shared through {valkey.url}\n" in one.lines
        shared(one, STORED)
        assert ask(two, SESSION, key="bob") == (first, 0)
        assert two.metric("tailrace_kv_valkey_loads_total") == 0
        assert ask(two, SESSION) == (first, 1488)
        assert two.metric("tailrace_kv_hit_tokens_total", tier="valkey") == 1488
        assert two.metric("tailrace_kv_hit_tokens_total", tier="disk") == 0
        assert two.metric("tailrace_kv_valkey_loaded_total") == 93
        assert 0 < two.metric("tailrace_kv_valkey_load_seconds_total") < 10
        assert two.metric("tailrace_kv_valkey_predicted_seconds_total") > 0
        assert two.metric("tailrace_kv_valkey_lookups_total") == 2
        assert "kv_disk" not in two.get("/metrics").text
        line = until(lambda: [line for line in two.requests() if "kv_load" in line], "the request's line")[0]
        assert line["kv_load"]["tiers"] == {"valkey": 1488}
        assert line["covered"] > 0.9
        assert ask(one, SESSION) == (first, 1488)
        assert one.metric("tailrace_kv_hit_tokens_total", tier="ram") == 1488


@needs_server
def test_twenty_sessions_keep_their_secrets_in_a_pool_for_one(fresh: Fresh, key: str, tmp_path: Path) -> None:
    """Everything through disk and server, mixed with other traffic; the server is killed on the way, and comes back."""
    sessions = [[*SESSION[:100], *([FIRST_BYTE + n] * 300)] for n in range(20)]
    with fresh() as server:
        truth = [ask(server, session)[0] for session in sessions]
    room = {"kv_tokens": 512, "max_context": 480, "kv_key_file": key}
    with running(Server, tmp_path) as valkey:
        with fresh(**EAGER, **room, kv_valkey=valkey.url) as one:
            for session, answer in zip(sessions, truth, strict=True):
                assert ask(one, session)[0] == answer
            shared(one, 6 + 20 * 19)
        disk = {"kv_disk": str(tmp_path / "kv"), "kv_disk_bytes": 1 << 19}  # for some of them
        with fresh(**EAGER, **room, **disk, kv_valkey=valkey.url) as two:
            until(lambda: is_up(two), "the server to be found")
            wrong: list[object] = []
            done = threading.Event()

            def others() -> None:
                """Short requests of which each has pages of its own."""
                at = 0
                while not done.is_set():
                    at += 1
                    prompt = [FIRST_BYTE + (at * 7 + n) % 250 for n in range(40)]
                    if ask(two, prompt, 2)[0] != ask(two, prompt, 2)[0]:
                        wrong.append(prompt)

            mixed = threading.Thread(target=others)
            mixed.start()
            cached = []
            for turn in range(3):
                for at, session in enumerate(sessions):
                    if turn == 1 and at == 7:
                        valkey.kill()
                    if turn == 1 and at == 14:
                        assert ask(two, sessions[12])[0] == truth[12]  # computed just now, and out of memory already
                        valkey.start()
                        until(lambda: is_up(two), "the server to be used again", 60)
                    text, found = ask(two, session)
                    assert text == truth[at]
                    cached.append(found)
            done.set()
            mixed.join()
            assert not wrong
            assert sum(cached[:20]) > 0.9 * 20 * 400
            for tier in ("valkey", "disk"):
                assert two.metric("tailrace_kv_hit_tokens_total", tier=tier) > 0
            assert two.metric("tailrace_kv_valkey_misses_total", cause="checksum") == 0
            until(lambda: two.metric("tailrace_kv_pages_used") == 0, "all pages to be given back")


@needs_server
def test_a_server_that_is_not_there_yet_is_found_later(fresh: Fresh, key: str, tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/valkey.sock"
    with fresh(**EAGER, kv_valkey=url, kv_key_file=key) as server:
        first, _ = ask(server, SESSION)
        assert not is_up(server)
        assert server.metric("tailrace_kv_valkey_queued") == 0
        assert any("KV pages are not shared through unix://" in line for line in server.log)
        with running(Server, tmp_path):
            until(lambda: is_up(server), "the server to be found", 60)
            assert ask(server, SESSION) == (first, 1488)
            shared(server, 93)  # what it has found in memory


@pytest.mark.parametrize("mode", ["hang", "cut", "rubbish"])
@pytest.mark.alone
def test_a_server_that_fails_costs_a_moment(mode: str, fresh: Fresh, key: str, tmp_path: Path) -> None:
    with (
        running(StandIn, tmp_path) as stand_in,
        fresh(**EAGER, kv_valkey=stand_in.url, kv_key_file=key, kv_tokens=2048, max_context=1600) as server,
    ):
        until(lambda: is_up(server), "the server to be found")
        first, _ = ask(server, SESSION)
        shared(server, STORED)
        other = [token + 1 for token in SESSION]
        ask(server, other)
        stand_in.mode = mode
        begun = time.monotonic()
        for _ in range(2):
            text, cached = ask(server, SESSION)
            assert text == first
            assert cached < 1488  # what the pool still had
            ask(server, other)
        assert time.monotonic() - begun < 5
        until(lambda: not is_up(server), "the failure to be noticed")
        stand_in.mode = "well"
        until(lambda: is_up(server), "the server to be used again", 60)
        assert ask(server, SESSION) == (first, 1488)
        assert server.metric("tailrace_kv_hit_tokens_total", tier="valkey") > 500
        assert server.metric("tailrace_kv_pages_used") == 0
