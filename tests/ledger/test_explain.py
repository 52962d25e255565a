"""Why a request took what it took, in words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tailrace.ledger.book import Book
from tailrace.ledger.lookup import Story, find, slowest, window
from tailrace.ledger.record import Detail, Note, Refusal, record_of, refusal_of
from tailrace.ledger.slo import parse
from tailrace.ledger.store import Ledger
from tailrace.ledger.timeline import Timeline
from tailrace.ledger.usage import Span
from tailrace.ledger.words import sentences, time_of
from tailrace.terms import Event, EventKind
from tests.ledger.rows import NOW, RUN, note, record

E = EventKind


def story(*events: Event, **notes: Any) -> Story:
    """Of the request "r", received at 0."""
    closed: list[Timeline] = []
    book = Book(closed.append)
    for name in {"r": 0, **dict.fromkeys(event.request for event in events)}:
        book.open(name, 0.0)
    for event in events:
        same = [one for one in events if event.begin and (one.begin, one.at) == (event.begin, event.at)] or [event]
        if same[0] is event:
            book.add(same)
    [timeline] = [one for one in closed if one.request == "r"]
    made = record_of(timeline, note(**notes), clock=0.0, usd_per_hour=3600.0)
    return Story(made, msgspec.json.decode(made.detail, type=Detail), "avx2, 2 threads")


def ev(kind: EventKind, at: float, **values: Any) -> Event:
    return Event(values.pop("request", "r"), kind, at, **values)


START = (ev(E.SUBMITTED, 0.5), ev(E.QUEUED, 0.5))
END = (ev(E.FINISHED, 9.0, cause="length"), ev(E.DELIVERED, 10.0))


def test_a_plain_request() -> None:
    said = sentences(
        story(
            *START,
            ev(E.ADMITTED, 0.6, cached=16, missed="new"),
            ev(E.CHUNK, 2.6, begin=0.6, computed=100),
            ev(E.TOKEN, 2.6, begin=0.6, computed=1),
            ev(E.TOKEN, 3.6, begin=2.6, computed=1),
            ev(E.TOKEN, 4.6, begin=3.6, computed=1),
            ev(E.FINISHED, 4.6, cause="length"),
            ev(E.DELIVERED, 4.7),
        )
    )
    assert said == [
        "It took 4.70 s: its first token came after 2.60 s, the others 1.00 s apart.",
        "Before the engine had it, checking, rendering and tokenizing took 500 ms.",
        "It waited 100 ms in the queue, last for the step that ran to end; when it came, 0 ran and 0 waited.",
        "Of its prompt's 116 tokens, 16 came from the cache, not more: no request before had the same tokens after "
        "that (or not lately).",
        "100 tokens of prompt were computed in one step, 2.00 s: 50 tokens/s.",
        "2 steps gave it its other tokens, 1.00 s each, alone.",
        "TTFT of at most 3.00 s: kept (it was 2.60 s).",
        "Its share of the device's time was 4.00 s, $4, 50% of it for its prompt (avx2, 2 threads).",
    ]


def test_stalls_and_whose_prompt_caused_them() -> None:
    said = " ".join(
        sentences(
            story(
                *START,
                ev(E.ADMITTED, 0.6, cached=0, cause="slots"),
                ev(E.CHUNK, 1.0, begin=0.6, computed=8),
                ev(E.TOKEN, 1.0, begin=0.6, computed=1),
                ev(E.TOKEN, 1.1, begin=1.0, computed=1),
                ev(E.TOKEN, 3.1, begin=1.1, computed=1),
                ev(E.CHUNK, 3.1, begin=1.1, computed=99, request="big"),
                ev(E.STALLED, 6.1, begin=3.1, cause="budget"),
                ev(E.CHUNK, 6.1, begin=3.1, computed=512, request="other"),
                *(ev(E.TOKEN, 6.2 + at / 10, begin=6.1 + at / 10, computed=1) for at in range(20)),
                *END,
            )
        )
    )
    assert "a prompt shorter than a page of 16 is never kept" in said
    assert "It was left out of one step, 3.00 s: the step had no room left for it." in said
    assert (
        "Others' prompts took 4.98 s of the steps in which it had or wanted a token: other 3.00 s, big 1.98 s." in said
    )
    assert (
        "The longest wait between two tokens was 3.10 s, 3.10 s after it came: the step had no room left for it and "
        "the step computed the prompt of other." in said
    )


def test_tiers_preemptions_and_clients_that_do_not_read() -> None:
    said = " ".join(
        sentences(
            story(
                *START,
                ev(E.ADMITTED, 0.6, cached=16, missed="pressure"),
                ev(E.LOADING, 0.6, cached=32, tier="disk", predicted=0.5, computing=1.0),
                ev(E.LOADED, 1.1, cached=32, tier="disk"),
                ev(E.CHUNK, 2.0, begin=1.1, computed=20),
                ev(E.TOKEN, 2.0, begin=1.1, computed=1),
                ev(E.PREEMPTED, 2.0, computed=68, cause="pages"),
                ev(E.ADMITTED, 4.0, cached=48, cause="pages"),
                ev(E.CHUNK, 5.0, begin=4.0, computed=21),
                ev(E.TOKEN, 5.0, begin=4.0, computed=1),
                ev(E.FINISHED, 5.0, cause="stop"),
                ev(E.DELIVERED, 9.0),
                blocked=2.0,
            )
        )
    )
    for words in (
        "48 came from the cache (32 from disk, which took 500 ms), not more: what follows had been computed before, "
        "and was forgotten since the pool needed the room.",
        "It was preempted (no KV page was free for its next token); it was away for 2.00 s; of 68 tokens 48 were "
        "still there, 20 computed again.",
        "For 2.00 s its answer waited for the client to read.",
        "Handing over what came after the last token took 4.00 s.",
    ):
        assert words in said


def test_ends_that_are_none() -> None:
    failed = story(*START, ev(E.FAILED, 1.0, cause="engine died"), ev(E.DELIVERED, 1.0), slo=parse("ttft=1,e2e=2"))
    assert sentences(failed) == [
        "It took 1.00 s, then failed (engine died): no token came.",
        "Before the engine had it, checking, rendering and tokenizing took 500 ms.",
        "It was never admitted: it waited 500 ms; when it came, 0 ran and 0 waited.",
        "TTFT of at most 1.00 s: missed (it did not get so far).",
        "E2E of at most 2.00 s: missed (it was 1.00 s).",
    ]
    left = story(*START, ev(E.ADMITTED, 0.6), ev(E.FINISHED, 2.0, cause="abort"), ev(E.DELIVERED, 2.0))
    assert sentences(left)[0] == "It took 2.00 s, until its client left or was cut off: no token came."
    died = story(*START, ev(E.ADMITTED, 0.6), ev(E.FAILED, 2.0, cause="engine died"), ev(E.DELIVERED, 2.0))
    assert "have no name: 70.0%" in " ".join(sentences(died))
    turned = refusal_of(Refusal(Note(http_request="h"), 429, "overloaded", 0.01), now=NOW, count=3)
    assert sentences(Story(turned, Detail(), "")) == ["3 requests like it were refused with status 429 (overloaded)."]


def test_whom_it_waited_for_is_in_the_ledger(where: str) -> None:
    ledger = Ledger(where)
    rows = [
        # received, admitted and ended: seconds after NOW
        ("early", 0.0, 0.0, 1.0),
        ("long", 0.0, 0.5, 6.0),
        ("short", 0.0, 1.5, 3.0),
        ("mine", 2.0, 5.0, 8.0),
        ("behind", 3.0, 5.5, 7.0),
    ]
    made = []
    for at, (name, came, entered, ended) in enumerate(rows, 1):
        waited = round((entered - came) * 1e6)
        one = record(name, ended=NOW + ended, received=round((NOW + came) * 1e6), prepare_us=0, queued_us=waited)
        made.append((at, msgspec.structs.replace(one, queue_us=waited, e2e_us=6_000_000 + at)))
    ledger.write(RUN, made, 0)
    ledger.write(msgspec.structs.replace(RUN, name="another"), made[:3], 0)
    [mine] = find(ledger, "mine")
    assert [(one.request, one.overlap) for one in mine.ahead] == [("long", 3.0), ("short", 1.0)]
    assert any(words.startswith("Behind whom: long of ada (20 tokens in, 4 out) ran for 3.00 s") for words in
               sentences(mine))  # fmt: skip
    assert [one.record.request for one in slowest(ledger, 2, Span(), by="e2e_us")] == ["behind", "mine"]
    assert len(slowest(ledger, 9, Span(NOW + 6.5, NOW + 7.5))) == 1
    records, total = window(ledger, 3, Span())
    assert ([one.request for one in records], total) == (["long", "mine", "behind"], 8)
    ledger.close()


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0004, "0.4 ms"), (0.0843, "84 ms"), (0.9996, "1.00 s"), (72.0, "1 min 12 s")]
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert time_of(seconds) == words
