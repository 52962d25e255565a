"""The endpoints: each takes an exchange, and answers it or raises an error of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Raw, UnsetType

import tailrace
from tailrace.api import schema
from tailrace.api.exchange import Exchange
from tailrace.api.messages import for_template
from tailrace.api.params import Asked, check, check_ids, too_long, unsupported
from tailrace.api.schema import Chat, Completion, Message
from tailrace.api.service import Service
from tailrace.api.shapes import ChatShape, TextShape
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.text import Text

T = TypeVar("T")
INLINE_CHARS = 4000
"""Longer text is tokenized in a worker thread, so that it does not hold the other streams up."""
TEXT_PLAIN = [(b"content-type", b"text/plain; charset=utf-8")]


async def read(service: Service, exchange: Exchange, decoder: msgspec.json.Decoder[T]) -> T:
    """The body of a request, decoded."""
    settings = service.settings
    try:
        data = await exchange.body(settings.limits.body_bytes, settings.timeouts.body, service.bodies)
        return schema.decode(decoder, data)
    finally:
        exchange.release(service.bodies)


async def tokenized(size: int, work: Callable[[], T]) -> T:
    """Runs tokenizing work: at once where it is short."""
    return work() if size <= INLINE_CHARS else await asyncio.to_thread(work)


def lower_bound(text: Text, *parts: str) -> int:
    """Tokens that these texts have at least, without tokenizing them."""
    return sum(map(text.min_tokens, parts))


async def chat_prompt(text: Text, body: Chat, service: Service, context: int, *, parse_special: bool) -> list[int]:
    """The ids of a chat. Raises InvalidInput, quickly where the text is far too long."""
    if parse_special:
        raise unsupported("tailrace.parse_special", "is a parameter of /v1/completions: chats mark turns themselves")
    messages = for_template(body.messages, service.settings.limits)
    least = lower_bound(text, *(message["content"] for message in messages))
    if least > context:
        raise too_long(least, None, context, exact=False)
    arguments = body.chat_template_kwargs
    if arguments and not service.settings.template_args:
        raise unsupported("chat_template_kwargs", "is switched off on this server")
    size = sum(len(message["content"]) for message in messages)
    return await tokenized(size, lambda: text.encode_chat(messages, template_args=arguments))


async def chat_completions(service: Service, exchange: Exchange) -> None:
    """POST /v1/chat/completions."""
    service.need()
    body = await read(service, exchange, schema.CHAT)
    text, ready = service.need()
    service.need_model(body.model)
    asked = check(body, service.settings.limits, vocab=text.vocab_size, timeline=wants_timeline(exchange))
    prompt = await chat_prompt(text, body, service, ready.max_context, parse_special=asked.parse_special)
    service.need()
    plan = service.plan(asked, [prompt], ready.max_context, "chatcmpl", start=True)
    service.submit(plan, exchange, "chat")
    await service.respond(plan, exchange, ChatShape(plan.facts(body.model), service.table(text)))


def wants_timeline(exchange: Exchange) -> bool:
    """Whether the header asks for it."""
    return exchange.header(b"x-tailrace-timeline") in (b"1", b"true")


def read_prompts(value: Raw | UnsetType, most: int, context: int) -> list[str] | list[list[int]]:
    """The prompts of a completions request, all of one kind. Raises InvalidInput, before anything is decoded where
    there are absurdly many."""
    data = b"" if isinstance(value, UnsetType) else bytes(value)
    if data in (b"", b"null"):
        raise InvalidInput("prompt is missing", param="prompt", code="missing_required_parameter")
    if data[:1] == b"[":
        refuse_absurd(data, most, context)
    prompt: Any = schema.raw(Raw(data), str | list[str | int | list[int]], "prompt", max_bytes=len(data))
    if isinstance(prompt, str):
        return some([prompt])
    if prompt and all(isinstance(one, int) for one in prompt):
        return some([prompt])
    if len(prompt) > most:
        raise InvalidInput(f"prompt has {len(prompt)} prompts; at most {most} are possible", param="prompt")
    if len({type(one) for one in prompt}) > 1 or any(isinstance(one, int) for one in prompt):
        raise InvalidInput("prompt mixes texts and token ids: give one kind", param="prompt", code="invalid_type")
    return some(prompt)


def some(prompts: list[Any]) -> list[Any]:
    """The prompts, unless one is empty or there are none."""
    if not prompts or not all(prompts):
        raise InvalidInput("a prompt is empty: give at least one token", param="prompt")
    return prompts


def refuse_absurd(data: bytes, most: int, context: int) -> None:
    """Counts separators in the JSON of a list: a lower bound of what decoding it would make."""
    texts = (data.count(b'"') - data.count(b'\\"')) // 2
    lists = 0 if texts else data.count(b"[") - 1
    if max(texts, lists) > most:
        raise InvalidInput(f"prompt has {max(texts, lists)} prompts; at most {most} are possible", param="prompt")
    if not texts and data.count(b",") - max(0, lists - 1) > max(1, lists) * context:
        raise too_long(context + 1, None, context, exact=False)


async def completion_prompts(
    text: Text, prompts: Sequence[str] | Sequence[list[int]], asked: Asked, context: int
) -> list[list[int]]:
    """The ids of every prompt. Raises InvalidInput."""
    ids: list[list[int]] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            if len(prompt) > context:
                raise too_long(len(prompt), None, context)
            check_ids(prompt, text.vocab_size, "prompt")
            ids.append(list(prompt))
            continue
        least = lower_bound(text, prompt)
        if least > context:
            raise too_long(least, None, context, exact=False)
        encoded = await tokenized(len(prompt), partial(text.encode, prompt, parse_special=asked.parse_special))
        if not encoded:
            raise InvalidInput("a prompt is empty: give at least one token", param="prompt")
        ids.append(encoded)
    return ids


async def completions(service: Service, exchange: Exchange) -> None:
    """POST /v1/completions."""
    service.need()
    body = await read(service, exchange, schema.COMPLETION)
    text, ready = service.need()
    service.need_model(body.model)
    limits = service.settings.limits
    asked = check(body, limits, vocab=text.vocab_size, timeline=wants_timeline(exchange))
    given = read_prompts(body.prompt, limits.prompts, ready.max_context)
    if len(given) * asked.n > limits.choices:
        raise InvalidInput(
            f"n times prompts is {len(given) * asked.n}; at most {limits.choices} are possible", param="n"
        )
    prompts = await completion_prompts(text, given, asked, ready.max_context)
    service.need()
    plan = service.plan(asked, prompts, ready.max_context, "cmpl", start=False)
    echo = echoed(text, body, given, asked)
    shape = TextShape(plan.facts(body.model), service.table(text), echo, echo_logprobs=asked.echo and asked.logprobs)
    if asked.echo and asked.max_tokens == 0 and not asked.logprobs:
        await echo_only(service, exchange, shape, plan.generation.choices, asked)
        return
    service.submit(plan, exchange, "completions")
    await service.respond(plan, exchange, shape)


def echoed(text: Text, body: Completion, given: Sequence[str] | Sequence[list[int]], asked: Asked) -> dict[int, str]:
    """The prompt's text for each choice, where it is to be echoed."""
    if not body.echo:
        return {}
    texts = [one if isinstance(one, str) else text.decode(one, skip_special=False) for one in given]
    return {index: texts[index // asked.n] for index in range(len(texts) * asked.n)}


async def echo_only(
    service: Service, exchange: Exchange, shape: TextShape, choices: Sequence[Any], asked: Asked
) -> None:
    """An echo without new tokens or log-probabilities needs no engine."""
    from tailrace.api.exchange import EVENT_STREAM
    from tailrace.api.generation import Delta
    from tailrace.api.shapes import DONE, usage_of

    deltas = [(choice, Delta("", finish="length")) for choice in choices]
    for choice in choices:
        choice.finish = "length"
    fields = {"usage": usage_of(choices, asked.n)}
    if not asked.stream:
        await exchange.answer(200, shape.whole(choices, deltas, fields))
        return
    await exchange.begin(200, list(EVENT_STREAM))
    data = b"".join(map(shape.opening, choices)) + b"".join(shape.chunk(*pair) for pair in deltas)
    await exchange.write(data + (shape.closing(fields) if asked.include_usage else b"") + DONE, more=False)


async def tokenize(service: Service, exchange: Exchange) -> None:
    """POST /tokenize: a prompt or messages, to ids."""
    body = await read(service, exchange, schema.TOKENIZE)
    text, ready = service.need()
    if body.model is not None:
        service.need_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInput("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        prompt = body.prompt
        bos = body.add_special_tokens is not False
        special = bool(body.parse_special)
        ids = await tokenized(len(prompt), lambda: text.encode(prompt, add_bos=bos, parse_special=special))
    else:
        messages = for_template(_messages(body.messages), service.settings.limits)
        generation = body.add_generation_prompt is not False
        size = sum(len(message["content"]) for message in messages)
        ids = await tokenized(size, lambda: text.encode_chat(messages, add_generation_prompt=generation))
    table = service.table(text)
    spelled = [table[one].decode("utf-8", "replace") for one in ids] if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": ready.max_context, "tokens": ids, "token_strs": spelled}
    await exchange.answer(200, msgspec.json.encode(answer))


def _messages(messages: Sequence[Message] | None) -> Sequence[Message]:
    return messages or ()


async def detokenize(service: Service, exchange: Exchange) -> None:
    """POST /detokenize: ids to text, control tokens shown unless asked otherwise."""
    body = await read(service, exchange, schema.DETOKENIZE)
    text, _ = service.need()
    if body.model is not None:
        service.need_model(body.model)
    check_ids(body.tokens, text.vocab_size, "tokens")
    skip = bool(body.skip_special_tokens)
    prompt = await tokenized(len(body.tokens), lambda: text.decode(body.tokens, skip_special=skip))
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


async def models(service: Service, exchange: Exchange) -> None:
    """GET /v1/models."""
    service.need()
    cards = [_model_card(service, name) for name in service.settings.names]
    await exchange.answer(200, msgspec.json.encode({"object": "list", "data": cards}))


async def model(service: Service, exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    service.need()
    name = exchange.scope["path"].removeprefix("/v1/models/")
    service.need_model(name)
    await exchange.answer(200, msgspec.json.encode(_model_card(service, name)))


async def health(service: Service, exchange: Exchange) -> None:
    """GET /health, /health/ready: 200 while a request would be served. /health/live: 200 unless this process cannot
    bring an engine back by itself. `/health?ready` is /health/ready; during a drain /health stays 200."""
    client = service.client
    path = exchange.scope["path"]
    ready_wanted = path == "/health/ready" or b"ready" in exchange.scope.get("query_string", b"").split(b"&")
    if path == "/health/live":
        good = client.state != "failed"
    else:
        good = service.ready if ready_wanted else service.text is not None and client.healthy
    body = {
        "status": "ok" if good else "unavailable",
        "engine": client.state if client.healthy or client.state != "ready" else "hung",
        "draining": service.draining,
        "restarts": client.restarts,
        "error": client.error or None,
    }
    rows = [(b"content-type", b"application/json")] + ([] if good else [(b"retry-after", b"1")])
    await exchange.answer(200 if good else 503, msgspec.json.encode(body), rows)


async def version(service: Service, exchange: Exchange) -> None:
    """GET /version."""
    await exchange.answer(200, msgspec.json.encode({"version": tailrace.__version__}))


async def metrics(service: Service, exchange: Exchange) -> None:
    """GET /metrics."""
    client = service.client
    service.settle()
    service.metrics.gauges(client.gauges, client.baseline, client.restarts)
    data = await asyncio.to_thread(
        service.metrics.render, ready=client.ready, healthy=client.healthy, restarts=client.restarts
    )
    await exchange.answer(200, data, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")])
