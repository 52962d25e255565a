"""The request's state machine allows its table and nothing else."""

import itertools

import pytest

from tailrace.engine.protocol import SamplingParams, Submit
from tailrace.engine.request import LEGAL, Request, State, pages_for


def make(state: State) -> Request:
    request = Request(Submit("r", [1, 2, 3], SamplingParams(max_tokens=2)), seq=1, arrived=0.0, chain=None)
    request.state = state
    return request


@pytest.mark.parametrize(("begin", "end"), list(itertools.product(State, State)))
def test_only_the_transitions_of_the_table_are_legal(begin: State, end: State) -> None:
    request = make(begin)
    if end in LEGAL[begin]:
        request.move(end)
        assert request.state is end
    else:
        with pytest.raises(ValueError, match=f"from {begin.value} to {end.value}"):
            request.move(end)
        assert request.state is begin


def test_every_state_can_end_and_the_end_is_final() -> None:
    assert all(State.FINISHED in LEGAL[state] for state in State if state is not State.FINISHED)
    assert not LEGAL[State.FINISHED]


def test_what_is_left_to_do_ends_with_the_last_token_it_may_have() -> None:
    request = make(State.RUNNING)
    assert request.todo == 3
    assert not request.decoding
    request.computed, request.expected = 3, 4
    assert request.todo == 1
    assert request.decoding
    request.computed, request.expected = 4, 5
    assert request.todo == 0


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_pages_are_rounded_up(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages
