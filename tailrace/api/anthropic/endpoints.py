"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.api.answers import new_call_id
from tailrace.api.anthropic import dialect
from tailrace.api.anthropic.convert import chat_of
from tailrace.api.anthropic.schema import COUNT_TOKENS, MESSAGES, CountTokens, Messages
from tailrace.api.anthropic.shape import MessageShape
from tailrace.api.endpoints import chat_plan, read
from tailrace.api.params import unsupported
from tailrace.api.prompts import Conversation, conversation
from tailrace.api.tools import read_tools
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.api.exchange import Exchange
    from tailrace.api.service import Service
    from tailrace.text import Text

SWITCH = "enable_thinking"
"""What templates call the switch of reasoning."""


async def messages(service: Service, exchange: Exchange) -> None:
    """POST /v1/messages."""
    dialect.need_version(exchange)
    service.need()
    body = await read(service, exchange, MESSAGES)
    text, _ = service.need()
    service.need_model(body.model)
    arguments, effort, budget = await thinking(service, text, body)
    chat = chat_of(body, service.settings.limits, arguments=arguments, effort=effort)
    plan, call_id = await chat_plan(service, exchange, chat, "msg_", budget)
    service.submit(plan, exchange, "messages")
    if call_id is new_call_id:
        call_id = _tool_use_id
    await service.respond(plan, exchange, MessageShape(plan.facts(body.model), call_id, exchange.error_body))


def _tool_use_id() -> str:
    return new_call_id(prefix="toolu_")


async def count_tokens(service: Service, exchange: Exchange) -> None:
    """POST /v1/messages/count_tokens: the tokens of a prompt, as they would be computed."""
    dialect.need_version(exchange)
    service.need(engine=False)
    body = await read(service, exchange, COUNT_TOKENS)
    text, ready = service.need(engine=False)
    service.need_model(body.model)
    arguments, effort, _ = await thinking(service, text, body)
    asked = Messages(**{name: getattr(body, name) for name in body.__struct_fields__}, max_tokens=1)
    chat = chat_of(asked, service.settings.limits, arguments=arguments, effort=effort)
    tools = read_tools(chat, service.settings.limits)
    await service.answers.tools(text, tools)
    given_to = Conversation(chat.messages, tools.offered, chat.chat_template_kwargs, chat.reasoning_effort)
    ids = await conversation(service, given_to, ready.max_context)
    await exchange.answer(200, msgspec.json.encode({"input_tokens": len(ids)}))


async def thinking(service: Service, text: Text, body: CountTokens) -> tuple[dict[str, Any], str | None, int | None]:
    """What `thinking` means: values for the template, an effort for it, and the most tokens of reasoning. Without it
    the model does not reason, where its template has a switch. Raises InvalidInput."""
    config = body.thinking
    known = await asyncio.to_thread(lambda: text.template_variables)  # reads the template, the first time
    form = service.answers.reasoning(text)
    if config is None or config.type == "disabled":
        if config is not None and config.budget_tokens is not None:
            raise InvalidInput("thinking.budget_tokens belongs to enabled thinking", param="thinking.budget_tokens")
        if form is not None and SWITCH in known:
            return {}, "none", None
        if form is not None and config is not None:
            raise unsupported("thinking.type", 'cannot be "disabled": this model\'s template has no switch for it')
        return {}, None, None
    if config.display not in (None, "summarized"):
        raise unsupported("thinking.display", 'can only be "summarized": reasoning is shown')
    if form is None:
        raise unsupported("thinking", "is not supported: this model does not reason")
    if config.type == "adaptive" and config.budget_tokens is not None:
        raise InvalidInput("thinking.budget_tokens belongs to enabled thinking", param="thinking.budget_tokens")
    if config.type == "enabled":
        _check_budget(config.budget_tokens, body)
        if text.tag_id(form.closer) is None:
            raise unsupported(
                "thinking.budget_tokens", 'cannot be kept by this model, whose tags are several tokens: use "adaptive"'
            )
    return ({SWITCH: True} if SWITCH in known else {}), None, config.budget_tokens


def _check_budget(budget: int | None, body: CountTokens) -> None:
    where = "thinking.budget_tokens"
    if budget is None:
        raise InvalidInput(f"missing parameter: {where}", param=where, code="missing_required_parameter")
    most = body.max_tokens - 1 if isinstance(body, Messages) else (1 << 31) - 1
    if not 1 <= budget <= most:
        raise InvalidInput(f"{where} must be at least 1 and less than max_tokens, not {budget}", param=where)
