"""The shapes of answers. Fields that may be absent are UNSET by default."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An object with these fields and no others."""


class Detail(Shape, frozen=True):
    """What was wrong; `param` names the parameter that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape, frozen=True):
    """An error, as OpenAI's clients expect it."""

    error: Detail


class MessagesDetail(Shape, frozen=True):
    """What was wrong."""

    type: str
    message: str


class MessagesError(Shape, frozen=True):
    """An error, as Anthropic's clients expect it."""

    type: Literal["error"]
    error: MessagesDetail
    request_id: str


# --- chat and text completions


class PromptDetails(Shape, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int


class OutputDetails(Shape, frozen=True):
    """Of the output's tokens, where they are told apart."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Shape, frozen=True):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails | UnsetType = UNSET


class Likely(Shape, frozen=True):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(Shape, frozen=True):
    """A token of the answer, and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Likely]


class ChatLogprobs(Shape, frozen=True):
    """Of a choice."""

    content: list[Logprob]
    refusal: None


class CalledFunction(Shape, frozen=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class CalledTool(Shape, frozen=True):
    """A call that the model wants made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Answered(Shape, frozen=True):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(Shape, frozen=True):
    """One answer."""

    index: int
    message: Answered
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Shape, frozen=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | UnsetType = UNSET
    tailrace: dict[str, Any] | UnsetType = UNSET


class FunctionDelta(Shape, frozen=True):
    """More of a call's function."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(Shape, frozen=True):
    """More of a call; its first delta has its id and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Shape, frozen=True):
    """More of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Shape, frozen=True):
    """More of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(Shape, frozen=True):
    """An event of a stream; the last one is followed by `data: [DONE]`. One without choices has the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    tailrace: dict[str, Any] | UnsetType = UNSET


class TextLogprobs(Shape, frozen=True):
    """Of a choice, token by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(Shape, frozen=True):
    """One answer; in a stream, more of it, with a finish reason at its end."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class TextCompletion(Shape, frozen=True):
    """A whole answer, or an event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    tailrace: dict[str, Any] | UnsetType = UNSET


# --- responses


class CachedDetails(Shape, frozen=True):
    """Of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningDetails(Shape, frozen=True):
    """Of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(Shape, frozen=True):
    """Tokens."""

    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class OutputItem(msgspec.Struct, frozen=True):
    """A message, reasoning, or a call of a function."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]


class Response(Shape, frozen=True):
    """A response, whatever its status."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    tailrace: dict[str, Any] | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, frozen=True):
    """An event of a stream; docs/responses.md has their order."""

    type: str
    sequence_number: int


class Deleted(Shape, frozen=True):
    """What was deleted."""

    id: str
    object: str
    deleted: bool


class Listed(Shape, frozen=True):
    """A page of a list."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


# --- Anthropic's


class MessageUsage(Shape, frozen=True):
    """Tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int] | UnsetType = UNSET
    service_tier: Literal["standard"] | UnsetType = UNSET


class ContentBlock(msgspec.Struct, frozen=True):
    """Text, thinking, or a call."""

    type: Literal["text", "thinking", "tool_use"]


class AnswerMessage(Shape, frozen=True):
    """A whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    tailrace: dict[str, Any] | UnsetType = UNSET


class MessageEvent(msgspec.Struct, frozen=True):
    """An event of a stream; docs/anthropic.md has their order."""

    type: str


class TokenCount(Shape, frozen=True):
    """Of a prompt."""

    input_tokens: int


# --- texts


class ReadUsage(Shape, frozen=True):
    """Tokens, special ones included."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Shape, frozen=True):
    """Of one text: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Shape, frozen=True):
    """In the order of the texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: ReadUsage


class RankedDocument(Shape, frozen=True):
    """A document, where it was asked for."""

    text: str


class Ranked(Shape, frozen=True):
    """`index`: the place of the document in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(Shape, frozen=True):
    """The best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: ReadUsage


class Scored(Shape, frozen=True):
    """Of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Shape, frozen=True):
    """In the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Scored]
    usage: ReadUsage


class Tokens(Shape, frozen=True):
    """Token ids of a prompt; `token_strs` where they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Prompt(Shape, frozen=True):
    """The text of token ids."""

    prompt: str


# --- what is stored


class File(Shape, frozen=True):
    """A file; times are seconds since the epoch."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None
    status: Literal["processed"]
    object: Literal["file"]


class Counts(Shape, frozen=True):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch; the times of what has not happened are null."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    errors: dict[str, Any] | None
    request_counts: Counts
    metadata: dict[str, str] | None


class StoredChat(msgspec.Struct, frozen=True):
    """A stored completion: the answer, with what was asked beside the messages."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metadata: dict[str, str]


# --- the server


class ModelCard(Shape, frozen=True):
    """A name of the served model, or of an adapter, whose `parent` the model is; `max_model_len`: most tokens of prompt
    and answer."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(Shape, frozen=True):
    """All names of the served model."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(Shape, frozen=True):
    """Whether the server serves, and why not."""

    status: Literal["ok", "unavailable"]
    engine: str
    asleep: bool
    draining: bool
    restarts: int
    error: str | None


class Version(Shape, frozen=True):
    """The server's."""

    version: str


class Done(msgspec.Struct, frozen=True):
    """What was done; more fields say more."""

    status: Literal["ok"]


class Sleeping(Shape, frozen=True):
    """Whether the engine sleeps."""

    is_sleeping: bool


class RequestList(Shape, frozen=True):
    """Requests, or the timelines of one."""

    object: Literal["list"]
    data: list[dict[str, Any]]
