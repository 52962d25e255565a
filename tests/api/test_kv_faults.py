"""What happens to processes and files while sessions come and go through the disk and a Valkey server: no answer is
wrong, none is waited for in vain, and nothing stays held."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.api.conftest import Running, launch, serving, until
from tests.api.stand import FIRST_BYTE
from tests.api.test_kv_disk import EAGER
from tests.valkey import Server, needs_server
from tests.valkey import running as valkey_running

SESSIONS = [[*(FIRST_BYTE + (7 * at + at // 5) % 400 for at in range(64)), *([FIRST_BYTE + n] * 200)] for n in range(8)]
SMALL = {**EAGER, "kv_tokens": 592, "max_context": 320, "log_requests": False}
"""37 pages, where a session takes 17 and, with its answer, 19: most come back from disk, and two that run at once
preempt one another."""


def body(n: int) -> dict[str, Any]:
    return {"model": "stand", "prompt": SESSIONS[n], "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def truth() -> list[str]:
    """The answers of a server without a disk."""
    with serving() as server:
        return [server.post("/v1/completions", body(n)).json()["choices"][0]["text"] for n in range(len(SESSIONS))]


class Load:
    """Clients that ask for sessions at random until they are told to stop, and hold each answer against the truth. A
    server that dies may refuse or cut off, and nothing else."""

    def __init__(self, server: Running, truth: list[str]) -> None:
        self.server, self.truth = server, truth
        self.right = self.failed = 0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(6)]

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        with self.server.http() as client:
            while not self._stop.is_set():
                n = rng.randrange(len(SESSIONS))
                try:
                    if rng.random() < 0.1:  # a client that leaves
                        with client.stream("POST", "/v1/completions", json={**body(n), "stream": True}) as answer:
                            next(answer.iter_raw(), None)
                        continue
                    answer = client.post("/v1/completions", json=body(n))
                except httpx.TransportError as error:
                    if isinstance(error, httpx.TimeoutException):
                        self.wrong.append(f"no answer: {error!r}")
                    self.failed += 1
                    time.sleep(0.01)
                    continue
                if answer.status_code == 200:
                    self.right += 1
                    if answer.json()["choices"][0]["text"] != self.truth[n]:
                        self.wrong.append(answer.text)
                else:
                    self.failed += 1
                    if answer.status_code not in (429, 503):
                        self.wrong.append(answer.text)
                    time.sleep(0.01)

    @contextmanager
    def on(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()
        assert self.wrong == []

    def answers(self, more: int) -> None:
        """Waits for so many more right answers."""
        wanted = self.right + more
        until(lambda: self.right >= wanted or self.wrong, f"{more} more answers")


def settled(server: Running, truth: list[str]) -> None:
    """It answers every session rightly, and then holds nothing."""
    for n, want in enumerate(truth):
        assert server.post("/v1/completions", body(n)).json()["choices"][0]["text"] == want
    until(
        lambda: server.metric("tailrace_kv_pages_used") == server.metric("tailrace_num_requests_running") == 0,
        "nothing to be held",
    )


def test_the_engine_is_killed_at_random_points_under_load(truth: list[str], tmp_path: Path) -> None:
    rng = random.Random(5)
    with serving(**SMALL, kv_disk=str(tmp_path)) as server:
        with Load(server, truth).on() as load:
            for _ in range(2):
                load.answers(rng.randrange(5, 20))
                engine = server.engine
                os.kill(engine, signal.SIGKILL)
                until(lambda old=engine: server.engine not in (0, old), "another engine")
            load.answers(10)
            assert load.failed > 0
        settled(server, truth)
        assert server.metric("tailrace_kv_hit_tokens_total", tier="disk") > 0


def test_the_server_is_killed_at_random_points_under_load_and_started_again(truth: list[str], tmp_path: Path) -> None:
    rng = random.Random(6)
    for _ in range(2):
        running = launch(**SMALL, kv_disk=str(tmp_path)).wait_ready()
        running.post("/v1/completions", body(0))  # under load there may be no time to store anything
        until(lambda server=running: server.metric("tailrace_kv_disk_pages") > 0, "pages on disk")
        with Load(running, truth).on() as load:
            load.answers(rng.randrange(12, 25))
            os.kill(running.process.pid, signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
    with serving(**SMALL, kv_disk=str(tmp_path)) as server:
        assert server.metric("tailrace_kv_disk_pages") > 0
        settled(server, truth)
        assert server.metric("tailrace_kv_hit_tokens_total", tier="disk") > 0
        assert server.metric("tailrace_kv_disk_misses_total", cause="checksum") == 0


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_bytes(bytes(range(32)))
    file.chmod(0o600)
    return str(file)


def hits(server: Running) -> float:
    return server.metric("tailrace_kv_hit_tokens_total", tier="valkey")


@needs_server
def test_valkey_is_killed_at_random_points_under_load_and_started_again(
    truth: list[str], tmp_path: Path, key_file: str
) -> None:
    """No request may so much as fail. After each kill it is empty, and pages are found in it again later."""
    rng = random.Random(8)
    with (
        valkey_running(Server, tmp_path) as valkey,
        serving(**SMALL, kv_valkey=valkey.url, kv_key_file=key_file) as server,
    ):
        with Load(server, truth).on() as load:
            for _ in range(3):
                found = hits(server)
                until(lambda found=found: hits(server) > found or load.wrong, "pages from Valkey")
                load.answers(rng.randrange(5, 15))
                valkey.kill()
                until(lambda: server.metric("tailrace_kv_valkey_up") == 0, "the kill to be noticed")
                load.answers(rng.randrange(1, 15))
                valkey.start()
                until(lambda: server.metric("tailrace_kv_valkey_up") == 1, "the server to be used again", 60)
            load.answers(10)
            assert load.failed == 0
        settled(server, truth)
        assert server.metric("tailrace_kv_valkey_misses_total", cause="checksum") == 0
        assert server.metric("tailrace_num_preemptions_total") > 0


@needs_server
def test_engine_and_valkey_are_killed_together_under_load(truth: list[str], tmp_path: Path, key_file: str) -> None:
    tiers = {"kv_valkey": f"unix://{tmp_path}/valkey.sock", "kv_key_file": key_file, "kv_disk": str(tmp_path / "kv")}
    with valkey_running(Server, tmp_path) as valkey, serving(**SMALL, **tiers, kv_disk_bytes=40 * 4096) as server:
        with Load(server, truth).on() as load:
            load.answers(20)
            engine = server.engine
            os.kill(engine, signal.SIGKILL)
            valkey.kill()
            until(lambda: server.engine not in (0, engine), "another engine")
            load.answers(10)
            valkey.start()
            until(lambda: hits(server) > 0 or load.wrong, "pages from Valkey", 60)
        settled(server, truth)


def full(server: Running, _folder: Path) -> None:
    """From now on no file gets longer than 64 bytes: writes are cut short, as on a disk that is full."""
    resource.prlimit(server.engine, resource.RLIMIT_FSIZE, (64, 64))


OWN_MOUNTS = ["unshare", "--mount"] if os.geteuid() == 0 else []
"""A command whose process, and what it starts, may mount what nobody else sees; it ends with them."""


def may_mount() -> bool:
    """Whether that is allowed here, where it is needed: permissions mean nothing to root."""
    if not OWN_MOUNTS:
        return True
    try:
        return not subprocess.run([*OWN_MOUNTS, "mount", "--bind", "/tmp", "/tmp"], capture_output=True).returncode
    except OSError:
        return False


def read_only(server: Running, folder: Path) -> None:
    if not OWN_MOUNTS:
        folder.chmod(0o500)
        return
    mount = ["nsenter", "-t", str(server.engine), "-m", "mount"]
    subprocess.run([*mount, "--bind", folder, folder], check=True)
    # refused while the engine is in the middle of writing a page there
    until(lambda: subprocess.run([*mount, "-o", "remount,bind,ro", folder]).returncode == 0, "a read-only mount")


@pytest.mark.skipif(not may_mount(), reason="root, but it may not mount")
def test_a_directory_that_is_only_read_is_used_and_the_log_says_so(truth: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serving(**SMALL, kv_disk=str(folder)) as server:
        with Load(server, truth).on() as load:
            load.answers(5)
        assert server.finish() == 0
    within: list[str] = []
    if OWN_MOUNTS:
        lock = f'mount --bind {folder} {folder} && mount -o remount,bind,ro {folder} && exec "$@"'
        within = [*OWN_MOUNTS, "sh", "-c", lock, "sh"]
    else:
        folder.chmod(0o500)
    with serving(within=within, **SMALL, kv_disk=str(folder)) as server:
        line = until(lambda: next((one for one in server.log if "cannot be written" in one), None), "a line in the log")
        assert f"{folder} cannot be written" in line
        assert "KV pages are read from it, and none are stored" in line
        with Load(server, truth).on() as load:
            load.answers(5)
        assert server.metric("tailrace_kv_disk_loaded_total") > 0


@pytest.mark.parametrize(
    "harm",
    [full, pytest.param(read_only, marks=pytest.mark.skipif(not may_mount(), reason="root, but it may not mount"))],
)
def test_the_disk_becomes_full_or_read_only_under_load(
    harm: Callable[[Running, Path], None], truth: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    with serving(within=OWN_MOUNTS if harm is read_only else (), **SMALL, kv_disk=str(folder)) as server:
        with Load(server, truth).on() as load:
            load.answers(10)
            harm(server, folder)
            load.answers(15)
            # what the sessions still need is on disk already; a new prompt has to be written
            server.post("/v1/completions", {"model": "stand", "prompt": [9] * 300, "max_tokens": 1})
            until(lambda: server.metric("tailrace_kv_disk_writable") == 0, "a page that cannot be written")
            assert load.failed == 0
        settled(server, truth)
        (said,) = [line for line in server.log if "no more KV pages are stored" in line]
        assert harm is full or any(reason in said for reason in ("Read-only file system", "Permission denied"))
    folder.chmod(0o700)


def test_files_are_changed_cut_short_and_deleted_while_they_are_served(truth: list[str], tmp_path: Path) -> None:
    rng = random.Random(7)
    happened = ("tailrace_kv_disk_misses_total", "tailrace_num_preemptions_total")
    with serving(**SMALL, kv_disk=str(tmp_path)) as server:
        with Load(server, truth).on() as load:
            load.answers(20)
            for turn in range(100):  # as long as it takes until what this is about has happened
                files = [path for path in tmp_path.iterdir() if path.suffix in (".seg", ".idx")]
                for path in rng.sample(files, min(5, len(files))):
                    harm(path, rng)
                load.answers(2)
                if turn >= 10 and all(server.metric(name) > 0 for name in happened):
                    break
            assert load.failed == 0
        settled(server, truth)
        assert all(server.metric(name) > 0 for name in happened)


def harm(path: Path, rng: random.Random) -> None:
    """One of the three, in place, whatever the server does with the file meanwhile."""
    kind = rng.randrange(3)
    try:
        if kind == 0:
            path.unlink()
        elif kind == 1:
            os.truncate(path, rng.randrange(300))
        else:
            with open(path, "r+b") as file:
                file.seek(rng.randrange(max(1, path.stat().st_size)))
                file.write(b"\xa5")
    except FileNotFoundError:
        pass


def test_two_servers_under_load_share_a_directory_that_is_too_small(truth: list[str], tmp_path: Path) -> None:
    with (
        serving(**SMALL, kv_disk=str(tmp_path), kv_disk_bytes=60 * 4096) as one,
        serving(**SMALL, kv_disk=str(tmp_path), kv_disk_bytes=60 * 4096) as two,
    ):
        with Load(one, truth).on() as first, Load(two, truth).on() as second:
            first.answers(15)
            second.answers(15)
            assert first.failed == second.failed == 0
        for server in (one, two):
            settled(server, truth)
            assert server.metric("tailrace_kv_disk_evicted_total") > 0
            assert server.metric("tailrace_kv_disk_writable") == 1
            assert server.metric("tailrace_kv_disk_misses_total", cause="checksum") == 0
