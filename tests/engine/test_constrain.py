"""Requests whose text must match a grammar, through the engine: they get the tokens that they get alone, and what goes
wrong with one of them is its own affair."""

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tailrace.engine.config import EngineConfig
from tailrace.engine.constrain import COMPILE_LIMIT, Constraint
from tailrace.terms import EventKind
from tailrace.text.grammar import Grammar
from tests.engine.test_core_properties import QUICK, Arrival, arrivals, check, configs, play
from tests.fakes import Driver, FakeClock, FakeMatcher

VOCAB = 64
CONFIG = EngineConfig(kv_tokens=1024, step_tokens=64)
LONG = " ".join(str(n % VOCAB) for n in range(8, 48))


def grammar(text: str) -> Grammar:
    return Grammar("regex", text)


def driver(config: EngineConfig = CONFIG, **options: Any) -> Driver:
    return Driver(config, vocab=VOCAB, eos_ids=[7], **options)


def test_a_text_ends_when_its_grammar_is_complete_and_forced_tokens_are_not_drawn() -> None:
    run = driver()
    run.submit("r", [1, 2, 3], 40, grammar=grammar("9 8 ? 5 5 5 5 ? 6"))
    run.run()
    run.assert_alone()
    assert run.finish_of("r") == "stop"
    assert len(run.tokens["r"]) == 9
    assert len(run.backend.steps) == 3  # the first forced one, and two drawn ones
    assert sum(event.computed for event in run.events_of("r", EventKind.TOKEN)) == 9


def test_forced_tokens_stop_at_max_tokens_and_at_stop_ids() -> None:
    run = driver()
    run.submit("short", [1], 3, grammar=grammar("9 8 7 6 5 4 ?"))
    run.submit("exact", [1], 2, grammar=grammar("9 8"))
    run.submit("id", [1], 30, grammar=grammar("9 ? 5 6 5"), stop_ids=(6,))
    run.run()
    assert (run.tokens["short"], run.finish_of("short")) == ([9, 8, 7], "stop")  # 7 ends a text
    assert (run.tokens["exact"], run.finish_of("exact")) == ([9, 8], "stop")
    assert run.tokens["id"][-1] == 6
    assert (run.last["id"].finish, run.last["id"].stop) == ("stop", 6)


@pytest.mark.parametrize("cut", [1, 2, 5, 11])
def test_a_text_that_is_cut_short_ends_with_length(cut: int) -> None:
    run = driver()
    run.submit("r", [1], cut, grammar=grammar("9 8 ? 5 5 5 5 5 5 ? 6 ? 5"))
    run.run()
    run.assert_alone()
    assert run.finish_of("r") == "length"
    assert len(run.tokens["r"]) == cut


def test_log_probabilities_of_forced_tokens_are_drawn_ones() -> None:
    run = driver()
    run.submit("told", [1, 2, 3], 40, grammar=grammar("9 8 ? 5 5 5 5 ? 6"), logprobs=1)
    run.submit("untold", [1, 2, 3], 40, grammar=grammar("9 8 ? 5 5 5 5 ? 6"))
    run.run()
    run.assert_alone()
    assert run.tokens["told"] == run.tokens["untold"]
    assert [one.token for one in run.logprobs["told"]] == run.tokens["told"]


def test_a_run_of_forced_tokens_is_computed_within_the_step_budget() -> None:
    run = driver(EngineConfig(kv_tokens=1024, step_tokens=16, max_running=4))
    for name in ("a", "b", "c"):
        run.submit(name, [1, 2], 100, grammar=grammar(f"? {LONG} ? 3"))
    run.submit("free", [3, 4], 30)
    run.run()
    run.assert_alone()
    assert max(tokens for _, tokens in run.backend.steps) <= 16


@pytest.mark.parametrize("most_preempted", [0, 3])
def test_forced_tokens_move_windows_on_and_have_pages_there(most_preempted: int) -> None:
    config = EngineConfig(
        kv_tokens=640, step_tokens=48, max_running=6, windows=(20, 100), max_preemptions=most_preempted
    )
    run = driver(config)
    for name in range(6):
        run.submit(f"r{name}", [1, 2, name], 200, grammar=grammar(f"? {LONG} ? {LONG} ? ? {LONG} ?"))
    run.submit("free", [3, 4], 100)
    run.run()
    run.assert_alone()
    run.assert_at_rest()
    assert max(tokens // sequences for sequences, tokens in run.backend.steps) > 16  # pages at once


def test_two_grammars_and_a_free_request_in_one_batch_get_what_they_get_alone() -> None:
    run = driver()
    run.submit("one", [1, 2], 20, grammar=grammar("? ? 5 6 ?"), temperature=0.8, seed=3)
    run.submit("two", [1, 2], 20, grammar=grammar("9 ? 4 ? ? ? 8 8 8"), temperature=0.8, seed=3)
    run.submit("free", [1, 2], 20, temperature=0.8, seed=3, ignore_eos=True)
    run.transfer()  # the grammars are compiled
    run.run()
    run.assert_alone()
    assert max(sequences for sequences, _ in run.backend.steps) == 3


def constrained() -> st.SearchStrategy[Arrival]:
    """Requests of every kind, half of them with a grammar."""
    items = st.lists(st.sampled_from(["?", "?", "?", "5", "9", "7", "12", LONG]), min_size=1, max_size=8)
    grammars = st.one_of(st.none(), items.map(" ".join).map(grammar))

    def with_grammar(one: Arrival, chosen: Grammar | None) -> Arrival:
        params = {**one.params, "grammar": chosen}
        if chosen is not None:  # the API refuses what may leave no token to draw
            params.pop("min_tokens", None)
            params.pop("ignore_eos", None)
        return Arrival(one.at, one.prompt, one.max_tokens, params, one.abort_after, one.late, one.outer)

    return st.builds(with_grammar, arrivals(), grammars)


@settings(QUICK, max_examples=60, phases=[Phase.generate])
@given(config=configs(), scenario=st.lists(constrained(), min_size=1, max_size=12))
def test_tokens_are_those_of_the_request_alone(config: EngineConfig, scenario: list[Arrival]) -> None:
    run = driver(config, clock=FakeClock(1000.0), duration=lambda batch: 0.01 + 0.001 * len(batch.tokens))
    step = run.step

    def step_and_compile(*args: Any) -> Any:
        news = step(*args)
        run.grammars.work()
        return news

    run.step = lambda intake=None: step_and_compile(intake)  # type: ignore[method-assign]  # beside the steps
    play(run, scenario)
    check(run, scenario, config)


def test_a_grammar_that_cannot_be_followed_fails_its_request_alone() -> None:
    run = driver()
    run.submit("lost", [1, 2], 20, grammar=grammar("? ? ! 5"))
    run.submit("lost at once", [1, 2], 20, grammar=grammar("! 5"))
    run.submit("other", [1, 2], 20, grammar=grammar("? ? ? 5"))
    run.submit("free", [1, 2], 20)
    run.run()
    run.assert_alone()
    run.assert_at_rest()
    for name, tokens in (("lost", 2), ("lost at once", 0)):
        assert run.last[name].error == "grammar_failed: too complex"
        assert len(run.tokens[name]) == tokens
        kinds = [event.kind for event in run.events_of(name)]
        assert kinds[-1] is EventKind.FINISHED


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone() -> None:
    run = driver()
    run.submit("bad", [1], grammar=grammar("bad"))
    run.submit("raise", [1], grammar=grammar("raise"))
    run.submit("good", [1], grammar=grammar("5 5"))
    run.submit("free", [1])
    run.run()
    assert run.last["bad"].error == "invalid_grammar: bad grammar"
    assert run.last["raise"].error.startswith("grammar_failed: OSError")
    run.assert_alone()
    assert {run.finish_of("good"), run.finish_of("free")} <= {"stop", "length"}


def test_others_go_on_while_a_grammar_is_compiled_and_the_wait_is_named() -> None:
    run = driver()
    run.submit("waits", [1, 2], 5, grammar=grammar("? ? ?"))
    run.submit("free", [1, 2], 5)
    for _ in range(10):
        run.step()
    assert "free" in run.last
    assert "waits" not in run.tokens
    assert not run.core.has_work  # the loop rests until it is woken
    run.run()
    run.assert_alone()
    assert [event.cause for event in run.events_of("waits", EventKind.ADMITTED)] == ["grammar"]
    run.submit("again", [1, 2], 5, grammar=grammar("? ? ?"))  # compiled already
    while run.core.has_work:
        run.step()
    assert run.tokens["again"] == run.tokens["waits"]


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_is_gone() -> None:
    run = driver()
    run.submit("gone", [1, 2], 5, grammar=grammar("? ? ?"))
    run.step()
    run.core.abort(["gone"])
    run.step()
    assert run.finish_of("gone") == "abort"
    assert not run.grammars.waiting
    run.run()
    run.assert_at_rest()


def test_a_request_does_not_wait_for_its_grammar_for_ever() -> None:
    run = driver()
    run.submit("late", [1, 2], 5, grammar=grammar("? ? ?"))
    run.step()
    run.clock.advance(COMPILE_LIMIT + 1.0)
    run.step()
    run.step()
    assert run.last["late"].error.startswith("grammar_failed: compiling the grammar took more than")
    run.run()
    run.assert_at_rest()


def test_what_is_forced_is_the_only_token_allowed_where_it_has_to_be_drawn() -> None:
    import numpy as np

    constraint = Constraint(FakeMatcher("5 40 ? 9", VOCAB), jump=False)
    bits = np.full(2, 7, np.uint32)
    constraint.fill(bits)
    assert bits.tolist() == [1 << 5, 0]
    assert constraint.take(5) == []
    constraint.fill(bits)
    assert bits.tolist() == [0, 1 << 8]
    assert constraint.take(40) == []
    assert constraint.take(1) == []
    assert not constraint.ended
    assert constraint.take(9) == []
    assert constraint.ended
