"""The file of keys: what is in it, who can read it, and what a crash leaves."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tailrace.api.access import store
from tailrace.terms import InvalidInput


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.json"


def test_a_key_is_in_the_file_as_its_digest_alone(file: Path) -> None:
    entry, key = store.create(file, "ada", tenant="t")
    text = file.read_text()
    assert store.KEY.fullmatch(key)
    assert key not in text
    assert key.rpartition("_")[2] not in text
    assert hashlib.sha256(key.encode()).hexdigest() in text
    assert file.stat().st_mode & 0o777 == 0o600
    assert store.read(file).keys == (entry,)
    assert store.create(file, "bob")[1] != key
    assert {one.name for one in file.parent.iterdir()} == {"keys.json", "keys.json.lock"}


def test_a_change_keeps_who_may_read_it_and_a_link(file: Path, tmp_path: Path) -> None:
    store.create(file, "ada")
    file.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(file)
    store.create(link, "bob")
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert len(store.read(file).keys) == 2


def test_a_revoked_key_keeps_its_first_time_and_names_must_be_clear(file: Path) -> None:
    store.create(file, "ada")
    other, _ = store.create(file, "ada")
    with pytest.raises(InvalidInput, match="2 keys have the name 'ada': give an id"):
        store.revoke(file, "ada")
    first = datetime(2026, 1, 1, tzinfo=UTC)
    assert store.revoke(file, other.id, now=first).revoked == first
    assert store.revoke(file, other.id).revoked == first
    assert store.read(file).find(other.id).state(first) == "revoked"
    with pytest.raises(InvalidInput, match="no key 'eve'"):
        store.revoke(file, "eve")


def test_limits_are_of_a_key_or_of_a_tenant(file: Path) -> None:
    entry, _ = store.create(file, "ada", tenant="t")
    store.limit(file, "ada", store.Quota(requests_per_minute=3), tenant=False)
    store.limit(file, "t", store.Quota(concurrent=2), tenant=True)
    keys = store.read(file)
    assert keys.find(entry.id).limits == store.Quota(requests_per_minute=3)
    assert keys.tenants == {"t": store.Quota(concurrent=2)}
    store.limit(file, "t", store.NO_QUOTA, tenant=True)
    assert store.read(file).tenants == {}


def test_times_end_keys(file: Path) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    entry, _ = store.create(file, "ada", expires=now + timedelta(days=1), now=now)
    assert entry.state(now) == "active"
    assert entry.state(now + timedelta(days=1)) == "expired"
    with pytest.raises(InvalidInput, match="expired already"):
        store.create(file, "bob", expires=now, now=now)


@pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65, "a/b", "\n"])
def test_names_are_plain(file: Path, name: str) -> None:
    for wrong in ({"name": name}, {"name": "a", "tenant": name}):
        with pytest.raises(InvalidInput, match="letters, digits"):
            store.create(file, **wrong)
    assert not file.exists()


def wrong_files() -> list[tuple[str, str]]:
    key: dict[str, Any] = {"id": "a", "digest": "0" * 64, "name": "n", "created": "2026-01-01T00:00:00Z"}

    def of(*keys: dict[str, Any], **more: Any) -> str:
        return json.dumps({"version": 1, "keys": keys, **more})

    return [
        ("", "malformed|truncated"),
        ("[]", "Expected"),
        ("[" * 100_000, "Expected"),
        (of(more=1), "unknown field `more`"),
        (of({**key, "tenat": "x"}), "unknown field `tenat`"),
        (of(key, key), "the same id"),
        (of({**key, "digest": "secret"}), "64 hexadecimal"),
        (of({**key, "scopes": ["root"]}), "root"),
        (of({**key, "scopes": []}), "no scope"),
        (of({**key, "created": "2026-01-01T00:00:00"}), "time zone"),
        (of({**key, "limits": {"concurrent": 0}}), "at least 1"),
        (of(tenants={"t": {"requests": 5}}), "unknown field `requests`"),
        (json.dumps({"version": 2}), "version|Invalid"),
    ]


@pytest.mark.parametrize(("text", "said"), wrong_files())
def test_a_file_that_is_wrong_is_refused_and_left_alone(file: Path, text: str, said: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    for act in (store.read, lambda one: store.create(one, "ada")):
        with pytest.raises(InvalidInput, match=re.compile(f"keys file .* is wrong: .*({said})", re.DOTALL)):
            act(file)
    assert file.read_text() == text


def test_without_a_file_it_is_said_how_to_make_one(file: Path) -> None:
    for act in (lambda: store.read(file), lambda: store.revoke(file, "ada")):
        with pytest.raises(InvalidInput, match="tailrace keys create"):
            act()


def _make(file: Path, name: str) -> None:
    for _ in range(5):
        store.create(file, name)


def test_writers_at_the_same_time_lose_nothing(file: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=_make, args=(file, f"w{index}")) for index in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert len(store.read(file).keys) == 15


def test_a_writer_that_dies_leaves_what_was_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create(file, "ada")
    before = file.read_bytes()

    def dies(_handle: int) -> None:
        raise SystemExit

    monkeypatch.setattr(os, "fsync", dies)
    with pytest.raises(SystemExit):
        store.create(file, "bob")
    assert file.read_bytes() == before
    monkeypatch.undo()
    store.create(file, "bob")
    assert [key.name for key in store.read(file).keys] == ["ada", "bob"]
