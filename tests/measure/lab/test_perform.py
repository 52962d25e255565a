"""All experiments against a mock server, and the report of what came of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tailrace.measure.bench import drive
from tailrace.measure.lab import page
from tailrace.measure.lab.experiment import Belief, Finding, Lesson, Mark, Table, Verdict
from tailrace.measure.lab.experiments import EXPERIMENTS
from tailrace.measure.lab.perform import Chapter, Report, perform
from tailrace.measure.lab.stand import Stand
from tailrace.terms import TailraceError
from tailrace.twin.catalogue.prices import builtin
from tests.measure import mock
from tests.measure.mock import Mock, running

BY_NAME = {one.name: one for one in EXPERIMENTS}


def performed(server: Mock, *names: str) -> list[Chapter]:
    stand = Stand("mock", 0.05, url=server.url, prices=builtin().apis)
    return drive(perform([BY_NAME[name] for name in names], stand))


def test_any_server_will_do_and_what_cannot_be_done_is_said() -> None:
    with running(mock.steady(0.002, 0.001)) as server:
        chapters = {one.name: one for one in performed(server, *BY_NAME)}
    done = {name for name, one in chapters.items() if one.lesson is not None}
    assert done == {"shapes", "batch", "context", "prefix", "agent"}
    assert "the files of mock are not here" in chapters["kv"].missing
    assert "not a server at a URL" in chapters["roofline"].missing
    for name in done:
        lesson = chapters[name].lesson
        assert lesson is not None
        assert lesson.findings
        assert lesson.figures
        assert chapters[name].found
    assert all(body["temperature"] == 0 for body in server.requests)
    assert all(headers["x-tailrace-timeline"] == "1" for headers in server.headers)
    shapes: Any = chapters["shapes"].found
    assert shapes["source"] == "the client's TTFT and E2E"
    text = page.html(Report(model="mock", where=server.url, began=0.0, seconds=9.0, budget=1.0,
                            chapters=list(chapters.values())))  # fmt: skip
    assert "Not done: the files of mock are not here" in text
    assert all(escaped not in text for escaped in ("<script", "src=", "@import"))
    assert set(re.findall(r'href="([^"]*)"', text)) == {f"#{name}" for name in chapters}


def test_no_run_asks_what_another_has_asked() -> None:
    with running(mock.steady(0.001, 0.001)) as server:
        performed(server, "batch")
        first = {str(body["messages"]) for body in server.requests}
        count = len(server.requests)
        performed(server, "batch")
        again = {str(body["messages"]) for body in server.requests[count:]}
    alike = first & again
    assert all(len(text) < 200 for text in alike), alike  # the probe's few words


def test_the_error_of_a_single_experiment_is_raised() -> None:
    with running(mock.refuse(503, "no room")) as server, pytest.raises(TailraceError, match="no room"):
        performed(server, "shapes")


def test_a_request_that_fails_ends_the_experiment_with_its_reason() -> None:
    asked = 0

    def later(body: dict[str, Any]) -> mock.Script:
        nonlocal asked
        asked += 1
        return mock.steady()(body) if asked < 8 else mock.refuse(500, "broken")(body)

    with running(later) as server, pytest.raises(TailraceError, match="500: broken"):
        performed(server, "batch")


def test_a_model_without_chats_is_asked_for_completions() -> None:
    def plain(body: dict[str, Any]) -> mock.Script:
        return mock.refuse(400, "no chat template")(body) if "messages" in body else mock.steady(0.001, 0.001)(body)

    with running(plain) as server:
        (chapter,) = performed(server, "batch")
    assert chapter.lesson is not None
    assert any("takes no chats" in note for note in chapter.lesson.notes)


def test_answers_that_come_in_one_piece_have_no_time_of_a_token() -> None:
    with running(mock.steady(0.002, per_chunk=1000)) as server:
        (shapes,) = performed(server, "shapes")
        with pytest.raises(TailraceError, match="in one piece"):
            performed(server, "batch")
    assert shapes.lesson is not None
    assert shapes.lesson.tables[0].rows[0][4] == "not defined"


def test_rounds_go_on_while_one_more_fits() -> None:
    assert len(list(Stand("m", 0.0).rounds(least=3))) == 3
    assert len(list(Stand("m", 1e9).rounds(least=3, most=7))) == 7


def test_the_page_marks_numbers_and_escapes_words() -> None:
    lesson = Lesson(
        did="<did>", tables=[Table(("a", "b"), [("<x>", "1")], Mark.PREDICTED)],
        findings=[Finding("one & two"), Finding("three", Mark.ASSUMED)],
        beliefs=[Belief("<it> is so", Verdict.FAILS, "1 < 2")], figures=["<figure>f</figure>"], notes=["note"],
    )  # fmt: skip
    chapters = [
        Chapter(name="one", question="why?", lesson=lesson),
        Chapter(name="two", question="how?", missing="<no>"),
    ]
    text = page.html(Report(model="<m>", where="here", began=0.0, seconds=1.0, budget=1.0, chapters=chapters))
    for words in ("&lt;did&gt;", "&lt;x&gt;", "one &amp; two", "“&lt;it&gt; is so”", "does not hold here", "why?",
                  "Not done: &lt;no&gt;", '<span class="from">assumed</span>', '<span class="from">predicted</span>',
                  "<figure>f</figure>", "prefers-color-scheme: dark", "width=device-width"):  # fmt: skip
        assert words in text, words
    assert "<m>" not in text
