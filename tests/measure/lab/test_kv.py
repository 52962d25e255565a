"""Pages: predicted and seen."""

from __future__ import annotations

import pytest

from tailrace.measure import prometheus
from tailrace.measure.lab import kv
from tailrace.measure.lab.experiment import Verdict
from tailrace.measure.record import Record
from tests.measure.lab.support import INSIDE
from tests.measure.support import record


def user(*, tokens: int = -1, input_tokens: int = 100) -> Record:
    """A prompt whose answer's 20 pieces come every tenth of a second from 1.0 on."""
    return record([1.0 + at / 10 for at in range(20)], input=input_tokens, tokens=tokens)


def test_only_moments_in_which_all_are_writing_count() -> None:
    late = record([2.0 + at / 10 for at in range(20)], input=100)
    looks = [(0.5, 0.51, 3), (1.51, 1.52, 14), (2.51, 2.52, 15), (2.81, 2.82, 16), (3.5, 3.6, 7)]
    (one, two) = kv.samples([user(), late], looks, INSIDE)
    assert (one.pages, two.pages) == (15, 16)
    # 16 and 6 tokens had come: 115 and 105 tokens' KV at least, 118 and 108 at most
    assert (one.low, one.high) == (8 + 7, 8 + 7)
    assert kv.agrees(one)
    assert (two.tokens, two.low, two.high) == (100 + 19 + 100 + 9, 8 + 7, 8 + 7)
    assert not kv.agrees(two)


def test_a_page_too_many_or_too_few_does_not_agree() -> None:
    (low, high) = kv.samples([user()], [(1.51, 1.52, 6), (1.53, 1.54, 9)], INSIDE)
    assert (low.low, low.high) == (7, 7)
    assert not kv.agrees(low)
    assert not kv.agrees(high)


def test_where_a_page_may_have_begun_both_numbers_are_right() -> None:
    looks = [(1.11, 1.12, pages) for pages in (6, 7, 8)]
    made = kv.samples([user(input_tokens=110)], looks, INSIDE)  # 111 to 114 tokens: page 8 begins with 113
    assert [kv.agrees(one) for one in made] == [False, True, True]
    assert kv.predicted(made[0]) == "7 to 8"


def test_pieces_of_several_tokens_widen_what_is_predicted() -> None:
    (alone,) = kv.samples([user()], [(1.51, 1.52, 7)], INSIDE)
    (many,) = kv.samples([user(tokens=60)], [(1.51, 1.52, 7)], INSIDE)
    assert (alone.low, alone.high) == (7, 7)
    assert many.low == 7
    assert many.high == -(-(100 + min(60, 6 + 40 + kv.AHEAD + kv.DRAFTED)) // 16)


def found(pages: int) -> kv.Kv:
    sample = kv.Sample(tokens=112, pages=pages, low=7, high=7)
    return kv.Kv(1000, 16_000, 16, 4_000_000, [kv.Wave(1, 100, [sample] * 3, 50_000_000)],
                 [kv.Wave(2, 100, [sample], 60_000_000)], 40_000_000, False, [])  # fmt: skip


def test_agreement_to_the_page_is_what_is_judged() -> None:
    right = kv.Experiment().teach(found(7))
    assert right.beliefs[0].verdict is Verdict.HOLDS
    assert "All 4 looks agree" in right.beliefs[0].because
    wrong = kv.Experiment().teach(found(8))
    assert wrong.beliefs[0].verdict is Verdict.FAILS
    assert "4 of 4 looks do not agree; the first: 8 pages, predicted 7" in wrong.beliefs[0].because
    said = " ".join(one.text for one in right.findings)
    assert "as much as 4,000 tokens of KV" in said
    assert "memory grew by 19.1 MiB" in said


def test_a_page_of_metrics_is_read() -> None:
    text = (
        "# HELP a b\n# TYPE a gauge\na 3.0\n"
        'a{x="1",y="q\\"z"} 4 1712\nab 5\nnan_one NaN\nbad x y\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="2048"} 1.0\n'
    )
    read = prometheus.parse(text, ("a", "nan_one", "vllm:cache_config_info"))
    assert read["a"] == {"": 3.0, 'x="1",y="q\\"z"': 4.0}
    assert set(read) == {"a", "vllm:cache_config_info"}
    (labels,) = read["vllm:cache_config_info"]
    assert prometheus.label(labels, "num_gpu_blocks") == "2048"
    assert prometheus.label(labels, "nothing") is None


@pytest.mark.parametrize("tokens", [1, 16, 17, 160])
def test_pages_of_a_sequence_are_whole(tokens: int) -> None:
    assert INSIDE.pages(tokens)[0] * 16 >= tokens > (INSIDE.pages(tokens)[0] - 1) * 16
