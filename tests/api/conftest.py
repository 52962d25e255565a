"""Real servers over the stand-in model, each a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx  # what the openai package brings
import openai
import pytest

from tailrace.api.content.database import connect
from tests import postgres

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 60.0
LOOK = 0.01
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""One for all clients: loading the certificates that nobody needs here takes longer than most tests."""


def until(holds: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
    """Waits until it holds; fails with `what` when it does not in time. Looks are counted, not seconds: where the whole
    machine is slow or stands still, what is waited for does too."""
    for _ in range(round(deadline / LOOK)):
        value = holds()
        if value:
            return value
        time.sleep(LOOK)
    pytest.fail(f"waited {deadline} s for: {what}")


class Running:
    """A server process, its URL, its lines of output and of log."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.log: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(process.stdout, self.lines), daemon=True),
            threading.Thread(target=self._read, args=(process.stderr, self.log), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.url = ""
        self.key = ""  # sent with all that says nothing else
        self._clients: list[httpx.Client] = []

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        with stream:
            lines.extend(iter(stream.readline, ""))

    def wait_ready(self) -> Running:
        def said() -> re.Match[str] | None:
            assert self.process.poll() is None, "".join([*self.lines, *self.log])
            return re.search(r"Serving on (https?://[\d.:]+)", "".join(self.lines))

        self.url = until(said, "the server to be ready")[1]
        return self

    @property
    def engine(self) -> int:
        """The engine's process id."""
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        pids = found.stdout.split()
        return int(pids[0]) if pids else 0

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        self._clients.append(httpx.Client(verify=NO_TLS))
        options = {"max_retries": 0, "timeout": DEADLINE, "http_client": self._clients[-1], **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def http(self, **options: Any) -> httpx.Client:
        if self.key:
            options.setdefault("headers", {"Authorization": f"Bearer {self.key}"})
        return httpx.Client(base_url=self.url, timeout=DEADLINE, verify=NO_TLS, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.http() as client:
            return client.get(path, **options)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series; 0 where it is not there."""
        return self.metric_of({}, name, **labels)

    def metric_of(self, headers: dict[str, str], name: str, **labels: str) -> float:
        """The same, with a key."""
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.get("/metrics", headers=headers).text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return 0.0

    def requests(self) -> list[dict[str, Any]]:
        """The log lines of requests so far."""
        return [json.loads(line) for line in self.log if line.startswith("{")]

    def finish(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(DEADLINE)
        for client in self._clients:
            client.close()
        for reader in self._readers:
            reader.join(DEADLINE)
        return status


def launch(within: Sequence[str] = (), **settings: Any) -> Running:
    """Starts a server, by the command `within` where there is one; does not wait for it."""
    body = {"model": "stand", "port": 0, "loader": "tests.api.stand:load", **settings}
    process = subprocess.Popen(
        [*within, sys.executable, "-m", "tests.api.serve", json.dumps(body)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Running(process)


@contextmanager
def serving(within: Sequence[str] = (), **settings: Any) -> Iterator[Running]:
    """A server that is ready."""
    running = launch(within, **settings)
    try:
        yield running.wait_ready()
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
            running.process.send_signal(signal.SIGTERM)  # the second signal ends it at once, and tidily
        running.wait()


@pytest.fixture(scope="session")
def quick() -> Iterator[Running]:
    """A quick engine with a context of 2,048 tokens."""
    with serving(served_names=["stand", "alias"]) as running:
        yield running


@pytest.fixture(scope="session")
def slow() -> Iterator[Running]:
    """Steps of 20 ms, two requests at a time, two in the queue, a pool that one long request fills."""
    with serving(loader="tests.api.stand:load_slow", max_running=2, max_waiting=2, kv_tokens=4096) as running:
        yield running


@pytest.fixture
def fresh() -> Callable[..., Any]:
    """Servers of a test's own, to be harmed."""
    return serving


@pytest.fixture
def postgresql(a_postgresql: postgres.Server | None) -> postgres.Server:
    """A PostgreSQL server without tables of ours."""
    if a_postgresql is None:
        pytest.skip(postgres.why_not())
    database = connect(a_postgresql.url, 1)
    tables = ("content", "objects", "pieces", "batches", "results", "servers", "ledger", "runs", "requests", "usage")
    for table in tables:
        database.execute(f"DROP TABLE IF EXISTS tailrace_{table}")
    database.commit()
    database.close()
    return a_postgresql


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URLs of empty content stores."""
    if request.param == "sqlite":
        return f"sqlite:////{tmp_path}/content.db"
    return str(request.getfixturevalue("postgresql").url)
