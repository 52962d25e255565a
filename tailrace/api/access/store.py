"""The file of keys: JSON that a person can read, replaced as a whole by one rename.

A key is `tr_` + its id + `_` + 43 letters and digits drawn from the system's randomness (256 bits). The file has the
SHA-256 of the whole. A password would need a slow, salted hash, since it can be guessed; nobody guesses 256 random
bits, whatever a guess costs, and a slow hash would be paid for by every request. The id is no secret: it finds the
entry, so that one digest is compared rather than all, and it is what logs show.

Writers hold a lock on a file beside it. A crash leaves the file as it was before or after the change.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import string
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from tailrace.api.priority import MOST_URGENT
from tailrace.terms import InvalidInput

VERSION = 1
ALPHABET = string.ascii_letters + string.digits
ID_CHARS = 10
SECRET_CHARS = 43
"""Letters and digits of a secret: 43 of 62 are 256 bits."""
KEY = re.compile(r"tr_([a-z0-9]{10})_([A-Za-z0-9]{43})")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
"""Of a tenant, and of a key."""
FILE_BYTES = 64 << 20
"""Largest file that is read: some 200,000 keys."""

Scope = Literal["inference", "admin"]
SCOPES: tuple[Scope, ...] = ("inference", "admin")


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a key or a tenant may use; None is no limit. Tokens are those of prompts and of answers."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    """Requests at a time, from their arrival to their last byte."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 1 <= value < 1 << 53:
                raise ValueError(f"{name} must be at least 1")


NO_QUOTA = Quota()


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key. `digest` is the SHA-256 of it, in hex; times are in UTC."""

    id: str
    digest: str
    name: str
    created: datetime
    tenant: str | None = None  # None: it is a tenant of its own
    scopes: tuple[Scope, ...] = ("inference",)
    expires: datetime | None = None
    revoked: datetime | None = None
    limits: Quota = NO_QUOTA
    least_priority: int = 0
    """The lowest `priority` that its requests may ask for; lower goes first, of all tenants' requests."""

    def state(self, now: datetime) -> Literal["active", "expired", "revoked"]:
        """Whether it may be used at a moment."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now >= self.expires else "active"


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the file says."""

    version: Literal[1] = 1
    tenants: dict[str, Quota] = {}
    """What a tenant's keys may use together."""
    keys: tuple[Key, ...] = ()

    def check(self) -> None:
        """Raises ValueError where it contradicts itself."""
        if len({key.id for key in self.keys}) != len(self.keys):
            raise ValueError("two keys have the same id")
        for key in self.keys:
            if not re.fullmatch(r"[0-9a-f]{64}", key.digest):
                raise ValueError(f"the digest of key {key.id} is not 64 hexadecimal digits")
            if not key.scopes:
                raise ValueError(f"key {key.id} has no scope")
            if not MOST_URGENT <= key.least_priority <= 0:
                raise ValueError(f"the least priority of key {key.id} is not between {MOST_URGENT} and 0")
            for when in (key.created, key.expires, key.revoked):
                if when is not None and when.tzinfo is None:
                    raise ValueError(f"a time of key {key.id} has no time zone")

    def find(self, given: str) -> Key:
        """The key with an id, or the only one with a name. Raises InvalidInput."""
        found = [key for key in self.keys if key.id == given] or [key for key in self.keys if key.name == given]
        if not found:
            raise InvalidInput(f"there is no key {given!r}; `tailrace keys list` shows those that are", param="key")
        if len(found) > 1:
            ids = ", ".join(key.id for key in found)
            raise InvalidInput(f"{len(found)} keys have the name {given!r}: give an id ({ids})", param="key")
        return found[0]

    def replaced(self, key: Key) -> Keys:
        """The same with another version of a key."""
        keys = tuple(key if one.id == key.id else one for one in self.keys)
        return msgspec.structs.replace(self, keys=keys)


def digest(key: str | bytes) -> bytes:
    """What is kept of a key, and what is compared."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def read(file: Path) -> Keys:
    """All keys. Raises InvalidInput where the file cannot be read or is wrong."""
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES + 1)
    except FileNotFoundError:
        raise InvalidInput(
            f"there is no keys file {file}: `tailrace keys create NAME --keys {file}` makes one with a first key",
            param="keys",
        ) from None
    except OSError as error:
        raise InvalidInput(f"the keys file {file} cannot be read: {error.strerror}", param="keys") from None
    if len(data) > FILE_BYTES:
        raise InvalidInput(f"the keys file {file} is larger than {FILE_BYTES} bytes", param="keys")
    try:
        keys = msgspec.json.decode(data, type=Keys)
        keys.check()
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise InvalidInput(f"the keys file {file} is wrong: {error}", param="keys") from None
    return keys


def change(file: Path, edit: Callable[[Keys], Keys]) -> Keys:
    """Reads, edits and replaces the file, which need not be there; one writer at a time. Raises InvalidInput."""
    file = file.resolve()  # a link stays one
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file):
            keys = edit(read(file) if file.exists() else Keys())
            keys.check()
            _replace(file, msgspec.json.format(msgspec.json.encode(keys), indent=1) + b"\n")
    except OSError as error:
        raise InvalidInput(f"the keys file {file} cannot be written: {error.strerror}", param="keys") from None
    return keys


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    import fcntl

    handle = os.open(file.with_name(file.name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(file: Path, data: bytes) -> None:
    """Only the owner may read what is new; a file that was there keeps who may read it."""
    new = file.with_name(file.name + ".new")
    new.unlink(missing_ok=True)
    handle = os.open(new, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as stream:
        if file.exists():
            was = file.stat()
            os.fchmod(handle, was.st_mode & 0o777)
            with contextlib.suppress(PermissionError):  # it was given to somebody else, which only root can do
                os.fchown(handle, was.st_uid, was.st_gid)
        stream.write(data)
        stream.flush()
        os.fsync(handle)
    new.replace(file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def create(
    file: Path,
    name: str,
    *,
    tenant: str | None = None,
    scopes: tuple[Scope, ...] = ("inference",),
    expires: datetime | None = None,
    limits: Quota = NO_QUOTA,
    least_priority: int = 0,
    now: datetime | None = None,
) -> tuple[Key, str]:
    """A new key: its entry, and the key itself, which is nowhere else. Raises InvalidInput."""
    import secrets

    check_name(name, "name")
    if tenant is not None:
        check_name(tenant, "tenant")
    ids = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(ID_CHARS))
    secret = "".join(secrets.choice(ALPHABET) for _ in range(SECRET_CHARS))
    key = f"tr_{ids}_{secret}"
    made = (now or datetime.now(UTC)).replace(microsecond=0)
    if expires is not None and expires <= made:
        raise InvalidInput("the key would have expired already", param="expires")
    entry = Key(
        ids, digest(key).hex(), name, made, tenant, scopes, expires, limits=limits, least_priority=least_priority
    )
    change(file, lambda keys: msgspec.structs.replace(keys, keys=(*keys.keys, entry)))
    return entry, key


def revoke(file: Path, given: str, *, now: datetime | None = None) -> Key:
    """Marks a key, found by id or name, as revoked; one that is already keeps its time. Raises InvalidInput."""
    at = (now or datetime.now(UTC)).replace(microsecond=0)

    def edit(keys: Keys) -> Keys:
        key = keys.find(given)
        return keys if key.revoked else keys.replaced(msgspec.structs.replace(key, revoked=at))

    keys = change(_there(file), edit)
    return keys.find(given)


def limit(file: Path, given: str, limits: Quota, *, tenant: bool, least_priority: int = 0) -> None:
    """Sets what a key (by id or name) or a tenant may use, and a key's least priority. Raises InvalidInput."""

    def edit(keys: Keys) -> Keys:
        if not tenant:
            key = msgspec.structs.replace(keys.find(given), limits=limits, least_priority=least_priority)
            return keys.replaced(key)
        check_name(given, "tenant")
        tenants = {name: quota for name, quota in keys.tenants.items() if name != given}
        return msgspec.structs.replace(keys, tenants=tenants if limits == NO_QUOTA else {**tenants, given: limits})

    change(_there(file), edit)


def check_name(name: str, param: str) -> None:
    """Raises InvalidInput unless it is a name."""
    if not NAME.fullmatch(name):
        raise InvalidInput(
            f"a {param} has 1 to 64 letters, digits and . _ @ -, and begins with a letter or digit, unlike {name!r}",
            param=param,
        )


def _there(file: Path) -> Path:
    """The file, which has to be there: only a new key makes one."""
    read(file)
    return file
