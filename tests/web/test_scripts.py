"""What the pages work out by themselves, in a JavaScript engine without a page; and what no file of theirs may do."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import quickjs

from tailrace.ledger import words
from tailrace.web import files

SOURCES = {name: files.read(name)[0].decode() for name in files.names()}


class Scripts:
    """The modules without a page."""

    def __init__(self) -> None:
        self._context = quickjs.Context()
        for name in ("format.js", "data.js"):
            self._context.eval(re.sub(r"^export ", "", SOURCES[name], flags=re.MULTILINE))

    def __call__(self, expression: str) -> Any:
        """The value of an expression."""
        return json.loads(self._context.eval(f"JSON.stringify({expression})"))


@pytest.fixture(scope="module")
def js() -> Scripts:
    return Scripts()


@pytest.mark.parametrize("seconds", [0.0004, 0.0099, 0.0123, 0.5, 0.9994, 1.0, 2.417, 59.99, 60.0, 72.4, 3599.0])
def test_a_time_is_written_as_explain_writes_it(js: Scripts, seconds: float) -> None:
    said = words.time_of(seconds)
    if seconds >= 60:  # whole seconds, cut and not rounded
        said = f"{int(seconds // 60)} min {int(seconds % 60)} s"
    assert js(f"time({seconds})") == said


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("time(null)", "-"),
        ("time(9000)", "2.5 h"),
        ("count(0)", "0"),
        ("count(12345)", "12,345"),
        ("count(1234567)", "1.2 M"),
        ("count(999999)", "1.0 M"),
        ("percent(0, 0)", "-"),
        ("percent(1, 1)", "100 %"),
        ("percent(99999, 100000)", "> 99.9 %"),
        ("percent(1, 1000000)", "< 0.1 %"),
        ("percent(1, 8)", "12.5 %"),
        ("dollars(null)", "-"),
        ("dollars(0)", "$0"),
        ("dollars(1234.5)", "$1,235"),
        ("dollars(3.291)", "$3.29"),
        ("dollars(0.012345)", "$0.0123"),
        ("dollars(0.00000123)", "$1.2e-6"),
        ("bytes(1536)", "1.5 KiB"),
        ("tick(0)", "0"),
        ("tick(0.25)", "250 ms"),
        ("tick(10)", "10 s"),
        ("tick(180)", "3 min"),
        ("short('chatcmpl-6b0ed1363466f1355b9', 12)", "chatcm…355b9"),
        ("short('abc')", "abc"),
        ("binName(0)", "0"),
        ("binName(1)", "1"),
        ("binName(5)", "16-31"),
        ("binName(11)", "1k-2k"),
    ],
)
def test_numbers_in_words(js: Scripts, expression: str, said: str) -> None:
    assert js(expression) == said


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_event_stream_is_taken_apart_wherever_it_was_cut(js: Scripts, cut: int) -> None:
    text = 'event: now\r\ndata: {"a":\r\ndata: 1}\r\n\r\n: a comment\n\ndata: [DONE]\n\ndata: half'
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    told = js(f"(() => {{ const e = new Events(); return {json.dumps(pieces)}.flatMap((p) => e.add(p)); }})()")
    assert told == [{"name": "now", "data": '{"a":\n1}'}, {"name": "message", "data": "[DONE]"}]


def test_rates_are_differences_and_never_less_than_nothing(js: Scripts) -> None:
    before, after = (
        {"at": 10, "n": 100, "ttft_count": 2, "ttft_sum": 1.0},
        {"at": 12, "n": 160, "ttft_count": 4, "ttft_sum": 4.0},
    )
    a, b = json.dumps(before), json.dumps(after)
    assert js(f"growth({a}, {b}, 'n')") == 30
    assert js(f"growth({b}, {{...{a}, at: 14}}, 'n')") == 0  # the engine was started again
    assert js(f"growth({a}, {a}, 'n')") == 0
    assert js(f"mean({a}, {b}, 'ttft')") == 1.5
    assert js(f"mean({a}, {a}, 'ttft')") is None
    assert js("since([{at: 1}, {at: 5}, {at: 9}], 5)") == {"at": 5}


def test_a_waterfall_leaves_no_gap(js: Scripts) -> None:
    bars = js("waterfall([['queue', 1], ['prefill', 2], ['decode', 5]], 8)")
    assert [(bar["from"], bar["share"]) for bar in bars] == [(0, 0.125), (0.125, 0.25), (0.375, 0.625)]
    assert js("waterfall([['queue', 0]], 0)")[0]["share"] == 0


def test_steps_of_one_kind_that_touch_are_one_and_chunks_stay_apart(js: Scripts) -> None:
    steps = [
        [0, 1, [0, 512, 0]],
        [1, 2, [0, 88, 1]],
        [2, 2.1, [0, 0, 1]],
        [2.1, 2.2, [0, 0, 2]],
        [2.2, 2.3, [0, 0, 0, "pages"]],
        [2.3, 2.4, [0, 0, 1]],
        [3.0, 3.1, [0, 0, 1]],
    ]
    told = js(f"runs({json.dumps(steps)})")
    assert [(run["kind"], run["steps"], run["tokens"]) for run in told] == [
        ("prefill", 1, 512),
        ("prefill", 1, 88),
        ("decode", 2, 3),
        ("stall", 1, 0),
        ("decode", 1, 1),
        ("decode", 1, 1),
    ]


def test_the_map_has_a_place_for_every_shape_between(js: Scripts) -> None:
    told = js(
        "(() => { const g = grid([{prompt: 3, output: 5}, {prompt: 6, output: 4}]);"
        " return [g.columns, g.rows, g.at.size]; })()"
    )
    assert told == [[3, 4, 5, 6], [5, 4], 2]
    assert js("grid([]).rows") == []
    assert js("bin(5)") == [16, 32]


def test_what_a_browser_sees_of_an_answer(js: Scripts) -> None:
    assert js("seen(1000, [1200, 1250, 1400], 5)") == {"ttft": 0.2, "each": 0.05, "gap": 0.15}
    assert js("seen(1000, [1200], 1)") == {"ttft": 0.2, "each": None, "gap": None}
    assert js("seen(1000, [], 0)") == {"ttft": None, "each": None, "gap": None}


def test_ids_in_a_sentence_become_links_and_nothing_else_does(js: Scripts) -> None:
    name = "chatcmpl-" + "0a" * 12 + ".1"
    told = js(f"pieces('Behind whom: {name} <b>ran</b>; chatcmpl-nothing.')")
    assert told == [{"text": "Behind whom: "}, {"id": name}, {"text": " <b>ran</b>; chatcmpl-nothing."}]


def test_addresses_go_there_and_back(js: Scripts) -> None:
    told = js("route('#/requests' + query({workload: 'a&b=<c>', after: null, order: ''}))")
    assert told == {"path": ["requests"], "query": {"workload": "a&b=<c>"}}
    assert js("route('#/request/%E0%A4%A')")["path"] == ["request", "%E0%A4%A"]
    assert js("route('')") == {"path": [], "query": {}}


def test_time_is_the_servers_and_not_the_browsers(js: Scripts) -> None:
    assert js("latest([{at: 5}, {at: 9}], {begin: 6, seconds: 1})") == 9
    assert js("latest([{at: 9}], {begin: 9.5, seconds: 0.25})") == 9.75
    assert js("latest([], undefined)") == 0


def test_another_key_is_asked_for_where_one_would_help(js: Scripts) -> None:
    for status, code, asked in [(401, "", True), (403, "insufficient_scope", True), (403, "wrong_host", False)]:
        assert js(f"wantsKey({{status: {status}, code: '{code}'}})") is asked


def test_round_values_on_an_axis(js: Scripts) -> None:
    assert js("ticks(0, 25.3, 4)") == [0, 10, 20]
    assert js("ticks(0, 0.03, 3)") == [0, 0.01, 0.02, 0.03]
    assert js("ticks(1, 1)") == [1]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_file_asks_nobody_else_and_makes_no_markup_of_text(name: str) -> None:
    source = SOURCES[name]
    assert set(re.findall(r"https?://[^\s\"'`<)]+", source)) <= {"http://www.w3.org/2000/svg"}
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "@import",
        "url(",
    ):
        assert forbidden not in source
    for imported in re.findall(r'from "/ui/([^"]+)"', source):
        assert imported in SOURCES
    assert "localStorage.setItem(KEY" not in source  # keys stay in the tab


def test_the_page_has_no_script_or_style_of_its_own_that_its_policy_would_refuse() -> None:
    page = SOURCES["index.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", page)
    for named in re.findall(r'(?:src|href)="/ui/([^"]+)"', page):
        assert named in SOURCES
