"""Stop strings: exact, whatever they share and however the text is cut."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.text import StopMatcher


def searched(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the match that ends first, the longest of those; found by trying everything."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    emitted, matched = "", None
    for piece in pieces:
        safe, matched = matcher.push(piece)
        emitted += safe
        if matched is not None:
            break
    return emitted + matcher.flush(), matched


LETTERS = st.text(alphabet="abé😀 ", max_size=30)


@settings(max_examples=300, deadline=None)
@given(
    LETTERS, st.lists(st.text(alphabet="abé😀 ", max_size=5), max_size=5), st.lists(st.integers(0, 30)), st.booleans()
)
def test_every_way_to_cut_the_text_gives_the_one_shot_result(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    at = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(at)]
    expected = searched(text, stops, include)
    assert run(pieces, stops, include) == expected
    assert run(list(text), stops, include) == expected


@settings(max_examples=150, deadline=None)
@given(LETTERS, st.lists(st.text(alphabet="abé😀 ", min_size=1, max_size=5), min_size=1, max_size=4))
def test_nothing_of_a_stop_string_is_emitted_early_and_nothing_is_held_back_for_long(
    text: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for index, char in enumerate(text):
        safe, matched = matcher.push(char)
        emitted += safe
        final, _ = searched(text, stops, False)
        assert final.startswith(emitted)
        if matched is not None:
            return
        held = index + 1 - len(emitted)
        assert held < max(map(len, stops))
        assert held == 0 or any(stop.startswith(text[len(emitted) : index + 1]) for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcd", ["bcd", "c"], ("ab", "c")),  # the one that ends first
        ("abcd", ["abc", "bc"], ("", "abc")),  # of those that end together the longest
        ("aab", ["ab"], ("a", "ab")),
        ("count 7 8 9 10", [" 7 8 9"], ("count", " 7 8 9")),
        ("xyz", [], ("xyz", None)),
        ("xyz", [""], ("xyz", None)),
        ("na" * 5 + "b", ["nanab"], ("nanana", "nanab")),
    ],
)
def test_examples(text: str, stops: list[str], expected: tuple[str, str | None]) -> None:
    assert run([text], stops) == expected
    assert run(list(text), stops) == expected


def test_after_a_match_everything_is_swallowed() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("more x") == ("", "x")
    assert matcher.flush() == ""


def test_time_is_linear_for_repetitive_text() -> None:
    stops = ["a" * 2000 + "b", "a" * 1999 + "c"]
    matcher = StopMatcher(stops)
    began = time.monotonic()
    for _ in range(200):
        matcher.push("a" * 1000)
    assert time.monotonic() - began < 5  # quadratic work would be 400 million steps
