"""Keys of a file and their limits, through a real socket with the official client."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tailrace.api.access import store
from tailrace.api.access.store import Quota
from tests.api.conftest import DEADLINE, Running, serving, until
from tests.api.stand import CRASH, FIRST_BYTE

CHAT = {"model": "stand", "messages": [{"role": "user", "content": "hello there"}]}


class Keyed:
    """A server that follows a file of keys."""

    def __init__(self, server: Running, file: Path) -> None:
        self.server = server
        self.file = file
        self.watcher = store.create(file, "watcher")[1]

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series."""
        return self.server.metric_of(bearer(self.watcher), name, **labels)

    def key(self, name: str, **options: Any) -> str:
        """A new key, once the server knows it."""
        key = store.create(self.file, name, **options)[1]
        until(lambda: self.server.get("/version", headers=bearer(key)).status_code == 200, "the key to be known")
        return key

    def settled(self, key: str, name: str) -> int:
        """What a header says is left, asked for with a request that takes no tokens."""
        answer = self.server.post("/tokenize", {"prompt": "a"}, headers=bearer(key))
        return int(answer.headers[f"x-ratelimit-remaining-{name}"])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """Steps of 20 ms, so that tests can act while a stream runs."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    store.create(file, "first")
    with serving(loader="tests.api.stand:load_slow", keys=str(file)) as server:
        yield Keyed(server, file)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{**CHAT, "max_tokens": 60, **options})  # type: ignore[call-overload]


def test_twenty_parallel_requests_get_what_the_limit_has_room_for(keyed: Keyed) -> None:
    key = keyed.key("crowd", limits=Quota(tokens_per_minute=100))
    client = keyed.server.client(key)
    started = threading.Barrier(20)

    def one(_: int) -> openai.RateLimitError | None:
        started.wait()
        try:
            ask(client, max_tokens=70)  # and 14 of the prompt
        except openai.RateLimitError as error:
            return error
        return None

    with ThreadPoolExecutor(20) as pool:
        outcomes = list(pool.map(one, range(20)))
    refused = [error for error in outcomes if error is not None]
    assert len(refused) >= 15  # an answer of 12 tokens is settled to 26, which lets in a few that come after it
    assert len(refused) < 20
    for error in refused:
        assert error.code == "rate_limit_exceeded"
        assert error.type == "tokens"
        assert 1 <= int(error.response.headers["retry-after"]) <= 61
        assert error.response.headers["x-ratelimit-limit-tokens"] == "100"
    used = 100 - keyed.settled(key, "tokens")
    assert used == 26 * (20 - len(refused)) <= 100
    assert keyed.metric("tailrace_limited_requests_total", of="key", limit="tokens") >= len(refused)


def test_headers_tell_what_is_left_and_settle_to_usage(keyed: Keyed) -> None:
    key = keyed.key("headers", limits=Quota(requests_per_minute=10, tokens_per_minute=1000))
    raw = keyed.server.client(key).chat.completions.with_raw_response.create(**{**CHAT, "max_tokens": 60})  # type: ignore[call-overload]
    usage = raw.parse().usage
    headers = raw.headers
    assert headers["x-ratelimit-limit-requests"] == "10"
    assert headers["x-ratelimit-remaining-requests"] == "9"
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - usage.total_tokens)
    assert headers["x-ratelimit-reset-tokens"][-1] == "s"
    streamed = keyed.server.post(
        "/v1/chat/completions", {**CHAT, "max_tokens": 60, "stream": True}, headers=bearer(key)
    )
    left = 1000 - usage.total_tokens - usage.prompt_tokens - 60
    assert streamed.headers["x-ratelimit-remaining-tokens"] == str(left)  # what it may take, until it has ended
    assert keyed.settled(key, "tokens") == 1000 - 2 * usage.total_tokens
    several = ask(keyed.server.client(key), n=3).usage  # whose prompt counts once, as in the usage
    assert keyed.settled(key, "tokens") == 1000 - 2 * usage.total_tokens - several.total_tokens


def test_requests_per_minute_are_refused_with_the_time_to_wait(keyed: Keyed) -> None:
    key = keyed.key("requests", limits=Quota(requests_per_minute=3))
    client = keyed.server.client(key)
    for _ in range(3):
        ask(client)
    with pytest.raises(openai.RateLimitError) as refused:
        ask(client)
    assert refused.value.type == "requests"
    assert 50 <= int(refused.value.response.headers["retry-after"]) <= 61
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert client.models.list().data  # which is no work


def test_what_a_client_sends_wrong_is_counted_and_what_the_server_refuses_is_not(keyed: Keyed) -> None:
    key = keyed.key("wrong", limits=Quota(requests_per_minute=5, tokens_per_minute=100))
    client = keyed.server.client(key)
    with pytest.raises(openai.BadRequestError):
        ask(client, temperature=9)
    with pytest.raises(openai.RateLimitError, match="can never be served: lower max_tokens") as never:
        ask(client, max_tokens=500)
    assert never.value.param == "max_tokens"
    assert never.value.response.headers["x-should-retry"] == "false"
    assert keyed.settled(key, "requests") == 3  # the wrong one, and this


def test_a_client_that_leaves_pays_for_what_was_computed(keyed: Keyed) -> None:
    key = keyed.key("leaves", limits=Quota(tokens_per_minute=1500, concurrent=1))
    stream = ask(keyed.server.client(key), max_tokens=1000, stream=True, extra_body={"ignore_eos": True})
    seen = 0
    for chunk in stream:
        seen += bool(chunk.choices[0].delta.content)
        if seen == 5:
            break
    with pytest.raises(openai.RateLimitError, match="1 requests at a time"):
        ask(keyed.server.client(key))
    stream.close()

    def left() -> int:
        answer = keyed.server.post("/tokenize", {"prompt": "a"}, headers=bearer(key))
        return int(answer.headers["x-ratelimit-remaining-tokens"]) if answer.status_code == 200 else 0

    assert 1500 - 14 - 5 - 200 < until(left, "the place to be free") <= 1500 - 14 - 5


def test_a_tenants_keys_share_limits_and_cached_prefixes(keyed: Keyed) -> None:
    one, other = (keyed.key(name, tenant="team") for name in ("one", "other"))
    alone = keyed.key("alone")
    store.limit(keyed.file, "team", Quota(requests_per_minute=4), tenant=True)
    until(lambda: "x-ratelimit-limit-requests" in keyed.server.post("/tokenize", {}, headers=bearer(one)).headers, "it")

    def cached(key: str) -> int:
        messages = [{"role": "user", "content": "what the team knows " * 10}]
        return int(
            ask(keyed.server.client(key), messages=messages, max_tokens=1).usage.prompt_tokens_details.cached_tokens
        )

    assert cached(one) == 0
    assert cached(other) > 0
    assert cached(alone) == 0
    refused = [keyed.server.post("/v1/chat/completions", CHAT, headers=bearer(other)) for _ in range(3)][-1]
    assert refused.status_code == 429
    assert "tenant team" in refused.json()["error"]["message"]
    assert ask(keyed.server.client(alone)).choices


@pytest.mark.alone
@pytest.mark.parametrize("stream", [True, False])
def test_a_revoked_key_is_refused_within_a_second_and_what_runs_is_ended(keyed: Keyed, stream: bool) -> None:
    key = keyed.key(f"leaked-{stream}")
    name = f"leaked-run-{stream}"
    body = {**CHAT, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    before = keyed.metric("tailrace_kv_pages_used")
    answers: list[Any] = []

    def run() -> None:
        answers.append(keyed.server.post("/v1/chat/completions", body, headers={**bearer(key), "x-request-id": name}))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: keyed.metric("tailrace_num_requests_running") >= 1, "it to run")
    store.revoke(keyed.file, f"leaked-{stream}")
    at = time.monotonic()
    until(lambda: keyed.server.get("/version", headers=bearer(key)).status_code == 401, "the key to be refused")
    assert time.monotonic() - at < 2.5  # a second, on a machine with nothing else to do
    thread.join(DEADLINE)
    (answer,) = answers
    if stream:
        assert answer.status_code == 200
        last = json.loads(answer.text.rstrip().rpartition("data: ")[2])
        assert "revoked while the request ran" in last["error"]["message"]
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["x-should-retry"] == "false"
    until(lambda: keyed.metric("tailrace_kv_pages_used") == before, "its pages to be free")
    line = until(lambda: [one for one in keyed.server.requests() if one.get("http_request") == name], "its line")[0]
    assert (line["key"], line.get("tenant")) == (key[3:13], None)


def test_an_expired_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    entry, key = store.create(file, "short")
    gone = entry.created.replace(year=entry.created.year - 1)
    import msgspec

    store.change(file, lambda keys: keys.replaced(msgspec.structs.replace(entry, created=gone, expires=gone)))
    with serving(keys=str(file)) as server, pytest.raises(openai.AuthenticationError, match="has expired"):
        server.client(key).models.list()


def test_a_file_that_becomes_wrong_changes_nothing_and_is_reported(keyed: Keyed) -> None:
    key = keyed.key("careful")
    good = keyed.file.read_text()
    try:
        keyed.file.write_text(good[:-10])
        until(lambda: any("still the keys" in line for line in keyed.server.log), "the report")
        assert keyed.server.get("/version", headers=bearer(key)).status_code == 200
    finally:
        keyed.file.write_text(good)
    keyed.key("after")


def test_random_keys_make_no_series_and_hold_no_memory(keyed: Keyed) -> None:
    def series() -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        families = text_string_to_metric_families(keyed.server.get("/metrics", headers=bearer(known)).text)
        return {(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples}

    known = keyed.key("watch")
    before = series()
    with keyed.server.http() as client:
        for index in range(300):
            key = f"tr_{random.randrange(10**9):010}_{'z' * 43}" if index % 2 else str(random.random())
            assert client.get("/v1/models", headers=bearer(key)).status_code == 401
    assert series() == before


def test_a_refusal_leaves_a_line_by_its_request_id(keyed: Keyed) -> None:
    key = keyed.key("lines")
    secret = "the secret word is swordfish"
    body = {**CHAT, "messages": [{"role": "user", "content": secret}], "temperature": 9}
    answer = keyed.server.post("/v1/chat/completions", body, headers=bearer(key))
    stranger = keyed.server.post("/v1/chat/completions", body, headers=bearer("swordfish"))

    def lines(name: str) -> list[dict[str, Any]]:
        return [one for one in keyed.server.requests() if one.get("http_request") == name]

    (line,) = until(lambda: lines(answer.headers["x-request-id"]), "the line")
    assert (line["event"], line["status"], line["param"], line["key"]) == ("refused", 400, "temperature", key[3:13])
    (line,) = until(lambda: lines(stranger.headers["x-request-id"]), "the other line")
    assert (line["status"], line["code"], "key" in line) == (401, "invalid_api_key", False)
    assert "swordfish" not in "".join(keyed.server.log)
    assert key not in "".join(keyed.server.log)


def test_what_the_server_fails_costs_nothing(keyed: Keyed) -> None:
    key = keyed.key("unlucky", limits=Quota(requests_per_minute=2, tokens_per_minute=100))
    body = {"model": "stand", "prompt": [FIRST_BYTE, CRASH], "max_tokens": 50}
    answer = keyed.server.post("/v1/completions", body, headers=bearer(key))
    assert answer.status_code == 503
    until(lambda: keyed.server.get("/health/ready").status_code == 200, "the next engine")
    assert keyed.settled(key, "tokens") == 100
    assert keyed.settled(key, "requests") == 0  # the two that asked
