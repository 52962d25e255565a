"""Who asks: the same refusal and the same comparison, whatever is wrong with a key."""

from __future__ import annotations

import hmac
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tailrace.api.access import store
from tailrace.api.access.account import Lease
from tailrace.api.access.guard import ANYONE, Guard
from tailrace.api.access.store import Quota
from tailrace.api.errors import HttpError


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.json"
    store.create(file, "first")
    return file


def entered(guard: Guard, authorization: bytes) -> Lease:
    lease = guard.lease(guard.identify(authorization, "inference"))
    assert lease is not None
    lease.enter()
    return lease


def refusal(guard: Guard, authorization: bytes | None, scope: str | None = "inference") -> HttpError:
    with pytest.raises(HttpError) as refused:
        guard.identify(authorization, scope)
    return refused.value


def test_every_key_is_compared_as_a_digest_in_constant_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, key = store.create(file, "ada")
    guard = Guard(("static",), ("admin",), str(file))
    compared: list[tuple[int, int]] = []
    plain = hmac.compare_digest

    def watched(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return plain(one, other)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    wrong = (key[:-1] + ("a" if key[-1] != "a" else "b"), "tr_aaaaaaaaaa_" + "b" * 43, "tr_", "", "x" * 5000, "static2")
    messages = set()
    for one in wrong:
        compared.clear()
        messages.add(str(refusal(guard, bearer(one))))
        assert compared == [(32, 32)] * 3, one
    assert len(messages) == 1
    for right in (key, "static"):
        compared.clear()
        guard.identify(bearer(right), "inference")
        assert compared == [(32, 32)] * 3


def test_a_digest_or_an_id_is_no_key(file: Path) -> None:
    entry, _ = store.create(file, "ada")
    guard = Guard(file=str(file))
    for wrong in (entry.digest, entry.id, f"tr_{entry.id}_", f"tr_{entry.id}_{entry.digest}"):
        assert refusal(guard, bearer(wrong)).status == 401
    for header in (None, b"", b"Bearer", b"Basic x", b"\xff\xfe \xff"):
        assert refusal(guard, header).code == "invalid_api_key"


def test_tenants_salt_and_keys_without_one_are_alone(file: Path) -> None:
    keys = [store.create(file, name, tenant=tenant)[1] for name, tenant in (("a", "t"), ("b", "t"), ("c", None))]
    guard = Guard(("static",), (), str(file))
    salts = [guard.identify(bearer(key)).tenant for key in [*keys, "static"]]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    assert "" not in salts
    imitation = Guard((salts[0],)).identify(bearer(salts[0])).tenant  # a key that reads like a tenant's salt
    assert imitation not in salts


def test_scopes_are_needed_and_kept_apart(file: Path) -> None:
    admin = store.create(file, "ops", scopes=("admin",))[1]
    both = store.create(file, "root", scopes=("inference", "admin"))[1]
    one = store.create(file, "ada")[1]
    guard = Guard(("plain",), ("boss",), str(file))
    for key, inference, administers in (
        (admin, False, True), (both, True, True), (one, True, False), ("plain", True, False), ("boss", False, True),
    ):  # fmt: skip
        guard.identify(bearer(key))
        for scope, may in (("inference", inference), ("admin", administers)):
            if may:
                guard.identify(bearer(key), scope)
            else:
                assert refusal(guard, bearer(key), scope).status == 403


def test_without_keys_anybody_may_ask_and_nobody_may_administer() -> None:
    guard = Guard()
    assert guard.identify(None, "inference") is ANYONE
    assert guard.lease(ANYONE) is None
    assert refusal(guard, bearer("x"), "admin").status == 403
    administered = Guard(admin_keys=("boss",))
    assert administered.identify(None, "inference") is ANYONE
    assert refusal(administered, None, "admin").status == 401
    administered.identify(bearer("boss"), "admin")


def test_the_wall_clock_ends_keys_and_nothing_else(file: Path) -> None:
    now = datetime.now(UTC)
    key = store.create(file, "ada", expires=now + timedelta(hours=1), limits=Quota(requests_per_minute=2))[1]
    wall, steady = [now.timestamp()], [50.0]
    guard = Guard(file=str(file), clock=lambda: steady[0], wall_clock=lambda: wall[0])
    caller = guard.identify(bearer(key))
    for jump in (-1e6, 1e3):  # neither frees a limit
        wall[0] = now.timestamp() + jump
        lease = entered(guard, bearer(key))
        guard.leave(caller, lease)
    with pytest.raises(HttpError, match="2 requests a minute"):
        entered(guard, bearer(key))
    steady[0] += 61
    entered(guard, bearer(key))
    wall[0] = now.timestamp() + 3601
    assert "has expired" in str(refusal(guard, bearer(key)))


def test_a_reload_keeps_what_was_used_and_ends_what_was_revoked(file: Path) -> None:
    entry, key = store.create(file, "ada", tenant="t", limits=Quota(requests_per_minute=2))
    other, other_key = store.create(file, "bob")
    guard = Guard(file=str(file))
    lease, stays = entered(guard, bearer(key)), entered(guard, bearer(other_key))
    ended: list[str] = []
    lease.on_revoked = lambda: ended.append("ada")
    stays.on_revoked = lambda: ended.append("bob")
    store.limit(file, "t", Quota(requests_per_minute=9), tenant=True)
    guard.take(store.read(file))
    caller = guard.identify(bearer(key))
    second = entered(guard, bearer(key))
    with pytest.raises(HttpError, match="2 requests a minute"):
        entered(guard, bearer(key))
    assert guard.limited["key", "requests"] == 1
    store.revoke(file, entry.id)
    guard.take(store.read(file))
    assert ended == ["ada"]
    assert lease.revoked
    assert second.revoked
    assert "was revoked" in str(refusal(guard, bearer(key)))
    for one in (lease, second):
        guard.leave(caller, one)
    assert guard._accounts.keys() == {("key", entry.id), ("tenant", "t")}
    guard.take(store.Keys(keys=(other,)))
    assert not guard._accounts
    assert "not valid" in str(refusal(guard, bearer(key)))


def test_strangers_leave_nothing_behind(file: Path) -> None:
    guard = Guard(file=str(file))
    before = len(guard.limited)
    for index in range(500):
        refusal(guard, bearer(f"tr_{index:010}_{'x' * 43}"))
    assert not guard._accounts
    assert not guard._leases
    assert len(guard.limited) == before == 6
