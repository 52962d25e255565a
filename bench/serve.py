"""Workloads through HTTP, as a user has them; beside another server where one is named, the load alternating.

    a            one request, 32 tokens in, 128 out: output tokens/s after the first
    b512, b2048  one request, one token out: prompt tokens/s
    c4, c16, c32 so many at once, 128 in, 128 out: output tokens/s in all
    dcold, dwarm 16 at once that share 1,024 tokens and have 32 of their own, 32 out: seconds, first and second time
    start        seconds from process start to the first token of an 8-token request

Prompts are random token ids, new ones each time. The server that is not measured is stopped by a signal meanwhile.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

WORKLOADS = ("a", "b512", "b2048", "c4", "c16", "c32", "dcold", "dwarm")
LESS_IS_BETTER = ("dcold", "dwarm", "start", "memory MB")


BELOW = 48_000
"""Prompts are made of ids from 200 up to this: ordinary tokens of the default model."""


def ids(count: int, rng: random.Random, below: int = BELOW) -> list[int]:
    return [rng.randrange(200, below) for _ in range(count)]


def complete(port: int, model: str, prompt: list[int] | str, count: int) -> list[float]:
    """One streamed completion of exactly `count` tokens; when each piece of it came. Raises RuntimeError where the
    server does otherwise."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        usage, came = None, []
        for line in response:
            if line.startswith(b'data: {"') and b'"usage":{' in line.replace(b'"usage": {', b'"usage":{'):
                usage = json.loads(line[6:])["usage"]
            elif line.startswith(b'data: {"'):
                came.append(time.perf_counter())
        if response.status != 200 or usage is None or usage["completion_tokens"] != count:
            raise RuntimeError(f"status {response.status}, usage {usage}, wanted {count} tokens")
        return came
    finally:
        connection.close()


def together(port: int, model: str, prompts: Sequence[list[int] | str], count: int) -> float:
    """All at once; seconds until the last is complete."""
    failures: list[BaseException] = []

    def one(prompt: list[int] | str) -> None:
        try:
            complete(port, model, prompt, count)
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(prompts)} requests failed: {failures[0]}")
    return time.perf_counter() - begin


def workload(name: str, port: int, model: str, rng: random.Random, prefix: list[int], below: int = BELOW) -> float:
    """One run of one workload: a rate, or seconds."""
    if name == "a":
        one = together(port, model, [ids(32, rng, below)], 1)
        return 128 / (together(port, model, [ids(32, rng, below)], 129) - one)
    if name[0] == "b":
        return int(name[1:]) / together(port, model, [ids(int(name[1:]), rng, below)], 1)
    if name[0] == "c":
        n = int(name[1:])
        return n * 128 / together(port, model, [ids(128, rng, below) for _ in range(n)], 128)
    return together(port, model, [prefix + ids(32, rng, below) for _ in range(16)], 32)


class Server:
    """A server in a process group of its own, started from a command line with {port}."""

    def __init__(self, label: str, command: str, *, below: int = 1000) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.label = label
        begin = time.perf_counter()
        words = shlex.split(command.format(port=self.port))
        self.process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self.model = self._wait()
            together(self.port, self.model, [ids(8, random.Random(0), below)], 1)
        except BaseException:
            self.stop()
            raise
        self.start = time.perf_counter() - begin

    def _wait(self) -> str:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=1) as answer:
                    return str(json.load(answer)["data"][0]["id"])
            except (OSError, ValueError, KeyError, IndexError):
                time.sleep(0.02)
        raise RuntimeError(f"{self.label} did not come up")

    def memory(self) -> float:
        """MB of the process tree, pages that processes share counted once."""
        total, todo = 0.0, [self.process.pid]
        while todo:
            pid = todo.pop()
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
        return total

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                self.signal(signal.SIGCONT)
                self.signal(number)
                self.process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def run(commands: list[str], names: list[str], repeats: int, *, below: int = BELOW) -> None:
    """Prints the table: the first command line is ours; ratios are of pairs measured one after the other. Prompts are
    of ids below `below`."""
    servers: list[Server] = []
    rows: dict[str, list[list[float]]] = {}
    rng = random.Random(time.time_ns())
    try:
        servers += [Server(f"server {i + 1}", command) for i, command in enumerate(commands)]
        rows["start"] = [[s.start] for s in servers]
        for s in servers:
            together(s.port, s.model, [ids(128, rng, below) for _ in range(4)], 8)
        for repeat in range(repeats):
            prefix = ids(1024, rng, below)
            for name in names:
                for i in range(len(servers)) if repeat % 2 == 0 else reversed(range(len(servers))):
                    for other in servers:
                        other.signal(signal.SIGCONT if other is servers[i] else signal.SIGSTOP)
                    value = workload(name, servers[i].port, servers[i].model, rng, prefix, below)
                    rows.setdefault(name, [[] for _ in servers])[i].append(value)
        for s in servers:
            s.signal(signal.SIGCONT)
        rows["memory MB"] = [[s.memory()] for s in servers]
    finally:
        for s in servers:
            s.stop()
    print(f"{'workload':12}" + "".join(f"{s.label:>14}" for s in servers) + ("   ratio (pairs)" if servers[1:] else ""))
    for name, values in rows.items():
        line = f"{name:12}" + "".join(f"{statistics.median(v):14.2f}" for v in values)
        if servers[1:]:
            pairs = sorted(x / y for x, y in zip(values[0], values[1], strict=True))
            line += f"   {statistics.median(pairs):.2f} ({pairs[0]:.2f} to {pairs[-1]:.2f})"
        print(line + ("   less is better" if name in LESS_IS_BETTER else ""))
