"""Disk tiers for tests, the pages that they hold, and where those are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.kv.prefix import PageChain, root_digest
from tailrace.kv.tiers import PageKey, key_at
from tailrace.kv.tiers.disk import DiskTier
from tailrace.kv.tiers.index import BLOCK
from tests.kv.tiers.harms import PAGE_BYTES
from tests.kv.tiers.places import Place, places, segment_files

SLOT = 2 * BLOCK
"""A page's place on the disk."""


def tier(folder: Path, most: int = 100 * SLOT, **options: Any) -> DiskTier:
    settings: dict[str, Any] = {"numerics": "test", "page_bytes": PAGE_BYTES, "page_tokens": 16, **options}
    return DiskTier(folder, most, key_file=settings.pop("key_file", None), **settings)


def chain(seed: int, pages: int, tenant: str = "") -> PageChain:
    made = PageChain(root_digest({"tenant": tenant.encode()}), 16)
    made.extend(np.random.default_rng(seed).integers(0, 1000, 16 * pages).astype(np.int32).tobytes())
    return made


def content(key: PageKey) -> bytes:
    """What a page holds: anything, but of its own."""
    return random.Random(key.digest).randbytes(PAGE_BYTES)


def keep(tier: DiskTier, chain: PageChain) -> list[PageKey]:
    keys = [key_at(chain, at) for at in range(len(chain))]
    for key in keys:
        assert tier.store(key, content(key))
    return keys


def loaded(tier: DiskTier, key: PageKey) -> bytes | None:
    data = tier.load(key)
    return None if data is None else bytes(data)


def place_of(folder: Path, key: PageKey) -> Place:
    return places(folder)[key.digest]


def taken(folder: Path) -> int:
    """Bytes of all segments."""
    return sum(path.stat().st_size for path in segment_files(folder))


def again(disk: DiskTier, folder: Path, most: int = 100 * SLOT, **options: object) -> DiskTier:
    """A server that starts when that one has ended."""
    disk.close()
    return tier(folder, most, **options)
