"""The result files of other load generators, each told by its fields and made into runs.

Where names differ, definitions decide: GuideLLM's and AIPerf's "inter-token latency" is a request's mean without its
first token, which is our TPOT; GuideLLM's own "TPOT" counts the first token in, and has no counterpart here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from tailrace.measure.load import Run
from tailrace.measure.record import Outcome, Record
from tailrace.measure.result import Measured
from tailrace.measure.statistics import QUANTILES, Stat
from tailrace.measure.summary import Rates, Shape, Summary, summarise
from tailrace.measure.watch import UNKNOWN

MS = 1e-3


def read(found: Any, name: str) -> list[Measured] | None:
    """The runs in a decoded file; None where it is of none of them. Raises KeyError, TypeError or ValueError where a
    field is missing or of another kind."""
    if not isinstance(found, dict):
        return None
    if "request_throughput" in found and "mean_ttft_ms" in found:
        return [vllm(found, name)]
    if isinstance(found.get("benchmarks"), list):
        return [guidellm(one, name, number) for number, one in enumerate(found["benchmarks"], 1)]
    aiperf_metrics = found.get("records") if isinstance(found.get("records"), dict) else found
    if isinstance(aiperf_metrics, dict) and isinstance(aiperf_metrics.get("request_throughput"), dict):
        return [aiperf(found, aiperf_metrics, name)]
    return None


def _measured(name: str, source: str, model: Any, load: str, level: float, open_loop: bool, summary: Summary,
              records: list[Record] | None = None, notes: list[str] | None = None) -> Measured:  # fmt: skip
    return Measured(
        label=name, url="an imported file", model=str(model or "an unknown model"), workload=name, load=load,
        level=level, open_loop=open_loop, summary=summary, records=records or [], notes=notes or [], source=source,
    )  # fmt: skip


def _summary(
    good: int, failed: int, rates: Rates, latency: Mapping[str, Stat | None], input_tokens: float | None,
    output_tokens: float | None,
) -> Summary:  # fmt: skip
    return Summary(
        requests=good + failed, outcomes={"ok": good, **({"error": failed} if failed else {})}, errors={}, rates=rates,
        latency={name: latency.get(name) for name in ("ttft", "tpot", "e2e", "itl", "gap")}, itl_basis="tokens",
        shape=Shape(input_tokens or 0.0, output_tokens or 0.0, input_tokens, output_tokens, None), phases={},
        goodput=None, client=UNKNOWN,
    )  # fmt: skip


# --- vllm bench serve -----------------------------------------------------------------------------------------------


def vllm(found: dict[str, Any], name: str) -> Measured:
    """A result of `vllm bench serve`. With --save-detailed it has every request, and is summarised as ours are; its
    TTFT counts from when a request was sent."""
    rate, most = found.get("request_rate", "inf"), found.get("max_concurrency")
    open_loop = rate not in ("inf", None) and float(rate) != float("inf")
    level = float(rate) if open_loop else float(most or found["num_prompts"])
    load = f"{level:g} a second" if open_loop else f"{level:g} at a time"
    model = found.get("model_id")
    if found.get("ttfts") and found.get("itls"):
        records = _requests(found)
        run = Run(0.0, (0.0, float(found["duration"])), records, UNKNOWN, open_loop=open_loop)
        summary = summarise(run)
        stated = _vllm_summary(found)
        notes = ["Rates are as vLLM gives them, of the whole run; latencies were computed again, request by request."]
        fields = {field: getattr(summary, field) for field in summary.__struct_fields__} | {"rates": stated.rates}
        return _measured(name, "vllm bench serve", model, load, level, open_loop, Summary(**fields), records, notes)
    return _measured(name, "vllm bench serve", model, load, level, open_loop, _vllm_summary(found))


def _requests(found: dict[str, Any]) -> list[Record]:
    records = []
    errors = found.get("errors") or [""] * len(found["ttfts"])
    starts = found.get("start_times") or [0.0] * len(found["ttfts"])
    first = min(starts, default=0.0)
    rows = zip(found["input_lens"], found["output_lens"], found["ttfts"], found["itls"], errors, starts, strict=True)
    for number, (asked, got, ttft, itls, error, start) in enumerate(rows):
        sent = start - first
        ok = not error and ttft > 0
        chunks = list(accumulate(itls, initial=sent + ttft)) if ok else []
        records.append(
            Record(
                number, 0, True, asked, got, sent=sent, chunks=chunks, ended=chunks[-1] if chunks else sent,
                outcome=Outcome.OK if ok else Outcome.ERROR, error=str(error)[-200:], input_tokens=asked,
                output_tokens=got,
            )
        )  # fmt: skip
    return records


def _vllm_summary(found: dict[str, Any]) -> Summary:
    good = int(found["completed"])
    failed = int(found.get("failed") or max(0, int(found.get("num_prompts") or good) - good))
    names = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}
    latency = {ours: _flat(found, theirs, good) for ours, theirs in names.items()}
    rates = Rates(
        seconds=float(found["duration"]), requests=float(found["request_throughput"]),
        output_tokens=float(found["output_throughput"]), peak_output_tokens=found.get("max_output_tokens_per_s"),
        total_tokens=float(found["total_token_throughput"]), chunks=0.0,
    )  # fmt: skip
    each = [found[key] / good if good else None for key in ("total_input_tokens", "total_output_tokens")]
    return _summary(good, failed, rates, latency, each[0], each[1])


def _flat(found: dict[str, Any], name: str, requests: int) -> Stat | None:
    """mean_ttft_ms, median_ttft_ms, p99_ttft_ms and so on."""
    if f"mean_{name}_ms" not in found:
        return None
    given = {quantile: found.get(f"{quantile}_{name}_ms") for quantile in QUANTILES}
    given["p50"] = given["p50"] if given["p50"] is not None else found.get(f"median_{name}_ms")
    return _stat(found[f"mean_{name}_ms"], found.get(f"std_{name}_ms"), given, requests, MS)


# --- GuideLLM -------------------------------------------------------------------------------------------------------


def guidellm(one: dict[str, Any], name: str, number: int) -> Measured:
    """One benchmark of GuideLLM's JSON. Its TTFT counts from when a request was sent."""
    told = one["metrics"]
    config = one.get("config") or one.get("args") or {}
    strategy = config.get("strategy") or {}
    strategy = strategy if isinstance(strategy, dict) else {"type_": strategy}
    rate = strategy.get("rate") or config.get("rate")
    rate = rate[0] if isinstance(rate, list) and rate else rate
    kind = str(strategy.get("type_") or strategy.get("kind") or "")
    streams = strategy.get("streams") or strategy.get("max_concurrency")
    open_loop = kind in ("constant", "poisson", "async")
    level = float(streams if not open_loop and streams else rate or 1)
    totals = told["request_totals"]
    good = int(totals["successful"])
    latency = {
        "ttft": _spread(told, "time_to_first_token_ms", good, MS),
        "tpot": _spread(told, "inter_token_latency_ms", good, MS),
        "e2e": _spread(told, "request_latency", good, 1.0),
    }
    requests, output = _mean(told, "requests_per_second"), _mean(told, "output_tokens_per_second")
    rates = Rates(
        float(one.get("duration") or 0.0), requests or 0.0, output, None, _mean(told, "tokens_per_second"), 0.0
    )
    failed = int(totals.get("errored") or 0) + int(totals.get("incomplete") or 0)
    summary = _summary(
        good, failed, rates, latency, _mean(told, "prompt_token_count"), _mean(told, "output_token_count")
    )
    load = f"{kind or 'load'} {level:g}" + (" a second" if open_loop else "")
    note = (
        "GuideLLM counts what was incomplete at the end among those that failed here."
        if totals.get("incomplete")
        else ""
    )
    return _measured(f"{name} {number}", "GuideLLM", config.get("model"), load, level, open_loop, summary,
                     notes=[note] if note else None)  # fmt: skip


def _successful(told: dict[str, Any], key: str) -> dict[str, Any] | None:
    found = (told.get(key) or {}).get("successful")
    return found if isinstance(found, dict) else None


def _mean(told: dict[str, Any], key: str) -> float | None:
    found = _successful(told, key)
    return None if found is None or found.get("mean") is None else float(found["mean"])


def _spread(told: dict[str, Any], key: str, requests: int, unit: float) -> Stat | None:
    found = _successful(told, key)
    if found is None or found.get("mean") is None:
        return None
    percentiles = found.get("percentiles") or {}
    given = {quantile: percentiles.get(quantile, found.get(quantile)) for quantile in QUANTILES}
    given["p50"] = given["p50"] if given["p50"] is not None else found.get("median")
    count, deviation = int(found.get("count") or requests), found.get("std_dev", found.get("std"))
    return _stat(found["mean"], deviation, given, count, unit, found.get("min"), found.get("max"))


# --- AIPerf ---------------------------------------------------------------------------------------------------------


def aiperf(found: dict[str, Any], told: dict[str, Any], name: str) -> Measured:
    """AIPerf's profile_export_aiperf.json. Its TTFT counts from when a request was sent."""

    def value(key: str) -> float | None:
        one = told.get(key)
        return float(one["avg"]) if isinstance(one, dict) and one.get("avg") is not None else None

    def stat(key: str, requests: int) -> Stat | None:
        one = told.get(key)
        if not isinstance(one, dict) or one.get("avg") is None:
            return None
        unit = {"ms": MS, "milliseconds": MS, "s": 1.0, "sec": 1.0, "seconds": 1.0, "us": 1e-6, "ns": 1e-9}[one["unit"]]
        given = {quantile: one.get(quantile) for quantile in QUANTILES}
        return _stat(
            one["avg"], one.get("std"), given, int(one.get("count") or requests), unit, one.get("min"), one.get("max")
        )

    good = int(value("request_count") or 0)
    failed = int(value("error_request_count") or 0)
    latency = {
        "ttft": stat("time_to_first_token", good), "tpot": stat("inter_token_latency", good),
        "e2e": stat("request_latency", good), "gap": stat("inter_chunk_latency", good),
    }  # fmt: skip
    rates = Rates(
        value("benchmark_duration") or 0.0, value("request_throughput") or 0.0, value("output_token_throughput"), None,
        value("total_token_throughput"), 0.0,
    )  # fmt: skip
    config = found.get("input_config") or {}
    generator = config.get("loadgen") or {}
    rate = generator.get("request_rate")
    level = float(rate or generator.get("concurrency") or 1)
    models = (config.get("endpoint") or {}).get("model_names") or [None]
    summary = _summary(good, failed, rates, latency, value("input_sequence_length"), value("output_sequence_length"))
    load = f"{level:g} a second" if rate else f"{level:g} at a time"
    return _measured(name, "AIPerf", models[0], load, level, bool(rate), summary)


def _stat(
    mean: float, deviation: Any, quantiles: dict[str, Any], requests: int, unit: float, least: Any = None,
    most: Any = None,
) -> Stat:  # fmt: skip
    known = {name: float(value) * unit for name, value in quantiles.items() if value is not None}
    return Stat(
        n=requests, requests=requests, undefined=0, mean=float(mean) * unit, deviation=float(deviation or 0.0) * unit,
        least=float(least or 0.0) * unit, most=float(most or 0.0) * unit, quantiles=known, intervals={},
    )  # fmt: skip
