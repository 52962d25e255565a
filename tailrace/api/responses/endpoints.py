"""The endpoints of responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UnsetType

from tailrace.api.content.pages import missing, name_in, need_store, sliced
from tailrace.api.content.query import Query
from tailrace.api.endpoints import chat_plan, read
from tailrace.api.errors import HttpError
from tailrace.api.exchange import Exchange
from tailrace.api.params import given, unsupported
from tailrace.api.responses import background, items, kept, translate
from tailrace.api.responses import body as bodies
from tailrace.api.responses.body import Create
from tailrace.api.responses.shape import ResponseShape
from tailrace.api.responses.truncation import shortest_cut
from tailrace.api.schema import Message
from tailrace.api.service import Plan, Service
from tailrace.terms import InvalidInput

SHOWING = ("include[]", "include", "stream")
ITEMS = ("after", "limit", "order", "include[]", "include")
ROOM = 8
"""One part in so many of the context is what `truncation: "auto"` leaves for an answer that nobody has bounded."""

LEAST = 2000
"""Bytes of a stored response without text."""


@dataclass(frozen=True)
class Asked:
    """A checked request: all of the conversation so far, and whether the response is to be stored."""

    body: Create
    conversation: list[items.Item]
    store: bool


async def create(service: Service, exchange: Exchange) -> None:
    """POST /v1/responses."""
    service.need()
    asked = await ask(service, exchange, await read(service, exchange, bodies.CREATE))
    plan, call_id = await planned(service, exchange, asked)
    shape = shape_of(service, asked, plan, call_id)
    if asked.body.background:
        with translate.own_words():
            await background.begin(service, exchange, plan, shape, asked.conversation)
        return
    keep = kept.keeper(service, exchange, plan, asked.conversation, shape.head) if asked.store else None
    with translate.own_words():
        service.submit(plan, exchange, "responses", stored=asked.store)
        await service.respond(plan, exchange, shape, keep)


async def ask(service: Service, exchange: Exchange, body: Create) -> Asked:
    """Everything but the prompt, checked, with the conversation that it goes on. Raises InvalidInput, or HttpError of
    the content store."""
    service.need()
    service.need_model(body.model)
    bodies.check(body)
    store = _stores(service, body)
    if body.background and not store:
        raise unsupported("background", "needs a content store (--content-store) with room, and store not to be false")
    if body.background and body.stream:
        raise unsupported("background", "cannot be combined with stream: events are not stored")
    own = items.read(body.input, service.settings.limits)
    before: list[items.Item] = []
    if body.previous_response_id is not None:
        if service.content is None:
            raise unsupported(
                "previous_response_id",
                "needs a stored response, and this server has no content store (--content-store)",
            )
        before = await kept.turns(service, exchange, body.previous_response_id)
    if len(before) + len(own) > service.settings.limits.messages:
        raise InvalidInput(
            f"the conversation has {len(before) + len(own)} items; at most {service.settings.limits.messages} are "
            "possible",
            param="input",
        )
    return Asked(body, [*before, *own], store)


def _stores(service: Service, body: Create) -> bool:
    """Whether the response is to be stored: by default where it can be. Who asks for it is refused where it cannot."""
    if service.content is None:
        if body.store:
            raise unsupported("store", "can only be false: this server has no content store (--content-store)")
        return False
    if body.store is False:
        return False
    try:
        service.content.need_room(LEAST + (0 if isinstance(body.input, UnsetType) else len(bytes(body.input))))
    except HttpError:
        if body.store:
            raise
        return False
    return True


async def planned(service: Service, exchange: Exchange, asked: Asked) -> tuple[Plan, Callable[[], str]]:
    """The generation, ready to be submitted, and what makes ids of calls. Raises InvalidInput."""
    body, limits = asked.body, service.settings.limits
    _, ready = service.need()

    async def plan(messages: Sequence[Message], roomy: bool) -> tuple[Plan, Callable[[], str]]:
        told = body
        if roomy and body.max_output_tokens is None:
            told = msgspec.structs.replace(body, max_output_tokens=max(1, ready.max_context // ROOM))
        return await chat_plan(service, exchange, translate.as_chat(told, messages, limits), "resp_")

    with translate.own_words():
        messages = items.messages(asked.conversation, body.instructions)
        if body.truncation == "auto":
            return await shortest_cut(messages, plan)
        return await plan(messages, False)


def shape_of(service: Service, asked: Asked, plan: Plan, call_id: Callable[[], str]) -> ResponseShape:
    """The shape of the answer."""
    assert service.text is not None
    head = head_of(asked, plan)
    return ResponseShape(head, service.table(service.text), call_id, logprobs=plan.asked.logprobs)


def head_of(asked: Asked, plan: Plan) -> dict[str, Any]:
    """A response as far as it is known before the answer."""
    body, params = asked.body, plan.asked.params
    choice = given(body.tool_choice)
    return {
        "id": plan.name,
        "object": "response",
        "created_at": plan.created,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": _effort(body), "summary": None},
        "service_tier": plan.asked.service_tier or "default",
        "store": asked.store,
        "temperature": params.temperature,
        "text": {"format": translate.shown_format(msgspec.UNSET if body.text is None else body.text.format)},
        "tool_choice": "auto" if choice is None else msgspec.json.decode(choice),
        "tools": translate.shown_tools(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _effort(body: Create) -> Any:
    effort = None if body.reasoning is None else given(body.reasoning.effort)
    return None if effort is None else msgspec.json.decode(effort)


async def get(service: Service, exchange: Exchange) -> None:
    """GET /v1/responses/{id}."""
    query = Query(exchange, SHOWING)
    if query.values.get("stream", "false") != "false":
        raise unsupported("stream", "can only be false: events are not stored")
    _, response = await kept.find_response(service, exchange, name_in(exchange))
    await exchange.answer(200, response)


async def delete(service: Service, exchange: Exchange) -> None:
    """DELETE /v1/responses/{id}."""
    name, store = name_in(exchange), need_store(service)
    now = store.clock()
    await background.cancel(service, exchange, name)
    if not await store.run(lambda shelf: shelf.delete("response", name, exchange.tenant, now)):
        raise missing("response", name)
    await exchange.answer(200, msgspec.json.encode({"id": name, "object": "response", "deleted": True}))


async def cancel(service: Service, exchange: Exchange) -> None:
    """POST /v1/responses/{id}/cancel: of one that runs in the background. One that has ended stays as it is."""
    name = name_in(exchange, -2)
    await background.cancel(service, exchange, name)
    _, response = await kept.find_response(service, exchange, name)
    shown = msgspec.json.decode(response)
    if not shown["background"]:
        raise InvalidInput("only responses that run in the background can be cancelled", param="id")
    if shown["status"] in kept.RUNNING:
        raise InvalidInput("it runs on another server of this store: cancel it there", param="id")
    await exchange.answer(200, response)


async def input_items(service: Service, exchange: Exchange) -> None:
    """GET /v1/responses/{id}/input_items: all that the response was an answer to, earlier turns included."""
    query = Query(exchange, ITEMS)
    conversation, _ = await kept.find_response(service, exchange, name_in(exchange, -2))
    await exchange.answer(200, msgspec.json.encode(sliced(conversation, query, "desc")))
