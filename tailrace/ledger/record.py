"""A request as the ledger keeps it: who asked, how much, where the time went, what came of it. Never its text.

Times are whole microseconds, money whole billionths of a dollar, so that sums are exact however they are made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.ledger import fingerprints
from tailrace.ledger.slo import NONE, Slo
from tailrace.ledger.timeline import Resume, Timeline
from tailrace.terms import Phase

LABEL = re.compile(r"[^\x20-\x7e]")
MOST_LABEL = 64
PAGE = 16
"""Tokens of a KV page: what is cached is cached by the page."""
MOST_LABELS = 256
"""Different workloads that one server tells apart; callers choose their names."""


class Note(msgspec.Struct):
    """What the HTTP layer knows of a request when it hands it to the engine, and later of its end."""

    http_request: str = ""
    key: str = ""
    tenant: str = ""
    model: str = ""
    adapter: str = ""
    endpoint: str = ""
    workload: str = ""
    stream: bool = False
    max_tokens: int = 0
    params: dict[str, Any] = {}  # those that shape the answer, where they are not the usual ones
    slo: Slo = NONE
    blocked: float = 0.0  # seconds for which the answer waited for its client to read
    prompt: Sequence[int] = ()  # its tokens, of which the row has fingerprints


class Refusal(msgspec.Struct, frozen=True):
    """A request that was refused before it reached the engine. `seconds` from its last byte to the answer."""

    note: Note
    status: int
    code: str
    seconds: float


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A row. `requests` is more than one for refusals that differ in nothing but their time. New fields come last."""

    request: str  # the engine's: what the answer's id is
    http_request: str  # x-request-id
    key: str
    tenant: str
    model: str
    adapter: str
    endpoint: str
    workload: str
    outcome: str  # ok, failed, refused, gone (its client left, or an operator ended it)
    finish: str
    code: str  # why it failed or was refused
    status: int  # of a refusal
    requests: int
    received: int  # microseconds since 1970
    ended: int
    stream: int
    max_tokens: int
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    computed_tokens: int
    output_tokens: int
    e2e_us: int
    ttft_us: int | None
    tpot_us: int | None
    prepare_us: int
    queue_us: int
    kv_lookup_us: int
    kv_load_us: int
    prefill_us: int
    decode_us: int
    stall_us: int
    stream_us: int
    other_us: int
    queued_us: int | None  # from when it was received until it was admitted
    prefill_steps: int
    decode_steps: int
    stalled_steps: int
    preemptions: int
    device_us: int
    device_prefill_us: int
    cost_nusd: int | None  # of its device time; None where no price was known
    slo_met: int | None  # 1 or 0; None where there was nothing to judge
    detail: str  # JSON: see `Detail`


class Detail(msgspec.Struct, omit_defaults=True):
    """The rest, which `explain` reads."""

    params: dict[str, Any] = {}
    slo: dict[str, tuple[float, bool]] = {}  # bound and verdict
    waited_for: str = ""
    missed: str = ""
    waiting_before: int = 0
    running_before: int = 0
    prefill_beside: int = 0
    decode_beside: int = 0
    stalls: dict[str, tuple[int, float]] = {}
    slowed: dict[str, float] = {}
    gap: tuple[float, float, str] | None = None  # seconds, when, and what lay in it
    resumes: list[Resume] = []
    load_declined: Resume | None = None
    loaded_from: dict[str, int] = {}
    load_predicted: float = 0.0
    late_lookups: int = 0
    blocked: float = 0.0
    prompt: str = ""  # see `fingerprints`


OUTCOMES = {"stop": "ok", "length": "ok", "tool_calls": "ok", "abort": "gone"}
"""By what ended a request; anything else has failed, unless the engine did not take it."""
ENGINE_REFUSALS = {"overloaded": 429, "draining": 503, "adapter_not_loaded": 404} | dict.fromkeys(
    (
        "context_length_exceeded",
        "invalid_prompt",
        "invalid_value",
        "invalid_grammar",
        "duplicate_request",
        "wrong_task",
    ),
    400,
)
"""Causes of requests that the engine did not take, with their statuses."""


def server_fault(status: int) -> bool:
    """Whether a refusal with this status is no mistake of its caller's."""
    return status == 429 or status >= 500


def us(seconds: float) -> int:
    """Microseconds."""
    return round(seconds * 1_000_000)


def _us(seconds: float | None) -> int | None:
    return None if seconds is None else us(seconds)


def label(text: str, known: set[str]) -> str:
    """A workload's name as the ledger has it: printable, short, and "other" where a server has told too many apart."""
    name = LABEL.sub("?", text.strip())[:MOST_LABEL]
    if name in known or len(known) < MOST_LABELS:
        known.add(name)
        return name
    return "other"


def detail_of(timeline: Timeline, note: Note, verdicts: dict[str, bool], key: bytes | None) -> str:
    """The JSON of a record's `detail`."""
    detail = Detail(
        params=note.params,
        slo={name: (getattr(note.slo, name), verdict) for name, verdict in verdicts.items()},
        waited_for=timeline.waited_for,
        missed=timeline.missed,
        waiting_before=timeline.waiting_before,
        running_before=timeline.running_before,
        prefill_beside=timeline.prefill_beside,
        decode_beside=timeline.decode_beside,
        stalls={cause: (steps, round(seconds, 6)) for cause, (steps, seconds) in timeline.stalls.items()},
        slowed={name: round(seconds, 6) for name, seconds in timeline.slowed.items()},
        gap=(round(timeline.gap, 6), round(timeline.gap_at, 6), timeline.gap_cause) if timeline.gap else None,
        resumes=timeline.resumes,
        load_declined=timeline.load_declined,
        loaded_from=timeline.loaded_from,
        load_predicted=timeline.load_predicted,
        late_lookups=timeline.late_lookups,
        blocked=round(note.blocked, 6),
        prompt=fingerprints.of(note.prompt, note.tenant, key) if key is not None else "",
    )
    return msgspec.json.encode(detail).decode()


def record_of(
    timeline: Timeline, note: Note, *, clock: float, usd_per_hour: float | None, key: bytes | None = None
) -> Record:
    """A closed request's row. `clock`: what the wall clock says at monotonic time 0. `key`: of the prompt's
    fingerprints; None leaves them out."""
    outcome = OUTCOMES.get(timeline.finish, "failed")
    status = ENGINE_REFUSALS.get(timeline.cause, 0) if outcome == "failed" else 0
    judged = outcome != "gone" and (not status or server_fault(status))
    verdicts = note.slo.verdicts(timeline.ttft, timeline.tpot, timeline.e2e, whole=outcome == "ok") if judged else {}
    phases = {phase: us(seconds) for phase, seconds in timeline.phases.items()}
    received = us(clock + timeline.received)
    device = us(timeline.device)
    return Record(
        request=timeline.request,
        http_request=note.http_request,
        key=note.key,
        tenant=note.tenant,
        model=note.model,
        adapter=note.adapter,
        endpoint=note.endpoint,
        workload=note.workload,
        outcome="refused" if status else outcome,
        finish=timeline.finish,
        code=timeline.cause if outcome == "failed" else "",
        status=status,
        requests=1,
        received=received,
        ended=received + us(timeline.e2e),
        stream=int(note.stream),
        max_tokens=note.max_tokens,
        prompt_tokens=timeline.prompt_tokens,
        cached_tokens=timeline.cached_tokens,
        loaded_tokens=timeline.loaded_tokens,
        computed_tokens=timeline.computed_tokens,
        output_tokens=timeline.output_tokens,
        e2e_us=us(timeline.e2e),
        ttft_us=_us(timeline.ttft),
        tpot_us=_us(timeline.tpot),
        prepare_us=phases[Phase.PREPARE],
        queue_us=phases[Phase.QUEUE],
        kv_lookup_us=phases[Phase.KV_LOOKUP],
        kv_load_us=phases[Phase.KV_LOAD],
        prefill_us=phases[Phase.PREFILL],
        decode_us=phases[Phase.DECODE],
        stall_us=phases[Phase.STALL],
        stream_us=phases[Phase.STREAM],
        other_us=phases[Phase.OTHER],
        queued_us=_us(timeline.admitted),
        prefill_steps=timeline.prefill_steps,
        decode_steps=timeline.decode_steps,
        stalled_steps=timeline.stalled_steps,
        preemptions=timeline.preemptions,
        device_us=device,
        device_prefill_us=min(device, us(timeline.device_prefill)),
        cost_nusd=None if usd_per_hour is None else round(device * usd_per_hour / 3.6),
        slo_met=int(all(verdicts.values())) if verdicts else None,
        detail=detail_of(timeline, note, verdicts, key),
    )


def refusal_of(refusal: Refusal, *, now: float, count: int = 1) -> Record:
    """The row of what was refused `count` times by `now` (seconds since 1970). One that the server was at fault for has
    missed its SLO; a caller's own mistake is not judged."""
    note = refusal.note
    missed = bool(note.slo) and server_fault(refusal.status)
    ended, seconds = us(now), us(refusal.seconds)
    row: dict[str, Any] = dict.fromkeys(Record.__struct_fields__, 0)
    row |= dict.fromkeys(("request", "adapter", "ttft_us", "tpot_us", "queued_us"))
    row |= {name: getattr(note, name) for name in ("http_request", "key", "tenant", "model", "endpoint", "workload")}
    row |= {"request": note.http_request, "adapter": note.adapter, "outcome": "refused", "finish": ""}
    row |= {"code": refusal.code, "status": refusal.status, "requests": count, "received": ended - seconds}
    row |= {"ended": ended, "e2e_us": seconds, "other_us": seconds, "cost_nusd": 0, "detail": "{}"}
    row["slo_met"] = 0 if missed else None
    return Record(**row)
