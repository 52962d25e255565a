"""POST /v1/responses: every parameter that exists somewhere, so that each is used, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tailrace.api.params import refuse_unserved, unsupported
from tailrace.api.schema import Body, Extras, Only
from tailrace.terms import InvalidInput

LOGPROBS = "message.output_text.logprobs"
TRUNCATIONS = ("disabled", "auto")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries besides events; `include_obfuscation` can only be false."""

    include_obfuscation: bool = False


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`text`: the form of the output."""

    format: Raw | UnsetType = UNSET
    verbosity: Raw | UnsetType = UNSET


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`reasoning`: how much of it, where the chat template knows degrees."""

    effort: Raw | UnsetType = UNSET
    summary: Raw | UnsetType = UNSET
    generate_summary: Raw | UnsetType = UNSET


_SHOWN = "is not supported: the reasoning item has the reasoning itself, as its content"


class Create(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body."""

    unserved: ClassVar[Mapping[str, Only]] = {
        **dict.fromkeys(("conversation", "prompt", "context_management", "moderation", "prompt_cache_key"), Only()),
        **dict.fromkeys(("prompt_cache_retention", "prompt_cache_options", "safety_identifier"), Only()),
        **dict.fromkeys(("background_options", "access_programs", "image", "text.verbosity"), Only()),
        "reasoning.summary": Only(_SHOWN),
        "reasoning.generate_summary": Only(_SHOWN),
        "stream_options.include_obfuscation": Only("can only be false", (False,)),
    }
    model: str
    input: Raw | UnsetType = UNSET
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    truncation: str | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Raw | UnsetType = UNSET
    tool_choice: Raw | UnsetType = UNSET
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    user: str | None = None
    service_tier: str | None = None
    # Not OpenAI's: as in chat completions
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Raw | UnsetType = UNSET
    seed: int | None = None
    stop: Raw | UnsetType = UNSET
    stop_token_ids: Raw | UnsetType = UNSET
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    tailrace: Extras | None = None
    chat_template_kwargs: Raw | UnsetType = UNSET
    conversation: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    context_management: Raw | UnsetType = UNSET
    moderation: Raw | UnsetType = UNSET
    prompt_cache_key: Raw | UnsetType = UNSET
    prompt_cache_retention: Raw | UnsetType = UNSET
    prompt_cache_options: Raw | UnsetType = UNSET
    safety_identifier: Raw | UnsetType = UNSET
    background_options: Raw | UnsetType = UNSET
    access_programs: Raw | UnsetType = UNSET
    image: Raw | UnsetType = UNSET


CREATE = msgspec.json.Decoder(Create)


def check(body: Create) -> None:
    """Refuses by name what is not served, and what chat completions do not look at. Raises InvalidInput."""
    refuse_unserved(body)
    for name in body.include or ():
        if name != LOGPROBS:
            raise unsupported("include", f'can only have "{LOGPROBS}", not {name[:64]!r}')
    if body.truncation is not None and body.truncation not in TRUNCATIONS:
        raise InvalidInput('truncation must be "disabled" or "auto"', param="truncation")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise InvalidInput("max_tool_calls must be at least 1", param="max_tool_calls")
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options needs stream to be true", param="stream_options")
