"""Errors, keys and headers as Anthropic's clients expect them.

Errors are found where chats are checked, with OpenAI's names of parameters: they are told with Anthropic's here.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tailrace.api.errors import HttpError

if TYPE_CHECKING:
    from tailrace.api.exchange import Exchange

VERSIONS = (b"2023-06-01", b"2026-10-21")
"""They differ in what requests are refused, and nothing that the later one refuses is served here but for temperature,
top_p and top_k: those are taken in either."""
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; other errors of the client's are invalid requests, and the server's are `api_error`."""
PARAMS = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "thinking",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
RENAMED = (
    (re.compile(r"tools\[(\d+)\]\.function\.parameters"), r"tools[\1].input_schema"),
    (re.compile(r"tools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"\bresponse_format\.json_schema\.schema\b"), "output_config.format.schema"),
    (re.compile(r"\btool_choice \"none\""), 'tool_choice {"type": "none"}'),
    (re.compile(r"Authorization: Bearer KEY"), "x-api-key: KEY"),
)


def speak(exchange: Exchange) -> None:
    """From here on this exchange is with one of Anthropic's clients."""
    exchange.anthropic = True
    exchange.key = exchange.header(b"x-api-key")
    exchange.extra.append((b"request-id", exchange.id.encode()))
    exchange.error_body = partial(error_body, request=exchange.id)


def need_version(exchange: Exchange) -> None:
    """Raises HttpError for a version of the API that is not this one; none is the usual one."""
    given = exchange.header(b"anthropic-version")
    if given is not None and given not in VERSIONS:
        shown = given.decode("latin-1")[:40]
        raise HttpError(400, f"anthropic-version: {shown!r} is not a version that is served; 2026-10-21 is")


def named(error: HttpError) -> str:
    """What is wrong, with Anthropic's names; it begins with the parameter's where it does not say that anyway."""
    text = str(error)
    param = error.param
    for pattern, new in RENAMED:
        text = pattern.sub(new, text)
        param = pattern.sub(new, param) if param else param
    param = PARAMS.get(param, param) if param else param
    return text if not param or param in text else f"{param}: {text}"


def error_body(error: HttpError, *, request: str) -> bytes:
    """An error as JSON."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    detail = {"type": kind, "message": named(error)}
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request})
