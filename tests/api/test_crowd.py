"""A thousand clients at once, most of them bad ones: the others do not notice, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator

import pytest

from bench.crowd import Place, amiss, crowd, known
from tests.api.conftest import NO_TLS, Running, serving, until
from tests.api.test_connection import HEALTH, line
from tests.api.test_tls import make

BODY_BYTES = 1 << 20
FILE_BYTES = 256 << 10
SECONDS = 5
"""That a client of the crowd may take over anything."""
GROWTH = 8 << 20
"""Bytes by which the server may grow from one crowd to the next: its allocators' play."""


@pytest.fixture(scope="module")
def patient() -> Iterator[Running]:
    """A server that was started with few descriptors, as by a shell."""
    timeouts = {"header": SECONDS, "keep_alive": SECONDS, "body": SECONDS, "send": SECONDS}
    shell = ("sh", "-c", 'ulimit -S -n 256 && exec "$@"', "sh")
    with serving(shell, timeouts=timeouts, limits={"body_bytes": BODY_BYTES}, log_requests=False) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with keys, TLS and a content store."""
    folder = tmp_path_factory.mktemp("guarded")
    cert, key = make(folder, "live")
    seconds = 5 * SECONDS  # a thousand handshakes take some of that
    timeouts = {"header": seconds, "keep_alive": seconds, "body": seconds, "send": seconds}
    with serving(
        timeouts=timeouts,
        limits={"body_bytes": BODY_BYTES, "file_bytes": FILE_BYTES},
        log_requests=False,
        api_keys=["the key"],
        tls_cert=str(cert),
        tls_key=str(key),
        content_store=f"sqlite:////{folder}/content.db",
    ) as server:
        server.key = "the key"
        NO_TLS.load_verify_locations(cert)  # from now on it knows one
        yield server


def held(server: Running) -> dict[str, float]:
    """What the engine holds for requests."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return {name: value for name in names if (value := server.metric(name))}


def files(server: Running) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def memory(server: Running) -> int:
    """Bytes of both processes, pages that they share counted once."""
    total = 0
    for pid in (server.process.pid, server.engine):
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            total += next(int(row.split()[1]) << 10 for row in rollup if row.startswith("Pss:"))
    return total


@pytest.mark.alone
def test_a_thousand_clients_at_once_harm_nobody_and_leave_nothing(patient: Running) -> None:
    place = Place(int(patient.url.rsplit(":", 1)[1]), "stand", body_bytes=BODY_BYTES, patience=40.0)
    asyncio.run(known(place))
    base = files(patient)
    engine = patient.engine
    sizes = []
    for seed, clients in enumerate((1000, 300)):
        ends = asyncio.run(crowd(place, clients, seed))
        assert not amiss(place, ends), ends
        until(lambda: not held(patient), f"nothing to be held: {held(patient)}")
        until(lambda: files(patient) <= base, f"{files(patient)} descriptors to be {base} again")
        sizes.append(memory(patient))
    assert sizes[1] < sizes[0] + GROWTH
    assert patient.engine == engine
    assert patient.client().chat.completions.create(
        model="stand", messages=[{"role": "user", "content": "hi"}]
    ).choices[0].message.content == "hi"  # fmt: skip


@pytest.mark.alone
def test_nor_do_they_where_keys_and_tls_are_asked_for_and_files_are_stored(guarded: Running) -> None:
    port = int(guarded.url.rsplit(":", 1)[1])
    place = Place(port, "stand", BODY_BYTES, patience=90.0, key="the key", tls=NO_TLS, file_bytes=FILE_BYTES)
    asyncio.run(known(place))
    base = files(guarded)
    engine = guarded.engine
    ends = asyncio.run(crowd(place, 1000, 2))
    assert not amiss(place, ends), ends
    until(lambda: not held(guarded), f"nothing to be held: {held(guarded)}")
    until(lambda: files(guarded) <= base, f"{files(guarded)} descriptors to be {base} again")
    assert guarded.get("/v1/files").json()["data"] == []
    assert guarded.metric("tailrace_content_bytes") == 0
    assert guarded.engine == engine


def test_connections_are_bounded_and_who_comes_too_late_is_told() -> None:
    with serving(limits={"connections": 4}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port)), timeout=20) for _ in range(4)]
        with line(server) as late:
            status, headers, body = late.answer()
            assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
            assert json.loads(body)["error"]["code"] == "service_unavailable"
        for one in idle:
            one.close()

        def served() -> bool:
            with line(server) as client:
                client.send(HEALTH)
                return client.answer()[0] == 200

        until(served, "room for another")
        flood = [socket.create_connection((host, int(port)), timeout=20) for _ in range(60)]
        with line(server) as last, pytest.raises((ConnectionError, AssertionError)):  # cut without a word
            last.answer()
        for one in flood:
            one.close()
        until(served, "room for another")
