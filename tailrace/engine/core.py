"""The engine loop: while the backend's threads run a step, the next one is planned.

`step()` waits for the running step, applies its tokens, brings the plan of the next step up to date (requests that have
ended are pruned, arrivals share in it), launches it, and only then turns what the ended step gave into the news. There
is no thread between the loop and the backend: the loop's own joins the step's work when it waits for it.

Where the next step is one more token for the same requests, the backend is told so beforehand and begins it by itself
(`Backend.chain`); all that the loop does then lies beside the running step. Anything that would change the plan keeps
the backend from it: a token that ends a request, or news (`interrupt`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.backends import PAGE_SIZE, Backend, Masks, Pages, Result
from tailrace.engine.adapters import Adapters
from tailrace.engine.batch import BatchBuilder, Builder, scored_rows, scores
from tailrace.engine.config import EngineConfig
from tailrace.engine.constrain import Grammars
from tailrace.engine.plan import Chunk, Plan
from tailrace.engine.protocol import (
    Adapted,
    Encode,
    FinishReason,
    Gauges,
    Output,
    Submit,
    TierGauges,
    TokenLogprob,
    Tokens,
    WindowGauges,
)
from tailrace.engine.request import Request, State
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.spec import AdapterSpec
from tailrace.engine.transfer import Offered, Transfers
from tailrace.engine.watch import StopWatch
from tailrace.kv.prefix import Digest, Node, PageChain, page_digest
from tailrace.kv.tiers import PageKey, key_of
from tailrace.terms import Event, EventKind, TailraceError

if TYPE_CHECKING:
    from tailrace.engine.publisher import Publisher
    from tailrace.text.tokens import TokenBytes

ALL_BITS = 0xFFFFFFFF
RATED_TOKENS = 64
"""Prompt tokens of a step from which on it tells how quick computing prompts is."""


@dataclass(slots=True)
class Drawn:
    """One request's token of an ended step, from `row` of its result, and those that its grammar forced after it."""

    request: Request
    chunk: Chunk
    row: int
    token: int
    finish: FinishReason | None
    stop: str | int | None
    forced: Sequence[int] = ()
    guessed: Sequence[int] = ()  # tokens drawn after it, in the rows that follow


class Flight:
    """A step that runs: its plan, when it began (`EventKind`), whom it left out, and whose its result's rows are."""

    __slots__ = ("begin", "plan", "sampled", "scored", "stalled")

    def __init__(self, plan: Plan, begin: float, stalled: list[tuple[Request, str]]) -> None:
        self.plan = plan
        self.begin = begin
        self.stalled = stalled
        self.sampled: list[tuple[Chunk, int]] = []  # with the row that draws its token
        self.scored: list[tuple[Chunk, int]] = []  # with the first row that scores its prompt tokens
        row = 0
        for chunk in plan.chunks.values():
            if plan.scored and scores(chunk):
                self.scored.append((chunk, row))
                row += scored_rows(chunk)
            if chunk.sample:
                self.sampled.append((chunk, row))
                row += len(chunk.drawn)


class EngineCore:
    """Requests in, news out; no processes and no sockets. One thread calls it.

    `clock` is in monotonic seconds. `builder`: for a backend that runs something else than arrays.

    Requests that cannot be taken are answered with an `Output` of finish "error", whose `error` begins with a code and
    a colon: `overloaded`, `draining`, `context_length_exceeded`, `output_too_long`, `invalid_prompt`,
    `invalid_max_tokens`, `invalid_stop`, `unsupported_grammar`, `duplicate_request`; a request whose step failed:
    `step_failed`; one whose grammar is wrong, or cannot be followed: `invalid_grammar`, `grammar_failed`; one whose
    adapter is not there: `adapter_not_loaded`.
    """

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        *,
        eos_ids: Iterable[int],
        vocab_size: int,
        token_bytes: TokenBytes | None = None,
        identity: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        digest: Digest = page_digest,
        publisher: Publisher | None = None,
        transfers: Transfers | None = None,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
        builder: Builder | None = None,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config, identity=identity, digest=digest)
        self.progress = 0  # tokens computed, ever
        self.steps = 0
        self.drafts = self.drafted = self.accepted = 0  # drafts of tokens, ever; tokens of them; those that were drawn
        self.draining = False  # refuse new requests
        self.wake: Callable[[], None] = lambda: None  # called on another thread: `step` has something to do again
        self._eos = frozenset(eos_ids)
        self._vocab_size = vocab_size
        self._token_bytes = token_bytes
        self._clock = clock
        self._backend = backend
        self._builder: Builder = builder or BatchBuilder(
            max_running=config.max_running,
            max_context=config.max_context,
            eos_ids=tuple(sorted(self._eos)),
            vocab_size=vocab_size,
            windows=len(config.windows),
        )
        self._held: dict[str, Request] = {}
        self._watches: dict[str, StopWatch] = {}
        self._flight: Flight | None = None
        self._refused: Exception | None = None  # what the backend raised instead of beginning a step
        self._next: Plan | None = None
        self._likely = False  # what follows next can be guessed for some request
        self._stale = False  # something has happened that the next plan does not know of
        self._outputs: list[Output] = []
        self._events: list[Event] = []
        self._publisher = publisher
        self._transfers = transfers if config.prefix_cache else None
        self._storing = False  # pages are stored once start-up is over
        self._blocked = False  # nothing can be computed until a load ends, a tier answers, or a grammar is compiled
        self._grammars = grammars
        self.on_adapted: Callable[[Adapted], object] = lambda _news: None  # what has become of an adapter
        self._adapters = adapters
        if adapters is not None:
            adapters.notify = self._woken
        self._astray: list[tuple[Request, Exception]] = []  # what they may draw next could not be told
        if grammars is not None:
            grammars.notify = self._woken
        if self._transfers is not None:
            self._transfers.notify = self._woken
            self.scheduler.offer = self._offer

    # --- what it holds

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to say."""
        return bool(
            (self._held and not self._blocked)
            or self._flight
            or self._outputs
            or self._events
            or (self._transfers is not None and self._transfers.has_finished)
            or (self._grammars is not None and self._grammars.has_finished)
            or (self._adapters is not None and self._adapters.due)
        )

    @property
    def work(self) -> int | None:
        """As `Backend.work`."""
        return self._backend.work

    @property
    def idle(self) -> bool:
        """Not a request held and not a step running."""
        return not self._held and self._flight is None

    @property
    def running_step(self) -> bool:
        """Whether a step runs."""
        return self._flight is not None

    @property
    def _compiling(self) -> bool:
        """Whether a request waits for its grammar."""
        return self._grammars is not None and self._grammars.waiting

    @property
    def gauges(self) -> Gauges:
        """The state now."""
        scheduler, publisher = self.scheduler, self._publisher
        cached = scheduler.index.evictable
        return Gauges(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=scheduler.pool.size,
            used_pages=scheduler.pool.size - scheduler.pool.free - cached - scheduler.index.kept,
            cached_pages=cached,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            steps=self.steps,
            pinned_pages=scheduler.index.kept,
            evictions=list(scheduler.index.evictions.values()),
            kv_batches=publisher.published if publisher is not None else 0,
            kv_batches_dropped=publisher.dropped if publisher is not None else 0,
            tiers=self.tier_gauges,
            resumed=[scheduler.resumed.ram, scheduler.resumed.tier, scheduler.resumed.computed],
            drafts=[self.drafts, self.drafted, self.accepted],
            windows=self._window_gauges() if scheduler.windows else [],
            adapters=self._adapter_gauges(self._adapters) if self._adapters is not None else {},
        )

    def _adapter_gauges(self, adapters: Adapters) -> dict[int, tuple[int, int]]:
        if not adapters.held:
            return {}
        running = Counter(r.adapter.id for r in self.scheduler.running if r.adapter is not None)
        return {one.id: (running[one.id], one.requests - running[one.id]) for one in adapters.held.values()}

    def _window_gauges(self) -> list[WindowGauges]:
        return [
            WindowGauges(
                size,
                window.pool.size,
                window.pool.size - window.pool.free - window.evictable - window.kept,
                window.evictable,
                window.kept,
            )
            for size, window in zip(self.config.windows, self.scheduler.windows, strict=True)
        ]

    @property
    def tier_gauges(self) -> dict[str, TierGauges]:
        """The state of the tiers below the pool by their names, nearest first, which changes at rest too. Any thread
        may ask."""
        if self._transfers is None:
            return {}
        hits = self.scheduler.prefix_loads
        return {
            name: TierGauges(
                pages=stats.tier.pages,
                bytes=stats.tier.bytes,
                writable=stats.tier.writable,
                queued=stats.queued,
                hits=hits.get(number, 0),
                loaded=stats.tier.loaded,
                stored=stats.tier.stored,
                evicted=stats.tier.evicted,
                dropped=stats.dropped,
                declined=stats.declined,
                loads=stats.loads,
                load_seconds=stats.load_seconds,
                predicted_seconds=stats.predicted_seconds,
                misses=dict(stats.tier.misses),
                page_bytes=self._transfers.page_bytes,
                computing_seconds=stats.computing_seconds,
                requeued=stats.requeued,
                up=stats.up,
                refused=stats.tier.refused,
                lookups=stats.lookups,
                lookup_seconds=stats.lookup_seconds,
                late_lookups=stats.late_lookups,
            )
            for number, (name, stats) in enumerate(self._transfers.stats.items())
        }

    def check_integrity(self) -> None:
        """AssertionError where pages, pins, slots and requests do not agree. For tests after every step, and idle."""
        self.scheduler.check_integrity()
        held = {**self.scheduler.waiting, **{request.id: request for request in self.scheduler.running}}
        assert held == self._held, "a request is neither waiting nor running"
        assert set(self._watches) <= set(held), "a stop watch outlived its request"
        if self._adapters is not None:
            self._adapters.check_integrity(Counter(r.adapter.id for r in held.values() if r.adapter is not None))

    def settle(self) -> None:
        """Start-up is over."""
        self._backend.settle()
        if self._publisher is not None:
            self._publisher.attach(self.scheduler.index, lambda: self.wake())
        self._storing = True

    def save(self, seconds: float) -> None:
        """Stores what is cached, and in no tier yet, in the tiers below the pool, as far as that goes in so many
        seconds; then forgets it. Nothing may be held. What runs too long is left: it is a miss later."""
        transfers = self._transfers
        if transfers is not None and self._storing:
            transfers.save(self._whole_pages(), seconds)
        self.scheduler.reset_prefix()
        self._news()

    def _whole_pages(self) -> Iterator[tuple[PageKey, Pages]]:
        """The cached pages that can be stored: those with a page in every sliding group, where there are some."""
        for node in self.scheduler.index.nodes():
            sides = [side.page for side in node.sides or () if side is not None]
            if len(sides) == len(self.scheduler.windows):
                yield key_of(node), (node.page, *sides) if sides else node.page

    def parts(self) -> Sequence[tuple[object, str, str]]:
        """What a step consists of, for a profile (`engine.profile`): objects, their methods, and what those do."""
        return (
            (self, "step", "step"),
            (self, "prepare", "plan ahead"),
            (self.scheduler, "plan", "plan"),
            (self, "_wait", "wait"),
            (self, "_take_in", "take in"),
            (self, "_apply", "apply"),
            (self, "_launch", "launch"),
            (self._builder, "build", "build batch"),
            (self, "_mask", "fill masks"),
            (self, "_follow", "follow"),
            (self, "_tell", "tell"),
            (self, "_keep", "store pages"),
            (self, "_news", "news"),
        )

    @property
    def backend(self) -> Backend:
        """What computes."""
        return self._backend

    def close(self) -> None:
        """Lets the step that runs end. What is held is lost."""
        self._backend.hold(True)
        if self._flight is not None:
            self._wait()
            self._flight = None
        if self._publisher is not None:
            self._publisher.close()
        if self._transfers is not None:
            self._transfers.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._adapters is not None:
            self._adapters.close()

    # --- messages

    def submit(self, request: Submit, chain: PageChain | None = None) -> None:
        """Takes a request in, or refuses it in the next news; never raises. `chain`: see `Scheduler.take`."""
        refusal = self._refusal(request)
        now = self._clock()
        if refusal:
            self._outputs.append(Output(request.request, finish="error", error=refusal))
            self._events.append(Event(request.request, EventKind.FAILED, now, cause=refusal.partition(":")[0]))
            return
        adapter = self._adapters.find(request.adapter) if self._adapters is not None and request.adapter else None
        if adapter is not None:
            adapter.requests += 1
        taken = self.scheduler.take(request, now, adapter, chain)
        self._held[taken.id] = taken
        if request.params.stop and self._token_bytes is not None:
            self._watches[taken.id] = StopWatch(self._token_bytes, request.params)
        self._events.append(Event(taken.id, EventKind.QUEUED, now))
        if request.params.grammar is not None and self._grammars is not None:
            try:
                self._grammars.begin(taken)
            except TailraceError as error:
                self._end(taken, "error", f"grammar_failed: {error}")
                return
        self._stale = True
        self._blocked = False

    def encode(self, request: Encode) -> None:
        """Refuses, in the next news: this engine's model generates text."""
        self._outputs.append(Output(request.request, finish="error", error="wrong_task: the model embeds no texts"))
        self._events.append(Event(request.request, EventKind.FAILED, self._clock(), cause="wrong_task"))

    def _refusal(self, submit: Submit) -> str:
        """Why a request cannot be taken; "" where it can."""
        prompt, params = submit.prompt, submit.params
        longest = self.config.max_context
        if submit.request in self._held:
            return f"duplicate_request: {submit.request} is already being served"
        if not prompt:
            return "invalid_prompt: the prompt has no tokens"
        if len(prompt) >= longest:
            return (
                f"context_length_exceeded: the prompt has {len(prompt)} tokens, and the context of {longest} tokens "
                "must hold at least one more"
            )
        if len(prompt) + params.max_tokens > longest:
            return (
                f"output_too_long: {len(prompt)} prompt tokens and max_tokens {params.max_tokens} make "
                f"{len(prompt) + params.max_tokens}, more than the context of {longest} tokens"
            )
        if params.max_tokens < 1:
            return f"invalid_max_tokens: max_tokens must be at least 1, not {params.max_tokens}"
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            return f"invalid_prompt: token ids must lie in 0 .. {self._vocab_size - 1}"
        if params.stop and self._token_bytes is None:
            return "invalid_stop: stop strings need the tokenizer's bytes, which this engine was not given"
        if params.grammar is not None and self._grammars is None:
            return "unsupported_grammar: this engine was not given what it takes to follow a grammar"
        if submit.adapter and (self._adapters is None or self._adapters.find(submit.adapter) is None):
            return "adapter_not_loaded: the adapter was unloaded"
        if self.draining:
            return "draining: the server is shutting down"
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            return f"overloaded: {len(self.scheduler.waiting)} requests are waiting already"
        return ""

    def abort(self, requests: Iterable[str]) -> None:
        """Ends these requests and frees what they hold now; the next news says so. Unknown ids are ignored."""
        for name in requests:
            request = self._held.get(name)
            if request is not None:
                self._end(request, "abort")

    def load_adapter(self, adapter: AdapterSpec) -> None:
        """Begins to load an adapter; `on_adapted` hears of it."""
        if self._adapters is None:
            self.on_adapted(Adapted(adapter.id, error="this engine takes no adapters"))
        else:
            self._adapters.load(adapter)

    def unload_adapter(self, adapter: int) -> None:
        """No later request has it."""
        if self._adapters is not None:
            self._adapters.unload(adapter)

    def reset_prefix(self) -> None:
        """Forgets the cached prefixes that no request holds."""
        self.scheduler.reset_prefix()

    # --- steps

    def interrupt(self) -> None:
        """There is something to take in: the next step waits for that. May be called from any thread."""
        self._backend.hold(True)

    def prepare(self) -> None:
        """Plans the next step while one runs. `step` begins with it."""
        if self._flight is not None and self._next is None and not self._flight.plan.drafted:
            self._next = plan = self.scheduler.plan(self._clock())
            self._stale = self._likely and plan.decodes < self.config.draft_rows
            unchanged = not self._stale and not plan.admitted and not self.scheduler.preempted
            adapting = self._adapters is not None and self._adapters.due
            if plan.chunks and unchanged and self._refused is None and not adapting:
                ahead = self._builder.ahead(plan)
                if ahead is not None:
                    self._backend.chain(*ahead)

    def step(self, intake: Callable[[], None] | None = None) -> Tokens | None:
        """Waits for the running step, launches the next, and returns the news of the one that ended and of whatever
        else has happened; None when there is nothing to do or to say. `intake` is called before the launch: a last
        chance to `submit` and `abort` what arrived while the step ran."""
        self.prepare()
        if self._stale:
            self._backend.hold(True)
        ended = self._flight
        outcome = self._wait() if ended is not None else None
        self._flight = None
        now = self._clock()
        if ended is not None and isinstance(outcome, Result) and self._backend.chained:
            drawn = self._apply(ended, outcome)
            self._follow(now)
            self._tell(ended, outcome, drawn, now)
            self._keep(ended.plan)
            self._take_in(intake, now)
            return self._news()
        self._take_in(intake, now)
        if self._adapters is not None and self._adapters.due:
            for news in self._adapters.settle():
                self.on_adapted(news)
        if ended is None or outcome is None:
            self._events += self._launch(None)
        elif isinstance(outcome, Exception):
            self._fail(ended, outcome)
            self._events += self._launch(now)
        else:
            drawn = self._apply(ended, outcome)
            launched = self._launch(now)
            self._tell(ended, outcome, drawn, now)
            self._keep(ended.plan)
            self._events += launched
        self._save_spilled()
        return self._news()

    @property
    def steady(self) -> int:
        """How many steps, the running one included, will give each running request one more token and end none, however
        long they take, where nothing comes in meanwhile. 0: not known. For simulators: see `repeat`."""
        flight = self._flight
        if flight is None or flight.stalled or self._next is not None or self._stale or self._outputs or self._events:
            return 0
        if self._transfers is not None or self._adapters is not None or self._grammars is not None or self._watches:
            return 0
        return self.scheduler.steady(flight.plan)

    def repeat(self, ends: Sequence[float], draw: Callable[[Request, int], Sequence[int]]) -> list[Event]:
        """Goes through the next steps, at most `steady` of them, as if `step` had been called when each has ended: at
        `ends`. `draw` gives so many next tokens of a request, none of which may end it. Returns the steps' events."""
        flight, count = self._flight, len(ends)
        assert flight is not None
        names = []
        for request in (chunk.request for chunk in flight.plan.chunks.values()):
            request.tokens.extend(draw(request, count))
            names.append(request.id)
        begins = [flight.begin, *ends[:-1]]
        self.scheduler.repeat(flight.plan, begins)
        self.steps += count
        self.progress += count * len(names)
        flight.begin = ends[-1]
        kind = EventKind.TOKEN
        return [Event(name, kind, at, begin, 1) for begin, at in zip(begins, ends, strict=True) for name in names]

    def _take_in(self, intake: Callable[[], None] | None, now: float) -> None:
        self._backend.hold(False)  # before looking: what comes after that puts it on hold again
        if intake is not None:
            intake()
        if self._transfers is not None and (self.scheduler.loads or self._transfers.has_finished):
            self._take_back(self._transfers, now)
        if self._grammars is not None and (self._grammars.waiting or self._grammars.has_finished):
            for request, error in self._grammars.finished():
                self._stale = True
                self._blocked = False
                if error:
                    self._end(request, "error", error)
        for request in self.scheduler.overdue(now):
            self._end(request, "timeout")

    def _follow(self, now: float) -> None:
        """The planned step runs already."""
        plan, self._next = self._next, None
        assert plan is not None
        self.scheduler.launch(plan)
        self._builder.follow()
        self._flight = Flight(plan, now, self.scheduler.stalled(plan))

    def _apply(self, ended: Flight, result: Result) -> list[Drawn]:
        """Gives each request its token, and ends those that are done: all that the next launch has to know."""
        self.steps += 1
        self.progress += ended.plan.tokens
        if self._transfers is not None and ended.plan.tokens - ended.plan.decodes >= RATED_TOKENS:
            self._transfers.computed(ended.plan.tokens, self._clock() - ended.begin)
        tokens: list[int] = result.tokens.tolist()
        drawn = []
        eos = self._eos
        self._likely = False
        for chunk, row in ended.sampled:
            request = chunk.request
            if request.state is State.FINISHED:
                continue
            token = tokens[row]
            if request.constraint is not None:
                constrained = self._constrained(request, chunk, row, token)
                if constrained is not None:
                    drawn.append(constrained)
                continue
            if chunk.draft:
                drawn.append(self._guessed(request, chunk, row, tokens, ended.plan))
                continue
            request.tokens.append(token)
            if request.drafter is not None:
                request.drafter.follow()
                self._likely |= request.drafter.ready
            finish, stop = None, None
            params = request.params
            if token in eos or params.stop_ids or params.stop or len(request.tokens) >= request.limit:
                finish, stop = self._check(request, token)
                if finish is not None:
                    self._release(request, finish)
            drawn.append(Drawn(request, chunk, row, token, finish, stop))
        return drawn

    def _guessed(self, request: Request, chunk: Chunk, row: int, tokens: list[int], plan: Plan) -> Drawn:
        """Gives a request its token and, as long as its draft was right, those after it."""
        drafter, draft = request.drafter, chunk.draft
        assert drafter is not None
        expected = drafter.expecting
        given: list[int] = []
        finish, stop = None, None
        for token in tokens[row : row + len(chunk.drawn)]:
            at = len(given)
            given.append(token)
            request.tokens.append(token)
            drafter.follow()
            finish, stop = self._check(request, token)
            if finish is not None or at == len(draft) or token != draft[at]:
                break
        accepted = len(given) - 1
        drafter.judge(len(draft), accepted, predicted=expected)
        self._likely |= drafter.ready
        self.drafts += 1
        self.drafted += len(draft)
        self.accepted += accepted
        self.scheduler.accept(request, accepted, plan)
        if finish is not None:
            self._release(request, finish)
        return Drawn(request, chunk, row, given[0], finish, stop, guessed=given[1:])

    def _constrained(self, request: Request, chunk: Chunk, row: int, token: int) -> Drawn | None:
        """Gives a request its token and those that its grammar forces after it, and ends it where the text is complete.
        None where it cannot go on, which ends it too."""
        constraint = request.constraint
        assert constraint is not None
        following: list[int] = []
        if token not in self._eos:
            try:
                if token < 0:
                    raise TailraceError("no token is left that could be drawn")
                following = constraint.take(token)
            except TailraceError as error:
                self._end(request, "error", f"grammar_failed: {error}")
                return None
        given: list[int] = []
        finish, stop = None, None
        for at, one in enumerate([token, *following]):
            given.append(one)
            request.tokens.append(one)
            finish, stop = self._check(request, one)
            if at == len(following) and constraint.ended and finish in (None, "length"):
                finish = "stop"
            if finish is not None:
                break
        if finish is not None:
            self._release(request, finish)
        elif len(given) > 1:
            self.scheduler.extend(request, len(given) - 1, self._next)
            self._stale = True
        return Drawn(request, chunk, row, token, finish, stop, given[1:])

    def _check(self, request: Request, token: int) -> tuple[FinishReason | None, str | int | None]:
        """Whether a request ends with this token, and the stop string or id that ended it."""
        params = request.params
        if token in self._eos and not params.ignore_eos:
            return "stop", None
        if params.stop_ids and token in params.stop_ids:
            return "stop", token
        if params.stop:
            stop = self._watches[request.id].push(token)[1]
            if stop is not None:
                return "stop", stop
        return ("length", None) if len(request.tokens) >= request.limit else (None, None)

    def _fail(self, ended: Flight, error: Exception) -> None:
        """The step raised: its requests end with the error, what they were to write is unknown to the index, and the
        rest goes on."""
        self.steps += 1
        for chunk in ended.plan.chunks.values():
            if chunk.request.state is not State.FINISHED:
                self._end(chunk.request, "error", f"step_failed: {type(error).__name__}: {error}")
        self.scheduler.withdraw(ended.plan, self._next)
        self._stale = True

    def _launch(self, since: float | None) -> list[Event]:
        """Brings the next plan up to date and launches it; leaves nothing running where there is nothing to compute.
        `since`: when the step that it follows ended, if there was one. Returns the events of the launch."""
        now = self._clock()
        scheduler = self.scheduler
        plan = self._next
        if plan is None or self._stale:
            plan = scheduler.plan(now, plan)
        self._next, self._stale = None, False
        events = [
            Event(request.id, EventKind.PREEMPTED, now if since is None else since, computed=request.lost, cause=cause)
            for request, cause in scheduler.preempted
            if request.state is not State.FINISHED
        ]
        scheduler.preempted.clear()
        for request in plan.admitted:
            self._builder.seat(request)
            events.append(
                Event(
                    request.id,
                    EventKind.ADMITTED,
                    now,
                    cached=request.hit,
                    cause=request.waited_for,
                    missed=request.missed if request.chain is not None else "off",
                )
            )
            if self._transfers is not None and request.loading is None:
                events += self._without_load(request, now)
        if self._transfers is not None:
            self._rescue_spilled(self._transfers)
            events += self._begin_loads(self._transfers, now)
            self._transfers.busy(bool(plan.chunks))
        self._blocked = not plan.chunks and (bool(scheduler.loads) or scheduler.awaiting or self._compiling)
        if not plan.chunks:
            return events
        scheduler.launch(plan)
        self._flight = Flight(plan, now if since is None else since, scheduler.stalled(plan))
        try:
            batch = self._builder.build(plan)
            self._backend.launch(batch)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises fails its step, and only that
            self._refused = error
        else:
            if batch.sampling.masks is not None:
                self._mask(self._flight, batch.sampling.masks)
        return events

    def _mask(self, flight: Flight, masks: Masks) -> None:
        """Says which tokens the requests with a grammar may draw, beside the step that runs already. Whatever happens,
        the step gets to know: it would wait for ever."""
        try:
            for chunk, row in flight.sampled:
                constraint = chunk.request.constraint
                if constraint is None:
                    continue
                bits = masks.bits[masks.row[row]]
                try:
                    constraint.fill(bits)
                except Exception as error:  # noqa: BLE001 - whatever it was, it is this request's alone
                    bits[:] = ALL_BITS
                    self._astray.append((chunk.request, error))
        finally:
            self._backend.release(masks)

    def _wait(self) -> Result | Exception:
        """The running step's result, or what it raised."""
        refused, self._refused = self._refused, None
        if refused is not None:
            return refused
        try:
            return self._backend.wait()
        except Exception as error:  # noqa: BLE001 - as above
            return error

    def _end(self, request: Request, finish: FinishReason, error: str = "") -> None:
        """Ends a request otherwise than by a token."""
        self._release(request, finish)
        self._outputs.append(Output(request.id, finish=finish, cached=request.cached, error=error))
        self._events.append(Event(request.id, EventKind.FINISHED, self._clock(), cause=finish))

    def _release(self, request: Request, finish: FinishReason) -> None:
        """Frees all that a request holds."""
        request.finish = finish
        self.scheduler.finish(request, self._next)
        del self._held[request.id]
        if request.adapter is not None:
            request.adapter.requests -= 1
        self._watches.pop(request.id, None)
        if self._grammars is not None:
            self._grammars.forget(request)
        self._builder.forget(request)
        plan = self._next
        if plan is not None:
            self._backend.hold(True)
        if self.scheduler.waiting or (plan is not None and len(plan.chunks) < len(self.scheduler.running)):
            self._stale = True  # there is room now for those that were left out

    # --- the tiers below the pool

    def _offer(self, request: Request, first: int, limit: int) -> Offered | None:
        """`scheduler.Offer`: what tiers have, or are about to get, where loading it is expected to be quicker than
        computing it."""
        transfers, chain = self._transfers, request.chain
        assert transfers is not None
        assert chain is not None
        lookup = request.lookup
        if lookup is None:
            request.lookup = lookup = transfers.ask(chain, first, limit)
            if transfers.awaited(lookup):
                tokens = len(lookup.digests) * PAGE_SIZE
                self._events.append(Event(request.id, EventKind.LOOKING, lookup.begun, cached=tokens))
        if not lookup.told:
            if transfers.awaited(lookup):
                return None
            lookup.told = True
            cause = "" if lookup.done else "late"
            self._events.append(Event(request.id, EventKind.LOOKED, self._clock(), cause=cause))
        offered = transfers.offer(chain, first, limit)
        if offered.why == "absent" and not lookup.done:
            return offered._replace(why="late")
        return offered

    def _without_load(self, request: Request, now: float) -> list[Event]:
        """A request was admitted without a load: why, where it has been preempted and comes back with less than it had,
        and where a tier had what is better computed."""
        offered = request.offered or Offered(why="scoring")  # else it would have been asked for
        less = bool(request.preemptions) and request.hit < request.lost - request.lost % PAGE_SIZE
        if not less and offered.why != "slower":
            return []
        event = Event(
            request.id,
            EventKind.DECLINED,
            now,
            cached=offered.declined * PAGE_SIZE,
            cause=offered.why,
            predicted=offered.loading,
            computing=known(offered.computing),
            tier=offered.tiers,
        )
        return [event]

    def _woken(self) -> None:
        """A load has ended, a tier has said what it has, a grammar is compiled or an adapter read; on the thread that
        did it."""
        self._backend.hold(True)
        self.wake()

    def _begin_loads(self, transfers: Transfers, now: float) -> list[Event]:
        """No step runs: whatever wrote pages that are free now has ended. And none that is launched before a load has
        ended knows of its pages."""
        events = []
        for load in self.scheduler.unbegun:
            transfers.begin(load)
            tokens = len(load.pages) * PAGE_SIZE
            event = Event(
                load.request.id,
                EventKind.LOADING,
                now,
                cached=tokens,
                predicted=load.predicted,
                computing=known(load.computing),
                tier=load.tiers,
            )
            events.append(event)
        self.scheduler.unbegun.clear()
        return events

    def _take_back(self, transfers: Transfers, now: float) -> None:
        """Loads that have ended, what tiers have said, and requests that have waited too long."""
        self._stale = transfers.heard() or self._stale
        for load in transfers.finished():
            self._stale = True
            request = load.request
            waited = request.loading is load
            tokens = self.scheduler.loaded(load)
            if waited:
                self.progress += tokens
                for part, (tier, count) in zip(load.parts, load.filled, strict=False):
                    event = Event(
                        request.id,
                        EventKind.LOADED,
                        now,
                        cached=count * PAGE_SIZE,
                        cause="" if count == part.count else "missing",
                        tier=transfers.name_of(tier),
                    )
                    self._events.append(event)
        for load in self.scheduler.loads:
            if transfers.late(load):
                transfers.gave_up(load)
                if not load.cancelled:
                    self._stale = True
                    self.scheduler.give_up(load.request)

    def _keep(self, plan: Plan) -> None:
        """Hands the pages that an ended step has made known, or found, to the tiers. The next step may be running: it
        does not write them."""
        transfers = self._transfers
        if transfers is None or not self._storing:
            return
        nodes: list[Node] = []
        for request in plan.admitted:
            found = request.path[: request.hit // PAGE_SIZE]
            if found and request.chain is not None:
                transfers.used(request.chain, len(found))
                nodes += found
        for node in nodes + plan.inserted:
            if node.alive and not self.scheduler.windows:
                transfers.store(key_of(node), node.page)
        for node in [*nodes, *(side.node for side in plan.sides)]:
            pages = [side.page for side in node.sides or () if side is not None]
            if node.alive and pages and len(pages) == len(self.scheduler.windows):  # else it is of no use
                transfers.store(key_of(node), (node.page, *pages))

    def _rescue_spilled(self, transfers: Transfers) -> None:
        """Pages of requests that the next step has preempted, and that it has handed on already: nothing has written
        them yet, the step and loads are about to. Few: only as many as the step needed."""
        if not self._storing:
            return
        for node, page in self.scheduler.spilled:
            if not node.alive:
                transfers.store(key_of(node), page, urgent=True)

    def _save_spilled(self) -> None:
        """The other pages of requests that the step that runs now has preempted: those that have not been stored,
        because the queue was full or because they are new."""
        spilled = self.scheduler.spilled
        if spilled and self._transfers is not None and self._storing:
            for node, page in spilled:
                if node.page == page:
                    self._transfers.store(key_of(node), page, urgent=True)
        spilled.clear()

    # --- news

    def _tell(self, ended: Flight, result: Result, drawn: list[Drawn], at: float) -> None:
        """Turns an ended step into outputs and events. What a request was told when it was aborted stays its last."""
        begin, events, token_event = ended.begin, self._events, EventKind.TOKEN
        for chunk, row in ended.scored:
            self._score(chunk, row, result)
        if ended.plan.decodes < len(ended.plan.chunks) or ended.plan.partial:
            done = {item.request.id for item in drawn}
            for chunk in ended.plan.chunks.values():
                request = chunk.request
                if request.state is State.FINISHED and request.id not in done:
                    continue
                if not chunk.decode:
                    events.append(Event(request.id, EventKind.CHUNK, at, begin, chunk.count))
                elif not chunk.sample:
                    events.append(Event(request.id, EventKind.CHUNK, at, begin, rows=chunk.rows))
        for request, cause in ended.stalled:
            if request.state is not State.FINISHED:
                events.append(Event(request.id, EventKind.STALLED, at, begin, cause=cause))
        for item in drawn:
            request, finish = item.request, item.finish
            rows = item.chunk.rows
            if rows > 1 and item.chunk.decode:
                count = 1 + len(item.forced) + len(item.guessed)
                events.append(Event(request.id, token_event, at, begin, count, rows=rows))
            else:
                events.append(Event(request.id, token_event, at, begin, 1 + len(item.forced) + len(item.guessed)))
            if finish is not None:
                events.append(Event(request.id, EventKind.FINISHED, at, cause=finish))
            self._outputs.append(self._output(item, result))

    def _output(self, item: Drawn, result: Result) -> Output:
        request, params = item.request, item.request.params
        first = item.chunk.end == request.prompt_len
        if not first and item.finish is None and params.logprobs < 0:
            return Output(request.id, [item.token, *item.forced, *item.guessed])
        scored = enumerate([item.token, *item.guessed], item.row) if params.logprobs >= 0 else ()
        return Output(
            request.id,
            [item.token, *item.forced, *item.guessed],
            [logprob(result, row, token, params.logprobs) for row, token in scored],
            item.finish,
            item.stop,
            request.cached if first or item.finish is not None else 0,
            request.prompt_logprobs if first else [],
            predicted=predictions(request) if item.finish is not None else (0, 0),
        )

    def _score(self, chunk: Chunk, row: int, result: Result) -> None:
        """Keeps the log-probabilities of the prompt tokens that follow those computed."""
        request = chunk.request
        for at in range(scored_rows(chunk)):
            token = request.tokens[chunk.begin + at + 1]
            scored = logprob(result, row + at, token, request.params.prompt_logprobs)
            request.prompt_logprobs[chunk.begin + at + 1] = scored
        if chunk.sample:
            request.scoring = False

    def _news(self) -> Tokens | None:
        for request, error in self._astray:
            if request.state is not State.FINISHED:
                self._end(request, "error", f"grammar_failed: {error}")
        self._astray.clear()
        if self._publisher is not None:
            self._publisher.flush()
        if not self._outputs and not self._events and self._flight is None:
            return None
        news = Tokens(self._outputs, self._events, self.gauges)
        self._outputs, self._events = [], []
        return news


def predictions(request: Request) -> tuple[int, int]:
    """Tokens of what the caller expected that were tried: accepted and rejected."""
    drafter = request.drafter
    return (drafter.accepted, drafter.rejected) if drafter is not None else (0, 0)


def known(seconds: float) -> float:
    """For an event: 0 where it is infinite, since it is not known."""
    return seconds if seconds < float("inf") else 0.0


def logprob(result: Result, row: int, token: int, top: int) -> TokenLogprob:
    """One row's log-probability with its `top` likeliest."""
    if not top:
        return TokenLogprob(token, float(result.logprobs[row]))
    likeliest = zip(result.top_tokens[row, :top].tolist(), result.top_logprobs[row, :top].tolist(), strict=True)
    return TokenLogprob(token, float(result.logprobs[row]), list(likeliest))
