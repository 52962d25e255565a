"""Stored responses and chat completions through a real socket, with the official client."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import Running, launch, serving, until

ADA, BOB = "ada-key", "bob-key"
SECRET = "the quick brown secret"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("content") / "content.db"


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Running]:
    """With a store and two tenants."""
    with serving(served_names=["stand"], content_store=f"sqlite:////{place}", api_keys=[ADA, BOB]) as running:
        running.key = ADA
        yield running


def ask(server: Running, given: Any, key: str = ADA, **options: Any) -> Any:
    return server.client(key).responses.create(model="stand", input=given, **options)


def refused(call: Callable[[], Any]) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as error:
        call()
    return error.value


def test_a_response_is_stored_unless_that_is_not_wanted(server: Running) -> None:
    answer = ask(server, "hello", metadata={"a": "b"})
    assert answer.to_dict()["store"] is True
    assert server.client(ADA).responses.retrieve(answer.id).to_dict() == answer.to_dict()
    unstored = ask(server, "hello", store=False)
    assert unstored.to_dict()["store"] is False
    assert refused(lambda: server.client(ADA).responses.retrieve(unstored.id)).status_code == 404


def test_a_streamed_response_is_stored_as_its_last_event_shows_it(server: Running) -> None:
    last = list(ask(server, "hello there", stream=True))[-1].response
    assert server.client(ADA).responses.retrieve(last.id).to_dict() == last.to_dict()


def test_another_tenant_finds_nothing(server: Running) -> None:
    answer = ask(server, "mine")
    bob = server.client(BOB)
    for call in (
        lambda: bob.responses.retrieve(answer.id),
        lambda: bob.responses.delete(answer.id),
        lambda: bob.responses.cancel(answer.id),
        lambda: bob.responses.input_items.list(answer.id),
        lambda: ask(server, "and?", BOB, previous_response_id=answer.id),
    ):
        assert refused(call).status_code == 404
    assert server.client(ADA).responses.retrieve(answer.id).output_text == "mine"


def test_a_conversation_goes_on_from_a_response(server: Running) -> None:
    first = ask(server, "one", instructions="be brief")
    second = ask(server, "two", previous_response_id=first.id)
    third = ask(server, [{"role": "user", "content": "three"}], previous_response_id=second.id, store=False)
    whole = ask(
        server,
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ],
    )
    assert third.usage.input_tokens == whole.usage.input_tokens  # and the instructions were of the first turn alone
    assert third.previous_response_id == second.id
    items = server.client(ADA).responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in items] == ["one", "one", "two"]
    server.client(ADA).responses.delete(first.id)
    again = ask(server, "three", previous_response_id=second.id)
    assert again.usage.input_tokens == third.usage.input_tokens
    error = refused(lambda: ask(server, "x", previous_response_id=first.id))
    assert (error.status_code, error.code, error.param) == (404, "previous_response_not_found", "previous_response_id")


def test_a_call_is_answered_in_the_next_turn(server: Running) -> None:
    tool = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    first = ask(server, call, tools=[tool])
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "noon"}
    assert ask(server, [output], previous_response_id=first.id, tools=[tool]).output_text == "noon"


def test_input_items_come_in_pages(server: Running) -> None:
    given = [{"role": "user", "content": str(number)} for number in range(7)]
    answer = ask(server, given)
    items = server.client(ADA).responses.input_items
    shown = [item.content[0].text for item in items.list(answer.id, limit=3)]
    assert shown == ["6", "5", "4", "3", "2", "1", "0"]
    page = items.list(answer.id, limit=3, order="asc")
    assert page.has_more
    assert [item.content[0].text for item in page.data] == ["0", "1", "2"]
    for wrong, param in (({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"after": "x"}, "after")):
        assert refused(lambda wrong=wrong: items.list(answer.id, **wrong)).param == param
    path = f"/v1/responses/{answer.id}/input_items"
    for query, param in (("order=up", "order"), ("colour=red", "colour"), ("limit=1&limit=2", "limit")):
        found = server.get(f"{path}?{query}")
        assert (found.status_code, found.json()["error"]["param"]) == (400, param)


def test_what_was_deleted_is_gone(server: Running) -> None:
    answer = ask(server, "x")
    with server.http() as http:
        deleted = http.delete(f"/v1/responses/{answer.id}")
        assert deleted.json() == {"id": answer.id, "object": "response", "deleted": True}
        assert http.delete(f"/v1/responses/{answer.id}").status_code == 404


def test_only_background_responses_can_be_cancelled(server: Running) -> None:
    answer = ask(server, "x")
    assert refused(lambda: server.client(ADA).responses.cancel(answer.id)).status_code == 400


def test_a_client_that_leaves_has_nothing_stored(server: Running) -> None:
    with ask(server, "x" * 900, stream=True) as stream:
        name = next(iter(stream)).response.id
    until(lambda: any(line.get("request") == name for line in server.requests()), "the line of its end")
    assert refused(lambda: server.client(ADA).responses.retrieve(name)).status_code == 404


# Chat completions


def chat(server: Running, text: str, key: str = ADA, **options: Any) -> Any:
    return server.client(key).chat.completions.create(
        model="stand", messages=[{"role": "system", "content": "s"}, {"role": "user", "content": text}], **options
    )


def test_a_chat_is_stored_only_where_that_is_asked_for(server: Running) -> None:
    stored = chat(server, "hello", store=True, metadata={"colour": "red"}, temperature=0.5)
    completions = server.client(ADA).chat.completions
    found = completions.retrieve(stored.id).to_dict()
    assert found | stored.to_dict() == found
    assert (found["metadata"], found["temperature"]) == ({"colour": "red"}, 0.5)
    assert refused(lambda: completions.retrieve(chat(server, "hello").id)).status_code == 404
    assert refused(lambda: server.client(BOB).chat.completions.retrieve(stored.id)).status_code == 404


def test_a_streamed_chat_is_stored_as_it_was_streamed(server: Running) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    text = 'Hm.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    chunks = list(chat(server, text, store=True, stream=True, tools=[tool]))
    found = server.client(ADA).chat.completions.retrieve(chunks[0].id).choices[0]
    ids = [call.id for chunk in chunks for call in chunk.choices[0].delta.tool_calls or () if call.id]
    assert [call.id for call in found.message.tool_calls or ()] == ids
    assert (found.message.content, found.finish_reason) == ("Hm.", "tool_calls")


def test_messages_are_listed(server: Running) -> None:
    stored = chat(server, "hello", store=True)
    rows = list(server.client(ADA).chat.completions.messages.list(stored.id))
    assert [(row.id, row.role, row.content) for row in rows] == [
        (f"{stored.id}-0", "system", "s"),
        (f"{stored.id}-1", "user", "hello"),
    ]


def test_chats_are_listed_filtered_relabelled_and_deleted(server: Running) -> None:
    names = [chat(server, str(n), store=True, metadata={"run": "1", "n": str(n)}).id for n in range(5)]
    completions = server.client(ADA).chat.completions
    assert [one.id for one in completions.list(metadata={"run": "1"}, limit=2)] == names
    assert [one.id for one in completions.list(metadata={"run": "1", "n": "3"})] == [names[3]]
    assert [one.id for one in completions.list(metadata={"run": "1"}, order="desc", model="stand")] == names[::-1]
    assert list(completions.list(metadata={"run": "1"}, model="other")) == []
    assert list(server.client(BOB).chat.completions.list()) == []
    assert completions.update(names[0], metadata={"run": "2"}).to_dict()["metadata"] == {"run": "2"}
    assert [one.id for one in completions.list(metadata={"run": "2"})] == [names[0]]
    assert completions.delete(names[0]).deleted
    assert refused(lambda: completions.delete(names[0])).status_code == 404
    assert refused(lambda: completions.update(names[1], metadata={"x": "y" * 513})).param == "metadata"


# The store


def test_nothing_of_it_is_in_the_log_or_in_metrics(server: Running) -> None:
    ask(server, SECRET, metadata={"label": SECRET})
    chat(server, SECRET, store=True, metadata={"label": SECRET})
    digest = hashlib.sha256(ADA.encode()).hexdigest()
    until(lambda: len(server.requests()) > 2, "lines of the log")
    for text in ("".join(server.log), "".join(server.lines), server.get("/metrics").text):
        assert SECRET not in text
        assert digest not in text


def test_it_survives_kill_and_expires(tmp_path: Path) -> None:
    url = f"sqlite:////{tmp_path}/c.db"
    with serving(served_names=["stand"], content_store=url) as first:
        answer = first.client().responses.create(model="stand", input="kept")
        first.finish(signal.SIGKILL)
    with serving(served_names=["stand"], content_store=url, content_retention=0.05) as second:
        assert second.client().responses.retrieve(answer.id).output_text == "kept"
        brief = second.client().responses.create(model="stand", input="brief")
        until(lambda: second.get(f"/v1/responses/{brief.id}").status_code == 404, "the end of what is kept briefly")


def test_a_full_store_refuses_who_asks_and_serves_who_does_not(tmp_path: Path) -> None:
    url = f"sqlite:////{tmp_path}/c.db"
    with serving(served_names=["stand"], content_store=url, content_bytes=1 << 16) as server:
        client = server.client()
        text = "x" * 1900
        options: dict[str, Any] = {"model": "stand", "input": text, "max_output_tokens": 8}
        answers = [client.responses.create(**options) for _ in range(20)]
        kept = [answer for answer in answers if answer.to_dict()["store"]]
        assert 5 < len(kept) < 20
        assert all(answer.output_text == text[:8] for answer in answers)  # none is lost
        assert client.responses.retrieve(kept[0].id).output_text == text[:8]
        last = list(client.responses.create(**options, stream=True))[-1].response
        assert (last.to_dict()["store"], last.output_text) == (False, text[:8])
        messages: Any = [{"role": "user", "content": text}]
        full = None
        while full is None:
            try:
                found = client.chat.completions.with_raw_response.create(
                    model="stand", messages=messages, store=True, max_tokens=8
                )
            except openai.InternalServerError as error:
                full = error
            else:
                assert found.parse().choices[0].message.content == text[:8]  # stored, or delivered all the same
                assert found.headers.get("x-tailrace-not-stored") in (None, "content_store_full")
        assert (full.status_code, full.code) == (507, "content_store_full")
        assert server.metric("tailrace_content_limit_bytes") == 1 << 16
        assert 1 << 15 < server.metric("tailrace_content_bytes") <= 1 << 16
        assert server.metric("tailrace_content_failures_total") > 0
        assert refused(lambda: client.responses.create(**options, store=True)).status_code == 507
        for answer in kept:
            client.responses.delete(answer.id)
        again = client.responses.create(**options, store=True)
        assert client.responses.retrieve(again.id).output_text == text[:8]


def test_without_a_store_there_is_nothing_to_find(quick: Running) -> None:
    for path in ("/v1/responses/resp_1", "/v1/chat/completions/x", "/v1/chat/completions"):
        answer = quick.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_content_store")


def test_a_store_that_cannot_be_opened_is_no_start(tmp_path: Path) -> None:
    (tmp_path / "c.db").write_bytes(b"no database" * 1000)
    running = launch(content_store=f"sqlite:////{tmp_path}/c.db")
    assert running.wait() == 1
    assert "does not work" in "".join(running.lines)
