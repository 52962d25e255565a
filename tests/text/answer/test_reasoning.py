"""Reasoning and what follows it."""

from __future__ import annotations

import pytest

from tailrace.text.answer.parts import Content, Reasoning
from tailrace.text.answer.reasoning import Opened
from tests.text.answer.support import Message, message, parser, run

NO, OPEN, CLOSED = Opened.NO, Opened.OPEN, Opened.CLOSED

CASES = [
    ("think", NO, "<think>\nBecause.\n</think>\n\nYes.", ("Yes.", "Because.")),
    ("think", NO, " \n<think>a</think>b", ("b", "a")),
    ("think", NO, "No reasoning.", ("No reasoning.", "")),
    ("think", NO, "  \nNo reasoning.\n", ("  \nNo reasoning.\n", "")),
    ("think", NO, "<think></think>b", ("b", "")),
    ("think", NO, "<think>cut off </th", ("", "cut off </th")),
    ("think", NO, "<think>\n\n", ("", "")),
    ("think", NO, "<thin", ("<thin", "")),
    ("think", NO, "It says <think>x</think>.", ("It says <think>x</think>.", "")),
    ("think", NO, "<think>a</think>b<think>c</think>", ("b<think>c</think>", "a")),
    ("think", NO, "<think>if a < b: </thing> \n <think> </think> ok", ("ok", "if a < b: </thing> \n <think>")),
    ("think", NO, "b</think>c", ("b</think>c", "")),
    ("think", OPEN, "\nBecause.\n</think>\n\nYes.", ("Yes.", "Because.")),
    ("think", OPEN, "<think>\nBecause.</think>Yes.", ("Yes.", "Because.")),
    ("think", OPEN, "never closed", ("", "never closed")),
    ("think", OPEN, "</think>b", ("b", "")),
    ("think", CLOSED, "<think>a</think>b", ("<think>a</think>b", "")),
    ("think", CLOSED, "\nplain", ("\nplain", "")),
    ("think-close", NO, "Because.\n</think>\n\nYes.", ("Yes.", "Because.")),
    ("think-close", NO, "<think>Because.</think>Yes.", ("Yes.", "Because.")),
    ("think-close", NO, "<thin", ("", "<thin")),
    ("think-close", CLOSED, "Yes.", ("Yes.", "")),
    ("mistral", NO, "[THINK]a [b][/THINK]c", ("c", "a [b]")),
]


@pytest.mark.parametrize(("form", "opened", "text", "expected"), CASES)
def test_reasoning_is_told_from_content(form: str, opened: Opened, text: str, expected: tuple[str, str]) -> None:
    whole = run(parser(None, form, opened), [text])
    assert message(whole) == Message(expected[0], expected[1], [])
    assert run(parser(None, form, opened), text) == whole


def test_calls_come_after_reasoning_and_not_within() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>\nI could {call}\n</think>\n\nSo:\n{call}"
    assert message(run(parser("hermes", "think"), text)) == Message("So:", f"I could {call}", [("f", "{}")])
    text = '<think>a</think>\n\n{"name": "f", "parameters": {}}'
    assert message(run(parser("llama3", "think"), text)) == Message("", "a", [("f", "{}")])


def test_reasoning_is_shown_at_once_unless_it_may_be_its_end() -> None:
    made = parser(None, "think", OPEN)
    assert made.reasoning
    assert made.push("a") == [Reasoning("a")]
    assert made.push(" </") == []
    assert made.push("p>") == [Reasoning(" </p>")]
    assert made.reasoning
    assert made.push("</think>\n") == []
    assert not made.reasoning
    assert made.push("\nb ") == [Content("b ")]
    assert made.push(" c") == [Content(" c")]
