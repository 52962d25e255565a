"""Whoever has no key can make no page that is believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.kv.tiers import key_at
from tailrace.kv.tiers.seal import NONCE_BYTES, TAG_BYTES, Seal, read_secret
from tailrace.terms import InvalidInput
from tests.kv.tiers.disks import chain, content
from tests.kv.tiers.harms import PAGE_BYTES

SECRET = bytes(range(32))
KEY = key_at(chain(1, 2), 1)


def seal(secret: bytes = SECRET, **changed: object) -> Seal:
    settings = {"numerics": "test", "page_bytes": PAGE_BYTES, "page_tokens": 16, **changed}
    return Seal(secret, **settings)  # type: ignore[arg-type]


def test_a_page_is_believed_as_it_was_sealed_and_by_those_with_the_key_alone() -> None:
    data = content(KEY)
    head = seal().head(KEY, data)
    assert len(head) == seal().head_bytes
    assert seal().entry_bytes == len(head) + PAGE_BYTES
    assert seal().fault(KEY, head, data, seal().entry_bytes) is None
    assert seal(bytes(32)).fault(KEY, head, data, seal().entry_bytes) == "checksum"


def test_no_two_entries_have_a_key_in_common() -> None:
    data = content(KEY)
    heads = [seal().head(KEY, data)[-NONCE_BYTES - TAG_BYTES :] for _ in range(100)]
    assert len({head[:NONCE_BYTES] for head in heads}) == len({head[NONCE_BYTES:] for head in heads}) == 100


def test_a_tag_holds_for_its_own_header_nonce_and_bytes() -> None:
    data, other = content(KEY), content(key_at(chain(2, 2), 1))
    one, two = seal().head(KEY, data), seal().head(KEY, other)
    size = seal().entry_bytes
    assert seal().fault(KEY, one, other, size) == "checksum"
    assert seal().fault(KEY, one[:-TAG_BYTES] + two[-TAG_BYTES:], data, size) == "checksum"
    nonce = slice(-NONCE_BYTES - TAG_BYTES, -TAG_BYTES)
    swapped = one[: nonce.start] + two[nonce] + one[-TAG_BYTES:]
    assert seal().fault(KEY, swapped, data, size) == "checksum"


def test_a_namespace_is_that_of_a_key_and_a_layout() -> None:
    names = {
        seal().namespace,
        seal(bytes(32)).namespace,
        seal(numerics="other").namespace,
        seal(page_bytes=PAGE_BYTES + 8).namespace,
        seal(page_tokens=32).namespace,
    }
    assert len(names) == 5
    assert seal().namespace == seal().namespace


def test_a_key_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="none"):
        read_secret(tmp_path / "none")
