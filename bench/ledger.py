"""What accounting for every request costs, and what it gives.

ledger      processor seconds a token of workload c32 (as text) with the ledger and without, in pairs; and what the
            events of a token cost on the way from the engine into the book, beside a step without any
ledgersum   10,000 requests of all kinds to a real server: how much of each one's time has a name, and whether what
            was divided adds up
ledgerrows  rows a second into a ledger (SQLite), how large it gets, and how long `tailrace usage` takes over it
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from bench.apishare import STREAMS, TOKENS, spent
from bench.serve import Server, together
from bench.soak import WORDS, children
from tailrace.engine.protocol import Gauges, Tokens
from tailrace.ledger.book import Book
from tailrace.ledger.record import Record
from tailrace.terms import Event, EventKind

HOURS = 24 * 90
"""Over which made rows are spread."""


def run(command: str, repeats: int) -> None:
    """Prints processor seconds a token, pair by pair: of everything, and of the API process alone, in which the ledger
    is (two engines differ by how their memory happens to lie). Medians with bootstrap intervals."""
    rng = random.Random(0)
    micros = events()
    with tempfile.TemporaryDirectory() as folder:
        servers: list[Server] = []
        ratios, shares, bare = [], [], []
        try:
            servers += [
                Server("on", f"{command} --ledger {folder}/ledger.db"),
                Server("off", f"{command} --ledger off"),
            ]
            print(f"{'µs a token: on':>15}{'off':>8}{'on / off':>10}{'API on':>9}{'off':>7}{'more, of all':>14}")
            for turn in range(repeats + 1):
                prompts = [" ".join(rng.choices(WORDS, k=TOKENS - 1)) for _ in range(STREAMS)]
                order = servers if turn % 2 else servers[::-1]
                took = {server.label: _turn(server, prompts) for server in order}
                if turn:  # the first one is to warm up
                    on, off = sum(took["on"]), sum(took["off"])
                    ratios.append(on / off)
                    shares.append((took["on"][0] - took["off"][0]) / off)
                    bare.append(off)
                    print(f"{on:15.0f}{off:8.0f}{ratios[-1]:10.3f}{took['on'][0]:9.0f}{took['off'][0]:7.0f}"
                          f"{shares[-1]:14.2%}", flush=True)  # fmt: skip
        finally:
            for server in servers:
                server.stop()
    low, high = interval(ratios)
    print(
        f"Ledger on against off: {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f}, 95 %, {len(ratios)} pairs)"
    )
    low, high = interval(shares)
    print(f"Of that in the API process: {statistics.median(shares):.2%} of all ({low:.2%} to {high:.2%})")
    print(f"Events: {micros:.2f} µs a token, {micros / statistics.median(bare):.2%} of all that a token takes")


def _turn(server: Server, prompts: list[str]) -> tuple[float, float]:
    """Processor microseconds of a server and of its engine for each token of the answers."""
    pids = [server.process.pid, children(server.process.pid)[0]]
    before = list(map(spent, pids))
    together(server.port, server.model, prompts, TOKENS)
    time.sleep(1)  # what the answers leave to be done is done
    api, engine = (1e6 * (spent(pid) - was) / (STREAMS * TOKENS) for pid, was in zip(pids, before, strict=True))
    return api, engine


def interval(values: list[float], rounds: int = 2000) -> tuple[float, float]:
    """Of the median, 95 %, by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    return medians[round(0.025 * rounds)], medians[round(0.975 * rounds) - 1]


def events(steps: int = 2000) -> float:
    """Processor microseconds that a token's event costs: made, encoded, decoded, folded."""
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Tokens).decode

    def once(tell: bool) -> float:
        book = Book(lambda _timeline: None)
        book.parity = 3000.0
        names = [f"chatcmpl-{at:024}" for at in range(STREAMS)]
        for name in names:
            book.open(name, 0.0)
        begin = time.process_time()
        for step in range(steps):
            at = 1.0 + step
            made = [Event(name, EventKind.TOKEN, at, at - 1.0, 1) for name in names] if tell else []
            book.add(decode(encode(Tokens([], made, Gauges()))).events)
        return time.process_time() - begin

    pairs = [once(True) - once(False) for _ in range(5)]
    return 1e6 * statistics.median(pairs) / (steps * STREAMS)


def run_sum(command: str, count: int) -> None:
    """Prints what the ledger says of so many real requests."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "ledger.db"
        server = Server("ours", f"{command} --ledger {place} --slo ttft=1,tpot=0.1")
        try:
            begin = time.perf_counter()
            with ThreadPoolExecutor(48) as pool:
                statuses = list(pool.map(lambda at: _mixed(server, at), range(count)))
            took = time.perf_counter() - begin
        finally:
            server.stop()
        with contextlib.closing(sqlite3.connect(place)) as connection:
            show_sum(connection, statuses, took)


def show_sum(connection: sqlite3.Connection, statuses: list[int], took: float) -> None:
    names = ("prepare", "queue", "kv_lookup", "kv_load", "prefill", "decode", "stall", "stream", "other")
    total = " + ".join(f"{name}_us" for name in names)
    one = connection.execute(
        f"SELECT COUNT(*), MAX(1.0 * other_us / MAX(e2e_us, 1)), MAX(ABS({total} - e2e_us)), SUM(device_us),"
        " SUM(outcome = 'ok'), SUM(outcome = 'gone'), SUM(other_us > 0.01 * e2e_us), MAX(ended) - MIN(received),"
        " COUNT(DISTINCT request), AVG(1.0 * other_us / MAX(e2e_us, 1))"
        " FROM tailrace_requests WHERE outcome != 'refused'"
    ).fetchone()
    print(f"{len(statuses)} requests in {took:.0f} s; the ledger has {one[0]}, {one[8]} different ones")
    print(f"ended: {one[4]} ok, {one[5]} whose client left")
    print(f"named phases cover at least {1 - one[1]:.3%} of each, {1 - one[9]:.4%} on average; {one[6]} less than 99 %")
    print(f"phases add up to the time from end to end within {one[2]} µs")
    print(f"device time: {one[3] / 1e6:.1f} s in {one[7] / 1e6:.1f} s, {one[3] / one[7]:.1%}")


def _mixed(server: Server, at: int) -> int:
    """One request: chat or completion, streamed or not, several answers, stop strings, shared beginnings; every
    fiftieth client leaves in the middle."""
    rng = random.Random(at)
    words = " ".join(rng.choices(WORDS, k=250 if at % 40 == 0 else rng.choice((3, 10, 20, 60))))
    text = f"{' '.join(WORDS * 4)} {words}" if at % 5 == 0 else words
    body: dict[str, Any] = {"model": server.model, "max_tokens": rng.randrange(1, 16), "stream": at % 2 == 0}
    body |= {"temperature": rng.choice((0, 1)), "ignore_eos": at % 3 == 0}
    path = "/v1/completions"
    if at % 4 == 0:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
        body.pop("ignore_eos")
    else:
        body["prompt"] = text
    if at % 11 == 0:
        body["n"] = 2
    if at % 7 == 0:
        body["stop"] = [" the", "\n"]
    while (status := _ask(server, path, body, leave=at % 50 == 49)) == 503:
        time.sleep(1)
    return status


def _ask(server: Server, path: str, body: dict[str, Any], *, leave: bool) -> int:
    """The status of the answer; 0 for a client that does not wait for it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        if leave:
            time.sleep(0.05)
            return 0
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def run_rows(count: int) -> None:
    """Prints how quick a ledger takes so many rows, and how long usage over them takes."""
    from tailrace.ledger.run import Run
    from tailrace.ledger.store import Ledger

    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        place = f"{folder}/ledger.db"
        ledger = Ledger(place)
        made = made_rows(count)
        begin, used = time.perf_counter(), time.process_time()
        slowest, written = float("inf"), 0
        mark = begin
        while batch := [row for _, row in zip(range(1000), made, strict=False)]:
            ledger.write(Run("made", 0), list(enumerate(batch, written + 1)), 0)
            written += len(batch)
            if written % 100_000 == 0:
                now = time.perf_counter()
                slowest, mark = min(slowest, 100_000 / (now - mark)), now
        took, used = time.perf_counter() - begin, time.process_time() - used
        ledger.close()
        size = Path(place).stat().st_size
        print(f"{count:,} rows: {count / took:,.0f} a second, slowest 100,000 at {slowest:,.0f}; "
              f"{1e6 * used / count:.0f} µs of a processor and {size / count:.0f} bytes each")  # fmt: skip
        for options in (["--by", "key"], ["--by", "model,workload"], ["--by", "day"], ["--since", "45d"]):
            print(f"tailrace usage {' '.join(options)}: {_timed('usage', place, options):.2f} s")
        for options in (["--slowest", "20"], ["--slowest", "20", "--since", "7d"], [a_request(place)]):
            print(f"tailrace explain {' '.join(options)}: {_timed('explain', place, options):.2f} s")
        print(f"tailrace ledger rebuild: {_timed('ledger', place, ['rebuild']):.2f} s")
        print(f"memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def a_request(place: str) -> str:
    """A request that is there."""
    with contextlib.closing(sqlite3.connect(place)) as connection:
        row = connection.execute("SELECT request FROM tailrace_requests ORDER BY seq LIMIT 1 OFFSET 321").fetchone()
    return str(row[0])


def _timed(command: str, place: str, options: list[str]) -> float:
    words = [sys.executable, "-m", "tailrace.cli", command, *options, "--ledger", place]
    best = float("inf")
    for _ in range(2):
        begin = time.perf_counter()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        best = min(best, time.perf_counter() - begin)
    return best


def made_rows(count: int) -> Iterator[Record]:
    """Rows of 20 keys, 10 tenants, 2 models and 5 workloads, as they would have come over 90 days."""
    rng = random.Random(1)
    first = int(time.time()) - HOURS * 3600
    detail = json.dumps({"waited_for": "slots", "waiting_before": 3, "running_before": 32, "prefill_beside": 120,
                         "decode_beside": 3000, "slowed": {f"chatcmpl-{7:024}": 0.123456},
                         "stalls": {"budget": [3, 0.123456]}, "gap": [0.123456, 1.234567, ""]})  # fmt: skip
    for at in range(count):
        ended = first * 1_000_000 + at * (HOURS * 3600 * 1_000_000 // count)
        key = rng.randrange(20)
        e2e = rng.randrange(100_000, 9_000_000)
        values = dict.fromkeys(Record.__struct_fields__, 0) | {
            "request": f"chatcmpl-{ended // 1_000_000:08x}{os.urandom(8).hex()}", "key": f"key-{key}",
            "http_request": f"req-{os.urandom(12).hex()}", "tenant": f"tenant-{key % 10}", "adapter": "",
            "model": f"model-{key % 2}", "endpoint": "chat", "workload": f"work-{rng.randrange(5)}", "outcome": "ok",
            "finish": "stop", "code": "", "requests": 1, "received": ended - e2e, "ended": ended, "max_tokens": 128,
            "prompt_tokens": rng.randrange(10, 2000), "output_tokens": rng.randrange(1, 400), "e2e_us": e2e,
            "ttft_us": e2e // 9, "tpot_us": 15_000, "decode_us": e2e, "device_us": e2e // 20, "slo_met": key % 2,
            "detail": detail,
        }  # fmt: skip
        yield Record(**values)
