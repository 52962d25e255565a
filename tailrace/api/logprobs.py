"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tailrace.engine.protocol import TokenLogprob

if TYPE_CHECKING:
    from tailrace.text import TokenBytes

FLOOR = -9999.0
"""What stands for minus infinity, which JSON cannot say."""


def _finite(value: float) -> float:
    return value if value > FLOOR else FLOOR


def spell(table: TokenBytes, token: int) -> tuple[str, list[int]]:
    """A token's text (incomplete characters as U+FFFD) and its bytes."""
    data = table[token]
    return data.decode("utf-8", "replace"), list(data)


def chat_content(table: TokenBytes, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of chat completions."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text, data = spell(table, token)
        return {"token": text, "logprob": _finite(value), "bytes": data}

    return [
        {**entry(token, one.logprob), "top_logprobs": [entry(other, value) for other, value in one.top]}
        for token, one in zip(tokens, logprobs, strict=False)
    ]


def text_logprobs(
    table: TokenBytes, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], offsets: Sequence[int], top: int
) -> dict[str, Any]:
    """`choices[].logprobs` of text completions; None stands where a token has no log-probability (a prompt's first)."""
    rows: list[dict[str, float] | None] = []
    for token, one in zip(tokens, logprobs, strict=False):
        if one is None:
            rows.append(None)
            continue
        row: dict[str, float] = {}
        for other, value in one.top:  # of several that spell alike (parts of characters), the likeliest
            text = spell(table, other)[0]
            row[text] = max(_finite(value), row.get(text, FLOOR))
        row[spell(table, token)[0]] = _finite(one.logprob)
        rows.append(row)
    return {
        "tokens": [spell(table, token)[0] for token in tokens],
        "token_logprobs": [None if one is None else _finite(one.logprob) for one in logprobs[: len(tokens)]],
        "top_logprobs": rows if top > 0 else None,
        "text_offset": list(offsets),
    }


def join_text(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several pieces of `text_logprobs` as one."""
    joined: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": None, "text_offset": []}
    for part in parts:
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined[name] += part[name]
        if part["top_logprobs"] is not None:
            joined["top_logprobs"] = (joined["top_logprobs"] or []) + part["top_logprobs"]
    return joined
