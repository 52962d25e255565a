"""The endpoints: each takes an exchange, and answers it or raises an error of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

import tailrace
from tailrace.api import schema
from tailrace.api.adapters import NamedAdapter
from tailrace.api.answers import call_ids
from tailrace.api.constrained import constrained
from tailrace.api.exchange import Exchange
from tailrace.api.params import Asked, check, given, unsupported
from tailrace.api.prompts import (
    Conversation,
    chat_prompt,
    completion_prompts,
    conversation,
    echoed,
    ids_to_decode,
    infill_prompts,
    most_text,
    predicted,
    read_prompts,
    refuse_long,
    tokenized,
)
from tailrace.api.service import Plan, Service
from tailrace.api.shapes import ChatShape, TextShape
from tailrace.api.tools import read_tools, shown
from tailrace.terms import InvalidInput

T = TypeVar("T")


async def read(service: Service, exchange: Exchange, decoder: msgspec.json.Decoder[T]) -> T:
    """The body of a request, decoded."""
    settings = service.settings
    try:
        data = await exchange.body(settings.limits.body_bytes, settings.timeouts.body, service.bodies)
        return schema.decode(decoder, data)
    except InvalidInput as error:
        if error.code != "unknown_parameter" or settings.unknown_parameters != "warn":
            raise
        return pass_over(decoder, data, exchange)
    finally:
        exchange.release(service.bodies)


def pass_over(decoder: msgspec.json.Decoder[T], data: bytes, exchange: Exchange) -> T:
    """The body without its unknown parameters, which a header of the answer names. Raises InvalidInput."""
    from tailrace.api import unknown

    try:
        data, names = unknown.without(data, decoder.type)
    except (ValueError, RecursionError) as error:
        raise schema.explain(error) from None
    exchange.extra.append(unknown.header(names))
    return schema.decode(decoder, data)


async def chat_completions(service: Service, exchange: Exchange) -> None:
    """POST /v1/chat/completions."""
    service.need()
    body = await read(service, exchange, schema.CHAT)
    service.need_model(body.model)
    if body.store and service.content is None:
        raise unsupported("store", "can only be false: this server has no content store (--content-store)")
    plan, call_id = await chat_plan(service, exchange, body, "chatcmpl-")
    keep = None
    if body.store:
        from tailrace.api.content import chats

        keep = chats.keeper(service, exchange, plan, body)
    service.submit(plan, exchange, "chat", stored=keep is not None)
    assert service.text is not None
    shape = ChatShape(plan.facts(body.model), service.table(service.text), call_id)
    await service.respond(plan, exchange, shape, keep)


async def chat_plan(
    service: Service, exchange: Exchange, body: schema.Chat, prefix: str, budget: int | None = None
) -> tuple[Plan, Callable[[], str]]:
    """A chat completion, checked and ready to be submitted, and what makes the ids of its calls of tools. `budget` is
    the most tokens of reasoning. Raises InvalidInput, or HttpError where nothing can be served."""
    text, ready = service.need()
    service.need_task(ready, "generate")
    asked = asked_for(service, exchange, body, text.vocab_size)
    tools = read_tools(body, service.settings.limits)
    await service.grammars.admit(asked.form)
    writes = await service.answers.tools(text, tools)
    prompt = await chat_prompt(service, body, tools, ready.max_context, parse_special=asked.parse_special)
    reading = service.answers.reading(text, prompt, tools, writes)
    asked = await constrained(service.grammars, text, asked, tools, reading, budget)
    asked = await predicted(service, text, body, asked, ready.max_context)
    service.need()
    plan = service.plan(asked, [prompt], ready.max_context, prefix, model=body.model, start=True, reading=reading)
    return plan, call_ids(short=writes is not None and text.short_call_ids)


def asked_for(service: Service, exchange: Exchange, body: schema.Common, vocab: int) -> Asked:
    """What a caller wants, apart from its prompt. Raises InvalidInput, or HttpError 403."""
    timeline, least = wants_timeline(exchange), exchange.least_priority
    return check(body, service.settings.limits, vocab=vocab, least_priority=least, timeline=timeline)


def wants_timeline(exchange: Exchange) -> bool:
    """Whether the header asks for it."""
    return exchange.header(b"x-tailrace-timeline") in (b"1", b"true")


async def completions(service: Service, exchange: Exchange) -> None:
    """POST /v1/completions."""
    service.need()
    body = await read(service, exchange, schema.COMPLETION)
    text, ready = service.need()
    service.need_task(ready, "generate")
    service.need_model(body.model)
    limits = service.settings.limits
    asked = asked_for(service, exchange, body, text.vocab_size)
    prompts_given = read_prompts(body.prompt, limits.prompts, ready.max_context)
    if len(prompts_given) * asked.n > limits.choices:
        raise InvalidInput(
            f"n times prompts is {len(prompts_given) * asked.n}; at most {limits.choices} are possible", param="n"
        )
    await service.grammars.admit(asked.form)
    if body.suffix:
        prompts = await infill_prompts(service, prompts_given, body.suffix, asked, ready.max_context)
    else:
        prompts = await completion_prompts(service, prompts_given, asked, ready.max_context)
    echo = await echoed(text, body, prompts_given, asked)
    service.need()
    plan = service.plan(asked, prompts, ready.max_context, "cmpl-", model=body.model, start=False)
    shape = TextShape(plan.facts(body.model), service.table(text), echo, echo_logprobs=asked.echo and asked.logprobs)
    service.submit(plan, exchange, "completions")
    await service.respond(plan, exchange, shape)


async def tokenize(service: Service, exchange: Exchange) -> None:
    """POST /tokenize: a prompt or messages, to ids."""
    body = await read(service, exchange, schema.TOKENIZE)
    text, ready = service.need(engine=False)
    if body.model is not None:
        service.need_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInput("give either prompt or messages", param="prompt")
    for name in ("tools", "chat_template_kwargs"):
        if body.messages is None and given(getattr(body, name)) is not None:
            raise InvalidInput(f"{name} belongs to messages", param=name)
    if body.prompt is not None:
        refuse_long(len(body.prompt), most_text(service, text, ready.max_context), "prompt")
        bos = body.add_special_tokens is not False
        work = partial(text.encode, body.prompt, add_bos=bos, parse_special=bool(body.parse_special))
        ids = await tokenized(len(body.prompt), work)
    else:
        messages = Conversation(
            body.messages or (), shown(body.tools, service.settings.limits), body.chat_template_kwargs
        )
        generation = body.add_generation_prompt is not False
        ids = await conversation(service, messages, ready.max_context, generation=generation)
    table = service.table(text)

    def encode() -> bytes:
        spelled = [table[one].decode("utf-8", "replace") for one in ids] if body.return_token_strs else None
        answer = {"count": len(ids), "max_model_len": ready.max_context, "tokens": ids, "token_strs": spelled}
        return msgspec.json.encode(answer)

    await exchange.answer(200, await tokenized(len(ids), encode))


async def detokenize(service: Service, exchange: Exchange) -> None:
    """POST /detokenize: ids to text, control tokens shown unless asked otherwise."""
    body = await read(service, exchange, schema.DETOKENIZE)
    text, ready = service.need(engine=False)
    if body.model is not None:
        service.need_model(body.model)
    ids = ids_to_decode(body.tokens, ready.max_context, text.vocab_size)
    prompt = await tokenized(len(ids), partial(text.decode, ids, skip_special=bool(body.skip_special_tokens)))
    await exchange.answer(200, msgspec.json.encode({"prompt": prompt}))


def _model_card(service: Service, name: str) -> dict[str, Any]:
    ready = service.client.ready
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tailrace",
        "root": service.settings.model_name,
        "parent": None,
        "max_model_len": ready.max_context if ready else None,
    }


def _adapter_card(service: Service, adapter: NamedAdapter) -> dict[str, Any]:
    own = {"created": adapter.created, "parent": service.settings.model_name}
    return _model_card(service, adapter.name) | own


async def models(service: Service, exchange: Exchange) -> None:
    """GET /v1/models."""
    service.need(engine=False)
    cards = [_model_card(service, name) for name in service.settings.names]
    cards += [_adapter_card(service, adapter) for adapter in service.adapters.all]
    answer: dict[str, Any] = {"object": "list", "data": cards}
    if exchange.anthropic:
        from tailrace.api.anthropic import models as theirs

        answer = theirs.page(exchange, cards)
    await exchange.answer(200, msgspec.json.encode(answer))


async def model(service: Service, exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    service.need(engine=False)
    name = exchange.path.removeprefix("/v1/models/")
    service.need_model(name)
    adapter = service.adapters.find(name)
    card = _model_card(service, name) if adapter is None else _adapter_card(service, adapter)
    if exchange.anthropic:
        from tailrace.api.anthropic import models as theirs

        card = theirs.one(exchange, card)
    await exchange.answer(200, msgspec.json.encode(card))


async def health(service: Service, exchange: Exchange) -> None:
    """GET /health, /health/ready: 200 while a request would be served. /health/live: 200 unless this process cannot
    bring an engine back by itself. `/health?ready` is /health/ready; during a drain, and while the server sleeps,
    /health stays 200, and /health/ready where a request would wake it."""
    client = service.client
    path = exchange.path
    ready_wanted = path == "/health/ready" or b"ready" in exchange.query.split(b"&")
    if path == "/health/live":
        good = client.state != "failed"
    else:
        asleep = client.state in ("sleeping", "asleep") or service.slept == "waking"
        good = service.ready if ready_wanted else service.text is not None and (client.healthy or asleep)
    body = {
        "status": "ok" if good else "unavailable",
        "engine": client.state if client.healthy or client.state != "ready" else "hung",
        "asleep": client.state in ("sleeping", "asleep"),
        "draining": service.draining,
        "restarts": client.restarts,
        "error": client.error or None,
    }
    rows = [(b"content-type", b"application/json")] + ([] if good else [(b"retry-after", b"1")])
    await exchange.answer(200 if good else 503, msgspec.json.encode(body), rows)


async def version(service: Service, exchange: Exchange) -> None:
    """GET /version."""
    await exchange.answer(200, msgspec.json.encode({"version": tailrace.__version__}))


async def openapi(service: Service, exchange: Exchange) -> None:
    """GET /openapi.json: this server's endpoints, with its own limits and names."""
    from tailrace.api.reference.openapi import document

    await exchange.answer(200, await asyncio.to_thread(lambda: msgspec.json.encode(document(service.settings))))


async def metrics(service: Service, exchange: Exchange) -> None:
    """GET /metrics."""
    client = service.client
    service.settle()
    service.metrics.limits(service.guard.limited)
    service.metrics.content = service.stored()
    service.metrics.ledger = service.accounts.numbers()
    counts = client.gauges.adapters
    service.metrics.adapters = {one.name: counts.get(one.id, (0, 0)) for one in service.adapters.all}
    service.metrics.max_adapters = service.settings.max_loras
    service.metrics.gauges(client.gauges, client.baseline, client.incarnation)
    if service.slept != "awake" or client.wakes:
        sleeper = service.sleeper
        service.metrics.sleep(sleeper.state, sleeper.sleeps, sleeper.wakes, sleeper.wake_seconds)
    data = await asyncio.to_thread(
        service.metrics.render, ready=client.ready, healthy=client.healthy, restarts=client.restarts
    )
    await exchange.answer(200, data, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")])
