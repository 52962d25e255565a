"""From what a client sent to token ids, within bounds: what cannot fit is refused in milliseconds, and what takes long
is done in a thread, so that one client's long text does not stop the others' streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from msgspec import Raw, UnsetType

from tailrace.api import schema
from tailrace.api.messages import for_template, text_size, with_short_ids
from tailrace.api.params import Asked, check_ids, given, too_long, unsupported
from tailrace.api.schema import Chat, Completion, ContentPart, Message, raw
from tailrace.api.service import Service
from tailrace.api.tools import Tools
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.text import Text

T = TypeVar("T")
INLINE_CHARS = 4000
"""Longer text is tokenized in a worker thread, so that it does not hold the other streams up."""
LEAST_TEXT = 1 << 20
"""Characters of text that are looked at however small the context is."""
LEAST_IDS = 1 << 16
"""Token ids that /detokenize takes however small the context is."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
TEMPLATE_BYTES = 1 << 16
"""Longest `chat_template_kwargs`: switches of a template, never text."""


async def tokenized(size: int, work: Callable[[], T]) -> T:
    """Runs tokenizing work: at once where it is short."""
    return work() if size <= INLINE_CHARS else await asyncio.to_thread(work)


def most_text(service: Service, text: Text, context: int) -> int:
    """Characters that a text can have: as many as the context could hold if every token were the longest one."""
    return max(LEAST_TEXT, context * service.longest(text))


def refuse_long(size: int, most: int, param: str) -> None:
    """Raises InvalidInput where a text has more characters than any that fits the context."""
    if size > most:
        raise InvalidInput(
            f"the text has {size} characters; what this model's context holds has at most {most}",
            param=param,
            code="context_length_exceeded",
        )


@dataclass(frozen=True)
class Conversation:
    """What a chat template is given. `tools`: those that are offered, as it wants them; None for none."""

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None = None
    arguments: Raw | UnsetType = msgspec.UNSET
    effort: Raw | UnsetType = msgspec.UNSET


def template_arguments(given_to: Conversation, text: Text, *, allowed: bool) -> dict[str, Any] | None:
    """Values for the template: `chat_template_kwargs` and `reasoning_effort`. Raises InvalidInput, also for what the
    template does not know."""
    data = given(given_to.arguments)
    arguments: dict[str, Any] = {}
    if data is not None:
        arguments = schema.raw(data, dict[str, Any], "chat_template_kwargs", max_bytes=TEMPLATE_BYTES)
    if arguments and not allowed:
        raise unsupported("chat_template_kwargs", "is switched off on this server")
    for name in arguments:
        if name not in text.template_variables:
            shown = name if len(name) <= 64 else name[:64] + "..."
            raise unsupported("chat_template_kwargs", f"has {shown!r}, which this model's chat template does not know")
    effort = reasoning_effort(given_to.effort, text)
    for name, value in effort.items():
        if arguments.get(name, value) != value:
            raise InvalidInput(
                f"reasoning_effort and {name} in chat_template_kwargs contradict each other: give one of them",
                param="reasoning_effort",
            )
    return {**arguments, **effort} or None


def reasoning_effort(value: Raw | UnsetType, text: Text) -> dict[str, Any]:
    """`reasoning_effort` as a value for the template. Raises InvalidInput where the template knows none."""
    data = given(value)
    if data is None:
        return {}
    effort: str = schema.raw(data, str, "reasoning_effort", max_bytes=64)
    if effort not in EFFORTS:
        raise InvalidInput(f"reasoning_effort is one of {', '.join(EFFORTS)}", param="reasoning_effort")
    if "reasoning_effort" in text.template_variables:
        return {"reasoning_effort": effort}
    if "enable_thinking" not in text.template_variables:
        raise unsupported("reasoning_effort", "is not known to this model's chat template")
    if effort != "none":
        raise unsupported(
            "reasoning_effort", 'can only be "none": this model reasons, or does not, and knows no degrees'
        )
    return {"enable_thinking": False}


async def conversation(service: Service, given_to: Conversation, context: int, *, generation: bool = True) -> list[int]:
    """The ids of a chat. Raises InvalidInput, quickly where it is far too long."""
    text, _ = service.need(engine=False)
    settings = service.settings
    messages, arguments, tools = given_to.messages, given_to.arguments, given_to.tools
    size = text_size(messages)
    refuse_long(size, most_text(service, text, context), "messages")
    extra: dict[str, Any] | None = None
    if given(arguments) is not None or given(given_to.effort) is not None:  # reads the template, the first time
        extra = await asyncio.to_thread(template_arguments, given_to, text, allowed=settings.template_args)
    size += 0 if isinstance(arguments, UnsetType) else len(bytes(arguments))
    size += 0 if tools is None else len(msgspec.json.encode(tools))
    plain = for_template(messages, settings.limits)
    least = sum(text.min_tokens(message["content"]) for message in plain)
    if least > context:
        raise too_long(least, None, context, "messages", exact=False)
    called = any(message.tool_calls or message.tool_call_id for message in messages)
    if called and await asyncio.to_thread(lambda: text.short_call_ids):  # renders a few, the first time
        plain = with_short_ids(plain)
    work = partial(text.encode_chat, plain, add_generation_prompt=generation, tools=tools, template_args=extra)
    return await tokenized(size, work)


async def chat_prompt(service: Service, body: Chat, tools: Tools, context: int, *, parse_special: bool) -> list[int]:
    """The ids of a chat completion's prompt. Raises InvalidInput."""
    if parse_special:
        raise unsupported("tailrace.parse_special", "is a parameter of /v1/completions: chats mark turns themselves")
    given_to = Conversation(body.messages, tools.offered, body.chat_template_kwargs, body.reasoning_effort)
    return await conversation(service, given_to, context)


class Prediction(msgspec.Struct, frozen=True):
    """What the caller expects to be answered."""

    type: Literal["content"]
    content: str | list[ContentPart]


async def predicted(service: Service, text: Text, body: Chat, asked: Asked, context: int) -> Asked:
    """With the tokens of the body's `prediction`, if it has one: a guess, which changes no token of the answer."""
    value = given(body.prediction)
    if value is None:
        return asked
    if not asked.params.guessable:
        raise unsupported("prediction", "cannot be combined with penalties, min_tokens, or a form of the answer")
    prediction: Prediction = raw(value, Prediction, "prediction")
    content = prediction.content
    if not isinstance(content, str):
        other = next((part.type for part in content if part.type != "text" or part.text is None), None)
        if other is not None:
            raise InvalidInput(f'prediction.content has a part of type "{other}"; only text is', param="prediction")
        content = "".join(part.text or "" for part in content)
    refuse_long(len(content), most_text(service, text, context), "prediction")
    ids = await tokenized(len(content), partial(text.encode_inside, content))
    return replace(asked, params=msgspec.structs.replace(asked.params, predicted=ids[:context]))


def read_prompts(value: Raw | UnsetType, most: int, context: int) -> list[str] | list[list[int]]:
    """The prompts of a completions request, all of one kind. Raises InvalidInput, before anything is decoded where
    there are absurdly many."""
    data = b"" if isinstance(value, UnsetType) else bytes(value)
    if data in (b"", b"null"):
        raise InvalidInput("prompt is missing", param="prompt", code="missing_required_parameter")
    if data[:1] == b"[":
        refuse_absurd(data, most, context)
    prompt: Any = schema.raw(Raw(data), str | list[str | int | list[int]], "prompt", max_bytes=len(data))
    if isinstance(prompt, str):
        return some([prompt])
    if prompt and all(isinstance(one, int) for one in prompt):
        return some([prompt])
    if len(prompt) > most:
        raise InvalidInput(f"prompt has {len(prompt)} prompts; at most {most} are possible", param="prompt")
    if len({type(one) for one in prompt}) > 1 or any(isinstance(one, int) for one in prompt):
        raise InvalidInput("prompt mixes texts and token ids: give one kind", param="prompt", code="invalid_type")
    return some(prompt)


def some(prompts: list[Any]) -> list[Any]:
    """The prompts, unless one is empty or there are none."""
    if not prompts or not all(prompts):
        raise InvalidInput("a prompt is empty: give at least one token", param="prompt")
    return prompts


def refuse_absurd(data: bytes, most: int, context: int) -> None:
    """Counts strings, lists and numbers in the JSON of a list, without decoding it."""
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")  # what is left of the quotes begins or ends a string
    texts = plain.count(b'"') // 2
    if texts <= most:
        outside = b"".join(plain.split(b'"')[::2])
        lists = outside.count(b"[") - 1
        commas = outside.count(b",")
    else:
        lists = commas = 0
    if max(texts, lists) > most:
        raise InvalidInput(f"prompt has {max(texts, lists)} prompts; at most {most} are possible", param="prompt")
    if commas - texts - lists > max(1, lists) * context:
        raise too_long(context + 1, None, context, "prompt", exact=False)


async def infill_prompts(
    service: Service, prompts: Sequence[str] | Sequence[list[int]], suffix: str, asked: Asked, context: int
) -> list[list[int]]:
    """The ids of prompts whose answers stand between them and the suffix. Raises InvalidInput, also where the model was
    not trained for that."""
    text, _ = service.need(engine=False)
    if text.infill is None:
        raise unsupported("suffix", "is not supported: this model has no tokens for fill-in-the-middle")
    if asked.echo or asked.parse_special:
        raise unsupported("suffix", "cannot be combined with echo or tailrace.parse_special")
    most = most_text(service, text, context)
    ids: list[list[int]] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise InvalidInput("suffix needs prompts that are texts", param="suffix")
        least = text.min_tokens(prompt) + text.min_tokens(suffix)
        if least > context:
            raise too_long(least, None, context, "prompt", exact=False)
        refuse_long(len(prompt), most, "prompt")
        refuse_long(len(suffix), most, "suffix")
        ids.append(await tokenized(len(prompt) + len(suffix), partial(text.encode_infill, prompt, suffix)))
    return ids


async def completion_prompts(
    service: Service, prompts: Sequence[str] | Sequence[list[int]], asked: Asked, context: int
) -> list[list[int]]:
    """The ids of every prompt. Raises InvalidInput."""
    text, _ = service.need(engine=False)
    most = most_text(service, text, context)
    ids: list[list[int]] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            if len(prompt) > context:
                raise too_long(len(prompt), None, context, "prompt")
            check_ids(prompt, text.vocab_size, "prompt")
            ids.append(list(prompt))
            continue
        least = text.min_tokens(prompt)
        if least > context:
            raise too_long(least, None, context, "prompt", exact=False)
        refuse_long(len(prompt), most, "prompt")
        encoded = await tokenized(len(prompt), partial(text.encode, prompt, parse_special=asked.parse_special))
        if not encoded:
            raise InvalidInput("a prompt is empty: give at least one token", param="prompt")
        ids.append(encoded)
    return ids


async def echoed(
    text: Text, body: Completion, prompts: Sequence[str] | Sequence[list[int]], asked: Asked
) -> dict[int, str]:
    """The prompt's text for each choice, where it is to be echoed."""
    if not body.echo:
        return {}
    size = sum(map(len, prompts))
    work = partial(_texts, text, prompts)
    texts = await tokenized(size, work)
    return {index: texts[index // asked.n] for index in range(len(texts) * asked.n)}


def _texts(text: Text, prompts: Sequence[str] | Sequence[list[int]]) -> list[str]:
    return [one if isinstance(one, str) else text.decode(one, skip_special=False) for one in prompts]


def ids_to_decode(value: Raw, context: int, vocab: int) -> list[int]:
    """The ids of /detokenize, checked. Raises InvalidInput, before they are decoded where they are too many."""
    most = max(LEAST_IDS, context)
    count = bytes(value).count(b",") + 1
    if count > most:
        raise InvalidInput(f"tokens has {count} ids; at most {most} are possible", param="tokens")
    ids: list[int] = schema.raw(value, list[int], "tokens", max_bytes=len(memoryview(value)))
    check_ids(ids, vocab, "tokens")
    return ids
