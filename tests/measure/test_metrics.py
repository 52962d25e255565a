"""Every metric of what a server sent follows by arithmetic."""

from __future__ import annotations

import pytest

from tailrace.measure import metrics, slo
from tailrace.measure.record import Outcome, Record
from tailrace.measure.slo import Slo
from tailrace.measure.summary import summarise, tokens_per_chunk
from tailrace.terms import InvalidInput
from tests.measure.support import ran, record


def test_ttft_counts_from_when_it_was_due_or_else_sent() -> None:
    assert metrics.ttft(record([1.5, 2.0], sent=1.0)) == 0.5
    assert metrics.ttft(record([1.5, 2.0], sent=1.0, due=0.25)) == 1.25
    assert metrics.ttft(record([])) is None


def test_e2e_ends_with_the_last_token_of_a_complete_answer() -> None:
    assert metrics.e2e(record([1.5, 2.0], sent=1.0)) == 1.0
    assert metrics.e2e(record([1.5, 2.0], sent=1.0, due=0.0)) == 2.0
    assert metrics.e2e(record([1.5, 2.0], outcome=Outcome.CUT)) is None


def test_tpot_is_per_token_after_the_first_and_not_defined_without_any() -> None:
    assert metrics.tpot(record([1.0, 1.5, 2.0, 2.5])) == 0.5
    assert metrics.tpot(record([1.0, 2.5], tokens=4)) == 0.5
    assert metrics.tpot(record([1.0])) is None
    assert metrics.tpot(record([1.0, 2.0], tokens=None)) is None
    found = summarise(ran([record([1.0]), record([1.0, 2.0])])).latency["tpot"]
    assert found is not None
    assert (found.n, found.undefined, found.mean) == (1, 1, 1.0)


def test_pieces_are_not_taken_for_tokens() -> None:
    """Known fault: with several tokens a piece, gaps were called ITL, and the peak rate fell below the mean."""
    one = record([1.0, 2.0, 3.0, 4.0], tokens=16)
    found = summarise(ran([one], (0.0, 8.0)))
    assert found.itl_basis == "usage"
    gap, itl = found.latency["gap"], found.latency["itl"]
    assert gap is not None
    assert itl is not None
    assert (gap.n, gap.mean) == (3, 1.0)
    assert itl.mean == pytest.approx(3 / 15)
    assert found.rates.output_tokens == 2.0
    assert found.rates.peak_output_tokens == 4.0
    assert found.rates.chunks == 0.5


@pytest.mark.parametrize("tokens", [4, 16])
@pytest.mark.parametrize("end", [4.2, 5.0, 7.9, 40.0])
def test_the_peak_is_never_below_the_mean(tokens: int, end: float) -> None:
    rates = summarise(ran([record([1.0, 2.0, 3.0, 4.0], tokens=tokens)] * 3, (0.0, end))).rates
    assert rates.output_tokens == pytest.approx(3 * tokens / end)
    assert rates.peak_output_tokens is not None
    assert rates.peak_output_tokens >= rates.output_tokens


def test_without_usage_no_tokens_are_made_up() -> None:
    found = summarise(ran([record([1.0, 2.0], tokens=None, input=None)]))
    assert (found.rates.output_tokens, found.rates.total_tokens, found.rates.peak_output_tokens) == (None, None, None)
    assert found.rates.chunks == 0.2
    assert found.latency["tpot"] is found.latency["itl"] is None
    assert found.latency["gap"] is not None
    assert found.shape.output is None


def test_tokens_that_show_nothing_do_not_make_pieces_of_tokens() -> None:
    odd = record([1.0] * 90, tokens=100)
    assert metrics.by_token([odd, record([1.0] * 100)])
    assert not metrics.by_token([odd])
    assert metrics.by_token([record([1.0], tokens=2)])
    assert not metrics.by_token([record([1.0] * 100, tokens=99)])
    assert not metrics.by_token([record([1.0], tokens=None)])
    assert not metrics.by_token([])


def test_rates_are_of_the_window_alone() -> None:
    warm = record([0.5, 1.5], measured=False)
    inside = record([2.0, 3.0, 4.0])
    stopped = record([4.5, 5.5], tokens=None, outcome=Outcome.STOPPED, measured=False)
    rates = summarise(ran([warm, inside, stopped], (1.0, 5.0))).rates
    assert rates.output_tokens == (1 + 3 + 1) / 4
    assert rates.requests == 2 / 4
    assert rates.total_tokens == (1 + 3 + 1 + 2 * 10) / 4


def test_what_failed_is_beside_the_latencies_and_adds_nothing_to_rates() -> None:
    """Known fault: a server that refuses half of the requests looked quicker."""
    failed = [record([], outcome=outcome) for outcome in (Outcome.REFUSED, Outcome.ERROR, Outcome.TIMEOUT)]
    cut = record([1.0, 2.0], outcome=Outcome.CUT)
    found = summarise(ran([record([1.0, 2.0]), *failed, cut]), Slo({"ttft": 5.0}))
    assert (found.requests, found.failures) == (5, 4)
    assert found.outcomes == {"ok": 1, "refused": 1, "error": 1, "timeout": 1, "cut": 1}
    assert found.goodput is not None
    assert (found.goodput.attainment, found.goodput.per_second) == (0.2, 0.1)
    assert found.rates.requests == 0.1
    assert found.rates.output_tokens == 0.2
    assert found.latency["ttft"] is not None
    assert found.latency["ttft"].n == 1


def test_goodput_wants_every_bound() -> None:
    quick, slow_start = record([0.1, 0.2, 0.3]), record([2.0, 2.1, 2.2])
    slow, stalled = record([0.1, 1.1, 2.1]), record([0.1, 0.2, 3.2, 3.3, 3.4])
    bounds = Slo({"ttft": 1.0, "tpot": 0.9, "gap": 2.0, "e2e": 5.0}, share=0.25)
    assert [bounds.good(one) for one in (quick, slow_start, slow, stalled)] == [True, False, False, False]
    found = summarise(ran([quick, slow_start, slow, stalled]), bounds).goodput
    assert found is not None
    assert found.kept == {"ttft": 0.75, "tpot": 0.75, "gap": 0.75, "e2e": 1.0}
    assert (found.attainment, found.met) == (0.25, True)
    assert found.interval[0] < 0.25 < found.interval[1]
    assert Slo({"tpot": 0.1}).good(record([1.0])), "there is no TPOT to judge by"


@pytest.mark.parametrize(
    ("text", "bounds"),
    [("ttft=500ms,tpot=0.05", {"ttft": 0.5, "tpot": 0.05}), ("e2e=20s", {"e2e": 20.0}), (" gap=1 ", {"gap": 1.0})],
)
def test_bounds_have_units(text: str, bounds: dict[str, float]) -> None:
    assert slo.parse([text]) == Slo(bounds)
    assert slo.parse([]) is None


@pytest.mark.parametrize(
    "text", ["ttft", "ttft=", "ttft=0", "itl=5", "ttft=5m", "ttft=-1", "ttft=1,ttft=2", "ttft=1.2.3"]
)
def test_wrong_bounds_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--slo"):
        slo.parse([text])
    with pytest.raises(InvalidInput, match="share"):
        slo.parse(["ttft=1"], 0.0)


def test_what_the_server_says_of_shapes_and_phases_is_kept() -> None:
    told = [
        record([1.0], cached_tokens=5, phases={"queue": 0.2, "decode": 1.0}), record([1.0], input=30, cached_tokens=15),
        record([1.0], phases={"queue": 0.4}),
    ]  # fmt: skip
    found = summarise(ran(told))
    assert (found.shape.input, found.shape.cached) == (pytest.approx(50 / 3), 0.5)
    assert found.phases == {"queue": pytest.approx(0.3), "decode": 0.5}


def test_late_is_what_the_client_was_not_what_it_waited_for() -> None:
    late = Record(0, 0, True, 1, 1, due=1.0, began=1.1, sent=1.5, connecting=0.4)
    assert metrics.dispatch_delay(late) == pytest.approx(0.1)
    assert metrics.dispatch_delay(record([1.0])) is None


def test_tokens_a_piece_come_from_those_that_were_counted() -> None:
    assert tokens_per_chunk([record([1.0, 2.0], tokens=8), record([1.0], tokens=None)]) == 4.0
    assert tokens_per_chunk([record([1.0], tokens=None)]) is None
