"""Who asks, and whether they may: keys given at the start, and those of a file that is followed while the server runs.

Light at import: what only a keys file needs is loaded where there is one.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from tailrace.api.errors import HttpError
from tailrace.api.priority import MOST_URGENT
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

    from tailrace.api.access.account import Account, Lease
    from tailrace.api.access.store import Key, Keys, Quota

LOOK = 0.5
"""Seconds between two looks at whether the keys file has changed: one `stat` each, apart from any request."""
TENANT = "tenant:"
"""What a tenant's name is preceded by where it salts the prefix cache: a static key's salt is a digest, so that no name
is ever another's."""
KINDS = ("key", "tenant")
WHATS = ("requests", "tokens", "concurrent")


@dataclass(frozen=True)
class Caller:
    """Who asks. `tenant` salts the prefix cache; `key` and `group` (a tenant's name) are for logs."""

    tenant: str = ""
    scopes: tuple[str, ...] = ("inference",)
    key: str = ""
    group: str = ""
    least_priority: int = 0
    """The lowest priority that their requests may ask for."""
    entry: Key | None = field(default=None, repr=False)


ANYONE = Caller(least_priority=MOST_URGENT)
"""Who asks where no key is configured."""


class Guard:
    """Tells who asks, and gives their requests leases."""

    def __init__(
        self,
        keys: Sequence[str] = (),
        admin_keys: Sequence[str] = (),
        file: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`keys` and `admin_keys` as they are sent. Raises InvalidInput where the file cannot be read."""
        self._static = [
            *((_digest(key.encode()), "inference") for key in keys),
            *((_digest(key.encode()), "admin") for key in admin_keys),
        ]
        self._asks = bool(keys) or file is not None
        self._file: Path | None = None
        self._clock, self._wall_clock = clock, wall_clock
        self._entries: dict[str, tuple[bytes, Key]] = {}
        self._quotas: dict[tuple[str, str], Quota] = {}
        self._accounts: dict[tuple[str, str], Account] = {}
        self._leases: dict[str, set[Lease]] = {}
        self._seen: tuple[int, ...] = ()
        self._nobody = os.urandom(32)  # what an unknown id is compared with
        self.limited: dict[tuple[str, str], int] = dict.fromkeys(product(KINDS, WHATS), 0)
        """Requests that a limit has refused, by whose limit and which."""
        if file is not None:
            from pathlib import Path

            from tailrace.api.access import store

            self._file = Path(file).expanduser()
            self._seen = _look(self._file)
            self.take(store.read(self._file))

    @property
    def follows(self) -> bool:
        """Whether there is a keys file."""
        return self._file is not None

    @property
    def asks(self) -> bool:
        """Whether anybody has to say who they are, for whatever."""
        return self._asks or self.administered

    @property
    def administered(self) -> bool:
        """Whether anybody could have the scope admin."""
        return self._file is not None or any(scope == "admin" for _, scope in self._static)

    # Who asks

    def identify(self, authorization: bytes | None, scope: str | None = None) -> Caller:
        """Who sends this header; `scope` is what they need, None where any key will do. Raises HttpError 401 or 403."""
        if not self._asks and scope != "admin":
            return ANYONE
        if not self.administered and scope == "admin":
            raise HttpError(
                403,
                "this server has no admin keys, so nobody can administer it: start it with --admin-key-file, or with "
                "--keys and a key that has the scope admin",
                kind="permission_error",
                code="insufficient_scope",
            )
        caller = self._caller(authorization)
        if scope is not None and scope not in caller.scopes:
            raise HttpError(
                403,
                f"this API key does not have the scope {scope}, which is needed here",
                kind="permission_error",
                code="insufficient_scope",
            )
        return caller

    def _caller(self, authorization: bytes | None) -> Caller:
        from hmac import compare_digest  # only where there are keys: it is a start's milliseconds

        scheme, _, given = (authorization or b"").partition(b" ")
        given = given.strip()
        digest = _digest(given)
        matches = [scope for kept, scope in self._static if compare_digest(digest, kept)]
        expected, entry = self._entry(given)
        found = compare_digest(digest, expected)
        if scheme.lower() != b"bearer":
            raise _unknown("no API key was given" if authorization is None else "the API key is not valid")
        if found and entry is not None:
            return self._entered(entry)
        if matches:
            return Caller(digest.hex(), tuple(dict.fromkeys(matches)), f"static-{digest.hex()[:8]}")
        raise _unknown("the API key is not valid")

    def _entry(self, given: bytes) -> tuple[bytes, Key | None]:
        """The digest and entry that the id in a key leads to; a digest that nothing has where it leads nowhere. Only
        the id, which is no secret, has any bearing on how long this takes."""
        prefix, _, rest = given.partition(b"_")
        name, _, _ = rest.partition(b"_")
        entry = self._entries.get(name.decode("latin-1")) if prefix == b"tr" else None
        return entry or (self._nobody, None)

    def _entered(self, entry: Key) -> Caller:
        if entry.revoked is not None:
            raise _unknown("the API key was revoked")
        if entry.expires is not None and self._wall_clock() >= entry.expires.timestamp():
            raise _unknown("the API key has expired")
        salt = TENANT + entry.tenant if entry.tenant is not None else entry.digest
        return Caller(salt, entry.scopes, entry.id, entry.tenant or "", entry.least_priority, entry)

    def again(self, key: str, tenant: str) -> Caller:
        """Whoever had this key (its name) and tenant once, for work that goes on without them. Raises HttpError 401
        where the key is none any more."""
        if not self._asks:
            return ANYONE
        entry = self._entries.get(key)
        if entry is not None:
            caller = self._entered(entry[1])
            if caller.tenant == tenant and "inference" in caller.scopes:
                return caller
        for digest, scope in self._static:
            if scope == "inference" and digest.hex() == tenant:
                return Caller(tenant, (scope,), key)
        raise _unknown("the API key that this was asked for with is none any more")

    # What they use

    def lease(self, caller: Caller) -> Lease | None:
        """A lease for one of the caller's requests, to be entered and left; None where nothing bounds or ends it."""
        key = caller.entry
        if key is None:
            return None
        from tailrace.api.access.account import Lease

        names = [("key", key.id)] + ([("tenant", key.tenant)] if key.tenant is not None else [])
        lease = Lease(tuple(self._account(*name) for name in names if name in self._quotas), self._clock, self._limited)
        self._leases.setdefault(key.id, set()).add(lease)
        return lease

    def leave(self, caller: Caller, lease: Lease, *, count: bool = True) -> None:
        """The request has ended."""
        lease.leave(count=count)
        assert caller.entry is not None
        others = self._leases.get(caller.entry.id)
        if others is not None:
            others.discard(lease)
            if not others:
                del self._leases[caller.entry.id]

    def _account(self, kind: str, name: str) -> Account:
        account = self._accounts.get((kind, name))
        if account is None:
            from tailrace.api.access.account import Account

            account = Account("key" if kind == "key" else "tenant", name, self._quotas[kind, name])
            self._accounts[kind, name] = account
        return account

    def _limited(self, kind: str, what: str) -> None:
        self.limited[kind, what] += 1

    # The file

    def take(self, keys: Keys) -> None:
        """From now on these are the keys. What was used stays used; running requests of keys that were revoked, or are
        gone, are ended."""
        from tailrace.api.access.account import leave_all
        from tailrace.api.access.store import NO_QUOTA

        self._entries = {key.id: (bytes.fromhex(key.digest), key) for key in keys.keys}
        self._quotas = {("key", key.id): key.limits for key in keys.keys if key.limits != NO_QUOTA}
        self._quotas |= {("tenant", name): quota for name, quota in keys.tenants.items() if quota != NO_QUOTA}
        known = {("key", name) for name in self._entries} | {("tenant", key.tenant) for key in keys.keys}
        for name, account in list(self._accounts.items()):
            account.quota = self._quotas.get(name, NO_QUOTA)
            if name not in known and name not in self._quotas:
                del self._accounts[name]
        for key, leases in list(self._leases.items()):
            entry = self._entries.get(key)
            if entry is None or entry[1].revoked is not None:
                leave_all(leases)

    async def follow(self, report: Callable[[str], object]) -> None:
        """Takes what the file says whenever that has changed, for ever. One that is wrong is reported, and what it said
        before stays."""
        import asyncio

        from tailrace.api.access import store

        assert self._file is not None
        while True:
            await asyncio.sleep(LOOK)
            found = _look(self._file)
            if found == self._seen:
                continue
            self._seen = found
            try:
                keys = await asyncio.to_thread(store.read, self._file)
            except InvalidInput as error:
                report(f"tailrace: {error}; the keys that it had before are still the keys")
                continue
            self.take(keys)
            report(f"tailrace: {len(keys.keys)} keys were read from {self._file}")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _look(file: Path) -> tuple[int, ...]:
    """What is another after any change to a file; () where there is none."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _unknown(what: str) -> HttpError:
    return HttpError(
        401,
        f"{what}: send the header Authorization: Bearer KEY",
        kind="authentication_error",
        code="invalid_api_key",
    )
