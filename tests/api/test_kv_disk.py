"""Sessions that come back from disk, through real servers: after a restart, after their pages were evicted, after an
engine has died, and whatever has happened to the files meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Running, launch, until
from tests.api.stand import FIRST_BYTE
from tests.kv.tiers.places import change_all, segment_files

SESSION = [FIRST_BYTE + (7 * at + at // 5) % 400 for at in range(1500)]
EAGER = {"loader": "tests.api.stand:load_eager"}
STORED = 1504 // 16
"""Pages of the session and the first tokens of its answer."""


def ask(server: Running, prompt: list[int], max_tokens: int = 8, key: str = "") -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    body = {"model": "stand", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = server.post("/v1/completions", body, headers=headers).json()
    assert "error" not in answer, answer
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def stored(server: Running, pages: int) -> None:
    until(lambda: server.metric("tailrace_kv_disk_pages") >= pages, f"{pages} pages on disk")


def test_a_session_comes_back_after_a_restart(fresh: Callable[..., Any], tmp_path: Path) -> None:
    with fresh(**EAGER, kv_disk=str(tmp_path / "kv")) as server:
        first, cached = ask(server, SESSION)
        assert cached == 0
        assert f"KV pages are also kept in {tmp_path / 'kv'} (at most 4096 MiB)\n" in server.lines
        stored(server, STORED)
        assert server.metric("tailrace_kv_disk_stored_total") == STORED
        assert server.finish() == 0
    with fresh(**EAGER, kv_disk=str(tmp_path / "kv")) as server:
        assert ask(server, SESSION) == (first, 1488)
        assert server.metric("tailrace_kv_hit_tokens_total", tier="disk") == 1488
        assert server.metric("tailrace_kv_hit_tokens_total", tier="ram") == 0
        assert server.metric("tailrace_kv_disk_loads_total") == 1
        assert 0 < server.metric("tailrace_kv_disk_load_seconds_total") < 10
        assert server.metric("tailrace_kv_disk_predicted_seconds_total") > 0
        assert server.metric("tailrace_phase_seconds_total", phase="kv_load") > 0
        assert ask(server, SESSION) == (first, 1488)
        assert server.metric("tailrace_kv_hit_tokens_total", tier="ram") == 1488
        line = until(lambda: [line for line in server.requests() if "kv_load" in line], "the request's line")[0]
        assert line["kv_load"]["tokens"] == 1488
        assert line["kv_load"]["tiers"] == {"disk": 1488}
        assert line["phases_ms"]["kv_load"] > 0
        assert line["covered"] > 0.9
    with fresh() as server:
        assert ask(server, SESSION) == (first, 0)
        assert server.metric("tailrace_kv_disk_pages") == 0
        assert "kv_disk" not in server.get("/metrics").text


def test_a_session_comes_back_after_the_engine_died(fresh: Callable[..., Any], tmp_path: Path) -> None:
    with fresh(**EAGER, kv_disk=str(tmp_path / "kv")) as server:
        first, _ = ask(server, SESSION)
        stored(server, STORED)
        engine = server.engine
        os.kill(engine, signal.SIGKILL)
        until(lambda: server.engine not in (0, engine), "another engine")
        until(lambda: server.get("/health").status_code == 200, "it to be ready")
        assert ask(server, SESSION) == (first, 1488)
        assert server.metric("tailrace_kv_disk_stored_total") == STORED


def test_twenty_sessions_keep_their_secrets_in_a_pool_for_one(fresh: Callable[..., Any], tmp_path: Path) -> None:
    sessions = [[*SESSION[:100], *([FIRST_BYTE + n] * 300)] for n in range(20)]
    with fresh() as server:
        truth = [ask(server, session)[0] for session in sessions]
    with fresh(**EAGER, kv_disk=str(tmp_path / "kv"), kv_tokens=512, max_context=480) as server:
        for session, answer in zip(sessions, truth, strict=True):
            assert ask(server, session)[0] == answer
        stored(server, 6 + 20 * 19)
        again = [ask(server, session) for session in reversed(sessions)]
        assert [answer for answer, _ in again] == truth[::-1]
        assert sum(cached for _, cached in again) > 0.9 * 20 * 400
        assert server.metric("tailrace_kv_hit_tokens_total", tier="disk") > 5000  # what they share was in the pool


@pytest.mark.parametrize(
    ("harm", "cause"),
    [
        (lambda path: os.truncate(path, 9), "size"),
        (change_all, "checksum"),
        (lambda path: path.unlink(), "absent"),
    ],
)
def test_harmed_files_cost_time_and_nothing_else(
    harm: Callable[[Path], None], cause: str, fresh: Callable[..., Any], tmp_path: Path
) -> None:
    with fresh(**EAGER, kv_disk=str(tmp_path)) as server:
        first, _ = ask(server, SESSION)
        stored(server, STORED)
        assert server.finish() == 0
    with fresh(**EAGER, kv_disk=str(tmp_path)) as server:
        for path in segment_files(tmp_path):
            harm(path)
        assert ask(server, SESSION) == (first, 0)
        assert server.metric("tailrace_kv_disk_misses_total", cause=cause) == 1
        assert server.metric("tailrace_kv_pages_used") == 0


def test_a_directory_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    running = launch(kv_disk=str(tmp_path / "file"))
    assert running.wait() != 0
    assert "KV pages cannot be kept in" in "".join([*running.lines, *running.log])
