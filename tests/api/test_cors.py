"""Web pages of other origins: those that were named may ask, with a key of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tailrace.api import cors
from tailrace.terms import InvalidInput
from tests.api.conftest import Running, serving

PAGE = "https://chat.example.com"
CHAT = {"model": "stand", "messages": [{"role": "user", "content": "hello"}]}
SENDS = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(cors_origins=[PAGE, "http://localhost:3000"], api_keys=["k"], admin_keys=["a"]) as running:
        yield running


def preflight(server: Running, origin: str, path: str = "/v1/chat/completions", **headers: str) -> Any:
    asked = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": SENDS}
    with server.http() as client:
        return client.options(path, headers={**asked, **headers})


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
def test_a_browser_is_told_without_a_key_what_a_page_may_send(server: Running, origin: str) -> None:
    answer = preflight(server, origin)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == SENDS
    assert answer.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in answer.headers


def test_answers_and_errors_and_streams_can_be_read_by_the_page(server: Running) -> None:
    key = {"authorization": "Bearer k", "origin": PAGE}
    for body, headers, status in (
        (CHAT, key, 200),
        ({**CHAT, "stream": True}, key, 200),
        ({**CHAT, "n": 0}, key, 400),
        (CHAT, {"origin": PAGE}, 401),
    ):
        answer = server.post("/v1/chat/completions", body, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = answer.headers["access-control-expose-headers"]
        assert "x-request-id" in exposed
        assert "x-ratelimit-remaining-tokens" in exposed


def test_other_origins_and_admin_endpoints_are_allowed_nothing(server: Running) -> None:
    for origin in (
        "https://evil.example.com",
        PAGE + ".evil.com",
        "null",
        PAGE.upper(),
        "https://chat.example.com:444",
    ):
        answer = preflight(server, origin)
        assert not [name for name in answer.headers if name.startswith("access-control")]
        answer = server.post("/v1/chat/completions", CHAT, headers={"authorization": "Bearer k", "origin": origin})
        assert "access-control-allow-origin" not in answer.headers
    answer = preflight(server, PAGE, "/admin/drain")
    assert answer.status_code == 405
    state = server.get("/admin/state", headers={"authorization": "Bearer a", "origin": PAGE})
    for one in (answer, state):
        assert not [name for name in one.headers if name.startswith("access-control")]
    strange = preflight(server, PAGE, **{"access-control-request-headers": "a b; c"})
    assert "access-control-allow-headers" not in strange.headers


def test_without_the_option_there_is_none_of_it(quick: Running) -> None:
    assert preflight(quick, PAGE).status_code == 405
    answer = quick.post("/v1/chat/completions", CHAT, headers={"origin": PAGE})
    assert not {"vary", "access-control-allow-origin"} & set(answer.headers)


def test_any_origin_is_a_choice() -> None:
    with serving(cors_origins=["*"]) as server:
        assert preflight(server, "https://x.test").headers["access-control-allow-origin"] == "*"
        assert "vary" not in server.post("/v1/chat/completions", CHAT, headers={"origin": "https://x.test"}).headers


@pytest.mark.parametrize("origin", ["chat.example.com", PAGE + "/", "ftp://a", "", "https://a b", "https://*.a.com"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(InvalidInput, match="--cors-origin"):
        cors.check([PAGE, origin])
    cors.check([PAGE, "*", "http://[::1]:3000"])
