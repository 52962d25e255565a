"""`tailrace generate`: every prompt once, whatever breaks on the way."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.cli.batch import Prompts, Results, Runner
from tailrace.cli.client import Client
from tailrace.models import load_model, open_checkpoint
from tailrace.terms import InvalidInput, TailraceError
from tests.cli.conftest import Run
from tests.cli.standin import Answer, Body, Refusal, StandIn
from tests.models import random_llama, random_lora


def records(out: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda record: record["index"])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\nthree")
    return file


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_a_text_file_is_one_prompt_a_line(run: Run, standin: StandIn, prompts: Path, out: Path) -> None:
    ended = run("generate", str(prompts), "--out", str(out), "--url", standin.url, "--max-tokens", "5")
    assert ended.returncode == 0, ended.stderr
    assert [record["text"] for record in records(out)] == ["you said: one", "you said: two", "you said: three"]
    first = records(out)[0]
    assert (first["index"], first["id"], first["finish_reason"]) == (0, "0", "stop")
    assert first["usage"]["completion_tokens"] == 2
    assert 0 < first["timing"]["ttft_s"] <= first["timing"]["e2e_s"]
    assert {path for path, _ in standin.requests} == {"/v1/completions"}
    assert all(body["max_tokens"] == 5 and body["model"] == "tiny" for body in standin.bodies)


def test_lines_of_json_bring_their_own_parameters(run: Run, standin: StandIn, tmp_path: Path, out: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"id": "a", "prompt": "p", "temperature": 0.5, "logit_bias": {"7": 1}},
        {"messages": [{"role": "user", "content": "m"}], "max_completion_tokens": 3},
        "just text",
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    ended = run("generate", str(file), "-o", str(out), "--url", standin.url, "--max-tokens", "9", "--temperature", "0")
    assert ended.returncode == 0, ended.stderr
    asked = {json.dumps(body.get("prompt") or body["messages"]): body for body in standin.bodies}
    first, second = asked['"p"'], asked[json.dumps(lines[1]["messages"])]  # type: ignore[index]
    assert (first["temperature"], first["max_tokens"], first["logit_bias"]) == (0.5, 9, {"7": 1})
    assert second["max_completion_tokens"] == 3
    assert "max_tokens" not in second
    assert records(out)[0]["id"] == "a"


def test_chat_wraps_prompts_into_messages(run: Run, standin: StandIn, prompts: Path, out: Path) -> None:
    run("generate", str(prompts), "-o", str(out), "--url", standin.url, "--system", "Be brief.", "-c", "1")
    assert standin.requests[0] == (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}], "model": "tiny",
         "stream": True, "stream_options": {"include_usage": True}},
    )  # fmt: skip


def test_reasoning_and_calls_are_recorded(run: Run, standin: StandIn, prompts: Path, out: Path) -> None:
    calls = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
        {"index": 1, "id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    deltas = [{"reasoning_content": "Hm"}, {"reasoning_content": "."}, *({"tool_calls": [call]} for call in calls)]
    standin.answer = lambda _: Answer([], finish="tool_calls", deltas=deltas)
    run("generate", str(prompts), "-o", str(out), "--url", standin.url, "--system", "Be brief.", "-c", "1")
    record = records(out)[0]
    assert (record["text"], record["reasoning"], record["finish_reason"]) == ("", "Hm.", "tool_calls")
    assert record["tool_calls"] == [
        {"id": "call_1", "name": "f", "arguments": '{"a": 1}'},
        {"id": "call_2", "name": "g", "arguments": "{}"},
    ]


def test_a_second_run_skips_what_is_done_and_tries_failures_again(
    run: Run, standin: StandIn, prompts: Path, out: Path
) -> None:
    standin.answer = lambda body: Refusal(400, "not this one") if body["prompt"] == "two" else Answer(["ok"])
    command = ("generate", str(prompts), "--out", str(out), "--url", standin.url)
    ended = run(*command)
    assert ended.returncode == 1
    assert "1 of 3 prompts failed" in ended.stderr
    assert records(out)[1]["error"] == "not this one"
    standin.requests.clear()
    standin.answer = lambda _: Answer(["better"])
    ended = run(*command)
    assert ended.returncode == 0
    assert "2 of 3 are done already" in ended.stderr
    assert [body["prompt"] for body in standin.bodies] == ["two"]
    assert [record.get("text") for record in records(out)] == ["ok", None, "better", "ok"]
    standin.requests.clear()
    assert run(*command).returncode == 0
    assert standin.requests == []


def test_a_torn_last_line_is_dropped_and_done_again(run: Run, standin: StandIn, prompts: Path, out: Path) -> None:
    command = ("generate", str(prompts), "--out", str(out), "--url", standin.url, "-c", "1")
    run(*command)
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    standin.requests.clear()
    assert run(*command).returncode == 0
    assert [body["prompt"] for body in standin.bodies] == ["three"]
    assert [record["text"] for record in records(out)] == ["you said: one", "you said: two", "you said: three"]


def test_results_of_other_prompts_are_not_mixed_up(run: Run, standin: StandIn, prompts: Path, out: Path) -> None:
    command = ("generate", str(prompts), "--out", str(out), "--url", standin.url)
    run(*command)
    ended = run(*command, "--temperature", "0")
    assert ended.returncode == 2
    assert "--restart" in ended.stderr
    assert run(*command, "--temperature", "0", "--restart").returncode == 0
    assert len(records(out)) == 3
    out.write_text("my diary\n")
    assert run(*command).returncode == 2
    assert out.read_text() == "my diary\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "an object with prompt or messages"),
        ('{"prompt": "a", "messages": []}', "exactly one"),
        ('{"id": 1}', "exactly one"),
        ('"fine"\n{"prompt": "a", "n": 2}', "line 2: n cannot"),
        ('{"prompt": "a", "stream": true}', "stream cannot"),
        ("\n", "no prompts"),
    ],
)
def test_a_wrong_line_is_refused_before_anything_is_sent(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidInput, match=message):
        Prompts.read(file, {})


def runner_for(standin: StandIn, waits: list[float], retries: int = 3) -> Runner:
    return Runner(Client(standin.url), "tiny", retries=retries, sleep=waits.append)


def run_one(standin: StandIn, tmp_path: Path, waits: list[float]) -> dict[str, Any]:
    file = tmp_path / "one.txt"
    file.write_text("x")
    outcomes: list[dict[str, Any]] = []
    runner_for(standin, waits).run(Prompts.read(file, {}), 4, lambda outcome: outcomes.append(outcome.record))
    return outcomes[0]


def failing_first(times: int, failure: Answer | Refusal) -> Callable[[Body], Answer | Refusal]:
    left = [failure] * times
    return lambda _: left.pop() if left else Answer(["whole"])


@pytest.mark.parametrize(
    ("failure", "waits"),
    [
        (Refusal(429, "busy", {"Retry-After": "7"}), [7.0, 7.0]),
        (Refusal(503, "no engine"), [0.5, 1.0]),
        (Answer(["half"], complete=False), [0.5, 1.0]),
        (Answer(["half"], error="the engine died"), [0.5, 1.0]),
    ],
)
def test_what_may_pass_is_tried_again_and_half_answers_are_not_kept(
    standin: StandIn, tmp_path: Path, failure: Answer | Refusal, waits: list[float]
) -> None:
    standin.answer = failing_first(2, failure)
    waited: list[float] = []
    assert run_one(standin, tmp_path, waited)["text"] == "whole"
    assert waited == waits


def test_tries_are_counted_and_the_last_error_recorded(standin: StandIn, tmp_path: Path) -> None:
    standin.answer = lambda _: Refusal(503, "no engine")
    record = run_one(standin, tmp_path, [])
    assert record["error"] == "no engine"
    assert "text" not in record
    assert len(standin.requests) == 4


def test_several_requests_are_in_flight_at_once(standin: StandIn, tmp_path: Path) -> None:
    together = threading.Barrier(4, timeout=30)

    def answer(_: Body) -> Answer:
        together.wait()
        return Answer(["ok"])

    standin.answer = answer
    file = tmp_path / "four.txt"
    file.write_text("a\nb\nc\nd")
    outcomes: list[dict[str, Any]] = []
    runner_for(standin, []).run(Prompts.read(file, {}), 4, lambda outcome: outcomes.append(outcome.record))
    assert [outcome["text"] for outcome in outcomes] == ["ok"] * 4


def test_two_runs_do_not_write_one_file(out: Path) -> None:
    with Results(out), pytest.raises(InvalidInput, match="another tailrace generate"), Results(out):
        pass


def test_a_full_disk_keeps_what_is_done_and_says_so(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    with Results(out) as results:
        results.append({"index": 0, "text": "kept"})
        monkeypatch.setattr(os, "write", lambda *_: 3)
        with pytest.raises(TailraceError, match="Make room and run again"):
            results.append({"index": 1, "text": "lost"})
    assert records(out) == [{"index": 0, "text": "kept"}]


def test_the_servers_models_are_checked(run: Run, standin: StandIn, prompts: Path, out: Path) -> None:
    ended = run("generate", str(prompts), "--out", str(out), "--url", standin.url, "--model", "other")
    assert ended.returncode == 2
    assert "it has tiny" in ended.stderr


def test_an_adapter_answers_where_one_is_given(run: Run, prompts: Path, tmp_path: Path) -> None:
    folder = random_llama.write(tmp_path / "llama")
    adapter = random_lora.make(tmp_path / "adapter", load_model(open_checkpoint(folder), max_context=64), 1)
    texts = []
    for name, more in (("plain", ()), ("adapted", ("--lora", str(adapter)))):
        options = ("-m", str(folder), "--max-tokens", "8", "--temperature", "0", *more)
        ended = run("generate", str(prompts), "--out", str(tmp_path / name), *options)
        assert ended.returncode == 0, ended.stderr
        texts.append([record["text"] for record in records(tmp_path / name)])
    assert len(texts[0]) == 3
    assert all(plain != adapted for plain, adapted in zip(*texts, strict=True))
