"""What an operator can do to a running server. Every endpoint needs a key with the scope admin (`front`).

Each call leaves a line in the log: what was done, with which key.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from tailrace.api import schema
from tailrace.api.adapters import NamedAdapter
from tailrace.api.endpoints import read
from tailrace.api.errors import HttpError
from tailrace.api.exchange import Exchange
from tailrace.api.service import LogLevel, Plan, Service, who
from tailrace.api.sleep import Running
from tailrace.engine.client import EngineLog
from tailrace.ledger.log import admin_line
from tailrace.ledger.timeline import as_json
from tailrace.terms import InvalidInput


class Abort(schema.Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /admin/abort: one of these. `request` is what an answer has as its id, or the x-request-id of a call;
    `tenant` and `key` are what GET /admin/requests says."""

    request: str | None = None
    tenant: str | None = None
    key: str | None = None
    all: bool = False


class Asleep(schema.Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /admin/sleep. What becomes of requests that run: with "refuse" there is no sleep while there are some."""

    level: int = 1
    running: Running = "refuse"


class Profiled(schema.Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /admin/profile: how long, in seconds, in steps, or both: whichever ends first."""

    seconds: float | None = None
    steps: int | None = None


class Pause(schema.Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /admin/pause. What runs goes on to its end, or is aborted."""

    running: Literal["finish", "abort"] = "finish"


class Level(schema.Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /admin/log_level. `level` is of what the API writes, `engine` of the engine process's own log."""

    level: LogLevel | None = None
    engine: EngineLog | None = None


class Load(schema.Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/load_lora_adapter, in vLLM's words. `load_inplace`: also where the name is another adapter's."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class Unload(schema.Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class Nothing(schema.Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of what needs no telling."""


ABORT = msgspec.json.Decoder(Abort)
PAUSE = msgspec.json.Decoder(Pause)
LEVEL = msgspec.json.Decoder(Level)
SLEEP = msgspec.json.Decoder(Asleep)
PROFILE = msgspec.json.Decoder(Profiled)
NOTHING = msgspec.json.Decoder(Nothing)
LOAD = msgspec.json.Decoder(Load)
UNLOAD = msgspec.json.Decoder(Unload)


async def body(service: Service, exchange: Exchange, decoder: msgspec.json.Decoder[schema.T]) -> schema.T:
    """The body; none at all is an empty object."""
    if exchange.whole and not exchange.held:
        return schema.decode(decoder, b"{}")
    return await read(service, exchange, decoder)


async def answer(service: Service, exchange: Exchange, verb: str, **facts: Any) -> None:
    """Says what was done, to the caller and to the log."""
    if service.log_level != "off":
        service.write_log(admin_line({"verb": verb, "http_request": exchange.id, **who(exchange), **facts}))
    await exchange.answer(200, msgspec.json.encode({"status": "ok", **facts}))


async def state(service: Service, exchange: Exchange) -> None:
    """GET /admin/state: what the server is doing."""
    gauges = service.client.gauges
    facts = {
        "engine": service.client.state,
        "paused": service.paused,
        "draining": service.draining,
        "log_level": service.log_level,
        "engine_log_level": service.client.log_level,
        "sleep": _sleep_facts(service),
        "profiling": service.client.on_spans is not None,
        "requests": len(service.exchanges),
        "running": gauges.running,
        "waiting": gauges.waiting,
        "kv_pages": {"all": gauges.pages, "used": gauges.used_pages, "cached": gauges.cached_pages},
        "restarts": service.client.restarts,
        "content": service.stored() or None,
        "adapters": [_adapter_row(service, one) for one in service.adapters.all],
    }
    await exchange.answer(200, msgspec.json.encode(facts))


def _adapter_row(service: Service, adapter: NamedAdapter) -> dict[str, Any]:
    running, waiting = service.client.gauges.adapters.get(adapter.id, (0, 0))
    facts = {"name": adapter.name, "digest": adapter.digest, "rank": adapter.rank, "bytes": adapter.bytes}
    return facts | {"running": running, "waiting": waiting}


async def requests(service: Service, exchange: Exchange) -> None:
    """GET /admin/requests: all that run. GET /admin/requests/{id}: the timeline of one, by the id of its answer or by
    its x-request-id, while it runs and for as long as it is among the last that have ended."""
    service.settle()
    _, _, name = exchange.path.removeprefix("/admin/").partition("/")
    if not name:
        rows = [_row(service, plan, one) for one, plan in service.exchanges.items()]
        await exchange.answer(200, msgspec.json.encode({"object": "list", "data": rows}))
        return
    rows = [
        {"http_request": one.id, **who(one), **as_json(fold.timeline(time.monotonic()))}
        for one, plan in _named(service, name)
        for choice in plan.generation.choices
        if (fold := service.book.fold(choice.request)) is not None
    ]
    ended = [msgspec.json.decode(line) for line in service.ended(name)]
    if not rows and not ended:
        raise _unknown(name, "is running or among the last that have ended")
    await exchange.answer(200, msgspec.json.encode({"object": "list", "data": [*rows, *ended]}))


def _row(service: Service, plan: Plan, exchange: Exchange) -> dict[str, Any]:
    choices = plan.generation.choices
    return {
        "request": plan.name,
        "http_request": exchange.id,
        **who(exchange),
        "age_ms": round((time.monotonic() - exchange.received) * 1000),
        "stream": plan.asked.stream,
        "choices": len(choices),
        "prompt_tokens": sum(len(choice.prompt) for choice in choices[:: plan.asked.n]),
        "output_tokens": sum(choice.output_tokens for choice in choices),
        "max_tokens": choices[0].params.max_tokens,
    }


async def abort(service: Service, exchange: Exchange) -> None:
    """POST /admin/abort: ends one request, those of a tenant or key, or all; their clients get an error. 404 where the
    one does not run."""
    wanted = await body(service, exchange, ABORT)
    given = [name for name in ("request", "tenant", "key") if getattr(wanted, name) is not None]
    given += ["all"] if wanted.all else []
    if len(given) != 1:
        raise InvalidInput("give one of request, tenant, key, or all as true", param=given[1] if given else "request")
    if wanted.request is not None:
        found = [one for one, _ in _named(service, wanted.request)]
        if not found:
            raise _unknown(wanted.request, "is running")
    else:
        found = [one for one in service.exchanges if wanted.all or _of(one, wanted)]
    aborted = service.abort(found)
    await answer(service, exchange, "abort", of=given[0], aborted=aborted)


def _of(exchange: Exchange, wanted: Abort) -> bool:
    caller = exchange.caller
    if caller is None:
        return False
    return caller.group == wanted.tenant if wanted.tenant is not None else caller.key == wanted.key


async def pause(service: Service, exchange: Exchange) -> None:
    """POST /admin/pause: new requests get 503 until /admin/resume, and /health/ready says so."""
    wanted = await body(service, exchange, PAUSE)
    service.paused = True
    if wanted.running == "abort":
        service.abort(list(service.exchanges))
    await answer(service, exchange, "pause", requests=len(service.exchanges))


async def resume(service: Service, exchange: Exchange) -> None:
    """POST /admin/resume: ends a pause."""
    await body(service, exchange, NOTHING)
    service.paused = False
    await answer(service, exchange, "resume")


async def drain(service: Service, exchange: Exchange) -> None:
    """POST /admin/drain: as SIGTERM does, finishes what runs and ends the server."""
    await body(service, exchange, NOTHING)
    await answer(service, exchange, "drain", requests=len(service.exchanges))
    service.stop()


async def reset_prefix_cache(service: Service, exchange: Exchange) -> None:
    """POST /admin/reset_prefix_cache: no request that comes after finds what was cached before, but for pages that
    running requests hold. 503 while there is no engine; one that sleeps has forgotten them."""
    await body(service, exchange, NOTHING)
    service.need(engine=False)
    service.client.reset_prefix()
    await answer(service, exchange, "reset_prefix_cache")


async def log_level(service: Service, exchange: Exchange) -> None:
    """POST /admin/log_level: "off", "requests" (a line each, without text) or "prompts" (with what was asked); and what
    the engine process says of itself, from "debug" (a line each step) to "error"."""
    wanted = await body(service, exchange, LEVEL)
    if wanted.level is None and wanted.engine is None:
        raise InvalidInput("give level, engine or both", param="level")
    before = {"from": service.log_level, "engine_from": service.client.log_level}
    if wanted.level is not None:
        service.log_level = wanted.level
    if wanted.engine is not None:
        service.client.set_log_level(wanted.engine)
    now = {"level": service.log_level, "engine": service.client.log_level}
    after = {"to": now["level"], "engine_to": now["engine"]}
    service.write_log(admin_line({"verb": "log_level", **who(exchange), **before, **after}))
    await exchange.answer(200, msgspec.json.encode({"status": "ok", **now}))


def _sleep_facts(service: Service) -> dict[str, Any]:
    """`since_s`: seconds since the state was entered; `cause`, of the sleep that is or was the last; `last_wake_ms`:
    what waking up took."""
    if service.slept == "awake" and not service.client.wakes:
        return {"state": "awake", "sleeps": 0, "wakes": 0}
    sleeper = service.sleeper
    return {
        "state": sleeper.state,
        "cause": sleeper.cause,
        "since_s": round(time.monotonic() - sleeper.since, 3),
        "sleeps": sleeper.sleeps,
        "wakes": sleeper.wakes,
        "last_wake_ms": round(sleeper.last_wake * 1000) if sleeper.wakes else None,
        "waiting": sleeper.waiting,
    }


async def sleep(service: Service, exchange: Exchange) -> None:
    """POST /admin/sleep, and vLLM's /sleep?level=1&mode=...: gives the engine's memory back. 409 where requests run."""
    query = _query(exchange, "level", "mode")
    wanted = await body(service, exchange, SLEEP)
    level, running = wanted.level, wanted.running
    if "level" in query:
        level = int(query["level"]) if query["level"].isdigit() else -1
    if "mode" in query:
        if query["mode"] not in MODES:
            raise InvalidInput(f"mode must be abort or wait, not {query['mode'][:40]!r}", param="mode")
        running = MODES[query["mode"]]
    if level != 1:
        raise InvalidInput("there is one level of sleep, 1: all memory is given back", param="level")
    slept = await service.sleeper.sleep(running, "operator")
    await answer(service, exchange, "sleep", state=service.slept, already=not slept)


async def wake(service: Service, exchange: Exchange) -> None:
    """POST /admin/wake, and vLLM's /wake_up: answers when the engine is ready. 503 where it does not start."""
    _query(exchange)
    await body(service, exchange, NOTHING)
    woken = await service.sleeper.wake()
    facts = {"wake_ms": round(service.sleeper.last_wake * 1000)} if woken else {}
    await answer(service, exchange, "wake", state=service.slept, already=not woken, **facts)


async def is_sleeping(service: Service, exchange: Exchange) -> None:
    """GET /admin/is_sleeping, and vLLM's /is_sleeping."""
    await exchange.answer(200, msgspec.json.encode({"is_sleeping": service.slept in ("asleep", "falling_asleep")}))


async def load_lora_adapter(service: Service, exchange: Exchange) -> None:
    """POST /admin/load_lora_adapter, and vLLM's /v1/load_lora_adapter: answers when requests may ask for it. 400 where
    it cannot be loaded, 403 where none may be (--lora-dir)."""
    wanted = await body(service, exchange, LOAD)
    service.need()
    made = await service.adapters.load(wanted.lora_name, wanted.lora_path, replace=wanted.load_inplace)
    facts = {"lora_name": made.name, "digest": made.digest, "rank": made.rank, "bytes": made.bytes}
    await answer(service, exchange, "load_lora_adapter", **facts)


async def unload_lora_adapter(service: Service, exchange: Exchange) -> None:
    """POST /admin/unload_lora_adapter, and vLLM's /v1/unload_lora_adapter: later requests get 404, those that run go on
    to their end. 404 where there is none of the name."""
    wanted = await body(service, exchange, UNLOAD)
    service.adapters.unload(wanted.lora_name)
    await answer(service, exchange, "unload_lora_adapter", lora_name=wanted.lora_name)


async def profile(service: Service, exchange: Exchange) -> None:
    """POST /admin/profile: a trace of what engine, API and requests do from now on, when it is complete. 409 while
    another is made."""
    from tailrace.api import profile as profiles

    wanted = await body(service, exchange, PROFILE)
    profiles.check(wanted.seconds, wanted.steps)
    service.need()
    data = await profiles.record(service, exchange, wanted.seconds, wanted.steps or 0)
    service.told("profile", http_request=exchange.id, **who(exchange), bytes=len(data))
    rows = [
        (b"content-type", b"application/json"),
        (b"content-disposition", b'attachment; filename="tailrace-trace.json"'),
    ]
    await exchange.answer(200, data, rows)


MODES: dict[str, Running] = {"abort": "abort", "wait": "finish"}
"""vLLM's words for what becomes of requests that run."""


def _query(exchange: Exchange, *known: str) -> dict[str, str]:
    """The parameters in the address. Raises InvalidInput for those that are not known."""
    from urllib.parse import parse_qsl

    found = dict(parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True))
    for name in found:
        if name not in known:
            raise InvalidInput(f"the parameter {name[:40]!r} is not known here", param=name[:64])
    return found


def _named(service: Service, name: str) -> list[tuple[Exchange, Plan]]:
    """The running ones with an id; several calls may have the same x-request-id, since clients choose it."""
    plain = name.partition(".")[0]
    return [(one, plan) for one, plan in service.exchanges.items() if name == one.id or plain == plan.name]


def _unknown(name: str, what: str) -> HttpError:
    shown = name if len(name) <= 200 else name[:200] + "..."
    return HttpError(404, f"no request {shown!r} {what}", param="request", code="request_not_found")


ENDPOINTS: dict[str, Callable[[Service, Exchange], Awaitable[None]]] = {
    "state": state,
    "requests": requests,
    "abort": abort,
    "pause": pause,
    "resume": resume,
    "drain": drain,
    "reset_prefix_cache": reset_prefix_cache,
    "log_level": log_level,
    "sleep": sleep,
    "wake": wake,
    "is_sleeping": is_sleeping,
    "profile": profile,
    "load_lora_adapter": load_lora_adapter,
    "unload_lora_adapter": unload_lora_adapter,
}
"""By the names that `front` knows them under."""
