"""The report is one well-formed file that needs nothing else, and shows what there is."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import msgspec
import pytest

from tailrace.measure import bench
from tailrace.measure.counting import Plan
from tailrace.measure.report import svg, words
from tailrace.measure.report.html import html
from tailrace.measure.result import Bench
from tailrace.measure.slo import Slo
from tailrace.workload.arrivals import Closed, Poisson
from tests.measure import mock
from tests.measure.mock import Body, Script, running
from tests.measure.test_bench import bed, done

SLO = Slo({"ttft": 0.05, "gap": 1.0})


class Tags(HTMLParser):
    """Every tag opened and closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in ("meta", "polyline", "polygon", "line", "rect", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def looked_at(page: str) -> Tags:
    """Well-formed, with plots that are XML, and nothing to fetch or run."""
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not tags.seen & {"script", "link", "img", "iframe"}
    assert not re.search(r"<[^>]*(src|href)=|url\(|@import", page)
    for plot in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = ElementTree.fromstring(plot)
        assert "nan" not in plot
        assert "inf" not in re.sub(r"<text.*?</text>", "", plot)
        assert root.attrib["aria-label"]
    return tags


def some_fail() -> mock.Callable[[Body], Script]:
    return lambda body: (mock.refuse() if "person" in str(body) else mock.steady(0.01, 0.005))(body)


@pytest.fixture(scope="module")
def one() -> Bench:
    with running(some_fail()) as server:
        plan = Plan(Poisson(60), sessions=60, warmup=5)
        place = bed(server, plan, SLO)
        run = done(bench.once(place), place)
    return Bench(kind="run", runs=[run], slo=SLO, price=1.0, setting={"seed": 0})


def test_one_run(one: Bench) -> None:
    page = html(one)
    looked_at(page)
    for said in ("Time to first token", "Gaps between tokens", "SLO: 50 ms", "no room", "a million output tokens"):
        assert said in page
    assert len(page) < 300_000


def test_what_others_wrote_is_text(one: Bench) -> None:
    run = msgspec.structs.replace(one.runs[0], model='<script>"&', notes=["<img src=x>"])
    page = html(msgspec.structs.replace(one, runs=[run]))
    looked_at(page)
    assert "&lt;script&gt;" in page


def test_a_sweep_and_a_comparison() -> None:
    with running(mock.steady(0.004, 0.002)) as server, running(mock.steady(0.012, 0.002)) as other:
        plan = Plan(Closed(1), sessions=8, sustain=False)
        place = bed(server, plan, SLO)
        runs, knee = done(bench.sweep(place, [1, 2, 4, 8]), place)
        page = html(Bench(kind="sweep", runs=runs, knee=knee, slo=SLO, price=1.0))
        looked_at(page)
        for said in ("TTFT against load", "Keeping the SLO", "Cost against load", "4 at a time"):
            assert said in page
        a, b = bed(server, plan, label="A"), bed(other, plan, label="B")
        runs, found = done(bench.compare(a, b, 6), a, b)
        compared = Bench(kind="compare", runs=runs, differences=found)
        page = html(compared)
        looked_at(page)
        assert "A is better" in page
        assert "TTFT, median" in page


def test_results_without_records_or_without_anything_still_make_a_page(one: Bench) -> None:
    looked_at(html(msgspec.structs.replace(one, runs=[msgspec.structs.replace(one.runs[0], records=[])])))
    looked_at(html(Bench(kind="import", runs=[])))
    with running(mock.refuse()) as server:
        place = bed(server, Plan(Closed(1), sessions=3), SLO)
        none = done(bench.once(place), place)
    page = html(Bench(kind="run", runs=[none], slo=SLO))
    looked_at(page)
    assert "3 of 3 failed" in page


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 0.37), (0.0, 12_345.0), (3.0, 3.2), (0.0, 1e-4)])
def test_ticks_are_round_and_few(low: float, high: float) -> None:
    ticks = svg.Axis("", low, high, str).ticks()
    assert 3 <= len(ticks) <= 12
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    (step,) = {float(f"{after - before:.3g}") for before, after in pairwise(ticks)}
    assert f"{step:.0e}"[0] in "125"
    assert all(tick / step == pytest.approx(round(tick / step)) for tick in ticks)


def test_powers_have_ticks_too() -> None:
    assert svg.axis("", [0.003, 0.9], str, log=True).ticks() == pytest.approx([0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5])
    assert svg.axis("", [1.0, 5000.0], str, log=True).ticks() == [1, 10, 100, 1000]
    assert svg.axis("", [2.0, 2.0], str, log=True).ticks() == [2.0]


def test_a_cumulative_line_is_thin_and_keeps_its_tail() -> None:
    points = svg.cumulative([float(value) for value in range(50_000)])
    assert len(points) < 1300
    assert points[0] == (0.0, 0.0)
    assert points[-1] == (49_999.0, 1.0)
    assert points[-2] == (49_998.0, 49_999 / 50_000)
    assert svg.cumulative([]) == []


def test_words_have_three_digits() -> None:
    assert [words.ms(value) for value in (0.0123456, 0.5, 1.234, 123.4)] == ["12.3 ms", "500 ms", "1.23 s", "123 s"]
    assert [words.rate(value) for value in (None, 0.1234, 12.34, 1234.5)] == ["not known", "0.123", "12.3", "1,234"]


def test_what_stands_at_the_end_of_an_axis_is_all_there() -> None:
    plot = svg.Plot(
        svg.axis("time", [0.008, 0.5], "{:.3f} seconds".format, log=True), svg.axis("share", [0, 1], str), "gaps"
    )
    texts = ElementTree.fromstring(str(plot).partition("</svg>")[0] + "</svg>").iter("text")
    ends = [float(t.attrib["x"]) + 3.5 * len(t.text or "") for t in texts if t.attrib.get("text-anchor") == "middle"]
    assert ends
    assert max(ends) <= svg.WIDTH
