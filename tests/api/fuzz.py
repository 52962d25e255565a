"""`make fuzz`: calls a real server tens of thousands of times with what its OpenAPI document allows, and with what it
forbids. No call may end in a 5xx or in an answer that is not as the document says, and the engine lives through all.

What follows on the command line goes to schemathesis: `make fuzz ARGS='--max-examples 50 --seed 7'`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tailrace.api.access import store
from tailrace.api.priority import MOST_URGENT
from tests.api.conftest import Running, serving
from tests.models import random_bert

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "negative_data_rejection",
)
GENERATING = ["--exclude-path-regex", "^/(admin/(drain|pause|profile|sleep)|sleep)$"]
"""All but what would end the server, stop it, or take as long as it is told to."""
READING = ["--include-path-regex", "^/(v1/embeddings|(v[12]/)?(rerank|score)|v1/models|health.*|version)$"]
"""What a model that reads texts has of its own."""
PATIENT = {"heartbeat": 300.0, "stuck": 300.0, "hang": 300.0}
"""Machines that do much else stop an engine for seconds. One that hangs is found by the client's own limit."""
Server = Callable[[Path], AbstractContextManager[Running]]


@contextmanager
def generating(folder: Path) -> Iterator[Running]:
    """A server of the stand-in with all that there is: a content store, keys, fill-in-the-middle."""
    key = store.create(folder / "keys.json", "fuzz", scopes=("inference", "admin"), least_priority=MOST_URGENT)[1]
    content = f"sqlite:////{folder}/content.db"
    limits = {"choices": 4, "file_bytes": 1 << 20}
    with serving(
        model="infill",
        served_names=["stand"],
        content_store=content,
        keys=str(folder / "keys.json"),
        max_context=256,
        limits=limits,
        timeouts=PATIENT,
    ) as running:
        running.key = key
        yield running


@contextmanager
def reading(folder: Path) -> Iterator[Running]:
    """A server of a small encoder."""
    model = random_bert.write(folder / "tiny", matryoshka_dimensions=[32, 64])
    cache = str(folder / "cache")
    with serving(model=str(model), loader="", served_names=["stand"], cache_dir=cache, timeouts=PATIENT) as running:
        yield running


def fuzz(server: Running, *options: str) -> subprocess.CompletedProcess[str]:
    """One run, with the output that it had."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color"]
    command += ["--checks", ",".join(CHECKS), "--generation-database", "none", "--warnings", "off"]
    command += ["--header", f"Authorization: Bearer {server.key or 'none'}", "--request-timeout", "300"]
    with tempfile.TemporaryDirectory() as place:  # it keeps what it has found where it is started
        return subprocess.run([*command, *options], cwd=place, capture_output=True, text=True, check=False)


def answers(server: Running) -> dict[str, int]:
    """How many answers it gave, by endpoint and status."""
    found = {}
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("tailrace_http_requests_total"):
            name, _, count = line.rpartition(" ")
            found[" ".join(name.split('"')[1::2])] = int(float(count))
    return {name: count for name, count in found.items() if count}


def lives(server: Running) -> bool:
    """Whether the engine that was there at first still answers."""
    health = server.get("/health/ready").json()
    return bool(health["status"] == "ok" and health["restarts"] == 0)


def main(options: list[str]) -> int:
    """All of it; returns the exit status."""
    options = options or ["--max-examples", "400"]
    failed = False
    with tempfile.TemporaryDirectory() as place:
        for server, scope in ((generating, GENERATING), (reading, READING)):
            with server(Path(place)) as running:
                ended = fuzz(running, *scope, *options)
                print(ended.stdout, ended.stderr, sep="\n")
                print("Answers:", answers(running))
                if not lives(running):
                    print("the engine died:", *running.log, sep="\n")
                failed |= ended.returncode != 0 or not lives(running)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
