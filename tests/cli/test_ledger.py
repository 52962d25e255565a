"""`tailrace usage`, `cost`, `explain` and `ledger`, as a person and as a program use them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tailrace.cli.explain import bar
from tailrace.cli.ledgers import moment, seconds
from tailrace.ledger.store import Ledger
from tailrace.terms import InvalidInput
from tests.cli.conftest import Run
from tests.ledger.rows import NOW, RUN, record


@pytest.fixture
def place(environment: dict[str, str]) -> Path:
    """A ledger with three requests of two workloads."""
    place = Path(environment["TAILRACE_LEDGER"])
    ledger = Ledger(str(place))
    rows = [
        record("chatcmpl-1", ended=NOW, workload="chat", http_request="mine"),
        record("chatcmpl-2.0", ended=NOW + 1, workload="chat"),
        record("cmpl-3", ended=NOW + 2, workload="rag", prompt_tokens=8000, e2e_us=9_000_000),
    ]
    ledger.write(RUN, list(enumerate(rows, 1)), (NOW + 7800) * 1_000_000)
    ledger.close()
    return place


def test_usage(run: Run, place: Path) -> None:
    table = run("usage", "--by", "workload").stdout.splitlines()
    assert table[0].split()[:3] == ["workload", "requests", "not"]
    assert [line.split()[:2] for line in table[1:]] == [["chat", "2"], ["rag", "1"]]
    lines = json.loads(run("usage", "--by", "", "--json").stdout)
    assert [(line["requests"], line["prompt_tokens"]) for line in lines] == [(3, 8040)]
    rows = list(csv.DictReader(io.StringIO(run("usage", "--by", "day,workload", "--csv").stdout)))
    assert [(row["day"], row["workload"], row["requests"]) for row in rows] == [
        ("2026-05-28", "chat", "2"), ("2026-05-28", "rag", "1"),
    ]  # fmt: skip
    assert run("usage", "--since", "1m").stdout == "No request ended in that time.\n"


def test_cost(run: Run, place: Path, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("[rented]\nusd_per_hour = 3\nsource = 'a page'\ndate = 2026-11-09\n")
    said = run("cost", "--price", str(tmp_path / "p.toml"), "--by", "workload", "--api", "some=1/2").stdout
    assert said.startswith("$3 an hour (a page, read on 2026-11-09); servers ran for 2.2 h")
    for words in ("busy", "amortised", "at SLO", "some: $1 and $2 a million in and out"):
        assert words in said
    bill = json.loads(run("cost", "--per-hour", "3.6", "--json").stdout)
    assert bill["utilisation"] == pytest.approx(3.9 / 7800, rel=0.01)
    assert bill["lines"][0]["busy"]["usd"] == pytest.approx(3.9 / 1000)
    assert bill["lines"][0]["amortised"]["usd"] == pytest.approx(7.8)
    assert "RunPod" in run("cost", "--prices").stdout
    unknown = run("cost")
    assert unknown.returncode == 2
    assert "give --per-hour, --price FILE or --device NAME" in unknown.stderr


def test_explain(run: Run, place: Path) -> None:
    said = run("explain", "chatcmpl-1").stdout
    for words in ("chatcmpl-1  chat, m, key ada, workload chat  ok (stop)", "queue", "prefill", "decode", "43.5%",
                  "- It took 2.30 s: its first token came after 2.00 s", "TTFT of at most 3.00 s: kept"):  # fmt: skip
        assert words in said
    assert run("explain", "mine").stdout == said
    assert "chatcmpl-2.0" in run("explain", "chatcmpl-2").stdout
    [slowest] = json.loads(run("explain", "--slowest", "1", "--since", "2026-05-01", "--json").stdout)
    assert slowest["request"] == "cmpl-3"
    assert slowest["words"][0].startswith("It took 9.00 s")
    window = run("explain", "--window", "10d", "--until", "2026-06-01").stdout
    assert "3 requests" in window
    assert "P prefill" in window


def test_ledger(run: Run, place: Path) -> None:
    assert "version 1, 3 rows of 1 servers" in run("ledger", "show").stdout
    assert run("ledger", "rebuild").stdout == "2 sums were made anew\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["usage", "--by", "colour"], "--by is any of"),
        (["usage", "--json", "--csv"], "choose one"),
        (["usage", "--since", "soon"], "--since is a time such as"),
        (["usage", "--ledger", "none.db"], "there is no ledger at none.db yet"),
        (["explain"], "name a request, or give --slowest or --window"),
        (["explain", "nobody"], "has no request nobody"),
        (["cost", "--api", "x"], "no API 'x' is known; known are deepseek-v3-2"),
        (["cost", "--api", "x=1"], "--api is NAME=IN/OUT"),
        (["cost", "--device", "abacus"], "no device 'abacus' is known"),
    ],
)
def test_what_is_wrong_is_said(run: Run, place: Path, arguments: list[str], words: str) -> None:
    ended = run(*arguments)
    assert ended.returncode in (1, 2)
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_times_are_read() -> None:
    assert [seconds(text, "--since") for text in ("90s", "1.5m", "2h", "7d")] == [90, 90, 7200, 604_800]
    assert moment("2026-05-28 10:00", "--since") < moment("2026-05-28T10:00:01", "--since")
    for wrong in ("", "5", "5y", "-5m", "nanm", "0s", "1e9d"):
        with pytest.raises(InvalidInput):
            seconds(wrong, "--since")


@pytest.mark.parametrize("width", [12, 44])
def test_bars_lie_where_they_belong(width: int) -> None:
    assert bar(0.0, 1.0, width) == "█" * width
    assert bar(0.0, 0.5, width) == "█" * (width // 2)
    assert bar(0.5, 0.5, width) == " " * (width // 2) + "█" * (width // 2)
    assert bar(0.3, 0.0, width) == ""
    assert bar(0.0, 1e-9, width).strip()
    assert len(bar(1.0, 1e-9, width)) == width
    assert len(bar(0.999, 0.5, width)) <= width
