"""Why a request took what it took, in sentences. Numbers are measured; what follows from them is called predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tailrace.ledger.changes import changes
from tailrace.ledger.lookup import Neighbour, Story
from tailrace.ledger.record import PAGE
from tailrace.ledger.store import MICRO

WAITED_FOR = {
    "slots": "for a place among the requests that run (--max-running)",
    "pages": "for KV pages, which others held (--kv-tokens)",
    "budget": "for room in a step, which shorter prompts filled (--step-tokens)",
    "prefix": "for another request that was computing the same beginning: cheaper than computing it twice",
    "grammar": "for its grammar to be compiled",
    "kv_lookup": "for a tier below the pool to say what it has of the prompt",
    "": "for the step that ran to end",
}
MISSED = {
    "new": "no request before had the same tokens after that (or not lately)",
    "pressure": "what follows had been computed before, and was forgotten since the pool needed the room",
    "ttl": "what follows had been computed before, and was forgotten when its time was over (--kv-ttl)",
    "quota": "what follows had been computed before, and was forgotten since its key has no larger share "
    "(--kv-tenant-share)",
    "reset": "what follows had been computed before, and was forgotten when the cache was reset",
    "window": "what follows is known, but not the pages that layers with a window need with it",
    "scoring": "it asked for log-probabilities of its prompt, which have to be computed",
    "off": "the prefix cache is off",
}
STALLS = {"pages": "no KV page was free for its next token", "budget": "the step had no room left for it"}
DECLINED = {
    "slower": "loading it was expected to take longer than computing it",
    "absent": "the tiers below the pool had nothing more",
    "late": "the tiers did not say in time what they have",
    "missing": "a part could not be loaded",
    "scoring": "it scores its prompt",
}
LITTLE = 0.0005
"""Seconds that are not worth a sentence."""


def sentences(story: Story) -> list[str]:
    """From the summary on, in the order of the request's life."""
    record = story.record
    if record.outcome == "refused":
        many = f"{record.requests} requests like it were" if record.requests > 1 else "It was"
        return [f"{many} refused with status {record.status} ({record.code})."]
    parts = (_summary, _prepare, _queue, _cache, _prefill, _decode, _stalls, _gap, _preempted, _stream, _other, _slo,
             _cost, _changes)  # fmt: skip
    return [sentence for part in parts for sentence in part(story)]


def time_of(seconds: float) -> str:
    """0.4 ms, 84 ms, 2.41 s, 1 min 12 s."""
    if seconds < 0.00995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def tokens_of(count: int) -> str:
    """1 token, 2,048 tokens."""
    return f"{count:,} token{'' if count == 1 else 's'}"


def _s(us: int | None) -> float:
    return (us or 0) / MICRO


def _summary(story: Story) -> Iterator[str]:
    record = story.record
    ends = {"ok": "", "failed": f", then failed ({record.code})", "gone": ", until its client left or was cut off"}
    ttft = "no token came" if record.ttft_us is None else f"its first token came after {time_of(_s(record.ttft_us))}"
    tpot = f", the others {time_of(_s(record.tpot_us))} apart" if record.tpot_us else ""
    if not record.output_tokens and record.outcome == "ok":
        ttft = f"{tokens_of(record.prompt_tokens)} were read"
    yield f"It took {time_of(_s(record.e2e_us))}{ends[record.outcome]}: {ttft}{tpot}."


def _prepare(story: Story) -> Iterator[str]:
    record = story.record
    if record.prepare_us > 0.05 * record.e2e_us and _s(record.prepare_us) > LITTLE:
        yield f"Before the engine had it, checking, rendering and tokenizing took {time_of(_s(record.prepare_us))}."


def _queue(story: Story) -> Iterator[str]:
    record, detail = story.record, story.detail
    if _s(record.queue_us) < LITTLE:
        return
    waiting, running = detail.waiting_before, detail.running_before
    there = f"when it came, {running} ran and {waiting} waited"
    if record.queued_us is None:
        yield f"It was never admitted: it waited {time_of(_s(record.queue_us))}; {there}."
    else:
        why = WAITED_FOR.get(detail.waited_for, f"because of {detail.waited_for}")
        yield f"It waited {time_of(_s(record.queue_us))} in the queue, last {why}; {there}."
    if story.ahead and _s(record.queue_us) > 0.01 * _s(record.e2e_us):
        shown = story.ahead[:3]
        more = len(story.ahead) - len(shown)
        tail = f", and {more} more" if more else ""
        yield f"Behind whom: {'; '.join(map(_neighbour, shown))}{tail}."


def _neighbour(one: Neighbour) -> str:
    key = f" of {one.key}" if one.key else ""
    return (
        f"{one.request}{key} ({one.prompt_tokens:,} tokens in, {one.output_tokens:,} out) ran for "
        f"{time_of(one.overlap)} of it"
    )


def _cache(story: Story) -> Iterator[str]:
    record, detail = story.record, story.detail
    if not record.prompt_tokens or record.queued_us is None or not (record.output_tokens or record.prefill_steps):
        return
    prompt, cached = record.prompt_tokens, record.cached_tokens
    most = (prompt - 1) // PAGE * PAGE
    loaded = ""
    if detail.loaded_from:
        tiers = ", ".join(f"{count:,} from {tier}" for tier, count in detail.loaded_from.items())
        loaded = f" ({tiers}, which took {time_of(_s(record.kv_load_us))})"
    said = f"Of its prompt's {tokens_of(prompt)}, {cached:,} came from the cache{loaded}"
    if detail.missed:
        yield f"{said}, not more: {MISSED.get(detail.missed, detail.missed)}."
    elif most and cached >= most:
        yield f"{said}: all that can, since pages of {PAGE} are kept and the last token is computed."
    elif not most:
        yield f"{said}: a prompt shorter than a page of {PAGE} is never kept."
    else:
        yield f"{said}."
    declined = detail.load_declined
    if declined is not None and declined.declined:
        tier = f" in {declined.tier}" if declined.tier else ""
        yield f"{tokens_of(declined.declined)} more lay{tier}: {DECLINED.get(declined.why_not, declined.why_not)}."


def _prefill(story: Story) -> Iterator[str]:
    record, detail = story.record, story.detail
    seconds = _s(record.prefill_us)
    if not record.computed_tokens or not seconds:
        return
    steps = "one step" if record.prefill_steps == 1 else f"{record.prefill_steps} steps"
    rate = record.computed_tokens / seconds
    beside = f"; the same steps computed {tokens_of(detail.prefill_beside)} of others' prompts" * (
        detail.prefill_beside > 0
    )
    yield (
        f"{tokens_of(record.computed_tokens)} of prompt were computed in {steps}, {time_of(seconds)}: "
        f"{rate:,.0f} tokens/s{beside}."
    )


def _decode(story: Story) -> Iterator[str]:
    record, detail = story.record, story.detail
    if not record.decode_steps or not record.decode_us:
        return
    each = _s(record.decode_us) / record.decode_steps
    with_whom = detail.decode_beside / record.decode_steps
    shared = "alone" if with_whom < 1.05 else f"shared by {with_whom:.1f} requests on average, itself included"
    tokens = record.output_tokens - 1
    many = f", {tokens / record.decode_steps:.1f} tokens a step thanks to drafts" * (
        tokens > 1.05 * record.decode_steps
    )
    yield f"{record.decode_steps} steps gave it its other tokens, {time_of(each)} each{many}, {shared}."
    taken = sum(detail.slowed.values())
    if taken > max(LITTLE, 0.01 * _s(record.e2e_us)):
        share = _share(detail.slowed)
        yield f"Others' prompts took {time_of(taken)} of the steps in which it had or wanted a token: {share}."


def _share(slowed: dict[str, float]) -> str:
    most: Sequence[tuple[str, float]] = sorted(slowed.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {time_of(seconds)}" for name, seconds in most[:3])
    return f"{shown}, and {len(most) - 3} more" if len(most) > 3 else shown


def _stalls(story: Story) -> Iterator[str]:
    for cause, (steps, seconds) in story.detail.stalls.items():
        why = STALLS.get(cause, f"because of {cause}")
        many = "one step" if steps == 1 else f"{steps} steps"
        yield f"It was left out of {many}, {time_of(seconds)}: {why}."


def _gap(story: Story) -> Iterator[str]:
    record, detail = story.record, story.detail
    if detail.gap is None or not record.tpot_us or detail.gap[0] < 2 * _s(record.tpot_us):
        return
    seconds, at, cause = detail.gap
    words = []
    kind, _, rest = cause.partition(" ")
    if kind == "stall":
        why, _, rest = rest.partition(" ")
        words.append(STALLS.get(why, why))
        kind, _, rest = rest.partition(" ")
    if kind == "prompt" and rest:
        words.append(f"the step computed the prompt of {rest}")
    if cause == "preempted":
        words.append("it had been preempted")
    why = " and ".join(words) or "a step that took so long"
    yield f"The longest wait between two tokens was {time_of(seconds)}, {time_of(at)} after it came: {why}."


def _preempted(story: Story) -> Iterator[str]:
    for resume in story.detail.resumes:
        away = "it did not come back" if resume.away is None else f"it was away for {time_of(resume.away)}"
        back = f"of {tokens_of(resume.had)} {resume.ram:,} were still there"
        loaded = f", {resume.loaded:,} were loaded" if resume.loaded else ""
        again = f", {resume.computed:,} computed again" if resume.away is not None else ""
        why = STALLS.get(resume.cause, resume.cause)
        yield f"It was preempted ({why}); {away}; {back}{loaded}{again}."


def _stream(story: Story) -> Iterator[str]:
    record, detail = story.record, story.detail
    if detail.blocked > LITTLE:
        yield f"For {time_of(detail.blocked)} its answer waited for the client to read."
    if _s(record.stream_us) > max(LITTLE, 0.05 * _s(record.e2e_us)):
        yield f"Handing over what came after the last token took {time_of(_s(record.stream_us))}."


def _other(story: Story) -> Iterator[str]:
    record = story.record
    if record.other_us > 0.01 * record.e2e_us:
        yield f"{time_of(_s(record.other_us))} have no name: {record.other_us / record.e2e_us:.1%}."


def _slo(story: Story) -> Iterator[str]:
    record = story.record
    values = {"ttft": record.ttft_us, "tpot": record.tpot_us, "e2e": record.e2e_us}
    for name, (bound, met) in story.detail.slo.items():
        value = values[name]
        came = "it did not get so far" if value is None else f"it was {time_of(_s(value))}"
        yield f"{name.upper()} of at most {time_of(bound)}: {'kept' if met else 'missed'} ({came})."


def _cost(story: Story) -> Iterator[str]:
    record = story.record
    if not record.device_us:
        return
    usd = f", ${record.cost_nusd / 1e9:.3g}" if record.cost_nusd else ""
    prompt = record.device_prefill_us / record.device_us
    yield (
        f"Its share of the device's time was {time_of(_s(record.device_us))}{usd}, {prompt:.0%} of it for its prompt "
        f"({story.hardware})."
    )


def _changes(story: Story) -> Iterator[str]:
    for change in changes(story):
        yield f"Predicted: up to {time_of(change.saves)} less with {change.what}."
