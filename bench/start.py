"""From a server's process start to the first token through HTTP, servers taking turns: seconds, and CPU seconds of all
its processes up to then (on a busy machine those move less).

A text completion of one token is asked for every 5 ms until it is answered. What a start keeps in caches is there: each
server is started once before any start counts.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

POLL = 0.005
"""Seconds between two requests."""
LIMIT = 120.0
"""Seconds after which a server counts as one that does not start."""
NOT_YET = (404, 503)
"""Answers of a server that is starting."""


class Start(NamedTuple):
    seconds: float
    cpu: float


def first_token(port: int, model: str) -> bool:
    """Whether the server gave a token. Raises RuntimeError where it never will."""
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        said = response.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    if response.status not in (200, *NOT_YET):
        raise RuntimeError(f"status {response.status}: {said[:200].decode(errors='replace')}")
    return response.status == 200


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants, threads that have ended left out."""
    total, todo = 0.0, [pid]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended just now
                todo += map(int, (task / "children").read_text().split())
                total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


def start(command: str, model: str) -> Start:
    """One start of the server that `command` (with {port}) runs. Raises RuntimeError where it does not come up."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    begin = time.perf_counter()
    process = subprocess.Popen(
        shlex.split(command.format(port=port)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        while not first_token(port, model):
            if process.poll() is not None or time.perf_counter() - begin > LIMIT:
                raise RuntimeError(f"it did not come up (exit status {process.poll()}): {command}")
            time.sleep(POLL)
        return Start(time.perf_counter() - begin, cpu_seconds(process.pid))
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(20)


def run(commands: list[str], model: str, repeats: int) -> None:
    """Prints medians of `repeats` starts of each server, and of the ratios of starts one after the other; the first
    command is ours."""
    for command in commands:
        start(command, model)
    starts: list[list[Start]] = [[] for _ in commands]
    for repeat in range(repeats):
        for i in range(len(commands)) if repeat % 2 == 0 else reversed(range(len(commands))):
            starts[i].append(start(commands[i], model))
    print(f"{'start':12}" + "".join(f"{f'server {i + 1}':>14}" for i in range(len(commands))))
    for at, name in enumerate(("seconds", "CPU seconds")):
        values = [[one[at] for one in of] for of in starts]
        line = f"{name:12}" + "".join(f"{statistics.median(v):14.3f}" for v in values)
        for other in values[1:]:
            pairs = sorted(x / y for x, y in zip(values[0], other, strict=True))
            line += f"   {statistics.median(pairs):.2f} ({pairs[0]:.2f} to {pairs[-1]:.2f})"
        print(line, flush=True)
