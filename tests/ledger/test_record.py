"""What a row says, and what callers can make of it."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger import place, slo
from tailrace.ledger.record import MOST_LABELS, Detail, Note, Record, Refusal, label, record_of, refusal_of
from tailrace.ledger.slo import Slo
from tailrace.terms import InvalidInput
from tests.ledger.rows import NOW, note, record, timeline


def test_the_phases_of_a_row_add_up() -> None:
    row = record_of(timeline(), note(), clock=NOW - 100.0, usd_per_hour=None)
    names = ("prepare", "queue", "kv_lookup", "kv_load", "prefill", "decode", "stall", "stream", "other")
    assert sum(getattr(row, f"{name}_us") for name in names) == row.e2e_us == 2_300_000
    assert (row.received, row.ended) == (NOW * 1_000_000, NOW * 1_000_000 + 2_300_000)
    assert row.cost_nusd is None
    assert msgspec.json.decode(row.detail, type=Detail).waited_for == "slots"


@pytest.mark.parametrize(
    ("finish", "outcome", "met"),
    [("stop", "ok", 1), ("length", "ok", 1), ("abort", "gone", None), ("timeout", "failed", 0), ("error", "failed", 0)],
)
def test_how_it_ended_and_whether_that_is_judged(finish: str, outcome: str, met: int | None) -> None:
    row = record_of(timeline(finish=finish), note(), clock=0.0, usd_per_hour=None)
    assert (row.outcome, row.slo_met) == (outcome, met)
    assert record_of(timeline(finish=finish), note(slo=Slo()), clock=0.0, usd_per_hour=None).slo_met is None


@pytest.mark.parametrize(("status", "met"), [(400, None), (404, None), (429, 0), (500, 0), (503, 0)])
def test_a_callers_own_mistake_is_not_the_servers(status: int, met: int | None) -> None:
    assert refusal_of(Refusal(note(), status, "code", 0.5), now=NOW).slo_met == met
    assert refusal_of(Refusal(Note(), status, "code", 0.5), now=NOW).slo_met is None
    assert refusal_of(Refusal(note(), status, "code", 0.5), now=NOW, count=3).requests == 3


def test_a_tpot_that_is_none_is_not_judged() -> None:
    bounds = slo.parse("ttft=1,tpot=0.1,e2e=2")
    assert bounds.verdicts(0.5, None, 0.5, whole=True) == {"ttft": True, "e2e": True}
    assert bounds.verdicts(1.5, 0.05, 1.9, whole=True) == {"ttft": False, "tpot": True, "e2e": True}
    assert bounds.verdicts(0.5, None, 0.5, whole=False) == {"ttft": False, "tpot": False, "e2e": False}


def test_a_request_s_own_bounds_go_before_the_usual_ones() -> None:
    headers = {b"x-slo-tpot-ms": b"50"}
    assert slo.asked(headers.get, slo.parse("ttft=1,tpot=0.1")) == Slo(1.0, 0.05)
    for wrong in (b"", b"0", b"-1", b"nan", b"inf", b"fast", b"\xff"):
        with pytest.raises(InvalidInput) as refused:
            slo.asked({b"x-slo-e2e-ms": wrong}.get, Slo())
        assert refused.value.param == "x-slo-e2e-ms"


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=1,ttft=2", "itl=1", "ttft=inf"])
def test_bounds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        slo.parse(text)


@given(st.text())
def test_a_workload_s_name_is_printable_and_short(text: str) -> None:
    name = label(text, set())
    assert len(name) <= 64
    assert name.isascii()
    assert name.isprintable() or not name


def test_callers_cannot_make_names_without_end() -> None:
    known: set[str] = set()
    names = [label(f"w{at}", known) for at in range(2 * MOST_LABELS)]
    assert len(set(names)) == MOST_LABELS + 1
    assert label("w0", known) == "w0"
    assert names[-1] == "other"


@given(st.floats(0, 1e6), st.floats(0.01, 1000))
def test_cost_is_device_time_times_price(seconds: float, rate: float) -> None:
    row = record_of(msgspec.structs.replace(timeline(), device=seconds), note(), clock=0.0, usd_per_hour=rate)
    assert row.cost_nusd is not None
    assert math.isclose(row.cost_nusd / 1e9, seconds / 3600 * rate, rel_tol=1e-6, abs_tol=1e-6)


def test_a_record_survives_the_spool() -> None:
    row = record()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=Record) == row


def test_a_user_without_a_home_has_no_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TAILRACE_LEDGER", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert place.default() == "off"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert place.default() == "/data/tailrace/ledger.db"
    assert place.shown("postgresql://ada:pw@h:1/db?x=y") == "postgresql://h:1/db"
