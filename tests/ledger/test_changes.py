"""What one change would have given: never more than the time that the thing took, and only what is worth telling."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tailrace.ledger.changes import changes
from tailrace.ledger.lookup import Story
from tailrace.ledger.record import Detail, Resume
from tailrace.ledger.words import sentences
from tests.ledger.rows import record


def story(detail: Detail | None = None, **values: Any) -> Story:
    """Of ten seconds, half of which it waited; a second for 90 of its prompt's 100 tokens."""
    made = record(
        e2e_us=10_000_000, queue_us=5_000_000, prefill_us=1_000_000, prompt_tokens=100, cached_tokens=10,
        computed_tokens=90,
    )  # fmt: skip
    return Story(msgspec.structs.replace(made, **values), detail or Detail(), "avx2, 2 threads")


def found(one: Story) -> dict[str, float]:
    return {change.what.partition(" (")[0]: pytest.approx(change.saves) for change in changes(one)}


def test_a_wait_for_a_place_would_not_have_been() -> None:
    assert found(story(Detail(waited_for="slots"))) == {"a free place among the requests that run when it came": 5.0}
    assert found(story(Detail(waited_for="pages"))) == {"free KV pages when it came": 5.0}
    assert not found(story(Detail(waited_for="prefix")))  # cheaper than computing it twice
    assert not found(story(Detail(waited_for="slots"), queued_us=None))  # it was never admitted


@pytest.mark.parametrize(("missed", "worth"), [("pressure", True), ("ttl", True), ("quota", True), ("new", False)])
def test_what_was_forgotten_need_not_have_been_computed(missed: str, worth: bool) -> None:
    """96 of 100 tokens can be cached, 10 were, so 86 of the 90 that took a second."""
    assert list(found(story(Detail(missed=missed))).values()) == ([86 / 90] if worth else [])


def test_the_most_comes_first_and_little_is_not_told() -> None:
    detail = Detail(
        waited_for="slots", slowed={"a": 1.5, "b": 0.5}, stalls={"pages": (3, 0.25), "budget": (1, 3.0)},
        resumes=[Resume("pages", 40, away=2.5), Resume("pages", 40)],
    )  # fmt: skip
    saves = [change.saves for change in changes(story(detail))]
    assert saves == pytest.approx([5.0, 2.75, 2.0])
    assert not changes(story(detail, e2e_us=1_000_000_000))
    said = [sentence for sentence in sentences(story(detail)) if sentence.startswith("Predicted: ")]
    assert said[0] == (
        "Predicted: up to 5.00 s less with a free place among the requests that run when it came (--max-running, or "
        "another replica)."
    )
    assert len(said) == 3
