"""OpenAI's JSON of answers and chunks. What does not change over a stream is encoded once per choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tailrace.api.answers import new_call_id
from tailrace.api.errors import HttpError
from tailrace.api.generation import Choice, Delta
from tailrace.api.logprobs import chat_content, join_text, text_logprobs
from tailrace.engine.protocol import TokenLogprob
from tailrace.text.answer.parts import Arguments, Call, Content, Part, Reasoning, merged

if TYPE_CHECKING:
    from tailrace.text import TokenBytes

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Facts:
    """What every piece of an answer says."""

    id: str
    created: int
    model: str
    logprobs: bool
    top: int  # likeliest tokens asked for
    usage_field: bool  # chunks say "usage": null until the last
    continuous_usage: bool
    service_tier: str | None = None  # said where it was asked for

    def head(self, kind: str) -> dict[str, Any]:
        """What an object of this kind begins with."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head if self.service_tier is None else {**head, "service_tier": self.service_tier}


def usage(
    prompt: int, output: int, cached: int, reasoning: int | None = None, predicted: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The usage object. `reasoning`: output tokens that were reasoning; None where that is not told apart. `predicted`:
    tokens of the caller's prediction that were tried, accepted and rejected; None where there was none."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    details = {} if reasoning is None else {"reasoning_tokens": reasoning}
    if predicted is not None:
        details |= {"accepted_prediction_tokens": predicted[0], "rejected_prediction_tokens": predicted[1]}
    return {**counts, "completion_tokens_details": details} if details else counts


def usage_of(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """The usage of a whole answer; the n choices of one prompt count it once."""
    firsts = choices[::n]
    return usage(
        sum(len(choice.prompt) for choice in firsts),
        sum(choice.output_tokens for choice in choices),
        sum(min(choice.cached, len(choice.prompt)) for choice in firsts),
        sum(choice.reasoning_tokens for choice in choices) if any(map(reasons, choices)) else None,
        predicted(choices),
    )


def predicted(choices: Sequence[Choice]) -> tuple[int, int] | None:
    """Tokens of the prediction that were tried: accepted and rejected; None where there was none."""
    if not any(choice.params.predicted for choice in choices):
        return None
    return sum(choice.predicted[0] for choice in choices), sum(choice.predicted[1] for choice in choices)


def reasons(choice: Choice) -> bool:
    """Whether its reasoning is told apart."""
    return choice.answer is not None and choice.answer.reasons


def by_choice(
    choices: Sequence[Choice], deltas: Sequence[tuple[Choice, Delta]]
) -> Iterator[tuple[Choice, list[Delta]]]:
    """Each choice with its own deltas, in order."""
    grouped: dict[int, list[Delta]] = {choice.index: [] for choice in choices}
    for choice, delta in deltas:
        grouped[choice.index].append(delta)
    return ((choice, grouped[choice.index]) for choice in choices)


class Shape(Protocol):
    """One endpoint's JSON. `done` is what a stream ends with, after everything else."""

    done: bytes

    def opening(self, choice: Choice) -> bytes:
        """What a stream begins with, if anything."""

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """A delta as server-sent events; empty where it shows nothing."""

    def closing(self, fields: Mapping[str, Any]) -> bytes:
        """A chunk without choices: usage, timeline."""

    def failure(self, error: HttpError) -> bytes:
        """What ends a stream whose answer cannot be completed."""

    def whole(
        self, choices: Sequence[Choice], deltas: Sequence[tuple[Choice, Delta]], fields: Mapping[str, Any]
    ) -> bytes:
        """The whole answer: of a request that does not stream, or of one that has been streamed. May be asked for
        again."""


def failed_chunk(error: HttpError) -> bytes:
    """The end of a stream of chunks that cannot go on."""
    return b"data: " + error.body() + b"\n\n"


@dataclass
class ChatShape:
    """`chat.completion` and `chat.completion.chunk`."""

    facts: Facts
    table: TokenBytes
    call_id: Callable[[], str] = new_call_id
    done: bytes = DONE
    failure = staticmethod(failed_chunk)
    _call_ids: dict[tuple[int, int], str] = field(default_factory=dict)
    _before: dict[int, bytes] = field(default_factory=dict)
    _after: bytes = b""

    def __post_init__(self) -> None:
        tail = b',"usage":null' if self.facts.usage_field else b""
        self._after = b'},"logprobs":null,"finish_reason":null}]' + tail + b"}\n\n"

    def _head(self) -> bytes:
        return b"data: " + encode(self.facts.head("chat.completion.chunk"))[:-1] + b',"choices":['

    def opening(self, choice: Choice) -> bytes:
        """The chunk that names the role."""
        self._before[choice.index] = self._head() + b'{"index":%d,"delta":{"content":' % choice.index
        head = self._head() + b'{"index":%d,"delta":{"role":"assistant","content":""' % choice.index
        return head + self._after

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """Text, then the finish reason in a chunk of its own."""
        data = b""
        if choice.answer is not None:
            data = self._parts(choice, delta)
        elif delta.text or (self.facts.logprobs and delta.tokens):
            data = self._text(choice, delta)
        if delta.finish is not None:
            head = self._head() + b'{"index":%d,"delta":{' % choice.index
            end = self._after.replace(b'"finish_reason":null', b'"finish_reason":"%s"' % delta.finish.encode(), 1)
            data += head + self._with_usage(choice, delta, end)
        return data

    def _text(self, choice: Choice, delta: Delta) -> bytes:
        after = self._after
        if self.facts.logprobs:
            content = {"content": chat_content(self.table, delta.tokens, delta.logprobs), "refusal": None}
            after = after.replace(b'"logprobs":null', b'"logprobs":' + encode(content), 1)
        return self._before[choice.index] + encode(delta.text) + self._with_usage(choice, delta, after)

    def _parts(self, choice: Choice, delta: Delta) -> bytes:
        """A chunk for each part; log-probabilities go with the first."""
        rows = [encode(self._fields(choice, part)) for part in delta.parts]
        after = self._with_usage(choice, delta, self._after)
        first = after
        if self.facts.logprobs and delta.tokens:
            rows = rows or [b'{"content":""}']
            content = {"content": chat_content(self.table, delta.tokens, delta.logprobs), "refusal": None}
            first = after.replace(b'"logprobs":null', b'"logprobs":' + encode(content), 1)
        head = self._head() + b'{"index":%d,"delta":' % choice.index
        return b"".join(head + row[:-1] + (after if at else first) for at, row in enumerate(rows))

    def _call_id(self, choice: Choice, index: int) -> str:
        """The id of a call, the same whenever it is shown."""
        return self._call_ids.setdefault((choice.index, index), self.call_id())

    def _fields(self, choice: Choice, part: Part) -> dict[str, Any]:
        """A part as a delta's fields."""
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case Call(index, name):
                function = {"name": name, "arguments": ""}
                ident = self._call_id(choice, index)
                return {"tool_calls": [{"index": index, "id": ident, "type": "function", "function": function}]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _with_usage(self, choice: Choice, delta: Delta, after: bytes) -> bytes:
        if not self.facts.continuous_usage:
            return after
        reasoning = delta.reasoning_tokens if reasons(choice) else None
        now = usage(len(choice.prompt), delta.output_tokens, choice.cached, reasoning)
        return after[: after.rindex(b'"usage":null')] + b'"usage":' + encode(now) + b"}\n\n"

    def closing(self, fields: Mapping[str, Any]) -> bytes:
        """A chunk without choices."""
        return self._head() + b"]," + encode(fields)[1:] + b"\n\n"

    def whole(
        self, choices: Sequence[Choice], deltas: Sequence[tuple[Choice, Delta]], fields: Mapping[str, Any]
    ) -> bytes:
        """One `chat.completion`."""
        rows = []
        for choice, mine in by_choice(choices, deltas):
            message = self._message(choice, mine)
            content = [one for d in mine for one in chat_content(self.table, d.tokens, d.logprobs)]
            logprobs = {"content": content, "refusal": None} if self.facts.logprobs else None
            row = {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}
            rows.append(row)
        return encode({**self.facts.head("chat.completion"), "choices": rows, **fields})

    def _message(self, choice: Choice, deltas: Sequence[Delta]) -> dict[str, Any]:
        """`message` of a whole answer. Content is null where there are calls and no text."""
        if choice.answer is None:
            return {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None}
        content, reasoning = [], []
        calls: list[dict[str, Any]] = []
        for part in merged(part for delta in deltas for part in delta.parts):
            match part:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case Call(index, name):
                    function = {"name": name, "arguments": ""}
                    calls.append({"id": self._call_id(choice, index), "type": "function", "function": function})
                case Arguments(index, text):
                    calls[index]["function"]["arguments"] += text
        said = "".join(content)
        message: dict[str, Any] = {"role": "assistant", "content": said or (None if calls else ""), "refusal": None}
        if choice.answer.reasons:
            message["reasoning_content"] = "".join(reasoning) or None
        return {**message, "tool_calls": calls} if calls else message


class Places:
    """Where in the text each token begins, in characters; one that ends a character begins where that does. It counts
    what the tokens spell, whether it is shown yet or held back as the possible begin of a stop string."""

    def __init__(self, table: TokenBytes, *, start: bool, at: int = 0) -> None:
        from tailrace.text import Detokenizer

        self._decoder = Detokenizer(table, start=start)
        self._at = at

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The places of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._at)
            self._at += len(self._decoder.push(token))
        return offsets


@dataclass
class TextShape:
    """`text_completion`, streamed or whole. With `echo` each choice begins with its prompt's text."""

    facts: Facts
    table: TokenBytes
    echo: Mapping[int, str] = field(default_factory=dict)  # prompt text by choice, where it is to be echoed
    echo_logprobs: bool = False
    done: bytes = DONE
    failure = staticmethod(failed_chunk)
    _before: dict[int, bytes] = field(default_factory=dict)
    _after: bytes = b""
    _echoed: set[int] = field(default_factory=set)
    _places: dict[int, Places] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tail = b',"usage":null' if self.facts.usage_field else b""
        self._after = b',"logprobs":null,"finish_reason":null}]' + tail + b"}\n\n"

    def _head(self) -> dict[str, Any]:
        return self.facts.head("text_completion")

    def opening(self, choice: Choice) -> bytes:
        """The echoed prompt, unless its log-probabilities are awaited."""
        head = b"data: " + encode(self._head())[:-1] + b',"choices":['
        self._before[choice.index] = head + b'{"index":%d,"text":' % choice.index
        if choice.index not in self.echo or self.echo_logprobs:
            return b""
        return self._before[choice.index] + encode(self._echo(choice)) + self._after

    def _echo(self, choice: Choice) -> str:
        """The prompt's text, once."""
        if choice.index in self._echoed or choice.index not in self.echo:
            return ""
        self._echoed.add(choice.index)
        return self.echo[choice.index]

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """Text and finish reason in one chunk."""
        before = self._prompt_pending(choice)
        text = self._echo(choice) + delta.text
        with_logprobs = self.facts.logprobs and (delta.tokens or before)
        if not text and not with_logprobs and delta.finish is None:
            return b""
        after = self._after
        if with_logprobs:
            after = after.replace(b'"logprobs":null', b'"logprobs":' + encode(self._logprobs(choice, delta, before)), 1)
        if delta.finish is not None:
            after = after.replace(b'"finish_reason":null', b'"finish_reason":"%s"' % delta.finish.encode(), 1)
        if self.facts.continuous_usage:
            now = usage(len(choice.prompt), delta.output_tokens, choice.cached)
            after = after[: after.rindex(b'"usage":null')] + b'"usage":' + encode(now) + b"}\n\n"
        return self._before[choice.index] + encode(text) + after

    def _prompt_pending(self, choice: Choice) -> bool:
        """Whether the prompt's own log-probabilities are still to come."""
        return self.echo_logprobs and choice.index in self.echo and choice.index not in self._echoed

    def _logprobs(self, choice: Choice, delta: Delta, prompt: bool) -> dict[str, Any]:
        parts = []
        if prompt:
            offsets = Places(self.table, start=True).of(choice.prompt)
            rows = list(delta.prompt_logprobs) or [None] * len(choice.prompt)
            parts.append(text_logprobs(self.table, choice.prompt, rows, offsets, self.facts.top))
        if delta.tokens:
            rows_out: list[TokenLogprob | None] = list(delta.logprobs)
            places = self._places.get(choice.index)
            if places is None:
                places = Places(self.table, start=False, at=len(self.echo.get(choice.index, "")))
                self._places[choice.index] = places
            offsets = places.of(delta.tokens)
            parts.append(text_logprobs(self.table, delta.tokens, rows_out, offsets, self.facts.top))
        return join_text(parts)

    def closing(self, fields: Mapping[str, Any]) -> bytes:
        """A chunk without choices."""
        return b"data: " + encode({**self._head(), "choices": [], **fields}) + b"\n\n"

    def whole(
        self, choices: Sequence[Choice], deltas: Sequence[tuple[Choice, Delta]], fields: Mapping[str, Any]
    ) -> bytes:
        """One `text_completion`."""
        rows = []
        for choice, mine in by_choice(choices, deltas):
            text, parts = "", []
            for delta in mine:
                before = self._prompt_pending(choice)
                text += self._echo(choice) + delta.text
                if self.facts.logprobs and (delta.tokens or before):
                    parts.append(self._logprobs(choice, delta, before))
            logprobs = join_text(parts) if self.facts.logprobs else None
            rows.append({"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish})
        return encode({**self._head(), "choices": rows, **fields})
