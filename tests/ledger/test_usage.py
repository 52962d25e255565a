"""Sums over the ledger, and what they cost."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.ledger import price
from tailrace.ledger.cost import bill
from tailrace.ledger.store import Ledger
from tailrace.ledger.usage import BY, Paid, Span, Usage, paid, usage
from tailrace.terms import InvalidInput
from tests.ledger.rows import DAY, NOW, RUN, record

HOUR = 3600


@pytest.fixture
def ledger(where: str) -> Ledger:
    """Three days of two keys: each hour a request of each, the second of "b" with twice the tokens."""
    made = Ledger(where)
    rows = [
        record(f"{key}{at}", ended=NOW + at * HOUR, key=key, prompt_tokens=tokens, workload=f"w{at % 2}")
        for at in range(72)
        for key, tokens in (("a", 10), ("b", 20))
    ]
    made.write(RUN, list(enumerate(rows, 1)), (NOW + 72 * HOUR) * 1_000_000)
    return made


def test_usage_is_told_apart_by_anything(ledger: Ledger) -> None:
    [everything] = usage(ledger, [])
    assert (everything.requests, everything.ok, everything.prompt_tokens) == (144, 144, 72 * 30)
    assert everything.device_seconds == pytest.approx(144 * 1.3)
    assert everything.ttft == pytest.approx(2.0)
    assert (everything.judged, everything.met) == (144, 144)
    assert {line.group["key"]: line.prompt_tokens for line in usage(ledger, ["key"])} == {"a": 720, "b": 1440}
    for by in ([name] for name in BY):
        assert sum(line.requests for line in usage(ledger, by)) == 144
    days = usage(ledger, ["day", "workload"])
    first = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
    assert sorted({line.group["day"] for line in days})[0] == f"{first:%Y-%m-%d}"
    assert [line.group["day"] for line in days] == sorted(line.group["day"] for line in days)
    assert len(days) == 8
    with pytest.raises(InvalidInput, match="--by is any of"):
        usage(ledger, ["colour"])
    ledger.close()


@pytest.mark.parametrize(
    ("since", "until"),
    [(None, NOW + 5), (NOW + 1, None), (NOW + 1, NOW + 2), (NOW, NOW + 3601), (NOW - 50, NOW + 10 * HOUR + 1),
     (NOW + 7.5 * HOUR, NOW + 8.5 * HOUR), (NOW + 2 * DAY, None), (NOW + 99 * DAY, None)],
)  # fmt: skip
def test_a_span_need_not_begin_with_an_hour(ledger: Ledger, since: float | None, until: float | None) -> None:
    ends = [NOW + at * HOUR for at in range(72)]
    inside = [at for at in ends if (since is None or at >= since) and (until is None or at < until)]
    lines = usage(ledger, ["key"], Span(since, until))
    assert [line.requests for line in lines] == ([len(inside)] * 2 if inside else [])
    ledger.close()


def test_where_rows_are_deleted_the_hour_s_sum_stands_for_them(ledger: Ledger) -> None:
    while ledger.prune((NOW + DAY) * 1_000_000, 0):
        pass
    assert sum(line.requests for line in usage(ledger, ["key"])) == 144
    whole_hour = usage(ledger, [], Span(NOW + 1, NOW + 2 * HOUR))
    assert whole_hour[0].requests == 6  # those of NOW and two hours later too: nothing tells rows apart any more
    assert [usage(ledger, [], Span(*span))[0].requests for span in ((NOW + 1, NOW + 2), (None, NOW + 1))] == [2, 2]
    ledger.close()


def test_what_was_paid_for_is_the_time_that_servers_ran(where: str) -> None:
    ledger = Ledger(where)
    second = msgspec.structs.replace(RUN, name="second", started=RUN.started + HOUR * 1_000_000, usd_per_hour=5.0)
    ledger.write(RUN, [], (NOW + 4 * HOUR) * 1_000_000)
    ledger.write(second, [], (NOW + 2 * HOUR) * 1_000_000)
    assert paid(ledger).seconds == 5 * HOUR
    assert paid(ledger).usd is None  # of the first one no price is known
    assert paid(ledger, usd_per_hour=2.0).usd == pytest.approx(10.0)
    assert paid(ledger, Span(NOW + HOUR, NOW + 1.5 * HOUR)).seconds == HOUR
    assert paid(ledger, Span(NOW + 3 * HOUR)) == Paid(1, HOUR, None, ["m"])
    assert paid(ledger, Span(NOW + 9 * HOUR)).seconds == 0
    ledger.close()


def line(device: float, **values: object) -> Usage:
    names = dict.fromkeys(Usage.__struct_fields__, 0) | {"group": {}, "e2e": None, "queue": None, "ttft": None}
    return Usage(**{**names, "device_seconds": device, **values})  # type: ignore[arg-type]


def test_a_server_that_works_half_of_the_time_costs_twice() -> None:
    one = line(1800.0, requests=10, ok=10, prompt_tokens=10**6, output_tokens=10**5, device_prefill_seconds=600.0,
               judged=10, met=5, good_output_tokens=50_000)  # fmt: skip
    cost = bill([one], Paid(1, 3600.0, None, []), 4.0, apis={})
    assert cost.utilisation == 0.5
    [only] = cost.lines
    assert only.busy.usd == pytest.approx(2.0)
    assert only.busy.per_request == pytest.approx(0.2)
    assert only.busy.per_million_input == pytest.approx(2 / 3)
    assert only.busy.per_million_output == pytest.approx(4 / 3 * 10)
    assert only.busy.per_good_request == pytest.approx(0.4)
    assert only.busy.per_million_good_output == pytest.approx(4 / 3 * 20)
    for name in ("usd", "per_request", "per_million_input", "per_million_output", "per_good_request"):
        assert getattr(only.amortised, name) == pytest.approx(2 * getattr(only.busy, name))


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=8), st.floats(1.0, 1e7), st.floats(0.0, 100.0))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shares_of_what_was_paid_add_up(devices: list[float], seconds: float, rate: float) -> None:
    made = bill([line(device) for device in devices], Paid(1, seconds, None, []), rate, apis={})
    total = sum(one.amortised.usd for one in made.lines)
    assert total == pytest.approx(seconds / 3600 * rate if sum(devices) else 0.0)
    assert sum(one.busy.usd for one in made.lines) == pytest.approx(sum(devices) / 3600 * rate)


FILE = """
name = "ours"
[owned]
price_usd = 26298
years = 3
watts = 500
usd_per_kwh = 0.2
usd_per_year = 876.6
[api.cheap]
usd_per_million_input = 1
usd_per_million_cached = 0.5
usd_per_million_output = 4
source = "their page"
date = 2026-11-09
"""


def test_a_price_file_says_what_an_hour_costs(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(FILE)
    profile = price.read(file)
    assert profile.usd_per_hour == pytest.approx(1.0 + 0.1 + 0.1)
    assert profile.api["cheap"].usd(3_000_000, 1_000_000, 500_000) == pytest.approx(2 + 0.5 + 2)
    assert price.sourced(profile.api["cheap"].source, profile.api["cheap"].date) == "their page, read on 2026-11-09"


@pytest.mark.parametrize(
    ("change", "words"),
    [(("years = 3", "years = 0"), "above 0"), (("watts = 500", "watts = -1"), "watts is -1"),
     (("[owned]", "[rented]\nusd_per_hour = 1\n[owned]"), "one device is either"),
     (("price_usd", "prize"), "prize"), (("= 3\n", "="), "p.toml"), (("watts = 500", "watts = nan"), "watts is nan")],
)  # fmt: skip
def test_a_wrong_price_file_is_explained(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    file = tmp_path / "p.toml"
    file.write_text(FILE.replace(*change))
    with pytest.raises(InvalidInput, match=words):
        price.read(file)
