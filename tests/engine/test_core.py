"""The life of a request through the engine core: tokens, ends, refusals, events, log-probabilities."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from tailrace.backends import Batch, Result
from tailrace.engine.config import EngineConfig
from tailrace.engine.core import EngineCore
from tailrace.engine.protocol import SamplingParams, Submit
from tailrace.terms import EventKind
from tailrace.text.tokens import TokenBytes
from tests.fakes import Driver, FakeBackend, FakeClock, expected_tokens, score

CONFIG = EngineConfig(kv_tokens=1024, step_tokens=64, max_running=8, max_waiting=16)


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first * 31 + 7 * at) % 500 for at in range(length)]


def test_a_request_alone_gets_its_tokens_and_leaves_nothing_behind() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", prompt(100), max_tokens=20)
    driver.run()
    assert driver.finish_of("a") == "length"
    assert len(driver.tokens["a"]) == 20
    driver.assert_alone()
    driver.assert_at_rest()


def test_the_prompt_is_computed_once_and_the_last_token_never() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", prompt(100), max_tokens=20)
    driver.run()
    assert driver.backend.computed == 100 + 19
    assert driver.core.progress == 119


def test_events_tell_the_whole_story_in_order() -> None:
    clock = FakeClock()
    driver = Driver(CONFIG, clock=clock, duration=lambda batch: 0.01 * len(batch.tokens))
    driver.submit("a", prompt(100), max_tokens=3)
    driver.run()
    kinds = [event.kind.value for event in driver.events_of("a")]
    assert kinds == ["queued", "admitted", "chunk", "chunk", "token", "token", "token", "finished"]
    chunks = driver.events_of("a", EventKind.CHUNK)
    assert [chunk.computed for chunk in chunks] == [64, 36]
    assert [round(chunk.at - chunk.begin, 6) for chunk in chunks] == [0.64, 0.36]
    times = [event.at for event in driver.events_of("a")]
    assert times == sorted(times)
    assert driver.events[-1].cause == "length"
    steps = chunks[:1] + driver.events_of("a", EventKind.TOKEN)
    assert all(before.at == after.begin for before, after in itertools.pairwise(steps))


def test_nothing_to_do_is_none_and_not_an_error() -> None:
    driver = Driver(CONFIG)
    assert not driver.core.has_work
    assert driver.step() is None
    driver.core.abort(["nobody"])
    driver.core.reset_prefix()
    assert driver.step() is None


# --- ends


def test_eos_ends_a_request_and_is_among_its_tokens() -> None:
    alone = expected_tokens(prompt(30), SamplingParams(max_tokens=20, temperature=0.0))
    driver = Driver(CONFIG, eos_ids=[alone[6]])
    driver.submit("a", prompt(30), max_tokens=20)
    driver.submit("b", prompt(30), max_tokens=20, ignore_eos=True)
    driver.run()
    assert driver.finish_of("a") == "stop"
    assert driver.last["a"].stop is None
    assert driver.tokens["a"] == alone[:7]
    assert driver.finish_of("b") == "length"
    assert driver.tokens["b"] == alone


def test_a_stop_id_ends_a_request_and_is_named() -> None:
    alone = expected_tokens(prompt(30), SamplingParams(max_tokens=20, temperature=0.0))
    driver = Driver(CONFIG)
    driver.submit("a", prompt(30), max_tokens=20, stop_ids=(alone[4], 511), ignore_eos=True)
    driver.run()
    assert (driver.finish_of("a"), driver.last["a"].stop) == ("stop", alone[4])
    assert driver.tokens["a"] == alone[:5]


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    alone = expected_tokens(prompt(30), SamplingParams(max_tokens=5, temperature=0.0))
    driver = Driver(CONFIG, eos_ids=[alone[4]])
    driver.submit("a", prompt(30), max_tokens=5)
    driver.run()
    assert driver.finish_of("a") == "stop"


def test_min_tokens_keeps_the_ends_away() -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0)
    ends = tuple(expected_tokens(prompt(30), params)[:3])
    driver = Driver(CONFIG, eos_ids=ends)
    driver.submit("a", prompt(30), max_tokens=30, min_tokens=10)
    driver.submit("b", prompt(30), max_tokens=30, min_tokens=10, logit_bias={ends[0]: 3.0, 400: -2.0})
    driver.submit("c", prompt(30), max_tokens=30)
    driver.run()
    assert len(driver.tokens["a"]) >= 10
    assert not set(driver.tokens["a"][:10]) & set(ends)
    assert len(driver.tokens["c"]) == 1
    driver.assert_alone()


LETTERS = TokenBytes.build([bytes([97 + token % 26]) for token in range(512)], special=[])


def letters(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


def test_a_stop_string_over_several_tokens_ends_the_request_at_its_last_token() -> None:
    alone = expected_tokens(prompt(30), SamplingParams(max_tokens=40, temperature=0.0))
    stop = letters(alone[10:13])
    driver = Driver(CONFIG, token_bytes=LETTERS)
    driver.submit("a", prompt(30), max_tokens=40, stop=("never there", stop))
    driver.run()
    assert (driver.finish_of("a"), driver.last["a"].stop) == ("stop", stop)
    assert len(driver.tokens["a"]) == letters(alone).index(stop) + 3
    driver.assert_at_rest()


def test_a_stop_string_does_not_match_within_the_first_min_tokens() -> None:
    alone = expected_tokens(prompt(30), SamplingParams(max_tokens=40, temperature=0.0))
    text = letters(alone)
    driver = Driver(CONFIG, token_bytes=LETTERS)
    driver.submit("a", prompt(30), max_tokens=40, min_tokens=12, stop=(text[10:13],))
    driver.run()
    later = text.find(text[10:13], 12)
    assert len(driver.tokens["a"]) == (later + 3 if later >= 0 else 40)


# --- sampling parameters reach the backend, and depend on nothing else


PARAMS = [
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.9, "seed": 2**64 - 1},
    {"temperature": 0.5, "seed": 7, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5},
    {"logit_bias": {3: 1.5, 9: -100.0}},
    {"logit_bias": {77: 100.0}, "repetition_penalty": 2.0},
    {"stop_ids": (1, 2, 3), "min_tokens": 5, "frequency_penalty": 1.0},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_request_gets_the_same_tokens_alone_and_beside_others(params: dict[str, object]) -> None:
    driver = Driver(CONFIG)
    driver.submit("alone", prompt(40), max_tokens=15, **params)
    driver.run()
    for beside in range(4):
        driver.submit(f"same{beside}", prompt(40), max_tokens=15, **params)
        driver.submit(f"other{beside}", prompt(20 + beside), max_tokens=15, temperature=0.7, seed=beside)
        driver.submit(f"greedy{beside}", prompt(25 + beside), max_tokens=15)
    driver.run()
    assert all(driver.tokens[f"same{beside}"] == driver.tokens["alone"] for beside in range(4))
    driver.assert_alone()


def test_seeds_survive_unseeded_neighbours() -> None:
    driver = Driver(CONFIG)
    for n in range(4):
        driver.submit(f"seeded{n}", prompt(20), max_tokens=10, temperature=0.9, seed=7)
        driver.submit(f"other{n}", prompt(20), max_tokens=10, temperature=0.9, seed=1000 + n)
    driver.run()
    assert len({tuple(driver.tokens[f"seeded{n}"]) for n in range(4)}) == 1
    assert len({tuple(driver.tokens[f"other{n}"]) for n in range(4)}) == 4
    driver.assert_alone()


def test_a_bias_on_an_id_that_the_tokenizer_does_not_have_never_reaches_the_backend() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", prompt(20), logit_bias={512: 100.0, 100_000: 100.0, -1: 100.0, 5: 0.5})
    driver.run()
    assert driver.finish_of("a") == "length"
    driver.assert_alone()


# --- log-probabilities


def test_log_probabilities_of_the_chosen_and_of_the_likeliest() -> None:
    driver = Driver(CONFIG)
    driver.submit("none", prompt(20), max_tokens=4)
    driver.submit("chosen", prompt(20), max_tokens=4, logprobs=0)
    driver.submit("three", prompt(20), max_tokens=4, logprobs=3)
    driver.run()
    assert driver.logprobs["none"] == []
    for request, top in (("chosen", 0), ("three", 3)):
        tokens = driver.tokens[request]
        for at, got in enumerate(driver.logprobs[request]):
            before = np.array([*prompt(20), *tokens[:at]], np.int32).tobytes()
            assert got.token == tokens[at]
            assert got.logprob == pytest.approx(score(before, tokens[at]))
            assert got.top == [(n, pytest.approx(score(before, n))) for n in range(top)]
        assert len(driver.logprobs[request]) == 4


@pytest.mark.parametrize("step_tokens", [16, 64, 512])
def test_prompt_log_probabilities_come_once_with_the_first_token_whatever_is_cached(step_tokens: int) -> None:
    config = EngineConfig(kv_tokens=1024, step_tokens=step_tokens, max_running=8, scored_rows=48)
    driver = Driver(config)
    driver.submit("before", prompt(90), max_tokens=3)
    driver.run()
    for request, top in (("a", 0), ("b", 2)):
        driver.submit(request, prompt(90), max_tokens=3, prompt_logprobs=top, logprobs=1)
    driver.submit("beside", prompt(90), max_tokens=3)
    driver.run()
    for request, top in (("a", 0), ("b", 2)):
        got = driver.first[request].prompt_logprobs
        assert got[0] is None
        assert len(got) == 90
        for at in range(1, 90):
            before = np.array(prompt(90)[:at], np.int32).tobytes()
            one = got[at]
            assert one is not None
            assert (one.token, one.logprob) == (prompt(90)[at], pytest.approx(score(before, prompt(90)[at])))
            assert one.top == [(n, pytest.approx(score(before, n))) for n in range(top)]
        assert driver.last[request].prompt_logprobs == []
        assert driver.last[request].cached == 0
    assert driver.first["beside"].prompt_logprobs == []
    assert driver.last["beside"].cached == 80
    driver.assert_alone()
    driver.assert_at_rest()


def test_a_one_token_prompt_has_one_unknown_log_probability() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", [5], max_tokens=1, prompt_logprobs=2)
    driver.run()
    assert driver.first["a"].prompt_logprobs == [None]


# --- refusals


@pytest.mark.parametrize(
    ("tokens", "params", "code"),
    [
        ([], {}, "invalid_prompt"),
        ([1, 512], {}, "invalid_prompt"),
        ([1, -1], {}, "invalid_prompt"),
        (prompt(1024), {"max_tokens": 1}, "context_length_exceeded"),
        (prompt(1020), {"max_tokens": 5}, "output_too_long"),
        (prompt(10), {"max_tokens": 0}, "invalid_max_tokens"),
        (prompt(10), {"stop": ("x",)}, "invalid_stop"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(tokens: list[int], params: dict[str, object], code: str) -> None:
    driver = Driver(CONFIG)
    driver.submit("bad", tokens, **params)
    driver.step()
    assert driver.finish_of("bad") == "error"
    assert driver.last["bad"].error.startswith(f"{code}: ")
    assert [(e.kind, e.cause) for e in driver.events] == [(EventKind.FAILED, code)]
    assert not driver.core.has_work


def test_exactly_the_context_is_served() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", prompt(1019), max_tokens=5)
    driver.submit("b", prompt(1023), max_tokens=1)
    driver.run()
    driver.assert_alone()
    assert {driver.finish_of(r) for r in "ab"} == {"length"}


def test_a_request_longer_than_the_pool_is_refused_and_blocks_nobody() -> None:
    driver = Driver(EngineConfig(kv_tokens=512, max_context=4096, step_tokens=64))
    driver.submit("long", prompt(1000))
    for n in range(10):
        driver.submit(f"short{n}", prompt(20, n))
    driver.run()
    assert driver.last["long"].error.startswith("context_length_exceeded: the prompt has 1000 tokens, and the context")
    assert all(driver.finish_of(f"short{n}") == "length" for n in range(10))
    driver.assert_alone()


def test_the_waiting_queue_is_bounded_and_says_so() -> None:
    driver = Driver(CONFIG)
    for n in range(17):
        driver.submit(f"r{n}", prompt(20, n))
    driver.step()
    assert driver.last["r16"].error.startswith("overloaded: 16 requests are waiting")
    driver.run()
    assert sum(driver.finish_of(f"r{n}") == "length" for n in range(17)) == 16


def test_one_name_is_served_once_at_a_time() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", prompt(20))
    core = driver.core
    core.submit(driver.submitted["a"])
    news = core.step()
    assert news is not None
    assert [(o.request, o.error.partition(":")[0]) for o in news.outputs] == [("a", "duplicate_request")]


def test_a_draining_engine_finishes_what_it_holds_and_takes_no_more() -> None:
    driver = Driver(CONFIG)
    driver.submit("held", prompt(20))
    driver.core.draining = True
    driver.submit("late", prompt(20))
    driver.run()
    assert driver.finish_of("held") == "length"
    assert driver.last["late"].error.startswith("draining: ")


# --- aborts and deadlines


def at_rest_within_a_step(driver: Driver, requests: list[str]) -> None:
    driver.core.abort(requests)
    assert driver.core.gauges.used_pages == 0
    driver.step()
    assert all(driver.finish_of(request) == "abort" for request in requests)
    assert [e.cause for e in driver.events if e.kind is EventKind.FINISHED] == ["abort"] * len(requests)
    driver.run(5)
    driver.assert_at_rest()


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_frees_everything_at_once_in_whatever_state(steps: int) -> None:
    driver = Driver(EngineConfig(kv_tokens=1024, step_tokens=64, max_running=3))
    names = [f"r{n}" for n in range(6)]
    for n, name in enumerate(names):
        driver.submit(name, prompt(60, n), max_tokens=50)
    for _ in range(steps):
        driver.step()
    at_rest_within_a_step(driver, names)


def test_a_request_aborted_while_its_step_runs_gets_no_more_news() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", prompt(20))
    driver.submit("b", prompt(30))
    driver.step()
    driver.step(intake=lambda: driver.core.abort(["a"]))
    assert driver.tokens["a"] == []
    assert driver.finish_of("a") == "abort"
    driver.run()
    driver.assert_alone(["b"])
    driver.assert_at_rest()


def test_a_client_that_leaves_the_queue_is_gone_at_once() -> None:
    driver = Driver(EngineConfig(kv_tokens=1024, step_tokens=64, max_running=1))
    driver.submit("runs", prompt(20), max_tokens=30)
    driver.submit("queued", prompt(20, 2), max_tokens=30)
    driver.step()
    driver.core.abort(["queued"])
    assert driver.core.gauges.waiting == 0
    driver.run()
    assert driver.finish_of("queued") == "abort"
    assert driver.events_of("queued", EventKind.ADMITTED) == []


def test_a_deadline_ends_a_request_waiting_or_running() -> None:
    clock = FakeClock(100.0)
    config = EngineConfig(kv_tokens=1024, step_tokens=64, max_running=1)
    driver = Driver(config, clock=clock, duration=lambda batch: 1.0)
    driver.submit("runs", prompt(20), max_tokens=50, deadline=110.0)
    driver.submit("waits", prompt(20), max_tokens=50, deadline=104.0)
    driver.submit("patient", prompt(20, 9), max_tokens=5, deadline=200.0)
    driver.run()
    assert [driver.finish_of(r) for r in ("runs", "waits", "patient")] == ["timeout", "timeout", "length"]
    ends = {e.request: e.at for e in driver.events if e.kind is EventKind.FINISHED}
    assert 110.0 <= ends["runs"] <= 111.0
    assert 104.0 <= ends["waits"] <= 105.0
    assert 0 < len(driver.tokens["runs"]) < 50
    driver.assert_at_rest()


def test_a_deadline_already_past_ends_the_request_before_it_computes() -> None:
    driver = Driver(CONFIG, clock=FakeClock(100.0))
    driver.submit("late", prompt(20), deadline=99.0)
    driver.run()
    assert driver.finish_of("late") == "timeout"
    assert driver.backend.computed == 0


# --- failing steps


def failing(on: Callable[[Batch], bool]) -> Callable[[Batch], Exception | None]:
    return lambda batch: RuntimeError("the device is on fire") if on(batch) else None


def test_a_failed_step_fails_its_requests_and_nobody_else() -> None:
    seen: list[int] = []

    def on(batch: Batch) -> bool:
        seen.append(len(batch.tokens))
        return len(seen) == 3

    driver = Driver(EngineConfig(kv_tokens=1024, step_tokens=64, max_running=2), fail=failing(on))
    for n in range(6):
        driver.submit(f"r{n}", prompt(40, n), max_tokens=10)
    driver.run()
    failed = [r for r in driver.last if driver.finish_of(r) == "error"]
    assert 1 <= len(failed) <= 2
    assert all(driver.last[r].error == "step_failed: RuntimeError: the device is on fire" for r in failed)
    assert [e.cause for e in driver.events if e.kind is EventKind.FINISHED].count("error") == len(failed)
    assert sum(driver.finish_of(r) == "length" for r in driver.last) == 6 - len(failed)
    driver.assert_alone()
    driver.assert_at_rest()


@pytest.mark.parametrize("failing_step", range(1, 7))
def test_pages_that_a_failed_step_should_have_written_are_unknown(failing_step: int) -> None:
    count = 0

    def on(batch: Batch) -> bool:
        nonlocal count
        count += 1
        return count == failing_step

    driver = Driver(CONFIG, fail=failing(on))
    stem = prompt(200)
    driver.submit("leader", [*stem, 1], max_tokens=8)
    for n in range(5):
        driver.submit(f"follower{n}", [*stem, 2, n], max_tokens=8)
    driver.run()
    driver.submit("after", [*stem, 3], max_tokens=8)
    driver.run()
    assert driver.finish_of("after") == "length"
    driver.assert_alone()
    driver.assert_at_rest()
    assert any(driver.finish_of(r) == "error" for r in driver.last)


def test_an_engine_whose_every_step_fails_answers_everybody() -> None:
    driver = Driver(CONFIG, fail=failing(lambda batch: True))
    for n in range(12):
        driver.submit(f"r{n}", prompt(100), max_tokens=10)
    driver.run(100)
    assert all(driver.finish_of(f"r{n}") == "error" for n in range(12))
    driver.assert_at_rest()
    assert driver.core.gauges.cached_pages == 0


# --- the loop


def test_what_arrives_while_a_step_runs_is_in_the_next_one() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", prompt(300), max_tokens=2)
    driver.step()
    driver.core.prepare()
    driver.step(intake=lambda: driver.submit("b", prompt(10), max_tokens=1))
    driver.step()
    assert driver.finish_of("b") == "length"
    assert "a" not in driver.last
    driver.run()
    driver.assert_alone()


def test_steps_of_the_same_decodes_follow_by_themselves_until_one_ends() -> None:
    driver = Driver(CONFIG)
    want = expected_tokens(prompt(20), SamplingParams(max_tokens=30, temperature=0.0))
    end = want[17]
    driver.submit("long", prompt(20), max_tokens=30)
    driver.submit("short", prompt(9), max_tokens=12)
    driver.submit("stopped", prompt(20), max_tokens=30, stop_ids=[end])
    chained = []
    while driver.core.has_work:
        driver.step()
        chained.append(driver.backend.chained)
    assert driver.tokens["stopped"] == want[: want.index(end) + 1]
    assert driver.finish_of("stopped") == "stop"
    driver.assert_alone()
    # not the first decode, nor the step after one in which a request ends, nor the two of a new batch
    assert sum(chained) > 18
    assert len(chained) == driver.core.steps + 1


def test_news_keeps_a_step_from_following_by_itself() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", prompt(20), max_tokens=30)
    for _ in range(4):
        driver.step()
    assert driver.backend.chained
    driver.core.interrupt()
    driver.step(intake=lambda: driver.submit("b", prompt(10), max_tokens=1))
    assert not driver.backend.chained
    driver.step()
    assert driver.finish_of("b") == "length"
    driver.step()
    driver.core.prepare()
    driver.core.abort(["a"])
    driver.step()
    assert not driver.backend.chained
    assert driver.finish_of("a") == "abort"
    driver.run()
    driver.assert_at_rest()


def test_a_backend_that_raises_does_not_end_the_loop() -> None:
    class Raises(FakeBackend):
        def run(self, batch: Batch) -> Result:
            if batch.tokens[0] == 13:
                raise MemoryError("no room")
            return super().run(batch)

    core = EngineCore(Raises(CONFIG.pages), CONFIG, eos_ids=(), vocab_size=512)
    core.submit(Submit("bad", [13, 14], SamplingParams(max_tokens=3)))
    outputs = []
    while core.has_work:
        news = core.step()
        outputs += news.outputs if news else []
    assert [o.error for o in outputs] == ["step_failed: MemoryError: no room"]
    core.submit(Submit("good", [15, 14], SamplingParams(max_tokens=3)))
    outputs = []
    while core.has_work:
        news = core.step()
        outputs += news.outputs if news else []
    assert outputs[-1].finish == "length"
    core.close()


def test_gauges_and_progress_follow() -> None:
    driver = Driver(CONFIG)
    driver.submit("a", prompt(40), max_tokens=30)
    news = driver.step()
    assert news is not None
    assert (news.gauges.running, news.gauges.pages, news.gauges.used_pages) == (1, 64, 3)
    before = driver.core.progress
    driver.step()
    assert driver.core.progress == before + 40
    driver.run()
    assert driver.core.gauges.used_pages == 0
    assert driver.core.gauges.cached_pages == 4
    driver.core.reset_prefix()
    assert driver.core.gauges.cached_pages == 0
