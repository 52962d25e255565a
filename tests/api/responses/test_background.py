"""Responses in the background, through a real socket, with the official client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import Running, serving, until

ADA, BOB = "ada-key", "bob-key"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Steps of 20 ms, and two tenants."""
    url = f"sqlite:////{tmp_path_factory.mktemp('content')}/c.db"
    with serving(
        served_names=["stand"], loader="tests.api.stand:load_slow", content_store=url, api_keys=[ADA, BOB]
    ) as running:
        running.key = ADA
        yield running


def begin(server: Running, text: str, key: str = ADA, **options: Any) -> Any:
    return server.client(key).responses.create(model="stand", input=text, background=True, **options)


def ended(server: Running, name: str, key: str = ADA) -> Any:
    client, found = server.client(key), []

    def look() -> bool:
        found.append(client.responses.retrieve(name))
        return found[-1].status not in ("queued", "in_progress")

    until(look, "its end")
    return found[-1]


def test_it_is_answered_while_nobody_waits(slow: Running) -> None:
    text = "x" * 50
    begun = begin(slow, text, metadata={"a": "b"})
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    done = ended(slow, begun.id)
    assert (done.status, done.output_text, done.metadata, done.background) == ("completed", text, {"a": "b"}, True)
    alone = slow.client(ADA).responses.create(model="stand", input=text)
    assert done.usage.output_tokens == alone.usage.output_tokens
    assert slow.client(ADA).responses.create(model="stand", input="y", previous_response_id=done.id).output_text == "y"
    with pytest.raises(openai.NotFoundError):
        slow.client(BOB).responses.retrieve(done.id)


def test_it_can_be_cancelled_and_keeps_what_there_was(slow: Running) -> None:
    begun = begin(slow, "x" * 900)
    client = slow.client(ADA)
    until(lambda: client.responses.retrieve(begun.id).status == "in_progress", "its begin")
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="stand", input="y", previous_response_id=begun.id)
    with pytest.raises(openai.NotFoundError):
        slow.client(BOB).responses.cancel(begun.id)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    until(lambda: slow.metric("tailrace_num_requests_running") == 0, "nothing to run")


def test_one_that_is_deleted_ends(slow: Running) -> None:
    begun = begin(slow, "x" * 900)
    slow.client(ADA).responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        slow.client(ADA).responses.retrieve(begun.id)
    until(lambda: slow.metric("tailrace_num_requests_running") == 0, "nothing to run")


@pytest.mark.parametrize("options", [{"stream": True}, {"store": False}])
def test_what_cannot_be_is_refused(slow: Running, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        begin(slow, "x", **options)
    assert error.value.param == "background"


def test_what_a_server_did_not_finish_has_failed_and_an_engine_that_dies_fails_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "served_names": ["stand"],
        "loader": "tests.api.stand:load_slow",
        "content_store": f"sqlite:////{tmp_path}/c.db",
    }
    with serving(**settings) as first:
        begun = begin(first, "x" * 900)
        client = first.client()
        until(lambda: client.responses.retrieve(begun.id).status == "in_progress", "its begin")
        os.kill(first.engine, signal.SIGKILL)
        failed = ended(first, begun.id)
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        until(lambda: first.get("/health").status_code == 200, "the next engine")
        lost = begin(first, "x" * 900)
        first.finish(signal.SIGKILL)
    with serving(**settings) as second:
        found = second.client().responses.retrieve(lost.id)
        assert (found.status, found.error.code) == ("failed", "server_error")
        assert second.client().responses.retrieve(begun.id).error.message == failed.error.message
