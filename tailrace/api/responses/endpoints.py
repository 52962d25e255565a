"""The endpoints of responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tailrace.api.endpoints import chat_plan, read
from tailrace.api.exchange import Exchange
from tailrace.api.params import given, unsupported
from tailrace.api.responses import body as bodies
from tailrace.api.responses import items, translate
from tailrace.api.responses.body import Create
from tailrace.api.responses.shape import ResponseShape
from tailrace.api.responses.truncation import shortest_cut
from tailrace.api.schema import Message
from tailrace.api.service import Plan, Service

ROOM = 8
"""One part in so many of the context is what `truncation: "auto"` leaves for an answer that nobody has bounded."""


@dataclass(frozen=True)
class Asked:
    """A checked request: its own input, all of the conversation, and whether the response is to be stored."""

    body: Create
    own: list[items.Item]
    conversation: list[items.Item]
    store: bool


async def create(service: Service, exchange: Exchange) -> None:
    """POST /v1/responses."""
    service.need()
    asked = await ask(service, await read(service, exchange, bodies.CREATE))
    plan, call_id = await planned(service, exchange, asked)
    shape = shape_of(service, asked, plan, call_id)
    with translate.own_words():
        service.submit(plan, exchange, "responses", stored=asked.store)
    await service.respond(plan, exchange, shape)


async def ask(service: Service, body: Create) -> Asked:
    """Everything but the prompt, checked. Raises InvalidInput."""
    service.need()
    service.need_model(body.model)
    bodies.check(body)
    if body.background:
        raise unsupported("background", "can only be false")
    if body.store:
        raise unsupported("store", "can only be false: this server has no content store (--content-store)")
    if body.previous_response_id is not None:
        raise unsupported(
            "previous_response_id", "needs a stored response, and this server has no content store (--content-store)"
        )
    own = items.read(body.input, service.settings.limits)
    return Asked(body, own, own, False)


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
        "service_tier": "default",
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
