"""Stop strings in the engine, where a text's beginning is special."""

from __future__ import annotations

import pytest

from tailrace.engine.protocol import SamplingParams
from tailrace.engine.watch import StopWatch
from tailrace.text import TokenBytes, decode

LEADING = TokenBytes.build([b" a", b" b", b"."], [], 1)
"""As SentencePiece spells: the space with which a text begins is not part of it."""


@pytest.mark.parametrize("continues", [False, True])
def test_a_text_that_continues_its_prompt_keeps_its_first_space_with_stop_strings_too(continues: bool) -> None:
    watch = StopWatch(LEADING, SamplingParams(max_tokens=3, stop=("x",), continues=continues))
    text = "".join(watch.push(token)[0] for token in (0, 1, 2)) + watch.finish()[0]
    assert text == decode(LEADING, [0, 1, 2], start=not continues)


def test_the_first_space_can_be_what_stops_a_text_that_continues() -> None:
    assert StopWatch(LEADING, SamplingParams(max_tokens=3, stop=(" a",), continues=True)).push(0) == ("", " a")
    assert StopWatch(LEADING, SamplingParams(max_tokens=3, stop=(" a",))).push(0) == ("a", None)
