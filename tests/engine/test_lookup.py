"""Drafts copied from a request's own tokens: what is guessed, when, and that it changes no token."""

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.backends import PAGE_SIZE
from tailrace.engine.config import EngineConfig
from tailrace.engine.lookup import FIRST_NEED, GRAM, Drafter
from tailrace.terms import EventKind
from tests.fakes import Driver

PERIOD = 6
MOST = EngineConfig().draft_tokens


def follow(prompt: list[int], output: list[int]) -> Drafter:
    """A drafter that has seen all of these."""
    tokens = array("i", prompt)
    drafter = Drafter(tokens)
    for token in output:
        tokens.append(token)
        drafter.follow()
    return drafter


def plain_guess(tokens: list[int]) -> int | None:
    """What followed the latest earlier occurrence of the last tokens."""
    gram = tokens[-GRAM:]
    for end in range(len(tokens) - 1, GRAM - 1, -1):
        if tokens[end - GRAM : end] == gram:
            return tokens[end]
    return None


def test_a_loop_is_guessed_on_and_on() -> None:
    loop = [1, 2, 3, 4, 5]
    drafter = follow([9], loop * 4)
    assert drafter.ready
    assert drafter.draft(7) == [1, 2, 3, 4, 5, 1, 2]
    assert drafter.draft(2) == [1, 2]


def test_one_token_on_and_on() -> None:
    drafter = follow([9], [4] * 12)
    assert drafter.draft(5) == [4] * 5


def test_a_quotation_of_the_prompt_is_guessed() -> None:
    prompt = list(range(100, 400))
    drafter = follow(prompt, [7, 8, *prompt[:8]])
    assert drafter.ready
    assert drafter.draft(4) == prompt[8:12]


def test_a_quotation_from_far_back_is_found_once_the_prompt_has_been_looked_through() -> None:
    prompt = list(range(1000, 3000))
    drafter = follow(prompt, [*range(100), *prompt[:20]])
    assert drafter.draft(3) == prompt[20:23]


def test_nothing_is_guessed_before_guesses_have_come_true() -> None:
    loop = list(range(50, 60))
    seen = follow([9], loop + loop[:GRAM])
    assert not seen.ready
    assert seen.streak == 0
    assert follow([9], loop + loop[: GRAM + FIRST_NEED]).ready
    assert not follow([9], loop + loop[: GRAM + FIRST_NEED - 1]).ready


def test_a_wrong_guess_ends_the_streak() -> None:
    loop = [1, 2, 3, 4]
    drafter = follow([9], [*loop * 4, 77])
    assert drafter.streak == 0
    assert drafter.draft(4) == []


def test_drafts_that_fail_ask_for_longer_streaks() -> None:
    drafter = follow([9], [4] * (GRAM + 1 + FIRST_NEED))
    assert drafter.ready
    drafter.judge(7, 0)
    assert not drafter.ready
    for _ in range(FIRST_NEED):
        drafter.judge(7, 7)
    assert drafter.ready


def test_a_draft_is_no_longer_than_the_streak_or_the_limit() -> None:
    drafter = follow([9], [4] * (GRAM + 1 + FIRST_NEED))
    assert len(drafter.draft(100)) == drafter.streak
    assert len(follow([9], [4] * 100).draft(20)) == 20


@settings(deadline=None)
@given(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=90), output=st.lists(st.integers(0, 2), max_size=90))
def test_without_a_streak_the_guess_is_what_followed_last(prompt: list[int], output: list[int]) -> None:
    tokens = array("i", prompt)
    drafter = Drafter(tokens)
    for token in output:
        tokens.append(token)
        drafter.follow()
        if drafter.streak == 0 and plain_guess(list(tokens)) is not None:
            drafter.streak = 1  # or it would not say
            assert drafter.draft(1) == [plain_guess(list(tokens))]
            drafter.streak = 0


def run(*, vocab: int = 40, period: int = PERIOD, submits: int = 1, **sizes: Any) -> Driver:
    driver = Driver(EngineConfig(kv_tokens=4096, **sizes), vocab=vocab, period=period)
    for n in range(submits):
        driver.submit(f"r{n}", [n, *range(20, 20 + PERIOD)], 120)
    driver.run()
    driver.assert_alone()
    driver.assert_at_rest()
    return driver


def test_text_that_repeats_takes_fewer_steps() -> None:
    plain, quick = run(draft_tokens=0), run()
    assert plain.core.gauges.drafts == [0, 0, 0]
    drafts, drafted, accepted = quick.core.gauges.drafts
    assert drafts > 0
    assert 0 < accepted <= drafted <= MOST * drafts
    assert quick.core.steps == plain.core.steps - accepted
    assert quick.tokens == plain.tokens


@pytest.mark.parametrize("sizes", [{}, {"draft_tokens": 0}, {"step_tokens": 16}])
def test_events_tell_of_every_token_that_was_computed(sizes: dict[str, int]) -> None:
    driver = Driver(EngineConfig(kv_tokens=4096, **sizes), vocab=40, period=PERIOD, duration=lambda _batch: 1.0)
    for n in range(3):
        driver.submit(f"r{n}", [n, *range(20, 20 + PERIOD)], 120)
    driver.run()
    chunks = {(e.request, e.at) for e in driver.events if e.kind is EventKind.CHUNK}
    told = 0
    for event in driver.events:
        if event.kind is EventKind.CHUNK:
            told += event.computed or event.rows
        elif event.kind is EventKind.TOKEN and (event.request, event.at) not in chunks:
            told += event.rows or 1
    assert told == driver.backend.computed
    assert any(event.rows > event.computed for event in driver.events) is ("draft_tokens" not in sizes)


def test_text_that_does_not_repeat_takes_the_same_steps() -> None:
    assert run(period=0, vocab=512).core.steps == run(period=0, vocab=512, draft_tokens=0).core.steps


def test_a_step_is_filled_up_to_its_rows_and_no_further() -> None:
    for rows in (4, 8, 12):
        driver = run(submits=4, draft_rows=rows)
        assert max(tokens for sequences, tokens in driver.backend.steps if sequences == 4 and tokens < 28) <= rows
        assert (driver.core.gauges.drafts[0] > 0) == (rows > 4)


def test_no_request_gives_way_to_a_guess() -> None:
    """Two requests fill the pool to the last token."""
    driver = Driver(EngineConfig(kv_tokens=16 * PAGE_SIZE), vocab=40, period=PERIOD)
    for n in range(2):
        driver.submit(f"r{n}", [n, *range(20, 20 + PERIOD)], 8 * PAGE_SIZE - 7)
    driver.run()
    driver.assert_alone()
    assert driver.core.gauges.preemptions == 0
    assert driver.core.gauges.drafts[2] > 0


@pytest.mark.parametrize("most", range(1, 40))
def test_max_tokens_ends_it_within_a_draft(most: int) -> None:
    driver = Driver(EngineConfig(), vocab=40, period=PERIOD)
    driver.submit("r", list(range(20, 20 + PERIOD)), most)
    driver.run()
    assert len(driver.tokens["r"]) == most
    assert driver.finish_of("r") == "length"
    driver.assert_alone()
    driver.assert_at_rest()


@pytest.mark.parametrize("stop", range(20, 20 + PERIOD))
def test_a_stop_token_ends_it_within_a_draft(stop: int) -> None:
    prompt = [(20 + n % PERIOD) for n in range(3 * PERIOD)]
    driver = Driver(EngineConfig(), vocab=40, period=PERIOD)
    driver.submit("r", prompt, 100, stop_ids=(stop,))
    driver.run()
    driver.assert_alone()
    driver.assert_at_rest()


def test_every_token_has_its_log_probability() -> None:
    plain = Driver(EngineConfig(draft_tokens=0), vocab=40, period=PERIOD)
    quick = Driver(EngineConfig(), vocab=40, period=PERIOD)
    for driver in (plain, quick):
        driver.submit("r", list(range(20, 20 + PERIOD)), 60, logprobs=2)
        driver.run()
    assert quick.core.gauges.drafts[2] > 0
    assert quick.logprobs == plain.logprobs
    assert len(quick.logprobs["r"]) == 60


def test_events_count_every_token_once() -> None:
    driver = run()
    counts = [event.computed for event in driver.events_of("r0", EventKind.TOKEN)]
    assert sum(counts) == len(driver.tokens["r0"]) == 120
    assert max(counts) == 1 + MOST


def test_what_drafts_have_computed_is_found_by_the_next_request() -> None:
    driver = run()
    known = [*driver.submitted["r0"].prompt, *driver.tokens["r0"]]
    driver.submit("next", known, 4)
    driver.run()
    driver.assert_alone()
    # all full pages but those that only the last token, which is never computed, would have filled
    assert driver.first["next"].cached == (len(known) - 1) // PAGE_SIZE * PAGE_SIZE


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.2}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"min_tokens": 4}],
)
def test_what_depends_on_more_than_the_tokens_before_is_not_guessed(params: dict[str, Any]) -> None:
    driver = Driver(EngineConfig(), vocab=40, period=PERIOD)
    driver.submit("r", list(range(20, 20 + PERIOD)), 60, **params)
    driver.run()
    assert driver.core.gauges.drafts == [0, 0, 0]


def test_a_step_that_fails_within_a_draft_fails_its_request_alone() -> None:
    failed = []

    def fail(batch: Any) -> Exception | None:
        if (
            len(batch.context) == 1
            and 1 < len(batch.tokens) < 1 + MOST + 1
            and not failed
            and int(batch.context[0]) > 20
        ):
            failed.append(batch)
            return OSError("gone")
        return None

    driver = Driver(EngineConfig(), vocab=40, period=PERIOD, fail=fail)
    driver.submit("r", list(range(20, 20 + PERIOD)), 60)
    driver.run()
    assert failed
    assert driver.finish_of("r") == "error"
    driver.submit("again", list(range(20, 20 + PERIOD)), 60)
    driver.run()
    driver.assert_alone()
    driver.assert_at_rest()


def test_what_the_caller_expects_is_tried_at_once() -> None:
    predicted = list(range(100, 130))
    drafter = Drafter(array("i", [1, 2, 3]), predicted)
    assert drafter.ready
    assert drafter.expecting
    assert drafter.draft(3) == [100, 101, 102]


def test_it_is_found_again_after_a_difference_and_has_an_end() -> None:
    predicted = list(range(100, 130))
    tokens = array("i", [1, 2, 3])
    drafter = Drafter(tokens, predicted)
    for token in [100, 101, 7, 8, *range(104, 128)]:
        tokens.append(token)
        drafter.follow()
    assert drafter.ready
    assert drafter.draft(7) == [128, 129]
    for token in (128, 129):
        tokens.append(token)
        drafter.follow()
    assert not drafter.expecting


@pytest.mark.parametrize("wrong", [None, 0, 20, 40])
def test_a_prediction_changes_no_token(wrong: int | None) -> None:
    plain = Driver(EngineConfig(), vocab=512)
    plain.submit("r", [1, 2, 3], 60)
    plain.run()
    predicted = list(plain.tokens["r"])
    if wrong is not None:
        predicted[wrong] = (predicted[wrong] + 1) % 512
    driver = Driver(EngineConfig(), vocab=512)
    driver.submit("r", [1, 2, 3], 60, predicted=predicted)
    driver.run()
    driver.assert_alone()
    driver.assert_at_rest()
    accepted, rejected = driver.last["r"].predicted
    assert driver.core.steps == plain.core.steps - accepted
    assert accepted > (45 if wrong is None else 25)
    assert rejected <= (0 if wrong in (None, 0) else MOST)


def test_a_prediction_that_is_all_wrong_costs_next_to_nothing() -> None:
    driver = Driver(EngineConfig(), vocab=512)
    driver.submit("r", [1, 2, 3], 60, predicted=list(range(300, 400)))
    driver.run()
    driver.assert_alone()
    assert driver.last["r"].predicted == (0, 0)  # the first token was another, so nothing was tried


def test_a_prediction_that_has_ended_is_no_guess() -> None:
    tokens = array("i", [1, 2, 3])
    drafter = Drafter(tokens, list(range(100, 130)))
    for token in range(100, 160):
        tokens.append(token)
        drafter.follow()
        assert drafter.ready == (token < 129)


@pytest.mark.parametrize("seed", range(12))
def test_the_end_of_the_context(seed: int) -> None:
    """No page is taken that the request can never use: the block tables end there."""
    driver = Driver(EngineConfig(kv_tokens=1024, max_context=64, step_tokens=64), vocab=40, period=1 + seed % 4)
    for n in range(3):
        driver.submit(f"r{n}", [seed, n, *range(20, 20 + n)], 64 - 2 - n)
    driver.run()
    driver.assert_alone()
    driver.assert_at_rest()
    assert {driver.finish_of(f"r{n}") for n in range(3)} == {"length"}


def test_a_small_step_keeps_room_for_prompts() -> None:
    driver = Driver(EngineConfig(step_tokens=8, prefix_cache=False), vocab=40, period=PERIOD)
    driver.submit("loop", list(range(20, 20 + PERIOD)), 400)
    for _ in range(60):
        driver.step()
    driver.submit("late", list(range(5, 35)), 1)
    for _ in range(30):
        driver.step()
    assert driver.finish_of("late") == "length"
    driver.run()
    driver.assert_alone()
