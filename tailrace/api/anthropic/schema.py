"""Bodies of Messages requests. As in `api.schema`, every parameter that exists is a field, and is used or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tailrace.api.schema import Body, Only


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a prefix should be cached. Every prefix is, so it is taken and changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What blocks of content share."""

    cache_control: CacheControl | None = None


class Text(Block, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="text"):
    """Text."""

    text: str
    citations: Raw | UnsetType = UNSET


class Image(msgspec.Struct, frozen=True, tag="image"):
    """Refused by name."""


class Document(msgspec.Struct, frozen=True, tag="document"):
    """Refused by name."""


class ToolUse(Block, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="tool_use"):
    """A call that the assistant made."""

    id: str
    name: str
    input: Raw


class ToolResult(Block, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: str | list[Text | Image | Document] | None = None
    is_error: bool | None = None


class Thinking(Block, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="thinking"):
    """Reasoning of the assistant, sent back. Signatures are not looked at: the server gives none."""

    thinking: str
    signature: str = ""


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Text | Image | Document | ToolUse | ToolResult | Thinking]


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool of the client's. Those with another type are Anthropic's own, and refused by name."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model reasons, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text of the answer must match."""

    type: Literal["json_schema"]
    schema: Raw


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the answer is written."""

    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of the caller."""

    user_id: str | None = None


class CountTokens(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens: all that a prompt is made of."""

    unserved: ClassVar[Mapping[str, Only]] = {
        **dict.fromkeys(("context_management", "mcp_servers", "output_format", "user_profile_id"), Only()),
        **dict.fromkeys(("workspace_id", "billing_policy", "compaction"), Only()),
        "speed": Only('can only be "standard"', ("standard",)),
        "output_config.effort": Only(),
    }
    model: str
    messages: list[Turn]
    system: str | list[Text | Image | Document] | None = None
    tools: Raw | UnsetType = UNSET
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: Raw | UnsetType = UNSET
    mcp_servers: Raw | UnsetType = UNSET
    output_format: Raw | UnsetType = UNSET
    speed: str | None = None
    user_profile_id: Raw | UnsetType = UNSET
    workspace_id: Raw | UnsetType = UNSET
    billing_policy: Raw | UnsetType = UNSET
    compaction: Raw | UnsetType = UNSET


class Messages(CountTokens, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages."""

    unserved: ClassVar[Mapping[str, Only]] = {
        **CountTokens.unserved,
        **dict.fromkeys(("container", "diagnostics", "inference_geo"), Only()),
        **dict.fromkeys(("fallback_credit_token", "fallbacks", "thread"), Only()),
    }
    max_tokens: int
    stop_sequences: Raw | UnsetType = UNSET
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Raw | UnsetType = UNSET
    diagnostics: Raw | UnsetType = UNSET
    inference_geo: Raw | UnsetType = UNSET
    fallback_credit_token: Raw | UnsetType = UNSET
    fallbacks: Raw | UnsetType = UNSET
    thread: Raw | UnsetType = UNSET


MESSAGES = msgspec.json.Decoder(Messages)
COUNT_TOKENS = msgspec.json.Decoder(CountTokens)
