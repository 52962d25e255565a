"""Request bodies. Every parameter that exists somewhere is a field here, so that each is used, or refused by name.

Decoding is strict: an unknown field or a wrong type raises InvalidInput that names the parameter. Lists that a client
could make absurdly long stay raw bytes until their length has been looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tailrace.terms import InvalidInput

T = TypeVar("T")


@dataclass(frozen=True)
class Only:
    """What becomes of a parameter that exists elsewhere and is not served: it is refused, and `why` says so, unless it
    is absent, null, or one of `values`, which say what happens anyway."""

    why: str = "is not supported"
    values: tuple[Any, ...] = ()


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request body: its fields are all parameters that there are. Optional ones may be null, which means absent.
    `unserved` are those of them, or of what lies in them (a.b), that are refused by name; `params.refuse_unserved`
    does that, and the table of `api.reference` says so."""

    unserved: ClassVar[Mapping[str, Only]] = {}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries besides text. `include_obfuscation` is OpenAI's padding against traffic analysis: only
    false is possible here."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Extras(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tailrace's own switches, under "tailrace"."""

    timeline: bool = False
    token_times: bool = False
    parse_special: bool = False


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is served, the other kinds are named when refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


def _no_arguments() -> Raw:
    return Raw(b"{}")


class FunctionCall(msgspec.Struct, frozen=True):
    """A call that an assistant made; `arguments` is JSON text, or the object itself."""

    name: str
    arguments: Raw = msgspec.field(default_factory=_no_arguments)


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call of an assistant's message, sent back by the client."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One chat message, as a client sends it or as this server once answered it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: Raw | UnsetType = UNSET  # never looked at
    parsed: Raw | UnsetType = UNSET  # neither: the official client adds it to what it has streamed
    audio: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET


class Common(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What chat and text completions share."""

    unserved: ClassVar[Mapping[str, Only]] = {
        "prompt_cache_key": Only(),
        "prompt_cache_retention": Only(),
        "safety_identifier": Only(),
        "cache_salt": Only(),
        "use_beam_search": Only(values=(False,)),
        "length_penalty": Only("belongs to beam search, which is not supported", (1.0,)),
        "skip_special_tokens": Only("can only be true", (True,)),
        "stream_options.include_obfuscation": Only("can only be false", (False,)),
    }
    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Raw | UnsetType = UNSET
    seed: int | None = None
    stop: Raw | UnsetType = UNSET
    stop_token_ids: Raw | UnsetType = UNSET
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    priority: int | None = None
    tailrace: Extras | None = None
    response_format: Raw | UnsetType = UNSET
    guided_json: Raw | UnsetType = UNSET
    guided_regex: Raw | UnsetType = UNSET
    guided_choice: Raw | UnsetType = UNSET
    guided_grammar: Raw | UnsetType = UNSET
    structured_outputs: Raw | UnsetType = UNSET
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    service_tier: str | None = None
    prompt_cache_key: Raw | UnsetType = UNSET
    prompt_cache_retention: Raw | UnsetType = UNSET
    safety_identifier: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET


class Chat(Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    unserved: ClassVar[Mapping[str, Only]] = {
        **Common.unserved,
        "prompt_cache_options": Only(),
        "moderation": Only(),
        "audio": Only(),
        "verbosity": Only(),
        "web_search_options": Only(),
        "chat_template": Only(),
        "functions": Only("is not supported: OpenAI has replaced it by tools"),
        "function_call": Only("is not supported: OpenAI has replaced it by tool_choice"),
        "modalities": Only('can only be ["text"]', (["text"],)),
        "echo": Only("is a parameter of /v1/completions", (False,)),
        "continue_final_message": Only(values=(False,)),
        "add_generation_prompt": Only("can only be true", (True,)),
    }
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Raw | UnsetType = UNSET
    tool_choice: Raw | UnsetType = UNSET
    parallel_tool_calls: bool | None = None
    functions: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    store: bool | None = None
    modalities: list[str] | None = None
    audio: Raw | UnsetType = UNSET
    prediction: Raw | UnsetType = UNSET
    reasoning_effort: Raw | UnsetType = UNSET
    verbosity: Raw | UnsetType = UNSET
    web_search_options: Raw | UnsetType = UNSET
    prompt_cache_options: Raw | UnsetType = UNSET
    moderation: Raw | UnsetType = UNSET
    chat_template: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None


class Completion(Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    unserved: ClassVar[Mapping[str, Only]] = {
        **Common.unserved,
        "add_special_tokens": Only("can only be true; send token ids to decide every token yourself", (True,)),
    }
    prompt: Raw | UnsetType = UNSET
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class Tokenize(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    parse_special: bool | None = None
    tools: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET


class Detokenize(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Raw
    skip_special_tokens: bool | None = None


_AT = re.compile(r"(?s)^(.*?)(?: - at `(key in )?\$?\.?([^`]*)`)?$")
_NAMED = re.compile(r"(?:unknown|missing required) field `([^`]*)`")
MAX_MESSAGE = 300
MAX_STRINGS = 1 << 17
"""Most strings of a body, names of fields included."""


def explain(error: Exception) -> InvalidInput:
    """A decoding error, with the parameter that it is about."""
    match = _AT.match(str(error))
    text, path = (match[1], match[3] or "") if match else (str(error), "")
    named = _NAMED.search(text)
    param = ".".join(part for part in (path, named[1] if named else "") if part) or None
    shown = _short(param) if param else None
    if named and "unknown" in text:
        return InvalidInput(f"unknown parameter: {shown}", param=shown, code="unknown_parameter")
    if named:
        return InvalidInput(f"missing parameter: {shown}", param=shown, code="missing_required_parameter")
    if isinstance(error, msgspec.ValidationError):
        where = f"{shown}: " if shown else ""
        return InvalidInput(f"{where}{_short(text)}", param=shown, code="invalid_type")
    return InvalidInput(f"the body is not valid JSON: {_short(text)}", code="invalid_json")


def _short(text: str | None) -> str:
    text = text or ""
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


CHAT = msgspec.json.Decoder(Chat)
COMPLETION = msgspec.json.Decoder(Completion)
TOKENIZE = msgspec.json.Decoder(Tokenize)
DETOKENIZE = msgspec.json.Decoder(Detokenize)


def refuse_crowded(data: bytes) -> None:
    """Raises InvalidInput for a body of absurdly many small values: decoding it would stop everything else."""
    plain = data.replace(rb"\\", b"")  # so that each quote left is escaped or is not
    strings = (plain.count(b'"') - plain.count(rb"\"")) // 2
    if strings > MAX_STRINGS:
        raise InvalidInput(f"the body has {strings} strings; at most {MAX_STRINGS} are possible", code="invalid_value")


def decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """The body as its type. Raises InvalidInput."""
    refuse_crowded(data)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise explain(error) from None
    except RecursionError:
        raise InvalidInput("the body is nested too deeply", code="invalid_json") from None


def raw(value: Raw, kind: type[T] | Any, param: str, *, max_bytes: int | None = None) -> T:
    """A raw parameter as its type; refused unread where it is longer than any valid value could be."""
    data = memoryview(value)
    if max_bytes is not None and len(data) > max_bytes:
        raise InvalidInput(f"{param} is too long ({len(data)} bytes; at most {max_bytes})", param=param)
    try:
        decoded: T = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        inner = explain(error)
        raise InvalidInput(f"{param}: {inner}", param=param, code="invalid_type") from None
    return decoded
