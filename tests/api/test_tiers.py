"""`service_tier`: which requests go first, and what the answer says of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tailrace.api.access import store
from tests.api.conftest import NO_TLS, Running, serving, until

CHAT: dict[str, Any] = {"model": "stand", "messages": [{"role": "user", "content": "abc"}]}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.mark.parametrize(("tier", "said"), [("auto", "default"), ("default",) * 2, ("flex",) * 2, ("priority",) * 2])
def test_the_answer_says_its_tier(quick: Running, tier: str, said: str) -> None:
    client = quick.client()
    whole = client.chat.completions.create(**CHAT, service_tier=tier)
    assert whole.service_tier == said
    chunks = list(client.chat.completions.create(**CHAT, service_tier=tier, stream=True))
    assert {chunk.service_tier for chunk in chunks} == {said}
    assert client.responses.create(model="stand", input="abc", service_tier=tier).service_tier == said


def test_who_does_not_ask_is_told_nothing(quick: Running) -> None:
    assert "service_tier" not in quick.post("/v1/chat/completions", CHAT).json()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_other_tiers_are_refused(quick: Running, path: str) -> None:
    content = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(path, CHAT)
    for body in ({"service_tier": "scale"}, {"service_tier": "flex", "priority": 3}):
        answer = quick.post(path, {"model": "stand", **content, **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "service_tier"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, dict[str, str]]]:
    """A server with a plain key, one that may go first, and one that is told at the start."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = {name: store.create(file, name, least_priority=least)[1] for name, least in (("plain", 0), ("pager", -30))}
    with serving(keys=str(file), api_keys=["static"]) as server:
        yield server, {**keys, "static": "static"}


PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("key", "tier", "least"), [("plain", "default", 0), ("static", "default", 0), ("pager", "priority", -30)]
)
def test_a_key_goes_first_only_where_it_may(
    keyed: tuple[Running, dict[str, str]], path: str, key: str, tier: str, least: int
) -> None:
    server, keys = keyed

    def ask(**more: Any) -> Any:
        body = {"model": "stand", **PATHS[path], **more}
        return server.post(path, body, headers={"authorization": f"Bearer {keys[key]}"})

    assert ask(service_tier="priority").json()["service_tier"] == tier
    assert ask(service_tier="flex").json()["service_tier"] == "flex"
    for allowed in (least, 1000):
        assert ask(priority=allowed).status_code == 200
    for body in ({}, {"service_tier": "auto"}):
        refused = ask(priority=least - 1, **body)
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("permission_error", "priority", "insufficient_scope")
        assert f"a priority of {least} or more, not for {least - 1}" in error["message"]


def test_no_tenant_goes_before_another_by_asking_for_it(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """One slot comes free while requests of two tenants wait for it, of which the second asks to go first."""
    file = tmp_path / "keys.json"
    keys = {name: store.create(file, name)[1] for name in ("busy", "one", "other", "third")}
    keys["pager"] = store.create(file, "pager", least_priority=-30)[1]
    ended: list[str] = []
    with serving(loader="tests.api.stand:load_slow", keys=str(file), max_running=2) as server:

        def ask(key: str, tokens: int, **more: Any) -> None:
            body = {"model": "stand", "prompt": f"{key} {tokens}", "max_tokens": tokens, "ignore_eos": True, **more}
            answer = server.post("/v1/completions", body, headers={"authorization": f"Bearer {keys[key]}"})
            assert answer.status_code == 200, answer.text
            ended.append(key)

        def requests(state: str, count: int) -> None:
            header = {"authorization": f"Bearer {keys['busy']}"}
            until(lambda: server.metric_of(header, f"vllm:num_requests_{state}") == count, f"{count} to be {state}")

        for first, second in (("one", "other"), ("third", "pager")):
            asked = [pool.submit(ask, "busy", 40), pool.submit(ask, "busy", 80)]
            requests("running", 2)
            asked.append(pool.submit(ask, first, 30))
            requests("waiting", 1)
            asked.append(pool.submit(ask, second, 10, service_tier="priority"))
            requests("waiting", 2)
            for one in asked:
                one.result()
    assert [key for key in ended if key != "busy"] == ["one", "other", "pager", "third"]


def test_anthropics_tiers_are_the_standard_one(quick: Running) -> None:
    import anthropic
    import httpx2

    with httpx2.Client(verify=NO_TLS) as http:
        client = anthropic.Anthropic(base_url=quick.url, api_key="none", max_retries=0, http_client=http)
        for tier in ("auto", "standard_only"):
            message = client.messages.create(**CHAT, max_tokens=9, service_tier=tier)
            assert message.usage.service_tier == "standard"


def test_priority_goes_before_default_and_that_before_flex(slow: Running, pool: ThreadPoolExecutor) -> None:
    """One slot comes free while two requests wait for it."""
    ended: dict[str, float] = {}

    def ask(tier: str, tokens: int) -> None:
        body = {"model": "stand", "prompt": f"{tier} {tokens}", "max_tokens": tokens, "service_tier": tier}
        answer = slow.post("/v1/completions", {**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        ended.setdefault(tier, time.monotonic())

    for first, second in (("flex", "default"), ("default", "priority")):
        ended.clear()
        running = [pool.submit(ask, "auto", 40), pool.submit(ask, "auto", 80)]
        until(lambda: slow.metric("vllm:num_requests_running") == 2, "both to run")
        waiting = [pool.submit(ask, first, 30)]
        until(lambda: slow.metric("vllm:num_requests_waiting") == 1, "the first to wait")
        waiting.append(pool.submit(ask, second, 10))
        until(lambda: slow.metric("vllm:num_requests_waiting") == 2, "both to wait")
        for one in (*running, *waiting):
            one.result()
        assert ended[second] < ended[first]
