"""What other load generators wrote is read by its definitions, and nothing is made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.measure import importing
from tailrace.measure.report.html import html
from tailrace.measure.result import Measured
from tailrace.terms import InvalidInput

VLLM = {
    "date": "20260101-120000", "endpoint_type": "openai", "backend": "openai", "label": None, "model_id": "a/model",
    "tokenizer_id": "a/model", "num_prompts": 3, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 2,
    "duration": 4.0, "completed": 2, "failed": 1, "total_input_tokens": 20, "total_output_tokens": 7,
    "request_throughput": 0.5, "request_goodput": None, "output_throughput": 1.75, "total_token_throughput": 6.75,
    "max_output_tokens_per_s": 3.0, "mean_ttft_ms": 150.0, "median_ttft_ms": 150.0, "std_ttft_ms": 50.0,
    "p99_ttft_ms": 199.0, "mean_tpot_ms": 100.0, "median_tpot_ms": 100.0, "std_tpot_ms": 0.0, "p99_tpot_ms": 100.0,
    "mean_itl_ms": 100.0, "median_itl_ms": 100.0, "std_itl_ms": 0.0, "p99_itl_ms": 100.0,
}  # fmt: skip
DETAILED = {
    "input_lens": [10, 10, 10], "output_lens": [3, 4, 0], "ttfts": [0.1, 0.2, 0.0],
    "itls": [[0.1, 0.1], [0.1, 0.1, 0.1], []], "start_times": [5.0, 5.5, 6.0],
    "generated_texts": ["", "", ""], "errors": ["", "", "Service Unavailable"],
}  # fmt: skip


def spread(mean: float, **percentiles: float) -> dict[str, Any]:
    return {"successful": {"mean": mean, "median": mean, "std_dev": 1.0, "min": mean / 2, "max": 2 * mean, "count": 8,
                           "percentiles": percentiles}}  # fmt: skip


GUIDELLM = {
    "metadata": {"version": 1},
    "benchmarks": [{
        "config": {"strategy": {"type_": "constant", "rate": 2.5}, "model": "a/model"}, "duration": 30.0,
        "metrics": {
            "request_totals": {"successful": 8, "errored": 1, "incomplete": 1, "total": 10},
            "requests_per_second": spread(2.4), "output_tokens_per_second": spread(80.0),
            "tokens_per_second": spread(200.0), "prompt_token_count": spread(50.0), "output_token_count": spread(33.0),
            "time_to_first_token_ms": spread(120.0, p50=110.0, p90=160.0, p95=180.0, p99=190.0),
            "time_per_output_token_ms": spread(99.0, p50=99.0), "inter_token_latency_ms": spread(20.0, p50=19.0),
            "request_latency": spread(1.5, p50=1.4, p95=1.9),
        },
    }],
}  # fmt: skip
AIPERF = {
    "request_count": {"unit": "requests", "avg": 10.0}, "error_request_count": {"unit": "requests", "avg": 2.0},
    "request_throughput": {"unit": "requests/sec", "avg": 2.5},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 99.0}, "benchmark_duration": {"unit": "sec", "avg": 4.0},
    "time_to_first_token": {"unit": "ms", "avg": 20.0, "p50": 18.0, "p95": 35.0, "p99": 39.0, "min": 9.0, "max": 40.0,
                            "std": 5.0, "count": 10},
    "inter_token_latency": {"unit": "ms", "avg": 8.0, "p50": 7.5, "p99": 12.0},
    "request_latency": {"unit": "ms", "avg": 900.0, "p50": 880.0},
    "input_sequence_length": {"unit": "tokens", "avg": 64.0}, "output_sequence_length": {"unit": "tokens", "avg": 40.0},
    "input_config": {"endpoint": {"model_names": ["a/model"]}, "loadgen": {"concurrency": 4}},
}  # fmt: skip


def one(found: object, folder: Path) -> Measured:
    path = folder / "theirs.json"
    path.write_text(json.dumps(found))
    bench = importing.read([path])
    assert "not defined" in html(bench) or bench.runs[0].summary.latency["itl"] is not None
    (run,) = bench.runs
    return run


def stat(run: Measured, metric: str) -> tuple[float, float | None, int]:
    found = run.summary.latency[metric]
    assert found is not None
    return found.mean, found.quantiles.get("p50"), found.n


def test_vllm_without_requests(tmp_path: Path) -> None:
    run = one(VLLM, tmp_path)
    assert (run.source, run.model, run.load, run.open_loop) == ("vllm bench serve", "a/model", "2 at a time", False)
    assert (run.summary.requests, run.summary.failures) == (3, 1)
    assert stat(run, "ttft") == (0.15, 0.15, 2)
    assert run.summary.latency["e2e"] is None
    assert (run.summary.rates.output_tokens, run.summary.rates.peak_output_tokens) == (1.75, 3.0)
    assert run.summary.shape.output == 3.5
    found = run.summary.latency["ttft"]
    assert found is not None
    assert (found.quantiles, found.intervals) == ({"p50": 0.15, "p99": 0.199}, {})


def test_vllm_with_every_request_is_summarised_as_ours(tmp_path: Path) -> None:
    run = one({**VLLM, **DETAILED, "request_rate": 2.0}, tmp_path)
    assert (run.open_loop, run.level) == (True, 2.0)
    assert run.summary.outcomes == {"ok": 2, "error": 1}
    assert run.summary.errors == {"Service Unavailable": 1}
    assert stat(run, "tpot")[0] == pytest.approx(0.1)
    assert stat(run, "e2e") == (pytest.approx(0.4), pytest.approx(0.4), 2)
    assert run.summary.itl_basis == "tokens"
    assert run.summary.rates.output_tokens == 1.75
    assert [record.sent for record in run.records] == [0.0, 0.5, 1.0]


def test_guidellm_means_our_tpot_by_its_inter_token_latency(tmp_path: Path) -> None:
    run = one(GUIDELLM, tmp_path)
    assert (run.source, run.open_loop, run.level, run.model) == ("GuideLLM", True, 2.5, "a/model")
    assert stat(run, "ttft") == (0.12, 0.11, 8)
    assert stat(run, "tpot") == (0.02, 0.019, 8)
    assert stat(run, "e2e") == (1.5, 1.4, 8)
    assert run.summary.latency["itl"] is None
    assert (run.summary.requests, run.summary.failures) == (10, 2)
    assert run.summary.rates.total_tokens == 200.0
    assert run.notes


@pytest.mark.parametrize("nested", [False, True])
def test_aiperf_of_both_layouts(nested: bool, tmp_path: Path) -> None:
    run = one({"records": AIPERF, "input_config": AIPERF["input_config"]} if nested else AIPERF, tmp_path)
    assert (run.source, run.load, run.model) == ("AIPerf", "4 at a time", "a/model")
    assert stat(run, "ttft") == (0.02, pytest.approx(0.018), 10)
    assert stat(run, "tpot")[0] == 0.008
    assert stat(run, "e2e")[0] == 0.9
    assert (run.summary.requests, run.summary.failures) == (12, 2)
    assert run.summary.rates.output_tokens == 99.0


@pytest.mark.parametrize(
    "found", [{}, [], 5, {"benchmarks": [{}]}, {**VLLM, "duration": "x"}, {**AIPERF, "request_latency": {"avg": 1}}]
)
def test_what_is_none_of_them_is_refused_by_name(found: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"theirs\.json"):
        one(found, tmp_path)
    (tmp_path / "theirs.json").write_text("{")
    with pytest.raises(InvalidInput, match="is no JSON"):
        importing.read([tmp_path / "theirs.json"])
