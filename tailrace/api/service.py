"""What all endpoints share, and the life of a generation from checked prompt to last byte."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from tailrace.api.access.guard import Guard
from tailrace.api.accounts import Accounts, fresh_name
from tailrace.api.adapters import Adapters
from tailrace.api.answers import Answers, Reading
from tailrace.api.errors import HttpError, unavailable
from tailrace.api.exchange import EVENT_STREAM, BodyBudget, Exchange
from tailrace.api.generation import Choice, Delta, Generation
from tailrace.api.grammars import GrammarDesk
from tailrace.api.metrics import Metrics
from tailrace.api.params import Asked, choice_seed, fit
from tailrace.api.settings import Settings
from tailrace.api.shapes import Facts, Shape, usage_of
from tailrace.engine.client import EngineClient
from tailrace.engine.protocol import Ready, SamplingParams, Task
from tailrace.ledger.book import Book
from tailrace.ledger.log import Write, admin_line, refusal_line, request_line, to_stderr
from tailrace.ledger.timeline import Timeline, as_json
from tailrace.terms import Event, EventKind, Overloaded, TailraceError

if TYPE_CHECKING:
    from tailrace.api.batches.runner import Runner
    from tailrace.api.content.store import ContentStore
    from tailrace.api.responses.background import Background
    from tailrace.api.sleep import Sleeper
    from tailrace.text import Text, TokenBytes


INLINE_ROWS = 20_000
"""Tokens, times what is told of each, that are turned into JSON in a few milliseconds."""
FOLD_STEPS = 16
"""Steps of plain tokens that are folded together."""
RECENT = 1000
"""Lines of ended requests that admin endpoints can still show; and as many of what was refused before it was known
who asked."""
LOGGED_TOKENS = 8192
"""Most of a prompt that the log shows, where it shows prompts."""
FREE = (
    "engine_unavailable", "engine_error", "internal_error", "service_unavailable", "overloaded", "aborted", "asleep",
)  # fmt: skip
"""Codes of errors with which the server fails a request: it costs nothing then."""
ABILITY: dict[Task, str] = {
    "generate": "generates text: it has no embeddings (--pooling makes a server of embeddings of it) and ranks nothing",
    "embed": "embeds texts and generates none: ask /v1/embeddings, /rerank or /score",
    "rank": "scores pairs of texts and does nothing else: ask /rerank or /score",
}
"""What a model does, for those who have asked for something else."""
LogLevel = Literal["off", "requests", "prompts"]


@dataclass
class Service:
    """One replica's parts. `text` arrives while the engine loads."""

    settings: Settings
    client: EngineClient
    text: Text | None = None
    write_log: Write = to_stderr
    draining: bool = False
    paused: bool = False
    stop: Callable[[], object] = lambda: None
    """Drains and ends the server."""
    content: ContentStore | None = None
    batches: Runner | None = None
    background: dict[str, Background] = field(default_factory=dict)
    """Responses that run in the background, by their ids."""
    created: int = field(default_factory=lambda: int(time.time()))
    exchanges: dict[Exchange, Plan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics = Metrics(
            self.settings.model_name, self.settings.max_context or 131_072, prefix_cache=self.settings.prefix_cache
        )
        self.book = Book(self._closed, self.metrics.observe)
        self.answers = Answers(self.settings)
        self.bodies = BodyBudget(self.settings.limits.bodies_bytes)
        self.guard = Guard(self.settings.api_keys, self.settings.admin_keys, self.settings.keys)
        self.log_level: LogLevel = "off"
        if self.settings.log_requests:
            self.log_level = "prompts" if self.settings.log_prompts else "requests"
        kept = RECENT if self.guard.administered else 0
        self._ended: deque[tuple[frozenset[str], str]] = deque(maxlen=kept)
        self._strange: deque[tuple[frozenset[str], str]] = deque(maxlen=kept)  # from whoever: they push out only these
        self.grammars = GrammarDesk()
        self.adapters = Adapters(self.settings, self.client)
        self.inside = 0  # requests that need the engine, from when they were let in
        self.active_at = time.monotonic()  # when the last of them left
        self._sleeper: Sleeper | None = None
        self.accounts = Accounts(self.settings)
        self._facts: dict[str, Mapping[str, Any]] = {}
        self._table: TokenBytes | None = None
        self._unfolded: list[Sequence[Event]] = []
        self.client.listen(self._events)

    # Events

    def _events(self, events: Sequence[Event]) -> None:
        """Nothing is urgent about plain tokens: folding a few steps' at once costs a fraction of folding each as it
        comes, since the code is in the caches then. Anything else is folded at once, and so is all before it."""
        self._unfolded.append(events)
        if len(self._unfolded) >= FOLD_STEPS or not all(event.kind is EventKind.TOKEN for event in events):
            self.settle()

    def settle(self) -> None:
        """Folds what has not been folded yet; whoever reads the book or the metrics calls it first."""
        unfolded, self._unfolded = self._unfolded, []
        for events in unfolded:
            self.book.add(events)
            self.metrics.end_step()

    def _closed(self, timeline: Timeline) -> None:
        facts = self._facts.pop(timeline.request, {})
        self.metrics.closed(timeline)
        self.accounts.closed(timeline)
        if self.log_level == "off" and not self.guard.administered:
            return
        line = request_line(timeline, facts)
        if self.log_level != "off":
            self.write_log(line)
        if self.guard.administered:
            request = timeline.request
            names = frozenset((request, request.partition(".")[0], str(facts.get("http_request", ""))))
            if "prompt" in facts:
                line = request_line(timeline, {name: fact for name, fact in facts.items() if name != "prompt"})
            self._ended.append((names, line))

    def refused(self, exchange: Exchange, error: HttpError, endpoint: str) -> None:
        """A request ended with an error: its line, by the id that the client was told."""
        self.accounts.refused(exchange, error, endpoint)
        facts: dict[str, Any] = {"endpoint": endpoint, "http_request": exchange.id, "method": exchange.method}
        facts |= {**who(exchange), "status": error.status, "code": error.code, "param": error.param}
        facts["e2e_ms"] = round((time.monotonic() - exchange.received) * 1000, 3)
        self._keep_refusal(facts, known=exchange.caller is not None and endpoint != "admin")

    def malformed(self, name: str, error: HttpError) -> None:
        """Something that is no request got an answer with this id."""
        facts = {"endpoint": "other", "http_request": name, "status": error.status, "code": error.code}
        self._keep_refusal(facts, known=False)

    def _keep_refusal(self, facts: dict[str, Any], *, known: bool) -> None:
        line = refusal_line(facts)
        if self.log_level != "off":
            self.write_log(line)
        (self._ended if known else self._strange).append((frozenset((facts["http_request"],)), line))

    def ended(self, name: str) -> list[str]:
        """The log's lines of those that had this id, among the last that have ended."""
        return [line for kept in (self._ended, self._strange) for names, line in kept if name in names]

    # State

    @property
    def ready(self) -> bool:
        """Whether a request would be served now, or once the server has woken up for it."""
        up = self.client.healthy or (self._sleeper is not None and self.slept != "awake" and self._sleeper.wakes_up)
        return self.text is not None and up and not self.draining and not self.paused

    # Sleep

    @property
    def sleeper(self) -> Sleeper:
        """What puts the engine to sleep, and wakes it; made when it is first asked for."""
        if self._sleeper is None:
            from tailrace.api.sleep import Sleeper

            self._sleeper = Sleeper(self)
        return self._sleeper

    @property
    def slept(self) -> str:
        """`sleep.State`: "awake" where nobody ever wanted to sleep."""
        return "awake" if self._sleeper is None else self._sleeper.state

    async def enter(self) -> None:
        """A request that needs the engine comes in; it may have to wait until that is awake. Raises HttpError 503,
        Overloaded. Each that is let in leaves."""
        if self._sleeper is not None:
            await self._sleeper.gate()
        self.inside += 1

    def stay(self) -> None:
        """A request that was let in goes on when its client has been answered; it leaves too."""
        self.inside += 1

    def leave(self) -> None:
        """It has ended."""
        self.inside -= 1
        self.active_at = time.monotonic()

    def rest(self) -> None:
        """Now and then: goes to sleep by itself, where it is to."""
        if self._sleeper is not None or self.settings.timeouts.sleep_after:
            self.sleeper.tick(time.monotonic())

    def drained(self) -> bool:
        """Whether everybody has got an answer who is to get one."""
        if self._sleeper is not None and self._sleeper.waiting:
            self._sleeper.close()
            return False
        return not self.exchanges

    def abort(self, exchanges: Iterable[Exchange]) -> list[str]:
        """Ends what these ask for, with an error that says so; the names of the answers."""
        plans = [self.exchanges[exchange] for exchange in exchanges]
        for plan in plans:
            plan.generation.fail(aborted())
        return [plan.name for plan in plans]

    def told(self, verb: str, **facts: Any) -> None:
        """Something that was done to the server, for the log."""
        if self.log_level != "off":
            self.write_log(admin_line({"verb": verb, **facts}))

    def stored(self) -> dict[str, int]:
        """The content store in numbers; empty where there is none."""
        if self.content is None or self.batches is None:
            return {}
        return {**self.content.numbers(), "batch_lines": self.batches.lines}

    def need_unpaused(self) -> None:
        """Raises HttpError 503 while the server is paused."""
        if self.paused:
            raise HttpError(
                503,
                "the server is paused by its operator",
                kind="service_unavailable",
                code="paused",
                retry_after=5.0,
            )

    def need(self, *, engine: bool = True) -> tuple[Text, Ready]:
        """What serving needs; without `engine`, what answers need that it has no part in, which are given while it
        sleeps, too. Raises HttpError 503 while it is not there."""
        if self.draining:
            error = unavailable("the server is shutting down", 5.0)
            error.close = True
            raise error
        asleep = self.client.state in ("sleeping", "asleep")
        if self.text is not None and self.client.ready is not None and asleep:
            if engine:
                raise self.sleeper.refusal()
            return self.text, self.client.ready
        if self.text is None or self.client.ready is None or self.client.state != "ready":
            state = self.client.state
            why = f": {self.client.error}" if self.client.error else ""
            raise unavailable("the server is starting" if state == "starting" else f"no engine{why}", 1.0)
        return self.text, self.client.ready

    def need_task(self, ready: Ready, *tasks: Task) -> None:
        """Raises HttpError 400 unless the model does one of these."""
        if ready.task in tasks:
            return
        name = self.settings.model_name
        raise HttpError(400, f"the model {name!r} {ABILITY[ready.task]}", param="model", code="unsupported_model")

    def table(self, text: Text) -> TokenBytes:
        """The byte table of the vocabulary, built once."""
        if self._table is None:
            self._table = text.token_bytes()
        return self._table

    def longest(self, text: Text) -> int:
        """Bytes of the vocabulary's longest token."""
        return max(1, self.table(text).longest)

    def need_model(self, model: str) -> None:
        """Raises HttpError 404 unless it is served here."""
        if model not in self.settings.names and self.adapters.find(model) is None:
            shown = model if len(model) <= 200 else model[:200] + "..."
            raise HttpError(
                404,
                f"the model {shown!r} is not served here (GET /v1/models lists what is)",
                param="model",
                code="model_not_found",
            )

    # Generations

    def plan(
        self,
        asked: Asked,
        prompts: Sequence[list[int]],
        context: int,
        prefix: str,
        *,
        model: str,
        start: bool,
        reading: Reading | None = None,
    ) -> Plan:
        """Engine requests for every choice of every prompt. Raises InvalidInput where the context cannot hold them,
        HttpError 404 where `model` is not served by now. `start`: the text begins a message, rather than going on from
        its prompt's. `reading`: how the answers are taken apart. `prefix`: what the answer's id begins with."""
        from tailrace.engine.watch import StopWatch
        from tailrace.text import Detokenizer

        assert self.text is not None
        self.need_model(model)
        adapter = self.adapters.find(model)
        number = adapter.id if adapter is not None else 0
        table = self.table(self.text)
        name = fresh_name(prefix)
        source = "messages" if start else "prompt"
        generation = Generation(asked.stream, None if asked.form is None else asked.form.param, source)
        hide = asked.echo and asked.max_tokens == 0
        eos = frozenset(self.text.eos_ids)
        for prompt in prompts:
            wanted = asked.max_tokens
            params = fit(asked.params, len(prompt), 1 if hide else wanted, context, source)
            params = msgspec.structs.replace(params, continues=not start, shown=reading.shown if reading else ())
            if hide:
                params = msgspec.structs.replace(params, max_tokens=1, min_tokens=0, logprobs=-1)
            for copy in range(asked.n):
                index = len(generation.choices)
                own = params if copy == 0 else _further(params, copy)
                watch = StopWatch(table, own) if own.stop else None
                request = name if len(prompts) * asked.n == 1 else f"{name}.{index}"
                decoder = Detokenizer(table, start=start, shown=own.shown)
                answer = reading.parser() if reading else None
                choice = Choice(generation, index, request, prompt, own, decoder, watch, eos, answer, hide, number)
                generation.add(choice)
        return Plan(generation, asked, name, int(time.time()), adapter.name if adapter is not None else None)

    def submit(self, plan: Plan, exchange: Exchange, endpoint: str, *, stored: bool = False) -> None:
        """Hands everything to the engine, or nothing. `stored`: what is said of the request goes to the content store,
        and so not to the log. Raises Overloaded or EngineDied."""
        choices = plan.generation.choices
        limits = self.settings.limits
        bounds = self.accounts.bounds(exchange)
        if self.client.held + len(choices) > limits.in_flight:
            raise Overloaded(f"{self.client.held} requests are in flight; at most {limits.in_flight} are possible")
        if exchange.lease is not None:
            if exchange.lease.revoked:
                raise revoked()
            exchange.lease.charge(plan.most_tokens, "max_tokens")
        timeout = self.settings.timeouts.request
        now = time.monotonic()
        asked = plan.asked
        facts: dict[str, Any] = {"endpoint": endpoint, "model": self.settings.model_name, "http_request": exchange.id}
        facts |= {"stream": asked.stream, "user": asked.user, **who(exchange)}
        facts["adapter"] = plan.adapter
        facts["metadata"] = None if stored else asked.metadata
        facts = {key: value for key, value in facts.items() if value is not None}
        if choices[0].params.max_tokens:
            self.metrics.submitted(asked.n, choices[0].params.max_tokens)
        if self.client.ready is not None:
            self.book.parity = self.client.ready.parity
        self.accounts.submitted(plan, exchange, endpoint, bounds)
        sent: list[str] = []
        try:
            for choice in choices:
                self.book.open(choice.request, exchange.received, keep_times=asked.token_times)
                own = self._facts[choice.request] = {**facts, "max_tokens": choice.params.max_tokens}
                if self.log_level == "prompts" and self.text is not None:
                    own["prompt"] = self.text.decode(choice.prompt[:LOGGED_TOKENS], skip_special=False)
                self.book.add([Event(choice.request, EventKind.SUBMITTED, time.monotonic())])
                priority = asked.priority if exchange.priority is None else exchange.priority
                deadline = now + timeout if timeout else 0.0
                self.client.submit(choice.message(exchange.tenant, priority, deadline), choice)
                sent.append(choice.request)
        except TailraceError:
            self.client.abort(sent)
            unsent = [choice.request for choice in choices if choice.request not in sent]
            self.book.discard(unsent)
            for request in unsent:
                self._facts.pop(request, None)
            self.accounts.withdrawn(unsent)
            self.delivered(sent)
            raise
        finally:
            exchange.booked = bool(sent)

    def delivered(self, requests: Sequence[str]) -> None:
        """The last byte is out, or nobody is there to take it."""
        self.settle()
        now = time.monotonic()
        self.book.add([Event(request, EventKind.DELIVERED, now) for request in requests])

    @contextmanager
    def attended(self, plan: Plan, exchange: Exchange) -> Iterator[None]:
        """While inside, a client that hangs up ends the generation, and so does the end of its key; on leaving,
        whatever still runs is aborted, and what it took is settled."""
        generation = plan.generation

        async def watch() -> None:
            await exchange.gone()
            generation.leave()

        watcher = asyncio.get_running_loop().create_task(watch())
        if exchange.lease is not None:
            exchange.lease.on_revoked = lambda: generation.fail(revoked())
        self.exchanges[exchange] = plan
        requests = [choice.request for choice in generation.choices]
        try:
            yield
        finally:
            del self.exchanges[exchange]
            watcher.cancel()
            self.settle_lease(plan, exchange)
            self.client.abort(choice.request for choice in generation.choices if choice.finish is None)
            self.accounts.delivered(generation.choices, exchange)
            self.delivered(requests)

    def settle_lease(self, plan: Plan, exchange: Exchange) -> None:
        """Settles with the limits of its key what the work took: prompts that the engine has taken up, and the tokens
        that came out. What the server itself failed costs nothing."""
        if exchange.lease is None:
            return
        generation, tokens = plan.generation, 0
        if generation.error is None or generation.error.code not in FREE:
            self.settle()
            choices, n = generation.choices, plan.asked.n
            for at in range(0, len(choices), n):
                group = choices[at : at + n]
                tokens += sum(choice.output_tokens for choice in group)
                if any(choice.finish is not None or self.admitted(choice) for choice in group):
                    tokens += len(group[0].prompt)
        exchange.lease.settle(tokens)

    def admitted(self, choice: Choice) -> bool:
        """Whether the engine has taken it up."""
        fold = self.book.fold(choice.request)
        return fold is not None and fold.admitted is not None

    async def respond(self, plan: Plan, exchange: Exchange, shape: Shape, keep: Keep | None = None) -> None:
        """Streams or answers a submitted plan, and has complete answers stored where that is asked for. Raises
        HttpError only while nothing has been sent."""
        with self.attended(plan, exchange):
            await plan.generation.started()
            if plan.asked.stream:
                await self._stream(plan, exchange, shape, keep)
            else:
                deltas = await plan.generation.whole()
                self.settle_lease(plan, exchange)  # so that the answer's headers say what is left
                if not plan.generation.gone:
                    data = await self._whole(plan, shape, deltas)
                    if keep is not None and (why := await keep.answered(data)):
                        exchange.extra.append((b"x-tailrace-not-stored", why.encode("ascii", "replace")))
                        data = await self._whole(plan, shape, deltas)
                    await exchange.answer(200, data)
                else:
                    exchange.status = 499
        self.metrics.produced(plan.generation.choices, plan.asked.n)

    async def _whole(self, plan: Plan, shape: Shape, deltas: Sequence[tuple[Choice, Delta]]) -> bytes:
        choices = plan.generation.choices
        fields = {"usage": usage_of(choices, plan.asked.n), **self._timeline(plan)}
        return await compose(shape, choices, deltas, fields, plan.asked.params.logprobs)

    async def _stream(self, plan: Plan, exchange: Exchange, shape: Shape, keep: Keep | None) -> None:
        generation = plan.generation
        shown: list[tuple[Choice, Delta]] = []  # what is to be stored
        await exchange.begin(200, list(EVENT_STREAM))
        opening = b"".join(map(shape.opening, generation.choices))
        if opening:
            await exchange.write(opening)

        def direct(choice: Choice, delta: Delta) -> bool:
            if not exchange.writable:
                return False
            if keep is not None:
                shown.append((choice, delta))
            data = shape.chunk(choice, delta)
            if data:
                exchange.write_now(data)
            return True

        if len(generation.choices) == 1:  # several share a write for each step
            generation.direct = direct
        while not generation.done or generation.pending:
            deltas = await generation.deltas()
            if keep is not None:
                shown += deltas
            data = b"".join([shape.chunk(choice, delta) for choice, delta in deltas])
            if data and not generation.gone:
                await exchange.write(data)
        if generation.gone:
            exchange.status = 499
        elif generation.error is not None:
            await exchange.write(shape.failure(generation.error), more=False)
        else:
            if keep is not None:
                await keep.answered(await self._whole(plan, shape, shown))
            await exchange.write(self._end(plan, shape), more=False)

    def _end(self, plan: Plan, shape: Shape) -> bytes:
        fields = self._timeline(plan)
        if plan.asked.include_usage:
            fields = {"usage": usage_of(plan.generation.choices, plan.asked.n), **fields}
        return (shape.closing(fields) if fields else b"") + shape.done

    def _timeline(self, plan: Plan) -> dict[str, Any]:
        """The "tailrace" field, where asked for: up to now, since the bytes that carry it are not out yet."""
        if not plan.asked.timeline:
            return {}
        self.settle()
        now = time.monotonic()
        folds = [self.book.fold(choice.request) for choice in plan.generation.choices]
        lines = [as_json(fold.timeline(now)) for fold in folds if fold is not None]
        return {"tailrace": {"timeline": lines[0]} if len(lines) == 1 else {"timelines": lines}}


class Keep(Protocol):
    """Stores one answer."""

    async def answered(self, data: bytes) -> str:
        """Stores a whole answer, as JSON. Returns why that failed; "" where it did not."""


@dataclass(frozen=True)
class Plan:
    """A generation that is ready to be submitted."""

    generation: Generation
    asked: Asked
    name: str
    created: int
    adapter: str | None = None
    """Its adapter's name."""

    @property
    def most_tokens(self) -> int:
        """Of all prompts, and of the longest answers that there can be."""
        choices = self.generation.choices
        prompts = sum(len(choice.prompt) for choice in choices[:: self.asked.n])
        return prompts + sum(choice.params.max_tokens for choice in choices)

    def facts(self, model: str) -> Facts:
        """For its shape."""
        return Facts(
            id=self.name,
            created=self.created,
            model=model,
            logprobs=self.asked.logprobs,
            top=self.asked.params.logprobs,
            usage_field=self.asked.include_usage or self.asked.continuous_usage,
            continuous_usage=self.asked.continuous_usage,
            service_tier=self.asked.service_tier,
        )


def aborted() -> HttpError:
    """Ends what an operator has ended."""
    return HttpError(
        503, "the request was aborted by the server's operator", kind="service_unavailable", code="aborted", retry=False
    )


def revoked() -> HttpError:
    """Ends what runs with a key that is none any more."""
    return HttpError(
        401,
        "the API key was revoked while the request ran",
        kind="authentication_error",
        code="invalid_api_key",
        retry=False,
    )


def who(exchange: Exchange) -> dict[str, str]:
    """Key and tenant of whoever asks, for logs."""
    caller = exchange.caller
    named = {} if caller is None else {"key": caller.key, "tenant": caller.group}
    return {name: value for name, value in named.items() if value}


async def compose(
    shape: Shape,
    choices: Sequence[Choice],
    deltas: Sequence[tuple[Choice, Delta]],
    fields: Mapping[str, Any],
    logprobs: int,
) -> bytes:
    """A whole answer as JSON; in a thread where it is so much that other streams would wait for it."""
    tokens = sum(choice.output_tokens + len(choice.prompt) for choice in choices)
    work = partial(shape.whole, choices, deltas, fields)
    return work() if tokens * (logprobs + 2) <= INLINE_ROWS else await asyncio.to_thread(work)


def _further(params: SamplingParams, copy: int) -> SamplingParams:
    return msgspec.structs.replace(params, seed=choice_seed(params.seed, copy))
