"""What an operator can do to a running server. Every endpoint needs a key with the scope admin (`front`).

Each call leaves a line in the log: what was done, with which key.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from tailrace.api import schema
from tailrace.api.endpoints import read
from tailrace.api.errors import HttpError
from tailrace.api.exchange import Exchange
from tailrace.api.service import LogLevel, Plan, Service, who
from tailrace.ledger.log import admin_line
from tailrace.ledger.timeline import as_json


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /admin/abort. `request` is what an answer has as its id, or the x-request-id of a call."""

    request: str


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /admin/pause. What runs goes on to its end, or is aborted."""

    running: Literal["finish", "abort"] = "finish"


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /admin/log_level."""

    level: LogLevel


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of what needs no telling."""


ABORT = msgspec.json.Decoder(Abort)
PAUSE = msgspec.json.Decoder(Pause)
LEVEL = msgspec.json.Decoder(Level)
NOTHING = msgspec.json.Decoder(Nothing)


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
        "requests": len(service.exchanges),
        "running": gauges.running,
        "waiting": gauges.waiting,
        "kv_pages": {"all": gauges.pages, "used": gauges.used_pages, "cached": gauges.cached_pages},
        "restarts": service.client.restarts,
        "content": service.stored() or None,
    }
    await exchange.answer(200, msgspec.json.encode(facts))


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
    ended = [msgspec.json.decode(line) for names, line in service.recent if name in names]
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
    """POST /admin/abort: ends one request; its client gets an error. 404 where it does not run."""
    wanted = await body(service, exchange, ABORT)
    found = _named(service, wanted.request)
    if not found:
        raise _unknown(wanted.request, "is running")
    for _, plan in found:
        plan.generation.fail(_aborted())
    await answer(service, exchange, "abort", aborted=[plan.name for _, plan in found])


async def pause(service: Service, exchange: Exchange) -> None:
    """POST /admin/pause: new requests get 503 until /admin/resume, and /health/ready says so."""
    wanted = await body(service, exchange, PAUSE)
    service.paused = True
    if wanted.running == "abort":
        for plan in service.exchanges.values():
            plan.generation.fail(_aborted())
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
    running requests hold. 503 while there is no engine."""
    await body(service, exchange, NOTHING)
    service.need()
    service.client.reset_prefix()
    await answer(service, exchange, "reset_prefix_cache")


async def log_level(service: Service, exchange: Exchange) -> None:
    """POST /admin/log_level: "off", "requests" (a line each, without text) or "prompts" (with what was asked)."""
    wanted = await body(service, exchange, LEVEL)
    before, service.log_level = service.log_level, wanted.level
    service.write_log(admin_line({"verb": "log_level", **who(exchange), "from": before, "to": wanted.level}))
    await exchange.answer(200, msgspec.json.encode({"status": "ok", "level": wanted.level}))


def _named(service: Service, name: str) -> list[tuple[Exchange, Plan]]:
    """The running ones with an id; several calls may have the same x-request-id, since clients choose it."""
    plain = name.partition(".")[0]
    return [(one, plan) for one, plan in service.exchanges.items() if name == one.id or plain == plan.name]


def _unknown(name: str, what: str) -> HttpError:
    shown = name if len(name) <= 200 else name[:200] + "..."
    return HttpError(404, f"no request {shown!r} {what}", param="request", code="request_not_found")


def _aborted() -> HttpError:
    return HttpError(
        503, "the request was aborted by the server's operator", kind="service_unavailable", code="aborted", retry=False
    )


ENDPOINTS: dict[str, Callable[[Service, Exchange], Awaitable[None]]] = {
    "state": state,
    "requests": requests,
    "abort": abort,
    "pause": pause,
    "resume": resume,
    "drain": drain,
    "reset_prefix_cache": reset_prefix_cache,
    "log_level": log_level,
}
"""By the names that `front` knows them under."""
