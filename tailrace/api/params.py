"""Checking parameters: a decoded body and the limits in, `SamplingParams` out. Every refusal names its parameter."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw, UnsetType

from tailrace.api.grammars import Wanted, wanted
from tailrace.api.priority import LEAST_URGENT, MOST_URGENT, ranked
from tailrace.api.schema import Body, Chat, Common, Completion, raw
from tailrace.api.settings import Limits
from tailrace.engine.protocol import SamplingParams
from tailrace.terms import InvalidInput

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for text completions; chat's is the rest of the context."""
SEED_MASK = (1 << 64) - 1
MOST = (1 << 31) - 1
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
INT_BOUNDS = {
    "top_k": (-1, MOST),
    "min_tokens": (0, MOST),
    "seed": (-(1 << 63), SEED_MASK),
    "priority": (MOST_URGENT, LEAST_URGENT),
}
"""The least and the greatest value of each."""
ID_BYTES = 24
"""No valid entry of a list of token ids is longer, blanks included."""


@dataclass(frozen=True)
class Asked:
    """What a request wants, apart from its prompt. `max_tokens` None is the rest of the context."""

    params: SamplingParams
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    logprobs: bool
    timeline: bool
    token_times: bool
    parse_special: bool
    priority: int
    user: str | None
    metadata: dict[str, str] | None
    form: Wanted | None  # what the output must match
    service_tier: str | None = None  # that it gets, where one was asked for


def unsupported(param: str, why: str = "is not supported") -> InvalidInput:
    """The refusal of a parameter that exists elsewhere."""
    return InvalidInput(f"{param} {why}", param=param, code="unsupported_parameter")


def bounded(value: float, low: float, high: float, param: str) -> None:
    """Raises InvalidInput unless low <= value <= high (NaN is never inside)."""
    if not low <= value <= high:
        shown = repr(value).removesuffix(".0")
        raise InvalidInput(f"{param} must be between {low:g} and {high:g}, not {shown}", param=param)


def bounded_int(value: int, low: int, high: int, param: str) -> None:
    """Raises InvalidInput unless low <= value <= high."""
    if not low <= value <= high:
        shown = str(value) if abs(value) < 1 << 64 else "a number beyond 64 bits"
        raise InvalidInput(f"{param} must be between {low} and {high}, not {shown}", param=param)


def given(value: Raw | UnsetType) -> Raw | None:
    """The raw value, or None where it is absent or null."""
    return None if isinstance(value, UnsetType) or bytes(value) == b"null" else value


def refuse_unserved(body: Body) -> None:
    """Refuses by name every parameter that is not served (`Body.unserved`). Raises InvalidInput."""
    for name, only in body.unserved.items():
        value: Any = body
        for part in name.split("."):
            value = getattr(value, part)
            if value is None or isinstance(value, UnsetType):
                break
        else:
            value = given(value) if isinstance(value, Raw) else value
            if value is not None and value not in only.values:
                raise unsupported(name, only.why)


def stop_strings(body: Common, limits: Limits) -> tuple[str, ...]:
    """The stop strings, checked."""
    value = given(body.stop)
    if value is None:
        return ()
    most = limits.stop_strings * (limits.stop_chars * 6 + 8) + 16
    decoded: str | list[str] = raw(value, str | list[str], "stop", max_bytes=most)
    stops = [decoded] if isinstance(decoded, str) else decoded
    if len(stops) > limits.stop_strings:
        raise InvalidInput(f"stop has {len(stops)} strings; at most {limits.stop_strings} are possible", param="stop")
    for stop in stops:
        if not stop:
            raise InvalidInput("a stop string cannot be empty", param="stop")
        if len(stop) > limits.stop_chars:
            raise InvalidInput(f"a stop string can have at most {limits.stop_chars} characters", param="stop")
    return tuple(dict.fromkeys(stops))


def stop_ids(body: Common, limits: Limits, vocab: int) -> tuple[int, ...]:
    """The stop token ids, checked."""
    value = given(body.stop_token_ids)
    if value is None:
        return ()
    ids: list[int] = raw(value, list[int], "stop_token_ids", max_bytes=limits.stop_strings * ID_BYTES + 16)
    if len(ids) > limits.stop_strings:
        raise InvalidInput(
            f"stop_token_ids has {len(ids)} ids; at most {limits.stop_strings} are possible", param="stop_token_ids"
        )
    check_ids(ids, vocab, "stop_token_ids")
    return tuple(dict.fromkeys(ids))


def logit_bias(body: Common, limits: Limits, vocab: int) -> dict[int, float]:
    """The logit bias, checked."""
    value = given(body.logit_bias)
    if value is None:
        return {}
    bias: dict[int, float] = raw(value, dict[int, float], "logit_bias", max_bytes=limits.logit_bias * 64 + 16)
    if len(bias) > limits.logit_bias:
        raise InvalidInput(
            f"logit_bias has {len(bias)} entries; at most {limits.logit_bias} are possible", param="logit_bias"
        )
    check_ids(bias, vocab, "logit_bias")
    for amount in bias.values():
        bounded(amount, -100.0, 100.0, "logit_bias")
    return bias


def check_ids(ids: Collection[int], vocab: int, param: str) -> None:
    """Raises InvalidInput unless every id is a token of the vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab):
        return
    for token in ids:
        if not 0 <= token < vocab:
            shown = str(token) if abs(token) < 1 << 64 else "a number beyond 64 bits"
            raise InvalidInput(f"{param}: {shown} is not a token id (0 to {vocab - 1})", param=param)


def _chat_max_tokens(body: Chat) -> tuple[int | None, str]:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidInput(
            f"max_tokens ({old}) and max_completion_tokens ({new}) contradict each other: give one of them",
            param="max_completion_tokens",
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _logprobs(body: Common, limits: Limits) -> int:
    """-1 none, 0 of the chosen token alone, n of the n likeliest too."""
    if isinstance(body, Chat):
        if body.top_logprobs is not None:
            bounded_int(body.top_logprobs, 0, limits.logprobs, "top_logprobs")
            if body.top_logprobs and not body.logprobs:
                raise InvalidInput("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (body.top_logprobs or 0) if body.logprobs else -1
    assert isinstance(body, Completion)
    if body.logprobs is None:
        return -1
    bounded_int(body.logprobs, 0, limits.logprobs, "logprobs")
    return body.logprobs


def _check_completion(body: Completion, n: int) -> None:
    if body.best_of is not None and body.best_of not in (1, n):
        raise unsupported("best_of", "can only be 1 or equal to n")
    if body.best_of == 1 and n != 1:
        raise InvalidInput("best_of cannot be smaller than n", param="best_of")


def or_default(value: float | None, default: float) -> float:
    """The value, or its default where it is null or absent."""
    return default if value is None else value


def check(body: Common, limits: Limits, *, vocab: int, least_priority: int, timeline: bool = False) -> Asked:
    """Everything but the prompt. `least_priority` is the lowest that the caller may ask for. Raises InvalidInput, or
    HttpError 403."""
    refuse_unserved(body)
    n = 1 if body.n is None else body.n
    bounded_int(n, 1, limits.choices, "n")
    if isinstance(body, Completion):
        _check_completion(body, n)
        max_tokens, named = body.max_tokens, "max_tokens"
        if max_tokens is None:
            max_tokens = COMPLETION_MAX_TOKENS
    else:
        assert isinstance(body, Chat)
        max_tokens, named = _chat_max_tokens(body)
    echo = bool(body.echo)
    if max_tokens is not None:
        bounded_int(max_tokens, 0 if echo else 1, MOST, named)
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options needs stream to be true", param="stream_options")
    _check_bounds(body)
    _check_labels(body)
    logprobs = _logprobs(body, limits)
    extras = body.tailrace
    options = body.stream_options
    form = wanted(body, limits)
    priority, tier = ranked(body.service_tier, body.priority, least_priority)
    params = _sampling(body, limits, vocab, max_tokens, logprobs, logprobs if echo else -1)
    return Asked(
        params=params if form is None else msgspec.structs.replace(params, grammar=form.grammar),
        max_tokens=max_tokens,
        n=n,
        stream=bool(body.stream),
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        echo=echo,
        logprobs=logprobs >= 0,
        timeline=timeline or (extras is not None and (extras.timeline or extras.token_times)),
        token_times=extras is not None and extras.token_times,
        parse_special=extras is not None and extras.parse_special,
        priority=priority,
        user=body.user,
        metadata=body.metadata,
        form=form,
        service_tier=tier,
    )


def _check_bounds(body: Common) -> None:
    for name, (low, high) in BOUNDS.items():
        if (value := getattr(body, name)) is not None:
            bounded(value, low, high, name)
    for name, (least, most) in INT_BOUNDS.items():
        if (number := getattr(body, name)) is not None:
            bounded_int(number, least, most, name)


def _check_labels(body: Common) -> None:
    """`user` and `metadata` go to the request's log line; OpenAI's bounds hold."""
    if body.user is not None and len(body.user) > 512:
        raise InvalidInput("user can have at most 512 characters", param="user")
    if body.metadata is not None:
        if len(body.metadata) > 16:
            raise InvalidInput("metadata can have at most 16 entries", param="metadata")
        if any(len(key) > 64 or len(value) > 512 for key, value in body.metadata.items()):
            raise InvalidInput("metadata keys can have 64 characters, values 512", param="metadata")


def _sampling(
    body: Common, limits: Limits, vocab: int, max_tokens: int | None, logprobs: int, prompt_logprobs: int
) -> SamplingParams:
    params = SamplingParams(
        max_tokens=max_tokens or 0,
        min_tokens=body.min_tokens or 0,
        temperature=or_default(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),
        top_p=or_default(body.top_p, 1.0),
        min_p=or_default(body.min_p, 0.0),
        presence_penalty=or_default(body.presence_penalty, 0.0),
        frequency_penalty=or_default(body.frequency_penalty, 0.0),
        repetition_penalty=or_default(body.repetition_penalty, 1.0),
        logit_bias=logit_bias(body, limits, vocab),
        seed=int.from_bytes(os.urandom(8)) if body.seed is None else body.seed & SEED_MASK,
        stop=stop_strings(body, limits),
        stop_ids=stop_ids(body, limits, vocab),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise InvalidInput(
            f"min_tokens ({params.min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens"
        )
    return params


def choice_seed(seed: int, index: int) -> int:
    """The seed of one of several choices: the first keeps the caller's, the others are spread over 64 bits."""
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15) & SEED_MASK


def too_long(prompt: int, max_tokens: int | None, context: int, source: str, *, exact: bool = True) -> InvalidInput:
    """The refusal of a prompt, or prompt and output, that the context cannot hold; `source` is the parameter that the
    prompt came with."""
    tokens = str(prompt) if exact else f"at least {prompt}"
    asked = "" if max_tokens is None else f" and max_tokens is {max_tokens}"
    total = "" if max_tokens is None else f", {prompt + max_tokens} in all"
    return InvalidInput(
        f"this model's context holds {context} tokens; the prompt has {tokens}{asked}{total}. Shorten "
        + ("the prompt" if max_tokens is None else "the prompt or lower max_tokens"),
        param="max_tokens" if max_tokens is not None and prompt < context else source,
        code="context_length_exceeded",
    )


def fit(params: SamplingParams, prompt: int, asked: int | None, context: int, source: str) -> SamplingParams:
    """The parameters with `max_tokens` filled in for a prompt of this length, which came with the parameter `source`.
    Raises InvalidInput where prompt and output do not fit into the context."""
    room = context - prompt
    if asked is None:
        if room < 1:
            raise too_long(prompt, None, context, source)
        if params.min_tokens > room:
            raise too_long(prompt, params.min_tokens, context, source)
        return msgspec.structs.replace(params, max_tokens=room)
    if asked > room:
        raise too_long(prompt, asked if room > 0 else None, context, source)
    return params
