"""Leases: what parallel requests take of a key's and a tenant's limits, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.api.access.account import Account, Lease, duration
from tailrace.api.access.store import Quota
from tailrace.api.errors import HttpError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def entered(*of: Any) -> Lease:
    lease = Lease(*of)
    lease.enter()
    return lease


def header(lease: Lease, name: str) -> str | None:
    return next((value.decode() for key, value in lease.headers() if key.decode() == f"x-ratelimit-{name}"), None)


def test_parallel_requests_cannot_all_slip_past_the_token_limit() -> None:
    account, clock = Account("key", "k", Quota(tokens_per_minute=100)), Clock()
    leases = [entered((account,), clock) for _ in range(20)]
    leases[0].charge(80)
    for lease in leases[1:]:
        with pytest.raises(HttpError) as refused:
            lease.charge(80)
        error = refused.value
        assert (error.status, error.kind, error.code) == (429, "tokens", "rate_limit_exceeded")
        assert error.retry_after is not None
        assert 60 < error.retry_after <= 61
    assert account.tokens.used(clock()) == 80


def test_what_was_charged_and_not_used_comes_back() -> None:
    account, clock = Account("key", "k", Quota(tokens_per_minute=100)), Clock()
    lease = entered((account,), clock)
    lease.charge(80)
    lease.settle(30)
    assert account.tokens.used(clock()) == 30
    lease.settle(0)  # nothing is charged any more
    lease.leave()
    assert account.tokens.used(clock()) == 30
    failed = entered((account,), clock)
    failed.charge(70)
    failed.leave()
    assert account.tokens.used(clock()) == 30


def test_several_charges_of_one_request_are_settled_together() -> None:
    account, clock = Account("key", "k", Quota(tokens_per_minute=100)), Clock()
    lease = entered((account,), clock)
    lease.charge(40)
    clock.now += 5
    lease.charge(50)
    lease.settle(20)
    assert account.tokens.used(clock()) == 20


def test_a_limit_of_either_holds_and_a_refusal_takes_nothing() -> None:
    clock = Clock()
    key, other = Account("key", "a", Quota(requests_per_minute=5)), Account("key", "b", Quota())
    tenant = Account("tenant", "t", Quota(requests_per_minute=2, concurrent=1))
    refused: list[tuple[str, str]] = []
    one = entered((key, tenant), clock, lambda *what: refused.append(what))
    with pytest.raises(HttpError, match="1 requests at a time") as busy:
        entered((other, tenant), clock, lambda *what: refused.append(what))
    assert busy.value.retry_after == 1
    one.leave()
    entered((other, tenant), clock).leave()
    with pytest.raises(HttpError, match="tenant t is reached: 2 requests a minute"):
        entered((key, tenant), clock, lambda *what: refused.append(what))
    assert (key.requests.used(clock()), tenant.requests.used(clock()), tenant.running) == (1, 2, 0)
    assert refused == [("tenant", "concurrent"), ("tenant", "requests")]
    clock.now += 61
    entered((key, tenant), clock).leave()


def test_a_request_that_the_server_failed_does_not_count() -> None:
    account, clock = Account("key", "k", Quota(requests_per_minute=1)), Clock()
    entered((account,), clock).leave(count=False)
    entered((account,), clock).leave()
    with pytest.raises(HttpError):
        entered((account,), clock)


def test_what_can_never_be_served_is_said_to_and_not_to_be_sent_again() -> None:
    lease = entered((Account("key", "k", Quota(tokens_per_minute=100)),), Clock())
    with pytest.raises(HttpError, match="lower max_tokens") as refused:
        lease.charge(101, "max_tokens")
    assert refused.value.param == "max_tokens"
    assert dict(refused.value.headers())[b"x-should-retry"] == b"false"
    assert b"retry-after" not in dict(refused.value.headers())


def test_headers_are_of_whoever_has_less_left() -> None:
    clock = Clock()
    key = Account("key", "a", Quota(requests_per_minute=10, tokens_per_minute=1000))
    tenant = Account("tenant", "t", Quota(requests_per_minute=3))
    lease = entered((key, tenant), clock)
    lease.charge(400)
    assert header(lease, "limit-requests") == "3"
    assert header(lease, "remaining-requests") == "2"
    assert header(lease, "reset-requests") == "1m1s"
    assert header(lease, "limit-tokens") == "1000"
    assert header(lease, "remaining-tokens") == "600"
    assert entered((Account("key", "b"),), clock).headers() == []


def test_changed_limits_count_what_was_used_before() -> None:
    account, clock = Account("key", "k", Quota(tokens_per_minute=100)), Clock()
    entered((account,), clock).charge(90)
    account.quota = Quota(tokens_per_minute=200)
    entered((account,), clock).charge(110)
    account.quota = Quota(tokens_per_minute=50)
    with pytest.raises(HttpError):
        entered((account,), clock).charge(1)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.1201, "121ms"), (1.5, "1.5s"), (60, "1m0s"), (3599.2, "60m0s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
