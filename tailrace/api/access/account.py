"""What a key and its tenant have used, and the lease that each of their requests holds.

Everything here happens on the server's loop, without a wait between looking and booking: of requests that come at the
same time each sees what those before it have taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

from tailrace.api.access.store import NO_QUOTA, Quota
from tailrace.api.access.window import Window
from tailrace.api.errors import HttpError

Kind = Literal["key", "tenant"]
What = Literal["requests", "tokens", "concurrent"]
Header = tuple[bytes, bytes]


class Account:
    """One key, or all keys of a tenant. `quota` may change at any time; what was used stays."""

    __slots__ = ("kind", "name", "quota", "requests", "running", "tokens")

    def __init__(self, kind: Kind, name: str, quota: Quota = NO_QUOTA) -> None:
        self.kind: Kind = kind
        self.name = name
        self.quota = quota
        self.requests = Window()
        self.tokens = Window()
        self.running = 0

    @property
    def shown(self) -> str:
        """Who it is, for the caller."""
        return "this API key" if self.kind == "key" else f"tenant {self.name}"


class Lease:
    """What one request holds of its accounts: a request and a place among those that run from the start, tokens once
    their number is known. Left exactly once; what is charged and not settled by then was not used."""

    __slots__ = ("_accounts", "_booked", "_charged", "_clock", "_refused", "on_revoked", "revoked")

    def __init__(
        self,
        accounts: tuple[Account, ...],
        clock: Callable[[], float],
        refused: Callable[[Kind, What], object] = lambda _kind, _what: None,
    ) -> None:
        """Takes nothing before `enter`. `refused` hears of what a limit refuses."""
        self._accounts = accounts
        self._clock = clock
        self._refused = refused
        self._charged: list[tuple[tuple[int, ...], int]] = []  # a slot for each account, and the tokens in it
        self._booked: tuple[int, ...] = ()
        self.revoked = False
        self.on_revoked: Callable[[], object] | None = None
        """Ends the request; called when its key is revoked."""

    def enter(self) -> None:
        """The request has come. Raises HttpError 429, with nothing taken, where a limit is reached."""
        now = self._clock()
        for account in self._accounts:
            most = account.quota.concurrent
            if most is not None and account.running >= most:
                raise self._too_many(account, most)
            self._look(account, "requests", account.quota.requests_per_minute, account.requests, 1, now)
        self._booked = tuple(account.requests.add(1, now) for account in self._accounts)
        for account in self._accounts:
            account.running += 1

    def charge(self, tokens: int, param: str | None = None) -> None:
        """Books tokens before the work begins: of the prompt, and as many of the answer as there can be. Raises
        HttpError 429 where they are too many; `param` could make them fewer."""
        now = self._clock()
        for account in self._accounts:
            self._look(account, "tokens", account.quota.tokens_per_minute, account.tokens, tokens, now, param)
        self._charged.append((tuple(account.tokens.add(tokens, now) for account in self._accounts), tokens))

    def settle(self, used: int) -> None:
        """The work that was charged for has ended, and took so many tokens: the rest is given back."""
        rest = sum(tokens for _slots, tokens in self._charged) - used
        for slots, tokens in self._charged:
            back = min(tokens, max(0, rest))
            rest -= back
            for account, slot in zip(self._accounts, slots, strict=True):
                account.tokens.give_back(slot, back)
        self._charged = []

    def revoke(self) -> None:
        """The key was revoked: ends the request."""
        self.revoked = True
        if self.on_revoked is not None:
            self.on_revoked()

    def leave(self, *, count: bool = True) -> None:
        """The request has ended. `count`: it stays counted as a request, which one that the server failed does not."""
        self.settle(0)
        for account, slot in zip(self._accounts, self._booked, strict=False):  # none is booked where it did not enter
            account.running -= 1
            if not count:
                account.requests.give_back(slot, 1)
        self._accounts = self._booked = ()

    def headers(self) -> list[Header]:
        """OpenAI's headers, of whichever account has less left."""
        now = self._clock()
        rows: list[Header] = []
        for name, found in (
            ("requests", [(a.quota.requests_per_minute, a.requests) for a in self._accounts]),
            ("tokens", [(a.quota.tokens_per_minute, a.tokens) for a in self._accounts]),
        ):
            limits = [(most - window.used(now), most, window) for most, window in found if most is not None]
            if limits:
                left, most, window = min(limits, key=lambda one: one[0])
                for what, value in (
                    ("limit", str(most)),
                    ("remaining", str(max(0, left))),
                    ("reset", duration(window.reset(now))),
                ):
                    rows.append((f"x-ratelimit-{what}-{name}".encode(), value.encode()))
        return rows

    def _look(
        self,
        account: Account,
        what: Literal["requests", "tokens"],
        most: int | None,
        window: Window,
        amount: int,
        now: float,
        param: str | None = None,
    ) -> None:
        """Raises HttpError 429 unless so much more is within the limit."""
        if most is None:
            return
        wait = window.wait(amount, most, now)
        if not wait:
            return
        self._refused(account.kind, what)
        used = window.used(now)
        if math.isinf(wait):
            raise HttpError(
                429,
                f"this request can take {amount} tokens, prompt and answer together; {account.shown} may use {most} a "
                f"minute, so it can never be served: lower {param or 'max_tokens'}, or shorten the prompt",
                kind=what,
                param=param,
                code="rate_limit_exceeded",
                retry=False,
            )
        raise HttpError(
            429,
            f"the limit of {account.shown} is reached: {most} {what} a minute, of which {used} are used, and this "
            f"request takes {amount}. Try again in {duration(wait)}",
            kind=what,
            code="rate_limit_exceeded",
            retry_after=wait,
        )

    def _too_many(self, account: Account, most: int) -> HttpError:
        self._refused(account.kind, "concurrent")
        return HttpError(
            429,
            f"the limit of {account.shown} is reached: {most} requests at a time, and {account.running} are running",
            kind="requests",
            code="rate_limit_exceeded",
            retry_after=1.0,
        )


def duration(seconds: float) -> str:
    """As OpenAI writes one: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 1000) / 1000:g}s"
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s"


def leave_all(leases: Iterable[Lease]) -> None:
    """Revokes every one; each may end others."""
    for lease in list(leases):
        lease.revoke()
