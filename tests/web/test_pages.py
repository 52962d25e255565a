"""The dashboard of a ledger by itself: files and JSON, what they say and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger import lookup, usage, words
from tailrace.ledger.store import Ledger
from tailrace.web import files
from tailrace.web.alone import Pages
from tailrace.web.desk import ENDPOINTS, Desk
from tailrace.web.reader import Reader
from tests.ledger.rows import NOW, RUN, record
from tests.web.wire import Answer, ask

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """125 requests, a second apart; every fifth is of a workload with a nasty name, one was refused."""
    made = Ledger(str(tmp_path_factory.mktemp("ledger") / "ledger.db"))
    rows = [
        record(f"chatcmpl-{at:024x}", ended=NOW + at, workload="chat" if at % 5 else EVIL, http_request=f"mine-{at}")
        for at in range(124)
    ]
    rows.append(record("req-1", ended=NOW + 200, outcome="refused", status=429, code="overloaded", requests=3))
    made.write(RUN, list(enumerate(rows, 1)), (NOW + 3600) * 1_000_000)
    return made


@pytest.fixture(scope="module")
def pages(ledger: Ledger) -> Iterator[Pages]:
    desk = Desk(Reader(ledger.shown), None, dict)
    yield Pages(desk)
    desk.close()


@pytest.mark.parametrize("path", ["/", "/ui", "/ui/", *(f"/ui/{name}" for name in sorted(files.names()))])
def test_every_file_keeps_the_page_to_itself(pages: Pages, path: str) -> None:
    answer = ask(pages, path)
    assert answer.status == 200
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.body


def test_json_is_not_kept_and_cannot_be_taken_for_a_page(pages: Pages, ledger: Ledger) -> None:
    answer = ask(pages, "/ui/api/state")
    assert (answer.headers["content-type"], answer.headers["cache-control"]) == ("application/json", "no-store")
    assert "content-security-policy" in answer.headers
    assert (answer.json["live"], answer.json["ledger"]) == (False, ledger.shown)


@pytest.mark.parametrize(
    ("target", "method", "status"),
    [
        ("/ui/../pyproject.toml", "GET", 404),
        ("/ui/nothing.js", "GET", 404),
        ("/uix", "GET", 404),
        ("/v1/models", "GET", 404),
        ("/ui/api/nothing", "GET", 404),
        ("/ui", "POST", 405),
        ("/ui/api/requests", "DELETE", 405),
        ("/ui/api/live", "GET", 404),
        ("/ui/api/steps", "GET", 404),
        ("/ui/api/requests/nobody", "GET", 404),
        ("/ui/api/requests?limit=0", "GET", 400),
        ("/ui/api/requests?limit=201", "GET", 400),
        ("/ui/api/requests?order=worst", "GET", 400),
        ("/ui/api/requests?after=1", "GET", 400),
        ("/ui/api/requests?after=9999999999999999999999.1", "GET", 400),
        ("/ui/api/requests?nonsense=1", "GET", 400),
        ("/ui/api/requests?since=-1", "GET", 400),
        ("/ui/api/usage?by=shoe", "GET", 400),
        ("/ui/api/cost?per_hour=nan", "GET", 400),
        ("/ui/api/state?x=1", "GET", 400),
        ("/ui/api/requests/" + "x" * 300, "GET", 404),
    ],
)
def test_what_is_not_there_or_makes_no_sense_is_said(pages: Pages, target: str, method: str, status: int) -> None:
    answer = ask(pages, target, method)
    assert answer.status == status
    assert len(answer.json["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("localhost:8001", 200),
        ("10.0.0.5", 200),
        ("evil.example:8001", 403),
        ("", 403),
    ],
)
def test_a_page_elsewhere_cannot_lead_its_own_name_here(pages: Pages, host: str, status: int) -> None:
    assert ask(pages, "/ui/api/usage", host=host).status == status


def listed(pages: Pages, query: str = "") -> Iterator[Answer]:
    """Every page of a list."""
    after = ""
    while True:
        answer = ask(pages, f"/ui/api/requests?limit=50{query}{after}")
        yield answer
        if answer.json["after"] is None:
            return
        after = "&after={}.{}".format(*answer.json["after"])


def test_pages_of_the_list_have_every_request_once(pages: Pages) -> None:
    found = list(listed(pages))
    names = [row["request"] for page in found for row in page.json["rows"]]
    assert names == ["req-1", *(f"chatcmpl-{at:024x}" for at in reversed(range(124)))]
    assert [page.json["total"] for page in found] == [125, None, None]


def test_the_list_has_no_more_than_a_row_says(pages: Pages) -> None:
    row = ask(pages, "/ui/api/requests?limit=1").json["rows"][0]
    assert "detail" not in row
    assert not {"prompt", "text", "messages", "output"} & set(row)


@pytest.mark.parametrize("order", ["e2e", "ttft", "tpot"])
def test_the_slowest_are_listed_whole_too(pages: Pages, order: str) -> None:
    rows = [row for page in listed(pages, f"&order={order}") for row in page.json["rows"]]
    values = [row[f"{order}_us"] for row in rows]
    assert values == sorted(values, reverse=True)
    assert len({row["request"] for row in rows}) == 124  # what was refused took no time


def test_the_list_is_narrowed_by_name_and_by_shape(pages: Pages) -> None:
    def count(query: str) -> int:
        return int(ask(pages, f"/ui/api/requests?{query}").json["total"])

    assert count("workload=%3Cscript%3Ealert(1)%3C%2Fscript%3E") == 25
    assert count("workload=chat&outcome=ok") == 99
    assert count("outcome=refused") == 1
    assert count("prompt=16.32&output=4.8") == 125
    assert count("prompt=32.64") == 0
    assert count("since=999999999999999999") == 125  # longer than there has been time
    assert count("since=60") == 0  # these requests ended long ago


def test_a_request_is_told_as_explain_tells_it(pages: Pages, ledger: Ledger) -> None:
    name = f"chatcmpl-{7:024x}"
    story = lookup.find(ledger, name)[0]
    told = ask(pages, f"/ui/api/requests/{name}").json
    assert told["running"] == []
    one = told["ended"][0]
    assert one["words"] == words.sentences(story)
    assert one["phases"] == [[phase, seconds] for phase, seconds in lookup.phases(story.record)]
    assert sum(seconds for _, seconds in one["phases"]) == pytest.approx(one["e2e_us"] / 1e6)
    assert ask(pages, "/ui/api/requests/mine-7").json["ended"][0]["request"] == name


def test_a_name_is_told_as_it_is_and_never_as_markup(pages: Pages) -> None:
    answer = ask(pages, f"/ui/api/requests/chatcmpl-{5:024x}")
    assert answer.json["ended"][0]["workload"] == EVIL
    assert answer.headers["content-type"] == "application/json"


def test_shapes_have_every_request_that_the_engine_had(pages: Pages) -> None:
    cells = ask(pages, "/ui/api/shapes").json["cells"]
    assert [(cell["prompt"], cell["output"], cell["requests"]) for cell in cells] == [(5, 3, 124)]
    assert cells[0]["e2e"] == pytest.approx(2.3)
    assert (cells[0]["judged"], cells[0]["met"]) == (124, 124)


def test_usage_is_what_the_command_line_prints(pages: Pages, ledger: Ledger) -> None:
    import msgspec

    told = ask(pages, "/ui/api/usage?by=workload,day").json["lines"]
    assert told == msgspec.json.decode(msgspec.json.encode(usage.usage(ledger, ["workload", "day"])))
    assert sum(line["requests"] for line in told) == 127


def test_cost_takes_a_price_that_is_typed_and_says_where_none_is_known(pages: Pages) -> None:
    assert ask(pages, "/ui/api/cost").json["bill"] is None
    bill = ask(pages, "/ui/api/cost?by=workload&per_hour=3.6").json["bill"]
    assert bill["source"] == "as typed here"
    assert bill["paid_seconds"] == 3600
    assert sum(line["amortised"]["usd"] for line in bill["lines"]) == pytest.approx(3.6)


def test_prices_come_with_seller_and_day(pages: Pages) -> None:
    for price in ask(pages, "/ui/api/prices").json["prices"]:
        assert price["usd_per_hour"] > 0
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", price["date"])


def told_without(desk: Desk, name: str) -> Any:
    try:
        return ask(Pages(desk), f"/ui/api/{name}")
    finally:
        desk.close()


@pytest.mark.parametrize("name", sorted(set(ENDPOINTS) - {"state", "live", "steps", "prices"}))
def test_a_ledger_that_cannot_be_read_is_said_for_what_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / "ledger.db").write_text("this is no database, but long enough to look like one" * 100)
    answer = told_without(Desk(Reader(str(tmp_path / "ledger.db")), None, dict), name)
    assert (answer.status, answer.json["error"]["code"]) == (503, "ledger_unavailable")
    assert "ledger.db" in answer.json["error"]["message"]


def test_without_a_ledger_it_says_so() -> None:
    answer = told_without(Desk(None, None, dict), "requests")
    assert (answer.status, answer.json["error"]["code"]) == (404, "no_ledger")
