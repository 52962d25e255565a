"""`service_tier`: which requests go first, and what the answer says of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.api.conftest import NO_TLS, Running, until

CHAT = {"model": "stand", "messages": [{"role": "user", "content": "abc"}]}


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
