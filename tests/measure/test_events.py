"""An answer is read the same however its bytes are cut, and only what carries something is a token."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.measure.events import Reader
from tests.measure.mock import DONE, FINISH, ROLE, event, piece, usage

ANSWER = (
    ROLE + b": a comment\n\n" + piece("Grüße ") + piece("", reasoning_content="🌊 thinking") + piece("")
    + piece("", tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}])
    + piece("", tool_calls=[{"index": 0, "function": {"arguments": '{"x"'}}]) + piece("水路") + FINISH
    + usage(7, 12, cached=3) + event({"choices": [], "tailrace": {"timeline": {"phases_ms": {"queue": 250.0}}}}) + DONE
)  # fmt: skip


def read(data: bytes, cuts: list[int]) -> Reader:
    reader = Reader(keep_text=True)
    edges = [0, *sorted(cuts), len(data)]
    for place, (begin, end) in enumerate(pairwise(edges)):
        reader.feed(data[begin:end], float(place))
    reader.end(99.0)
    return reader


@given(st.lists(st.integers(0, len(ANSWER)), max_size=20))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: list[int]) -> None:
    reader = read(ANSWER, cuts)
    assert "".join(reader.text or ()) == "Grüße 水路"
    assert len(reader.chunks) == 4
    assert (reader.done, reader.finish, reader.malformed, reader.error) == (True, "length", None, None)
    assert reader.usage is not None
    assert (reader.usage.prompt_tokens, reader.usage.completion_tokens) == (7, 12)
    assert reader.phases == {"queue": 0.25}


def test_a_piece_has_the_time_at_which_it_was_complete() -> None:
    end = ANSWER.index(b"thinking")
    assert read(ANSWER, [end]).chunks == [0.0, 1.0, 1.0, 1.0]


def test_line_ends_of_both_kinds_and_data_over_several_lines() -> None:
    data = b'data: {"choices": [\r\ndata: {"text": "a"}]}\r\n\r\ndata:[DONE]'
    reader = read(data, [])
    assert (len(reader.chunks), reader.done, reader.malformed) == (1, True, None)


@pytest.mark.parametrize(
    ("data", "malformed"),
    [
        (b"data: {broken\n\n", True),
        (b'data: {"choices": 5}\n\n', True),
        (b"data: \xff\xfe\n\n", True),
        (b"\n\n", False),
    ],
)
def test_what_is_no_chunk_is_said(data: bytes, malformed: bool) -> None:
    reader = read(data + DONE, [])
    assert (reader.malformed is not None) == malformed
    assert reader.done


@pytest.mark.parametrize("error", [{"message": "out of pages"}, "out of pages"])
def test_an_error_in_the_middle_is_found(error: object) -> None:
    reader = read(piece("a") + event({"error": error}) + DONE, [])
    assert reader.error == "out of pages"
