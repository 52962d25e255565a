"""One HTTP request as one or several engine requests, and the text that comes out of them.

A `Choice` is the sink of one engine request: it turns tokens into text that is safe to show (whole characters, nothing
of a stop string). A `Generation` is all choices of one HTTP request, and wakes its task at most once a step.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tailrace.api.errors import HttpError, as_http
from tailrace.engine.protocol import Encode, Output, SamplingParams, Submit, TokenLogprob
from tailrace.terms import TailraceError
from tailrace.text.answer.parts import Part, merged

if TYPE_CHECKING:
    from tailrace.engine.watch import StopWatch
    from tailrace.text import Detokenizer
    from tailrace.text.answer.parser import AnswerParser


@dataclass(frozen=True)
class Delta:
    """What one step added to a choice. `finish` is OpenAI's finish reason; `output_tokens` counts up to and with this
    step, since a delta may wait for its client while later steps go on."""

    text: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    finish: str | None = None
    output_tokens: int = 0
    parts: Sequence[Part] = ()  # instead of text, where the answer is taken apart
    reasoning_tokens: int = 0  # of the output tokens


@dataclass(eq=False)
class Choice:
    """One engine request of a generation."""

    generation: Generation
    index: int
    request: str
    prompt: list[int]
    params: SamplingParams
    decoder: Detokenizer
    watch: StopWatch | None  # where it has stop strings: the engine runs the same
    eos: frozenset[int] = frozenset()  # ends of text, which the vocabulary need not flag as special
    answer: AnswerParser | None = None  # where the answer is taken apart
    hide_tokens: bool = False  # echo with max_tokens 0: the one token that the engine needs is not shown
    adapter: int = 0  # the engine's id of its adapter
    output_tokens: int = 0
    cached: int = 0
    reasoning_tokens: int = 0
    finish: str | None = None
    stopped: bool = False
    matched: str | None = None  # the stop string that ended it
    predicted: tuple[int, int] = (0, 0)  # tokens of the caller's prediction that were tried: accepted and rejected

    def message(self, tenant: str, priority: int, deadline: float) -> Submit | Encode:
        """What the engine is sent."""
        return Submit(self.request, self.prompt, self.params, tenant, priority, deadline, self.adapter)

    def queued(self) -> None:
        """The engine has it: from here on it will not be refused."""
        self.generation.accept()

    def output(self, output: Output) -> None:
        """News of one step."""
        self.generation.take(self, output)

    def failed(self, error: TailraceError) -> None:
        """The engine lost it."""
        self.generation.fail(error)

    def absorb(self, output: Output) -> Delta:
        """Tokens to text."""
        tokens = output.tokens
        self.output_tokens += len(tokens)
        self.cached = max(self.cached, output.cached)
        self.predicted = output.predicted
        if self.answer is not None:
            return self._taken_apart(self.answer, output)
        text = self._text(output)
        finish = output.finish
        if finish is not None:
            if not self.stopped:
                text += self._tail()
            self.finish = "stop" if self.stopped else finish
        if self.hide_tokens:
            self.output_tokens = 0
            finish = "length" if finish is not None else None
            self.finish = finish
            return Delta("", prompt_logprobs=output.prompt_logprobs, finish=finish)
        return Delta(text, tokens, output.logprobs, output.prompt_logprobs, self.finish, self.output_tokens)

    def _taken_apart(self, answer: AnswerParser, output: Output) -> Delta:
        """Tokens to parts of the answer. Reasoning stands at the beginning: it has all tokens up to the one that closes
        it."""
        parts: list[Part] = []
        for at, token in enumerate(self._textual(output), self.output_tokens - len(output.tokens) + 1):
            inside = answer.reasoning
            parts += answer.push(self._piece(token))
            if inside or answer.reasoning:
                self.reasoning_tokens = at
            if self.stopped:
                break
        finish = output.finish
        if finish is not None:
            if not self.stopped:
                parts += answer.push(self._tail())
            parts += answer.finish()
            finish = "stop" if self.stopped else finish
            self.finish = "tool_calls" if finish == "stop" and answer.calls else finish
        return Delta(
            "",
            output.tokens,
            output.logprobs,
            finish=self.finish,
            output_tokens=self.output_tokens,
            parts=merged(parts),
            reasoning_tokens=self.reasoning_tokens,
        )

    def _textual(self, output: Output) -> Sequence[int]:
        """The tokens, without one that ended the text."""
        tokens: Sequence[int] = output.tokens
        if output.finish == "stop" and tokens and not self.params.include_stop:
            last = tokens[-1]
            if last == output.stop or (output.stop is None and last in self.eos):
                tokens = tokens[:-1]
        return tokens

    def _piece(self, token: int) -> str:
        if self.watch is None:
            return self.decoder.push(token)
        text, self.matched = self.watch.push(token)
        self.stopped = self.matched is not None
        return text

    def _text(self, output: Output) -> str:
        tokens = self._textual(output)
        if self.watch is None:
            push = self.decoder.push
            return push(tokens[0]) if len(tokens) == 1 else "".join(map(push, tokens))
        text = ""
        for token in tokens:
            if self.stopped:
                break
            text += self._piece(token)
        return text

    def _tail(self) -> str:
        if self.watch is None:
            return self.decoder.finish()
        text, self.matched = self.watch.finish()
        self.stopped = self.matched is not None
        return text


@dataclass(eq=False)
class Generation:
    """All choices of one HTTP request. Owned by its task; sinks only append and wake."""

    stream: bool
    form: str | None = None  # the parameter that its grammar came with
    source: str | None = None  # the parameter that its prompt came with
    choices: list[Choice] = field(default_factory=list)
    accepted: bool = False
    gone: bool = False  # the client has left
    error: HttpError | None = None
    direct: Callable[[Choice, Delta], bool] | None = None
    """Takes a delta that ends nothing straight to the client, if it can now; saves waking the task for each token."""
    _inbox: list[tuple[Choice, Delta]] = field(default_factory=list)
    _open: int = 0
    _waiter: asyncio.Future[None] | None = None

    def add(self, choice: Choice) -> None:
        """One more choice, before anything is submitted."""
        self.choices.append(choice)
        self._open += 1

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self._open == 0 or self.error is not None or self.gone

    @property
    def pending(self) -> bool:
        """There is news that `deltas` has not returned yet."""
        return bool(self._inbox)

    def accept(self) -> None:
        """The engine has taken one of the choices in."""
        if not self.accepted:
            self.accepted = True
            self._wake()

    def take(self, choice: Choice, output: Output) -> None:
        """A choice's news; called by the engine client, so it must not raise."""
        if output.finish == "error" or output.finish == "timeout":
            self.fail(refusal(output, self.form, self.source))
            return
        try:
            delta = choice.absorb(output)
            if self.direct is not None and delta.finish is None and not self._inbox and self.direct(choice, delta):
                return
        except Exception:  # noqa: BLE001 - a fault in one request's text must not stop the others
            traceback.print_exc(file=sys.stderr)
            self.fail(TailraceError("the text of this request could not be decoded"))
            return
        self._inbox.append((choice, delta))
        if delta.finish is not None:
            self._open -= 1
        if self.stream or self._open == 0:
            self._wake()

    def fail(self, error: TailraceError) -> None:
        """Ends the whole request."""
        if self.error is None:
            self.error = as_http(error)
            self._wake()

    def leave(self) -> None:
        """The client has left."""
        self.gone = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def started(self) -> None:
        """Waits until the engine has taken it in, given it something, or refused it. Raises HttpError if refused."""
        while not (self.accepted or self._inbox or self.done):
            await self._news()
        if self.error is not None:
            raise self.error

    async def deltas(self) -> list[tuple[Choice, Delta]]:
        """Everything since the last call, at least one entry unless `done`."""
        while not self._inbox and not self.done:
            await self._news()
        batch, self._inbox = self._inbox, []
        return batch

    async def whole(self) -> list[tuple[Choice, Delta]]:
        """Waits for the end. Raises HttpError where it failed; returns what there is when the client has left."""
        while not self.done:
            await self._news()
        if self.error is not None:
            raise self.error
        batch, self._inbox = self._inbox, []
        return batch

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        self._waiter = None


class Refusal(NamedTuple):
    """An error that an engine names, as an HTTP error: `param` is the parameter that is to blame, PROMPT the one that
    the request's prompt came with, FORM the one that its grammar did."""

    status: int
    kind: str
    code: str
    param: str | None = None


PROMPT, FORM = "the prompt", "the grammar"
INVALID = "invalid_request_error"
REFUSALS = {
    "overloaded": Refusal(429, "rate_limit_error", "overloaded"),
    "draining": Refusal(503, "service_unavailable", "service_unavailable"),
    "context_length_exceeded": Refusal(400, INVALID, "context_length_exceeded", PROMPT),
    "output_too_long": Refusal(400, INVALID, "context_length_exceeded", "max_tokens"),
    "invalid_prompt": Refusal(400, INVALID, "invalid_prompt", PROMPT),
    "invalid_max_tokens": Refusal(400, INVALID, "invalid_value", "max_tokens"),
    "invalid_stop": Refusal(400, INVALID, "invalid_value", "stop"),
    "unsupported_grammar": Refusal(400, INVALID, "invalid_value", FORM),
    "invalid_grammar": Refusal(400, INVALID, "invalid_grammar", FORM),
    "grammar_failed": Refusal(400, INVALID, "grammar_failed", FORM),
    "adapter_not_loaded": Refusal(404, INVALID, "model_not_found", "model"),
    "wrong_task": Refusal(400, INVALID, "unsupported_model", "model"),
}
"""By the name that an engine gives; any other is a 500."""
FAILED = Refusal(500, "server_error", "engine_error")


def refusal(output: Output, form: str | None = None, source: str | None = None) -> HttpError:
    """An engine's error as an HTTP error; `form` is the parameter that the request's grammar came with, `source` the
    one that its prompt did."""
    if output.finish == "timeout":
        return HttpError(503, "the request did not finish in time", kind="timeout", code="timeout", retry_after=1.0)
    name, _, text = output.error.partition(": ")
    status, kind, code, param = REFUSALS.get(name, FAILED)
    retry_after = 1.0 if status in (429, 503) else None
    param = {PROMPT: source, FORM: form}.get(param or "", param)
    message = text or output.error or "the engine failed"
    return HttpError(status, message, kind=kind, param=param, code=code, retry_after=retry_after)
