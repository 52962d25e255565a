"""GET /v1/models and /v1/models/{id}, as Anthropic has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tailrace.api.anthropic import dialect
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.api.exchange import Exchange

MOST = 1000
KNOWN = ("limit", "after_id", "before_id", "beta")
"""`beta` comes with what the clients have under that name; it changes nothing."""


def page(exchange: Exchange, cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of the list that is asked for, of the same cards as OpenAI's. Raises InvalidInput."""
    from tailrace.api.content.query import Query

    dialect.need_version(exchange)
    query = Query(exchange, KNOWN)
    limit = query.limit(20, MOST)
    after, before = query.values.get("after_id"), query.values.get("before_id")
    if after is not None and before is not None:
        raise InvalidInput("after_id and before_id cannot be combined", param="before_id")
    names = [card["id"] for card in cards]
    for param, name in (("after_id", after), ("before_id", before)):
        if name is not None and name not in names:
            raise InvalidInput(f"{param} is the id of none of them", param=param)
    if before is not None:
        end = names.index(before)
        start = max(0, end - limit)
        more = start > 0
    else:
        start = names.index(after) + 1 if after is not None else 0
        end = min(len(cards), start + limit)
        more = end < len(cards)
    rows = [_info(card) for card in cards[start:end]]
    return {
        "data": rows,
        "has_more": more,
        "first_id": rows[0]["id"] if rows else None,
        "last_id": rows[-1]["id"] if rows else None,
    }


def one(exchange: Exchange, card: Mapping[str, Any]) -> dict[str, Any]:
    """A model. Raises HttpError for a version of the API that is not served, InvalidInput for a query."""
    from tailrace.api.content.query import Query

    dialect.need_version(exchange)
    Query(exchange, ("beta",))
    return _info(card)


def _info(card: Mapping[str, Any]) -> dict[str, Any]:
    longest = card["max_model_len"]
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": longest,
        "max_tokens": longest - 1 if longest else None,
        "capabilities": None,
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
    }
