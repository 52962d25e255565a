"""Metrics, timelines, the log, and keys, through a real socket."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tailrace.api.metrics import Metrics
from tailrace.engine.protocol import Gauges
from tests.api.conftest import Running, serving, until

CHAT = {"model": "stand", "messages": [{"role": "user", "content": "hello there"}]}


@pytest.fixture(scope="module")
def watched() -> Iterator[Running]:
    """A server whose counters nobody else moves, with steps long enough to be measured."""
    with serving(loader="tests.api.stand:load_slow") as server:
        yield server


def families(server: Running) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}


def series(server: Running) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in families(server).values()
        for sample in family.samples
    }


def test_counts_are_those_of_the_answers(watched: Running) -> None:
    def totals() -> list[float]:
        names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
        names += ("inter_token_latency_seconds_count", "e2e_request_latency_seconds_count", "request_params_n_count")
        return [watched.metric(prefix + name) for name in names for prefix in ("tailrace_", "vllm:")]

    before = totals()
    longest = watched.metric("vllm:request_max_num_generation_tokens_sum")
    usage = watched.post("/v1/chat/completions", CHAT).json()["usage"]
    until(lambda: watched.metric("vllm:e2e_request_latency_seconds_count") == before[9] + 1, "the request to be closed")
    prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
    expected = [prompt, output, 1, output - 1, 1, 1]
    moved = [after - earlier for after, earlier in zip(totals(), before, strict=True)]
    assert moved == [value for value in expected for _ in range(2)]
    assert watched.metric("vllm:request_max_num_generation_tokens_sum") == longest + output


def test_an_echo_alone_is_accounted_for_as_everything_else_is(watched: Running) -> None:
    header = {"x-request-id": "echo-alone"}
    body = {"model": "stand", "prompt": "abc", "echo": True, "max_tokens": 0, "tailrace": {"timeline": True}}
    answer = watched.post("/v1/completions", body, headers=header).json()
    assert answer["choices"][0]["text"] == "abc"
    assert answer["tailrace"]["timeline"]["covered"] >= 0.99
    lines = until(lambda: [one for one in watched.requests() if one["http_request"] == "echo-alone"], "the log line")
    assert len(lines) == 1


def test_names_labels_and_buckets_are_vllms(watched: Running) -> None:
    watched.post("/v1/chat/completions", CHAT)
    found = families(watched)
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    counters = ("prompt_tokens", "generation_tokens", "request_success", "num_preemptions")
    counters += ("prefix_cache_queries", "prefix_cache_hits")
    histograms = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
    histograms += ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    histograms += ("request_inference_time_seconds", "request_time_per_output_token_seconds", "request_prompt_tokens")
    histograms += (
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "iteration_tokens_total",
        "request_params_n",
        "request_params_max_tokens",
    )
    for kind, names in (("gauge", gauges), ("counter", counters), ("histogram", histograms)):
        for name in names:
            family = found[f"vllm:{name}"]
            assert family.type == kind, name
            assert family.samples, name
            for sample in family.samples:
                assert sample.labels["model_name"] == "stand"
                assert sample.labels["engine"] == "0"
    reasons = {sample.labels["finished_reason"] for sample in found["vllm:request_success"].samples}
    assert {"stop", "length", "abort", "error"} <= reasons
    bounds = [s.labels["le"] for s in found["vllm:time_to_first_token_seconds"].samples if "le" in s.labels]
    assert bounds[:3] == ["0.001", "0.005", "0.01"]
    assert bounds[-2:] == ["2560.0", "+Inf"]
    assert found["vllm:cache_config_info"].samples[0].labels["block_size"] == "16"
    assert found["vllm:cache_config_info"].samples[0].labels["enable_prefix_caching"] == "True"


def test_evictions_keep_rising_when_an_engine_is_started_again() -> None:
    metrics = Metrics("m")
    metrics.gauges(Gauges(evictions=[5, 0, 1, 2]), Gauges(evictions=[1, 0, 0, 2]), 0)
    assert metrics.engine.evictions == {"pressure": 4, "ttl": 0, "quota": 1, "reset": 0}
    metrics.gauges(Gauges(evictions=[2, 0, 0, 4]), Gauges(evictions=[0, 0, 0, 3]), 1)
    metrics.gauges(Gauges(), None, 1)
    assert metrics.engine.evictions == {"pressure": 6, "ttl": 0, "quota": 1, "reset": 1}


def test_strangers_cannot_make_new_series() -> None:
    with serving() as server:
        _strangers_cannot_make_new_series(server)


def _strangers_cannot_make_new_series(watched: Running) -> None:
    before = series(watched)  # nothing has been asked yet
    assert before == series(watched)
    watched.post("/v1/chat/completions", {**CHAT, "n": 2})
    watched.post("/v1/models/zz", {})
    with watched.http() as client:
        for index in range(300):
            name = f"m{random.random()}"
            assert client.post("/v1/chat/completions", json={**CHAT, "model": name}).status_code == 404
            assert client.get(f"/{name}/{index}").status_code == 404
    assert series(watched) == before


def test_the_timeline_covers_the_request(watched: Running) -> None:
    body = {**CHAT, "tailrace": {"timeline": True, "token_times": True}}
    timeline = watched.post("/v1/chat/completions", body).json()["tailrace"]["timeline"]
    assert timeline["covered"] >= 0.99
    phases = timeline["phases_ms"]
    assert abs(sum(phases.values()) - timeline["e2e_ms"]) < 0.01
    assert {"prepare", "queue", "prefill", "decode", "other"} <= set(phases)
    assert timeline["finish"] == "stop"
    assert timeline["tokens"]["output"] == len("hello there") + 1
    assert timeline["steps"]["decode"] == timeline["tokens"]["output"] - 1
    times = timeline["token_times_ms"]
    assert len(times) == timeline["tokens"]["output"]
    assert times == sorted(times)
    assert times[0] == timeline["ttft_ms"]


def test_a_header_asks_for_the_timeline_too_and_streams_carry_it_last(watched: Running) -> None:
    header = {"x-tailrace-timeline": "1"}
    assert "tailrace" in watched.post("/v1/chat/completions", CHAT, headers=header).json()
    assert "tailrace" not in watched.post("/v1/chat/completions", CHAT).json()
    for options in ({}, {"stream_options": {"include_usage": True}}):
        answer = watched.post("/v1/chat/completions", {**CHAT, "stream": True, **options}, headers=header)
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        assert ["tailrace" in event for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1]["choices"] == []
        assert ("usage" in events[-1]) == bool(options)


def test_choices_have_timelines_of_their_own(watched: Running) -> None:
    answer = watched.post("/v1/chat/completions", {**CHAT, "n": 2, "tailrace": {"timeline": True}}).json()
    assert len(answer["tailrace"]["timelines"]) == 2


def test_a_request_leaves_one_line_without_its_text(watched: Running) -> None:
    secret = "the secret word is swordfish"
    body = {**CHAT, "messages": [{"role": "user", "content": secret}], "user": "u1", "metadata": {"job": "7"}}
    answer = watched.post("/v1/chat/completions", body)
    lines = until(lambda: [one for one in watched.requests() if one.get("user") == "u1"], "the line")
    assert len(lines) == 1
    line = lines[0]
    assert line["request"] == answer.json()["id"]
    assert line["http_request"] == answer.headers["x-request-id"]
    assert line["metadata"] == {"job": "7"}
    assert line["endpoint"] == "chat"
    assert line["covered"] >= 0.99
    assert "swordfish" not in "".join(watched.log)


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    with serving(api_keys=["alpha", "beta"]) as server:
        yield server


def test_a_key_is_needed_where_one_is_configured(keyed: Running) -> None:
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic alpha"}, {"authorization": "alpha"}):
        for path in ("/v1/models", "/metrics", "/version"):
            answer = keyed.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        keyed.client("wrong").models.list()
    assert keyed.client("alpha").models.list().data
    assert keyed.client("beta").models.list().data
    for path in ("/health", "/health/live", "/health/ready"):
        assert keyed.get(path).status_code == 200


def test_keys_do_not_share_cached_prefixes_whatever_the_client_says(keyed: Running) -> None:
    def cached(key: str, **body: Any) -> int:
        answer = keyed.client(key).chat.completions.create(
            model="stand", messages=[{"role": "user", "content": "a secret prefix " * 20}], max_tokens=1, **body
        )
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    assert cached("alpha") == 0
    assert cached("alpha") > 0
    assert cached("beta") == 0
    assert cached("beta", user="alpha") > 0
