"""POST /v1/responses: every parameter that exists somewhere, so that each is used, or refused by name."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tailrace.api.params import given, unsupported
from tailrace.api.schema import Extras
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


class Create(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body. Optional parameters may be null, which means absent."""

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
    # Known elsewhere, not served
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
UNSERVED = (
    "conversation",
    "prompt",
    "context_management",
    "moderation",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "safety_identifier",
    "background_options",
    "access_programs",
    "image",
)


def check(body: Create) -> None:
    """Refuses by name what is not served, and what chat completions do not look at. Raises InvalidInput."""
    for name in UNSERVED:
        if given(getattr(body, name)) is not None:
            raise unsupported(name)
    for part, names in ((body.text, ("verbosity",)), (body.reasoning, ("summary", "generate_summary"))):
        for name in names:
            if part is not None and given(getattr(part, name)) is not None:
                whose = "text" if part is body.text else "reasoning"
                why = "is not supported"
                if whose == "reasoning":
                    why = "is not supported: the reasoning item has the reasoning itself, as its content"
                raise unsupported(f"{whose}.{name}", why)
    for name in body.include or ():
        if name != LOGPROBS:
            raise unsupported("include", f'can only have "{LOGPROBS}", not {name[:64]!r}')
    if body.truncation is not None and body.truncation not in TRUNCATIONS:
        raise InvalidInput('truncation must be "disabled" or "auto"', param="truncation")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise InvalidInput("max_tool_calls must be at least 1", param="max_tool_calls")
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options needs stream to be true", param="stream_options")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "can only be false")
