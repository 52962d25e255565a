"""The timeline of one request, folded from its events: where every second went.

The fold keeps a cursor: the moment up to which time has been given to a phase. Each event gives the time since the
cursor to the phase that the request was in, so nothing is counted twice, and what no phase claims is `other`, measured.
"""

from __future__ import annotations

import msgspec

from tailrace.terms import Event, EventKind, Phase

WAITS = (Phase.PREPARE, Phase.QUEUE, Phase.KV_LOOKUP, Phase.KV_LOAD)
"""Phases that last until the event that ends them, whatever that is."""


class Resume(msgspec.Struct, frozen=True):
    """How a request came back after it was preempted: `had` tokens had been computed; of them so many were still in the
    pool (`ram`) and so many came from a tier (`loaded`); the rest was computed again. Seconds are None where they are
    not known, or where nothing was loaded."""

    cause: str  # why it was preempted
    had: int
    away: float | None = None  # seconds from then until it was admitted again; None: it has not been
    ram: int = 0
    loaded: int = 0
    tier: str = ""  # that had something, whether it was loaded or not; "disk+valkey" where both had
    declined: int = 0  # tokens that it had, and that were not loaded
    load: float | None = None  # seconds that the load took...
    load_predicted: float | None = None  # ...and should have taken
    computing_predicted: float | None = None  # seconds that computing the same should have taken
    why_not: str = ""  # nothing more was loaded: absent, slower, late, scoring or missing

    @property
    def computed(self) -> int:
        """Tokens that were computed again."""
        return max(0, self.had - self.ram - self.loaded)


class Timeline(msgspec.Struct, frozen=True):
    """Seconds and counts of one request. `phases` sums to `e2e` (up to rounding); `other` is part of it."""

    request: str
    received: float  # monotonic seconds
    e2e: float
    phases: dict[Phase, float]
    finish: str  # the finish reason; "" while it runs
    prompt_tokens: int  # looked up: computed plus cached, once
    computed_tokens: int  # prompt tokens computed, again after a preemption
    cached_tokens: int  # prompt tokens taken from the prefix cache when first admitted, at whatever tier
    loaded_tokens: int  # tokens loaded from tiers below the pool, again after a preemption
    loaded_from: dict[str, int]  # the same, by tier
    output_tokens: int
    prefill_steps: int
    decode_steps: int
    stalled_steps: int
    preemptions: int
    load_predicted: float  # seconds that the loads should have taken; what they took is the phase kv_load
    late_lookups: int  # times that a tier has not said in time what it has
    ttft: float | None  # received until the first token
    tpot: float | None  # mean seconds of each token after the first; None where there is none
    admitted: float | None  # received until first admitted
    queue: float | None  # taken into the queue until first admitted
    prefill: float | None  # first admitted until the first token
    decode: float | None  # first token until the last
    device: float = 0.0  # seconds of the steps that it took part in: its share, by the work that it put in...
    device_prefill: float = 0.0  # ...of which for its prompt
    cause: str = ""  # why it failed, where an event said
    waited_for: str = ""  # what kept it in the queue when it was admitted first: slots, pages, budget, prefix, grammar
    missed: str = ""  # why no more of its prompt was cached: see `terms.Event`
    waiting_before: int = 0  # requests that waited when it joined them...
    running_before: int = 0  # ...and that ran
    prefill_beside: int = 0  # prompt tokens of others in the steps that computed its prompt
    decode_beside: int = 0  # requests in the steps that gave it tokens, itself included, summed over the steps
    stalls: dict[str, tuple[int, float]] = {}  # steps and seconds, by cause
    slowed: dict[str, float] = {}  # seconds that others' prompts took of steps in which it had or wanted a token
    gap: float = 0.0  # longest wait from one token to the next...
    gap_at: float = 0.0  # ...which began so many seconds after it was received...
    gap_cause: str = ""  # ...and what lay in it: "prompt ID", "stall CAUSE", "preempted"; "" for a step as any
    token_times: list[float] = []  # seconds since received, one a token, where asked for
    resumes: list[Resume] = []  # one a preemption
    load_declined: Resume | None = None  # what tiers offered, where it was first admitted without that

    @property
    def covered(self) -> float:
        """Share of the end-to-end time that has a name."""
        return 1.0 - self.phases[Phase.OTHER] / self.e2e if self.e2e > 0 else 1.0


class Fold:
    """Takes a request's events in order of arrival; `timeline` may be asked for at any time."""

    __slots__ = (
        "admitted",
        "cached",
        "cause",
        "closed",
        "computed",
        "cursor",
        "declined",
        "decode_beside",
        "decode_steps",
        "device",
        "device_prefill",
        "finish",
        "fresh",
        "gap",
        "gap_cause",
        "gap_end",
        "hindrance",
        "keep_times",
        "last_token",
        "late_lookups",
        "left",
        "load_predicted",
        "loaded",
        "missed",
        "outputs",
        "preemptions",
        "prefill_beside",
        "prefill_steps",
        "queued",
        "received",
        "request",
        "resumes",
        "running_before",
        "slowed",
        "spent",
        "stalled_steps",
        "stalls",
        "state",
        "times",
        "token_first",
        "waited_for",
        "waiting_before",
    )

    def __init__(self, request: str, *, keep_times: bool = False) -> None:
        self.request = request
        self.keep_times = keep_times
        self.spent = dict.fromkeys(Phase, 0.0)
        self.state = Phase.PREPARE
        self.received = self.cursor = self.last_token = 0.0
        self.queued: float | None = None
        self.admitted: float | None = None
        self.token_first: float | None = None
        self.fresh = False  # admitted, but no step has begun for it yet
        self.computed = self.cached = self.outputs = 0
        self.loaded: dict[str, int] = {}  # by tier
        self.load_predicted = 0.0
        self.late_lookups = 0
        self.prefill_steps = self.decode_steps = self.stalled_steps = self.preemptions = 0
        self.finish = ""
        self.closed = False
        self.times: list[float] = []
        self.resumes: list[Resume] = []
        self.left = 0.0  # when it was preempted, or its load began
        self.declined: Resume | None = None
        self.device = self.device_prefill = 0.0
        self.cause = self.waited_for = self.missed = ""
        self.waiting_before = self.running_before = 0
        self.prefill_beside = self.decode_beside = 0
        self.stalls: dict[str, tuple[int, float]] = {}
        self.slowed: dict[str, float] = {}
        self.gap = self.gap_end = 0.0
        self.gap_cause = ""
        self.hindrance = ""  # what has lain between the last token and now

    @property
    def context(self) -> int:
        """Tokens that have their KV."""
        return self.cached + self.computed + self.outputs

    def add(self, event: Event) -> None:
        """Takes one event in."""
        kind = event.kind
        if kind is EventKind.TOKEN:
            self._token(event)
        elif kind is EventKind.CHUNK:
            if event.computed:
                self._step(event, Phase.PREFILL)
                self.prefill_steps += 1
                self.computed += event.computed
            else:
                self._step(event, Phase.DECODE)
                self.decode_steps += 1
        elif kind is EventKind.STALLED:
            self._step(event, Phase.STALL)
            self.stalled_steps += 1
            steps, seconds = self.stalls.get(event.cause, (0, 0.0))
            self.stalls[event.cause] = (steps + 1, seconds + event.at - event.begin)
            self.hindrance = f"stall {event.cause}"
        elif kind is EventKind.RECEIVED:
            self.received = self.cursor = event.at
        elif kind is EventKind.SUBMITTED:
            self._spend(Phase.PREPARE, event.at)
            self.state = Phase.QUEUE
        elif kind is EventKind.QUEUED:
            if self.queued is None:
                self.queued = event.at
            self._spend(Phase.QUEUE, event.at)
            self.state = Phase.QUEUE
        elif kind is EventKind.ADMITTED:
            self._admit(event)
        elif kind is EventKind.LOOKING:
            self._spend(Phase.QUEUE, event.at)
            self.state = Phase.KV_LOOKUP
        elif kind is EventKind.LOOKED:
            self._spend(Phase.KV_LOOKUP, event.at)
            self.state = Phase.QUEUE
            self.late_lookups += event.cause == "late"
        elif kind is EventKind.LOADING:
            self._spend(Phase.QUEUE, event.at)
            self.state = Phase.KV_LOAD
            self.load_predicted += event.predicted
            self.left = event.at
            self._resume(tier=event.tier, load_predicted=event.predicted, computing_predicted=event.computing or None)
        elif kind is EventKind.LOADED:
            self._spend(Phase.KV_LOAD, event.at)
            self.state = Phase.PREFILL
            self.fresh = True
            self.loaded[event.tier] = self.loaded.get(event.tier, 0) + event.cached
            self.cached += event.cached if not self.preemptions else 0
            loaded = event.cached + (self.resumes[-1].loaded if self.resumes else 0)  # one event a tier
            self._resume(loaded=loaded, load=event.at - self.left, why_not=event.cause)
        elif kind is EventKind.DECLINED:
            latest = self.resumes.pop() if self.resumes else None
            known = msgspec.structs.replace(
                latest or Resume("", 0),
                tier=event.tier,
                declined=event.cached,
                load_predicted=event.predicted or None,
                computing_predicted=event.computing or None,
                why_not=event.cause,
            )
            if latest is None:
                self.declined = known
            else:
                self.resumes.append(known)
        elif kind is EventKind.PREEMPTED:
            self._spend(Phase.KV_LOAD if self.state is Phase.KV_LOAD else Phase.OTHER, event.at)
            self.preemptions += 1
            self.state = Phase.QUEUE
            self.left = event.at
            self.hindrance = "preempted"
            self.resumes.append(Resume(event.cause, event.computed))
        elif kind is EventKind.FINISHED or kind is EventKind.FAILED:
            cut = (
                kind is EventKind.FINISHED or self.state in WAITS
            )  # else the engine is gone, and nobody knows since when
            self._spend(self.state if cut else Phase.OTHER, event.at)
            self.finish = self.finish or (event.cause if kind is EventKind.FINISHED else "error")
            self.cause = self.cause or event.cause
            self.state = Phase.STREAM
        elif kind is EventKind.DELIVERED:
            self._spend(self.state, event.at)  # a client that left did so in the middle of something
            self.closed = True

    def _resume(self, **changes: object) -> None:
        """More is known of how it came back from its latest preemption; nothing where there was none."""
        if self.resumes:
            self.resumes[-1] = msgspec.structs.replace(self.resumes[-1], **changes)

    def _spend(self, phase: Phase, until: float) -> None:
        if until > self.cursor:
            self.spent[phase] += until - self.cursor
            self.cursor = until

    def _step(self, event: Event, phase: Phase) -> None:
        """A step [begin, at]: what lies before it is still the queue right after admission, else nobody's. Between
        steps that follow each other nothing lies (`terms.EventKind`)."""
        if event.begin > self.cursor:
            self._spend(Phase.QUEUE if self.fresh else Phase.OTHER, event.begin)
        self.fresh = False
        self._spend(phase, event.at)

    def _admit(self, event: Event) -> None:
        self._spend(Phase.QUEUE, event.at)
        if self.admitted is None:
            self.admitted = event.at
            self.cached = event.cached
            self.waited_for = event.cause
            self.missed = event.missed
        self._resume(away=event.at - self.left, ram=event.cached)
        self.fresh = True
        self.state = Phase.PREFILL

    def _token(self, event: Event) -> None:
        first = self.token_first is None
        self._step(event, Phase.PREFILL if first else Phase.DECODE)
        if first:
            self.token_first = event.at
            self.state = Phase.DECODE
        else:
            self.decode_steps += 1
            gap = event.at - self.last_token
            if gap > self.gap:
                self.gap, self.gap_end, self.gap_cause = gap, event.at, self.hindrance
        self.hindrance = ""
        self.last_token = event.at
        self.outputs += event.computed
        if self.keep_times:
            self.times.extend([event.at - self.received] * event.computed)

    def timeline(self, now: float | None = None) -> Timeline:
        """The request so far; `now` (monotonic) extends it to this moment, for one that is still open."""
        phases = dict(self.spent)
        end = self.cursor
        if now is not None and now > end:
            phases[self.state if self.state in (*WAITS, Phase.STREAM) else Phase.OTHER] += now - end
            end = now
        first = self.token_first
        decode = self.last_token - first if first is not None else None
        return Timeline(
            request=self.request,
            received=self.received,
            e2e=end - self.received,
            phases=phases,
            finish=self.finish,
            prompt_tokens=self.computed + self.cached,
            computed_tokens=self.computed,
            cached_tokens=self.cached,
            loaded_tokens=sum(self.loaded.values()),
            loaded_from=dict(self.loaded),
            output_tokens=self.outputs,
            prefill_steps=self.prefill_steps,
            decode_steps=self.decode_steps,
            stalled_steps=self.stalled_steps,
            preemptions=self.preemptions,
            load_predicted=self.load_predicted,
            late_lookups=self.late_lookups,
            ttft=first - self.received if first is not None else None,
            tpot=decode / (self.outputs - 1) if decode is not None and self.outputs > 1 else None,
            admitted=self.admitted - self.received if self.admitted is not None else None,
            queue=self.admitted - self.queued if self.admitted is not None and self.queued is not None else None,
            prefill=first - self.admitted if first is not None and self.admitted is not None else None,
            decode=decode,
            device=self.device,
            device_prefill=self.device_prefill,
            cause=self.cause,
            waited_for=self.waited_for,
            missed=self.missed,
            waiting_before=self.waiting_before,
            running_before=self.running_before,
            prefill_beside=self.prefill_beside,
            decode_beside=self.decode_beside,
            stalls=dict(self.stalls),
            slowed=dict(self.slowed),
            gap=self.gap,
            gap_at=self.gap_end - self.gap - self.received if self.gap else 0.0,
            gap_cause=self.gap_cause,
            token_times=list(self.times),
            resumes=list(self.resumes),
            load_declined=self.declined,
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _offer(resume: Resume) -> dict[str, object]:
    """What tiers offered, and why it was not taken."""
    return {
        "tier": resume.tier or None,
        "declined_tokens": resume.declined,
        "load_predicted_ms": _ms(resume.load_predicted),
        "computing_predicted_ms": _ms(resume.computing_predicted),
        "why_not": resume.why_not or None,
    }


def as_json(timeline: Timeline) -> dict[str, object]:
    """For answers and logs: milliseconds, rounded to a microsecond; phases that took no time are left out."""
    ms = _ms
    body: dict[str, object] = {
        "request": timeline.request,
        "e2e_ms": ms(timeline.e2e),
        "phases_ms": {
            phase.value: ms(spent) for phase, spent in timeline.phases.items() if spent or phase is Phase.OTHER
        },
        "covered": round(timeline.covered, 6),
        "ttft_ms": ms(timeline.ttft),
        "tpot_ms": ms(timeline.tpot),
        "finish": timeline.finish or None,
        "tokens": {
            "computed": timeline.computed_tokens,
            "cached": timeline.cached_tokens,
            "output": timeline.output_tokens,
        },
        "steps": {
            "prefill": timeline.prefill_steps,
            "decode": timeline.decode_steps,
            "stalled": timeline.stalled_steps,
        },
        "preemptions": timeline.preemptions,
        "device_ms": ms(timeline.device),
    }
    if timeline.load_predicted:
        body["kv_load"] = {
            "tokens": timeline.loaded_tokens,
            "predicted_ms": ms(timeline.load_predicted),
            "tiers": timeline.loaded_from,
        }
    if timeline.late_lookups:
        body["kv_late_lookups"] = timeline.late_lookups
    if timeline.load_declined is not None:
        body["kv_load_declined"] = _offer(timeline.load_declined)
    if timeline.resumes:
        body["resumes"] = [
            {
                "cause": one.cause,
                "away_ms": _ms(one.away),
                "tokens": {"had": one.had, "ram": one.ram, "loaded": one.loaded, "computed": one.computed},
                "load_ms": _ms(one.load),
                **_offer(one),
            }
            for one in timeline.resumes
        ]
    if timeline.token_times:
        body["token_times_ms"] = [ms(at) for at in timeline.token_times]
    return body
