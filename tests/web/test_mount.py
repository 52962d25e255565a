"""The dashboard beside an API: who may see it, what it tells of a running server, and what a slow page costs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tailrace.api.exchange import Exchange
from tailrace.api.front import Front
from tailrace.api.service import Service
from tailrace.api.settings import Settings
from tailrace.engine.client import EngineClient
from tailrace.engine.protocol import Gauges, Output, Tokens
from tailrace.terms import Event, EventKind
from tailrace.web import live
from tailrace.web.mount import Dashboard
from tests.web.wire import Wire, ask, exchange, parsed

E = EventKind


def service(**settings: Any) -> Service:
    made = Settings(model="a-model", log_requests=False, **settings)
    return Service(made, EngineClient(made.engine()))


def front(**settings: Any) -> Front:
    own = service(**settings)
    return Front(own, Dashboard(own))


def test_without_ui_nothing_of_it_answers() -> None:
    own = Front(service())
    for target in ("/ui", "/ui/app.js", "/ui/api/state", "/ui/api/live"):
        assert ask(own, target).status == 404


@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [({}, "", 200),
     ({"api_keys": ("k",), "admin_keys": ("a",)}, "", 401),
     ({"api_keys": ("k",), "admin_keys": ("a",)}, "wrong", 401),
     ({"api_keys": ("k",), "admin_keys": ("a",)}, "k", 403),
     ({"api_keys": ("k",), "admin_keys": ("a",)}, "a", 200),
     ({"admin_keys": ("a",)}, "", 401),
     ({"admin_keys": ("a",)}, "a", 200),
     ({"api_keys": ("k",)}, "k", 403)],
)  # fmt: skip
def test_where_there_are_keys_it_takes_one_with_the_scope_admin(
    settings: dict[str, Any], key: str, status: int
) -> None:
    own = front(**settings)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for name in ("state", "steps"):
        answer = (
            ask(own, f"/ui/api/{name}", host="tailrace.example", **headers) if settings else ask(own, f"/ui/api/{name}")
        )
        assert answer.status == status
    assert ask(own, "/ui").status == 200  # what it shows is asked for with the key


def test_without_keys_only_an_address_opens_it() -> None:
    own = front(host="box.local")
    assert ask(own, "/ui/api/state", host="evil.example").status == 403
    assert ask(own, "/ui/api/state", host="box.local:8000").status == 200


def test_no_page_of_another_origin_may_read_it() -> None:
    own = front(cors_origins=("*",))
    assert "access-control-allow-origin" in ask(own, "/v1/models", origin="https://x.example").headers
    assert "access-control-allow-origin" not in ask(own, "/ui/api/state", origin="https://x.example").headers


def test_a_server_that_has_served_nobody_has_no_requests_yet(tmp_path: Path) -> None:
    answer = ask(front(ledger=str(tmp_path / "ledger.db")), "/ui/api/requests")
    assert (answer.status, answer.json["rows"], answer.json["total"]) == (200, [], 0)


def test_what_has_just_ended_is_said_to_be_on_its_way(tmp_path: Path) -> None:
    own = service(ledger=str(tmp_path / "ledger.db"))
    dashboard = Dashboard(own)
    step(own, Gauges(), Event("cmpl-1.0", E.TOKEN, 1.0, 0.9, 1))  # before anybody follows
    assert ask(Front(own, dashboard), "/ui/api/requests/cmpl-1").status == 404
    own.client.listen(dashboard._live.recent.add)
    step(own, Gauges(), Event("cmpl-1.0", E.TOKEN, 1.1, 1.0, 1))
    assert ask(Front(own, dashboard), "/ui/api/requests/cmpl-1").json == {"running": [], "ended": [], "soon": True}


def test_its_requests_are_counted_under_one_name() -> None:
    own = front()
    ask(own, "/ui/api/state")
    ask(own, "/ui/nothing")
    http = own.service.metrics.totals.http
    assert (http["ui", 200], http["ui", 404]) == (1, 1)


def step(service: Service, gauges: Gauges, *events: Event) -> None:
    """What the engine would have sent."""
    service.client._receive(Tokens([Output("r1")], list(events), gauges))


def test_a_sample_is_what_metrics_would_say() -> None:
    own = service()
    seen = live.Live(own, lambda _exchange: None)
    now = time.monotonic()
    own.book.open("r1", now - 3)
    gauges = Gauges(
        running=1, waiting=2, pages=64, used_pages=8, cached_pages=4, steps=7, prefix_queries=20, prefix_hits=5
    )
    step(own, gauges, Event("r1", E.CHUNK, now - 1, now - 2, 20), Event("r1", E.TOKEN, now - 1, now - 2, 1))
    step(own, gauges, Event("r1", E.TOKEN, now, now - 1, 1))
    sample = dict(zip(live.FIELDS, seen.sample(), strict=True))
    assert len(seen.sample()) == len(live.FIELDS)
    assert (sample["running"], sample["waiting"], sample["used"], sample["cached"]) == (1, 2, 8, 4)
    assert (sample["prompt_tokens"], sample["output_tokens"], sample["steps"]) == (20, 2, 7)
    assert (sample["ttft_count"], sample["ttft_sum"]) == (1, pytest.approx(2.0))
    assert (sample["itl_count"], sample["itl_sum"]) == (1, pytest.approx(1.0))


def test_a_page_gets_the_last_minutes_and_then_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY", 0.01)

    async def watched() -> list[tuple[str, Any]]:
        own = service()
        dashboard = Dashboard(own)
        dashboard.open()
        one = exchange("/ui/api/live")
        task = asyncio.create_task(Front(own, dashboard)(one))
        assert isinstance(one.line, Wire)
        while len(one.line.events()) < 4:
            await asyncio.sleep(0.005)
        await dashboard.close()
        await task
        assert one.line.data.endswith(b"0\r\n\r\n")  # ended, and not cut
        return one.line.events()

    told = asyncio.run(asyncio.wait_for(watched(), 20))
    assert [name for name, _ in told[:3]] == ["history", "now", "now"]
    assert told[0][1]["fields"] == list(live.FIELDS)
    assert len(told[-1][1]["sample"]) == len(live.FIELDS)
    assert told[-1][1]["requests"] == []


def watcher() -> Exchange:
    return exchange("/ui/api/live")


def test_a_page_that_does_not_read_gets_nothing_more_and_one_that_left_is_forgotten() -> None:
    async def tried() -> None:
        own = service()
        seen = live.Live(own, lambda _exchange: None)
        slow, gone = watcher(), watcher()
        tasks = [asyncio.create_task(seen.watch(one)) for one in (slow, gone)]
        await asyncio.sleep(0)
        assert isinstance(slow.line, Wire)
        assert isinstance(gone.line, Wire)
        slow.line.blocked_since = 1.0
        before = len(slow.line.data)
        gone.lose()
        await tasks[1]
        await seen._send(b"event: now\ndata: 1\n\n")
        assert len(slow.line.data) == before
        assert seen._watching == {slow}
        await seen.close()
        assert slow.line.cut
        slow.lose()
        await tasks[0]

    asyncio.run(tried())


def test_only_get_watches() -> None:
    answer = ask(front(), "/ui/api/live", "HEAD")
    assert (answer.status, answer.headers["allow"]) == (405, "GET")


def test_a_key_that_is_taken_back_ends_the_stream() -> None:
    async def tried() -> None:
        own = service(admin_keys=("a",))
        seen = live.Live(own, lambda one: own.guard.identify(one.authorization, "admin"))
        one = exchange("/ui/api/live", authorization="Bearer a")
        task = asyncio.create_task(seen.watch(one))
        await asyncio.sleep(0)
        await seen._send(b"event: now\ndata: 1\n\n")
        assert seen._watching
        own.guard._static.clear()
        await seen._send(b"event: now\ndata: 1\n\n")
        await task
        assert not seen._watching

    asyncio.run(asyncio.wait_for(tried(), 20))


def test_only_so_many_pages_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_WATCHING", 1)

    async def tried() -> int:
        own = service()
        dashboard = Dashboard(own)
        first, second = watcher(), watcher()
        task = asyncio.create_task(Front(own, dashboard)(first))
        await asyncio.sleep(0)
        await Front(own, dashboard)(second)
        await dashboard.close()
        await task
        assert isinstance(second.line, Wire)
        return parsed(bytes(second.line.data)).status

    assert asyncio.run(asyncio.wait_for(tried(), 20)) == 503
