"""`make soak`: thousands of mixed requests against a real server; pages and memory must come back to where they were.

Streams and not, several answers, stop strings, errors, clients that leave in the middle. Every round ends idle: no
request may be running or waiting, no page in use, and memory may not keep growing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import threading
import time
import urllib.request
from pathlib import Path

if __name__ == "__main__":  # run as a script: the project's root is one up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.serve import Server

WORDS = ("river", "turbine", "water", "channel", "power", "tail", "wheel", "gate", "mill", "dam", "weir", "sluice")


def body(rng: random.Random) -> dict[str, object]:
    """A random request, sometimes a wrong one."""
    prompt = " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 30, 200])))
    made: dict[str, object] = {"prompt": prompt, "max_tokens": rng.choice([1, 5, 20, 60]), "seed": rng.randrange(99)}
    made["temperature"] = rng.choice([0, 0.8, 1.3])
    extras: list[dict[str, object]] = [
        {}, {"n": 2}, {"stop": ["the", "a"]}, {"logprobs": 3}, {"echo": True}, {"ignore_eos": True},
        {"presence_penalty": 0.5}, {"top_p": 0.9}, {"prompt": ""}, {"temperature": -1}, {"max_tokens": 10**9},
    ]  # fmt: skip
    return made | rng.choice(extras)


def one(port: int, model: str, rng: random.Random) -> str:
    """Sends one; "left" when this client went away in the middle, else the status."""
    stream = rng.random() < 0.5
    leaves = rng.random() < 0.15
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body(rng) | {"model": model, "stream": stream}),
            {"Content-Type": "application/json"},
        )
        if leaves and not stream:
            return "left"
        response = connection.getresponse()
        if leaves:
            response.read(40)
            return "left"
        response.read()
        return str(response.status)
    finally:
        connection.close()


def gauges(port: int) -> dict[str, float]:
    """Running and waiting requests, and the share of KV in use, from /metrics."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    found = {}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        line = next(line for line in text.splitlines() if line.startswith(f"vllm:{name}"))
        found[name] = float(line.split()[-1])
    return found


def settle(port: int) -> dict[str, float]:
    """The gauges once nothing runs; AssertionError when that takes more than ten seconds."""
    for _ in range(200):
        now = gauges(port)
        if now["num_requests_running"] == now["num_requests_waiting"] == 0:
            return now
        time.sleep(0.05)
    raise AssertionError(f"not idle: {now}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--requests", type=int, default=4000)
    p.add_argument("--clients", type=int, default=12)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    os.chdir(Path(__file__).resolve().parent.parent)
    command = f"{sys.executable} -m tailrace.cli serve {args.model} --port {{port}} --kv-tokens 4096 --max-context 2048"
    server = Server("soak", command)
    try:
        base, memory, counts, done = settle(server.port), 0.0, dict[str, int](), 0
        print(f"{'requests':>9}{'memory MB':>11}  answers")
        while done < args.requests:
            share = min(200, args.requests - done)

            def client(number: int, count: int) -> None:
                rng = random.Random(args.seed * 1_000_003 + number)
                for _ in range(count):
                    answer = one(server.port, server.model, rng)
                    counts[answer] = counts.get(answer, 0) + 1

            threads = [
                threading.Thread(target=client, args=(done + i, share // args.clients + (i < share % args.clients)))
                for i in range(args.clients)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            done += share
            now = settle(server.port)
            assert now["kv_cache_usage_perc"] == base["kv_cache_usage_perc"], (
                f"pages are missing: {now}, at first {base}"
            )
            memory = server.memory()
            print(f"{done:9}{memory:11.0f}  {dict(sorted(counts.items()))}", flush=True)
        assert counts.get("200", 0) > done / 3, "hardly anything was answered"
        assert not any(status.startswith("5") for status in counts), "a request failed on the server's side"
    finally:
        server.stop()


if __name__ == "__main__":
    main()
