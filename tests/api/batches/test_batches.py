"""Files and batches through a real socket, with the official client."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tailrace.api.access import store
from tailrace.api.access.store import Quota
from tests.api.conftest import Running, serving, until

ADA, BOB = "ada-key", "bob-key"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two tenants, a small bound of files and of lines."""
    place = tmp_path_factory.mktemp("content") / "content.db"
    limits = {"file_bytes": 200_000, "batch_lines": 300, "batches": 2}
    with serving(
        served_names=["stand"], content_store=f"sqlite:////{place}", api_keys=[ADA, BOB], limits=limits
    ) as running:
        running.key = ADA
        yield running


def chat(text: str, **options: Any) -> dict[str, Any]:
    return {"model": "stand", "messages": [{"role": "user", "content": text}], **options}


def line(name: str, body: Any, url: str = "/v1/chat/completions", method: str = "POST") -> dict[str, Any]:
    return {"custom_id": name, "method": method, "url": url, "body": body}


def jsonl(rows: list[Any]) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def begin(client: openai.OpenAI, rows: list[Any], endpoint: Any = "/v1/chat/completions", **options: Any) -> Any:
    file = client.files.create(file=("in.jsonl", jsonl(rows)), purpose="batch")
    window: Any = options.pop("window", "24h")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **options)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    found: list[Any] = []

    def look() -> bool:
        found.append(client.batches.retrieve(batch.id))
        return found[-1].status in ENDED

    until(look, "the end of the batch")
    return found[-1]


def rows_of(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    return [] if file is None else [json.loads(row) for row in client.files.content(file).text.splitlines()]


def refused(call: Callable[[], Any]) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as error:
        call()
    return error.value


# Files


def test_a_file_is_kept_shown_listed_and_deleted(server: Running) -> None:
    client = server.client(ADA)
    content = b'{"a": "\xc3\xbc"}\r\n--boundary\r\n\x00\xff' * 20
    file = client.files.create(file=("näme.jsonl", content), purpose="batch")
    assert (file.bytes, file.purpose, file.status, file.object) == (len(content), "batch", "processed", "file")
    assert file.id.startswith("file-")
    assert client.files.retrieve(file.id).to_dict() == file.to_dict()
    assert client.files.content(file.id).content == content
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    assert file.id not in [one.id for one in client.files.list(purpose="batch_output")]
    bob = server.client(BOB)
    for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
        assert refused(lambda call=call: call(file.id)).status_code == 404
    assert list(bob.files.list()) == []
    assert client.files.delete(file.id).deleted
    assert refused(lambda: client.files.retrieve(file.id)).status_code == 404


def test_a_large_file_comes_back_as_it_was(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8192
    with serving(content_store=f"sqlite:////{tmp_path}/c.db") as server:
        client = server.client()
        file = client.files.create(file=("in", content), purpose="batch")
        assert client.files.content(file.id).content == content


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"file": ("x", b"")}, "file"),
        ({"file": ("x", b"x" * 200_001)}, "file"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"expires_after": {"anchor": "created_at", "seconds": 5}}, "expires_after.seconds"),
        ({"expires_after": {"anchor": "now", "seconds": 5000}}, "expires_after.anchor"),
    ],
)
def test_what_is_wrong_with_an_upload_is_named(server: Running, options: Any, param: str) -> None:
    error = refused(lambda: server.client(ADA).files.create(**{"file": ("x", b"x"), "purpose": "batch", **options}))
    assert (error.status_code, error.param) == (400, param)


def test_an_upload_that_is_far_too_large_or_no_form_is_refused(server: Running) -> None:
    error = refused(lambda: server.client(ADA).files.create(file=("x", b"x" * 400_000), purpose="batch"))
    assert error.status_code == 413
    with server.http() as http:
        assert http.post("/v1/files", json={}).status_code == 415
        for body in (
            b"",
            b"--x",
            b"--x\r\n\r\nno name\r\n--x--",
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nno end',
        ):
            found = http.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=x"})
            assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_form")


def test_a_file_can_be_kept_for_less_long(server: Running) -> None:
    file = server.client(ADA).files.create(
        file=("x", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == file.created_at + 3600


# Batches


def test_every_line_is_answered_as_it_would_be_alone(server: Running) -> None:
    client = server.client(ADA)
    texts = [f"text {index} ü" for index in range(20)]
    rows = [line(f"r{index}", chat(text, logprobs=True)) for index, text in enumerate(texts)]
    batch = begin(client, rows, metadata={"a": "b"})
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", "/v1/chat/completions", "24h")
    done = ended(client, batch)
    assert (done.status, done.error_file_id, done.metadata) == ("completed", None, {"a": "b"})
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (20, 20, 0)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.expires_at == done.created_at + 86400
    answers = rows_of(client, done.output_file_id)
    assert [one["custom_id"] for one in answers] == [f"r{index}" for index in range(20)]
    for text, one in zip(texts, answers, strict=True):
        assert set(one) == {"id", "custom_id", "response", "error"}
        assert one["error"] is None
        assert (one["response"]["status_code"], one["response"]["request_id"]) == (200, one["id"])
        alone = server.post("/v1/chat/completions", chat(text, logprobs=True)).json()
        assert one["response"]["body"]["choices"] == alone["choices"]
    file = client.files.retrieve(done.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.bytes == len(client.files.content(file.id).content)
    assert batch.id in [one.id for one in client.batches.list(limit=1)]


def test_all_endpoints_are_there(server: Running) -> None:
    client = server.client(ADA)
    made = [
        ("/v1/completions", {"model": "stand", "prompt": "x", "max_tokens": 3}, "text_completion"),
        ("/v1/responses", {"model": "stand", "input": "hello", "store": True}, "response"),
    ]
    for url, body, kind in made:
        done = ended(client, begin(client, [line("a", body, url)], url))
        answer = rows_of(client, done.output_file_id)[0]["response"]["body"]
        assert answer["object"] == kind
    assert client.responses.retrieve(answer["id"]).output_text == "hello"


def test_bad_lines_are_errors_of_their_own(server: Running) -> None:
    client = server.client(ADA)
    rows = [
        line("good", chat("a")),
        b"{no json",
        b"",
        line("good", chat("again")),
        line("method", chat("a"), method="GET"),
        line("url", chat("a"), url="/v1/completions"),
        line("stream", chat("a", stream=True)),
        line("model", {**chat("a"), "model": "other"}),
        line("value", chat("a", temperature=9)),
        line("no body", "text"),
        {"custom_id": "lacks"},
        b"\xff\xfe",
        line("last", chat("b")),
    ]
    done = ended(client, begin(client, rows))
    assert done.status == "completed"
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (12, 2, 10)
    assert [one["custom_id"] for one in rows_of(client, done.output_file_id)] == ["good", "last"]
    errors = rows_of(client, done.error_file_id)
    told = [
        (one["custom_id"], (one["error"] or {}).get("code"), (one["response"] or {}).get("status_code"))
        for one in errors
    ]
    assert told == [
        (None, "invalid_json", None),
        ("good", "duplicate_custom_id", None),
        ("method", "invalid_method", None),
        ("url", "invalid_url", None),
        ("stream", "invalid_value", None),
        ("model", None, 404),
        ("value", None, 400),
        ("no body", "invalid_type", None),
        ("lacks", "missing_required_parameter", None),
        (None, "invalid_json", None),
    ]
    assert [one["error"]["line"] for one in errors if one["error"]] == [2, 4, 5, 6, 7, 10, 11, 12]
    assert errors[6]["response"]["body"]["error"]["param"] == "temperature"


def test_a_file_without_lines_or_with_too_many_fails_the_batch(server: Running) -> None:
    client = server.client(ADA)
    for rows, code in (([b"", b"  "], "empty_file"), ([line(str(n), {}) for n in range(301)], "too_many_lines")):
        done = ended(client, begin(client, rows))
        assert (done.status, done.errors.data[0].code, done.output_file_id) == ("failed", code, None)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "400d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"colour": 1}, "colour"),
    ],
)
def test_what_is_wrong_with_a_batch_is_named(server: Running, wrong: dict[str, Any], param: str) -> None:
    file = server.client(ADA).files.create(file=("x", b"{}"), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **wrong}
    answer = server.post("/v1/batches", body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_another_tenant_finds_neither_batch_nor_output(server: Running) -> None:
    client, bob = server.client(ADA), server.client(BOB)
    done = ended(client, begin(client, [line("a", chat("x"))]))
    for call in (
        lambda: bob.batches.retrieve(done.id),
        lambda: bob.batches.cancel(done.id),
        lambda: bob.files.content(done.output_file_id),
        lambda: bob.batches.create(
            input_file_id=done.input_file_id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        assert refused(call).status_code == 404
    assert list(bob.batches.list()) == []
    assert refused(lambda: client.batches.cancel(done.id)).status_code == 400


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Steps of 20 ms, at most two lines at a time, three open batches."""
    place = tmp_path_factory.mktemp("content") / "content.db"
    with serving(
        served_names=["stand"],
        loader="tests.api.stand:load_slow",
        max_running=4,
        limits={"batches": 3},
        content_store=f"sqlite:////{place}",
    ) as running:
        yield running


def test_a_cancelled_batch_keeps_what_was_answered(slow: Running) -> None:
    client = slow.client()
    batch = begin(client, [line(str(index), chat("x" * 30)) for index in range(100)])
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2, "some answers")
    assert refused(lambda: client.files.delete(batch.input_file_id)).status_code == 400
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert done.status == "cancelled"
    answers = rows_of(client, done.output_file_id)
    assert 2 <= len(answers) == done.request_counts.completed < 100
    assert (done.request_counts.total, done.request_counts.failed) == (100, 0)
    until(lambda: slow.metric("tailrace_num_requests_running") == 0, "nothing to run")
    assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_that_is_not_done_in_time_expires(slow: Running) -> None:
    client = slow.client()
    done = ended(client, begin(client, [line(str(index), chat("x" * 30)) for index in range(60)], window="2s"))
    assert done.status == "expired"
    answers, errors = rows_of(client, done.output_file_id), rows_of(client, done.error_file_id)
    assert {one["custom_id"] for one in answers + errors} == {str(index) for index in range(60)}
    assert len(answers) + len(errors) == 60
    assert {one["error"]["code"] for one in errors} == {"batch_expired"}


def test_no_line_begins_while_others_fill_the_places(slow: Running) -> None:
    client = slow.client()
    batch = begin(client, [line(str(index), chat("x" * 40)) for index in range(200)])

    def answered() -> int:
        return int(client.batches.retrieve(batch.id).request_counts.completed)

    until(lambda: answered() >= 1, "the first line")
    body = chat("y" * 900, stream=True)
    streams = [client.chat.completions.create(**body) for _ in range(2)]
    for stream in streams:
        next(stream)
    until(lambda: slow.metric("tailrace_num_requests_running") == 2, "the lines that had begun to end")
    before = answered()
    for _ in range(30):
        for stream in streams:
            next(stream)
    assert answered() == before
    for stream in streams:
        stream.close()
    until(lambda: answered() > before, "the batch to go on")
    client.batches.cancel(batch.id)
    assert ended(client, batch).status == "cancelled"


def test_lines_give_their_pages_to_who_waits(tmp_path: Path) -> None:
    """Two lines hold all of the pool; the request that comes then would wait for their end."""
    with serving(
        served_names=["stand"],
        loader="tests.api.stand:load_slow",
        max_running=4,
        kv_tokens=512,
        max_context=512,
        content_store=f"sqlite:////{tmp_path}/c.db",
    ) as server:
        client = server.client()
        text = "x" * 200
        batch = begin(client, [line(str(index), chat(f"{index}{text}", seed=1)) for index in range(2)])
        until(lambda: server.metric("tailrace_num_requests_running") == 2, "the lines to run")
        answer = client.chat.completions.create(**chat("y" * 180, max_tokens=5))
        assert answer.choices[0].message.content == "yyyyy"
        assert client.batches.retrieve(batch.id).request_counts.completed == 0
        done = ended(client, batch)
        bodies = [one["response"]["body"] for one in rows_of(client, done.output_file_id)]
        assert [one["choices"][0]["message"]["content"] for one in bodies] == [f"{index}{text}" for index in range(2)]


def test_too_many_open_batches_are_refused(slow: Running) -> None:
    client = slow.client()
    made = [begin(client, [line("a", chat("x" * 900))]) for _ in range(3)]
    error = refused(lambda: begin(client, [line("a", chat("x"))]))
    assert (error.status_code, error.code) == (429, "too_many_batches")
    for batch in made:
        client.batches.cancel(batch.id)
        ended(client, batch)
    assert ended(client, begin(client, [line("a", chat("x"))])).status == "completed"


def test_a_batch_waits_for_room_in_the_store_and_loses_nothing(tmp_path: Path) -> None:
    url = f"sqlite:////{tmp_path}/c.db"
    with serving(served_names=["stand"], content_store=url, content_bytes=1 << 16) as server:
        client = server.client()
        filler = client.files.create(file=("x", b"x" * 35_000), purpose="batch")
        batch = begin(client, [line(str(index), chat(str(index))) for index in range(30)])
        until(lambda: server.metric("tailrace_content_failures_total") >= 1, "the store to be full")
        assert 0 < client.batches.retrieve(batch.id).request_counts.completed < 30
        client.files.delete(filler.id)
        done = ended(client, batch)
        assert (done.request_counts.completed, done.request_counts.failed) == (30, 0)
        assert [one["custom_id"] for one in rows_of(client, done.output_file_id)] == [str(n) for n in range(30)]
        second = begin(client, [line(str(index), chat(str(index))) for index in range(40)])
        failures = server.metric("tailrace_content_failures_total")
        until(lambda: server.metric("tailrace_content_failures_total") > failures, "the store to be full")
        client.batches.cancel(second.id)
        assert ended(client, second).status == "cancelled"


def test_a_paused_server_runs_no_line_and_fails_none(tmp_path: Path) -> None:
    url = f"sqlite:////{tmp_path}/c.db"
    admin = {"headers": {"Authorization": "Bearer boss"}}
    with serving(
        served_names=["stand"], loader="tests.api.stand:load_slow", content_store=url, admin_keys=["boss"]
    ) as server:
        client = server.client()
        batch = begin(client, [line(str(index), chat("x" * 20)) for index in range(16)])
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 1, "some answers")
        assert server.post("/admin/pause", {"running": "abort"}, **admin).status_code == 200
        until(lambda: server.metric("tailrace_batch_lines_running") == 0, "the lines to end")
        before = client.batches.retrieve(batch.id).request_counts
        assert before.completed < 16
        assert server.post("/admin/resume", {}, **admin).status_code == 200
        done = ended(client, batch)
        assert (done.request_counts.completed, done.request_counts.failed) == (16, 0)


def progressed(client: openai.OpenAI, batch: Any, seen: int) -> int:
    """Waits until more lines than `seen` are answered; how many are."""
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed > seen, "further answers")
    return int(client.batches.retrieve(batch.id).request_counts.completed)


def test_killed_in_the_middle_each_line_is_answered_exactly_once(tmp_path: Path) -> None:
    url = f"sqlite:////{tmp_path}/c.db"
    settings: dict[str, Any] = {"served_names": ["stand"], "loader": "tests.api.stand:load_slow", "content_store": url}
    total, batch, seen = 30, None, 0
    for attempt in range(3):
        with serving(**settings) as server:
            client = server.client()
            if batch is None:
                batch = begin(client, [line(str(index), chat(f"{index} " + "x" * 20)) for index in range(total)])
            if attempt == 2:
                done = ended(client, batch)
                answers = rows_of(client, done.output_file_id)
                break
            seen = progressed(client, batch, seen)
            server.finish(signal.SIGTERM if attempt else signal.SIGKILL)
    assert 0 < seen < total
    assert (done.status, done.request_counts.completed) == ("completed", total)
    assert [one["custom_id"] for one in answers] == [str(index) for index in range(total)]
    texts = [one["response"]["body"]["choices"][0]["message"]["content"] for one in answers]
    assert texts == [f"{index} " + "x" * 20 for index in range(total)]


def test_an_engine_that_dies_costs_no_line(tmp_path: Path) -> None:
    url = f"sqlite:////{tmp_path}/c.db"
    with serving(served_names=["stand"], loader="tests.api.stand:load_slow", content_store=url) as server:
        client = server.client()
        batch = begin(client, [line(str(index), chat("x" * 20)) for index in range(16)])
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3, "some answers")
        os.kill(server.engine, signal.SIGKILL)
        done = ended(client, batch)
        assert (done.request_counts.completed, done.request_counts.failed) == (16, 0)


def test_a_limit_of_the_key_slows_a_batch_and_fails_none_of_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    entry, key = store.create(keys, "ada", limits=Quota(concurrent=2))
    with serving(served_names=["stand"], keys=str(keys), content_store=f"sqlite:////{tmp_path}/c.db") as server:
        client = server.client(key)
        batch = begin(client, [line(str(index), chat("x" * 20)) for index in range(8)])
        done = ended(client, batch)
        assert (done.request_counts.completed, done.request_counts.failed) == (8, 0)
        store.revoke(keys, entry.id)
        server.key = key
        until(lambda: server.get("/v1/batches").status_code == 401, "the key to end")


def test_nothing_of_a_batch_is_in_the_log(server: Running) -> None:
    client = server.client(ADA)
    ended(client, begin(client, [line("secret-id", chat("secret text"))], metadata={"a": "secret label"}))
    assert "secret" not in "".join([*server.log, *server.lines]) + server.get("/metrics").text
