"""What the tiers below the KV pool give and cost: `kvdisk` and `kvvalkey`.

page       what storing one on disk takes the thread that does it, and loading it: processor time, which other
           programs change less than they change seconds
back       a session of 1,500 tokens comes back after the server was started again: seconds to its first token from
           disk, with its files in the system's cache and without, or from a Valkey server on this machine, beside as
           many new tokens that are computed
storing    CPU seconds a token of a server that stores beside one that does not, the load alternating: prompts of
           1,500 tokens with one token out (the most pages a token computed), and 4, 16 and 32 streams of 128 tokens in
           and 128 out; in Valkey only prompts and 16 streams. What the Valkey server takes is not in it
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import valkeyserver
from bench.serve import Server, ids, together
from bench.start import cpu_seconds
from tailrace.kv.tiers import PageKey, memory
from tailrace.kv.tiers.disk import DiskTier

Load = tuple[str, int, int, int]
SESSION = 1500
PAGE_BYTES = 23_040 * 16
"""Of the default model, in bf16."""
ROUND = 160
"""Pages that are stored in a row."""
LOADS = (
    ("prompts", 1, SESSION, 1),
    ("16 streams", 16, 128, 128),
    ("4 streams", 4, 128, 128),
    ("32 streams", 32, 128, 128),
)
"""Name, requests at once, tokens of each prompt and of each answer."""


def first_token(server: Server, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token of a streamed answer, and the prompt tokens that were cached."""
    body = {
        "model": server.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    begin = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    took, cached = 0.0, 0
    for line in connection.getresponse():
        if not line.startswith(b'data: {"'):
            continue
        took = took or time.perf_counter() - begin
        usage = json.loads(line[6:]).get("usage")
        cached = usage["prompt_tokens_details"]["cached_tokens"] if usage else cached
    connection.close()
    return took, cached


@contextlib.contextmanager
def serving(label: str, command: str) -> Iterator[Server]:
    server = Server(label, command)
    try:
        yield server
    finally:
        server.stop()


def stored(server: Server, tier: str, pages: int) -> None:
    """Waits until so many pages are in a tier; RuntimeError where that takes a minute."""
    end = time.monotonic() + 60
    while metric(server, f"tailrace_kv_{tier}_stored_total") < pages:
        if time.monotonic() > end:
            raise RuntimeError(f"{pages} pages were not stored within a minute")
        time.sleep(0.1)


def out_of_cache(folder: Path) -> None:
    """The system forgets what it has of these files in memory."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def back(ours: str, folder: Path, turns: int, rng: random.Random) -> None:
    """Prints the table: each session once from disk, next to as many new tokens."""
    sessions = [ids(SESSION, rng) for _ in range(turns)]
    command = f"{ours} --kv-disk {folder}"
    with serving("storing", command) as server:
        for session in sessions:
            first_token(server, session)
        stored(server, "disk", turns * (SESSION // 16))
    for cold in (True, False):  # what has been read once is in the system's cache
        if cold:
            out_of_cache(folder)
        with serving("back", command) as server:
            come_back(server, "from the disk" if cold else "system's cache", sessions, rng)


def come_back(server: Server, where: str, sessions: list[list[int]], rng: random.Random) -> None:
    """Prints a row: each session once from a tier, next to as many new tokens."""
    first_token(server, ids(SESSION, rng))  # the first of a server is slower
    tier, computed = [], []
    for turn, session in enumerate(sessions):
        for kind in (0, 1) if turn % 2 == 0 else (1, 0):
            took, cached = first_token(server, ids(SESSION, rng) if kind else session)
            if cached != (0 if kind else (SESSION - 1) // 16 * 16):
                raise RuntimeError(f"{cached} tokens were cached, which is not what was to be measured")
            (computed if kind else tier).append(took)
    ratios = sorted(a / b for a, b in zip(tier, computed, strict=True))
    loaded, anew = (statistics.median(times) * 1e3 for times in (tier, computed))
    print(
        f"back, {where:16}{loaded:8.0f} ms{anew:8.0f} ms computed   {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )


def metric(server: Server, name: str) -> float:
    """A series of its metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)


def shared(ours: str, options: str, turns: int, rng: random.Random) -> None:
    """Prints the table for Valkey: what one server has stored comes back at another."""
    sessions = [ids(SESSION, rng) for _ in range(turns)]
    with serving("storing", f"{ours} {options}") as server:
        for session in sessions:
            first_token(server, session)
        stored(server, "valkey", turns * (SESSION // 16))
    with serving("back", f"{ours} {options}") as server:
        come_back(server, "from Valkey", sessions, rng)


def spent(server: Server, prompts: list[list[int]], out: int) -> float:
    """CPU microseconds a token, half a second of rest included: what is queued is stored then."""
    before = cpu_seconds(server.process.pid)
    together(server.port, server.model, prompts, out)
    time.sleep(0.5)
    return (cpu_seconds(server.process.pid) - before) / sum(len(prompt) + out for prompt in prompts) * 1e6


def storing(ours: str, options: str, turns: int, rng: random.Random, loads: Sequence[Load] = LOADS) -> None:
    """Prints the table. Two processes of one server differ by several per cent, so both are started anew each turn."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name, *_ in loads}
    for turn in range(turns):
        with serving("plain", ours) as plain, serving("tier", f"{ours} {options}") as tier:
            for name, count, length, out in loads:
                times: tuple[list[float], list[float]] = ([], [])
                for again in range(4):
                    for at in (0, 1) if (turn + again) % 2 == 0 else (1, 0):
                        took = spent((plain, tier)[at], [ids(length, rng) for _ in range(count)], out)
                        if again:  # the first is to get warm
                            times[at].append(took)
                for kept, new in zip(found[name], times, strict=True):
                    kept.append(statistics.median(new))
    for name, (without, stored) in found.items():
        ratios = sorted(b / a for a, b in zip(without, stored, strict=True))
        print(
            f"storing, {name:13}{statistics.median(stored):8.0f} us{statistics.median(without):8.0f} us without    "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )


def page(folder: Path, turns: int) -> None:
    """Prints the table: pages of the default model, from as many places in memory as the queue has."""
    waiting = [memory(PAGE_BYTES) for _ in range(90)]
    for data in waiting:
        data[:] = os.urandom(PAGE_BYTES)
    for name, most in (("", 4 << 30), (", directory full", 3 * ROUND * PAGE_BYTES)):
        disk = DiskTier(folder / str(most), most, numerics="bench", page_bytes=PAGE_BYTES, page_tokens=16)
        storing, loading = [], []
        for turn in range(turns + 3):
            keys = [PageKey(secrets.token_bytes(32), bytes(32), bytes(64)) for _ in range(ROUND)]
            pages = [(key, waiting[at % len(waiting)]) for at, key in enumerate(keys)]
            begin = time.thread_time()
            for at in range(0, ROUND, disk.batch):
                disk.store_all(pages[at : at + disk.batch])
            stored = time.thread_time()
            disk.prepare(keys)
            if not all(disk.load(key) is not None for key in keys):
                raise RuntimeError("a page was stored and cannot be loaded")
            if turn >= 3:  # by then it is full
                storing.append((stored - begin) / ROUND * 1e6)
                loading.append((time.thread_time() - stored) / ROUND * 1e6)
        disk.close()
        for what, times in (("stored", storing), ("loaded from the disk", loading)):
            print(
                f"a page {what}{name}: {statistics.median(times):.0f} us ({min(times):.0f} to {max(times):.0f})",
                flush=True,
            )


PARTS = ("page", "back", "storing")


def run(ours: str, turns: int, parts: Sequence[str] = PARTS) -> None:
    """Prints the tables. Ratios are medians of pairs measured one after the other, with their range."""
    rng = random.Random(time.time_ns())
    with tempfile.TemporaryDirectory(prefix="tailrace-kvdisk-") as place:
        if "page" in parts:
            page(Path(place), turns)
        if "back" in parts:
            back(ours, Path(place) / "back", turns, rng)
        if "storing" in parts:
            storing(ours, f"--kv-disk {Path(place) / 'storing'}", turns, rng)


def run_valkey(ours: str, turns: int) -> None:
    """The same for a Valkey server."""
    rng = random.Random(time.time_ns())
    with tempfile.TemporaryDirectory(prefix="tailrace-kvvalkey-") as place:
        server = valkeyserver.Server(Path(place), "--maxmemory", "4gb", "--maxmemory-policy", "allkeys-lru")
        with contextlib.closing(server):
            print(valkeyserver.version(), flush=True)
            options = valkeyserver.shared_by(server)
            shared(ours, options, turns, rng)
            storing(ours, options, turns, rng, LOADS[:2])
