"""One answer on its way to the store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from tailrace.api.content.shelf import Kind, Stored
from tailrace.api.content.store import ContentStore
from tailrace.api.errors import HttpError


class Keeper:
    """A `service.Keep`: stores what `make` makes of an answer. Where that fails the caller has its answer all the same,
    and is told why it is not stored."""

    def __init__(
        self,
        store: ContentStore,
        kind: Kind,
        name: str,
        tenant: str,
        make: Callable[[bytes], bytes],
        *,
        created: float,
        model: str,
        metadata: Mapping[str, str] | None,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        """`failed` is called where the answer could not be stored, before it is shown again."""
        self._store = store
        self._make = make
        self._failed = failed
        self._blank = Stored(name, kind, tenant, created, store.expiry(created), b"", model, metadata)

    async def answered(self, data: bytes) -> str:
        """Stores it. Returns a code that says why it could not; "" where it is stored."""
        stored = replace(self._blank, body=self._make(data))
        try:
            await self._store.run(lambda shelf: shelf.put(stored))
        except HttpError as error:
            print(f"tailrace: {stored.id} was not stored: {error}", file=sys.stderr, flush=True)
            self._failed()
            return error.code or "failed"
        return ""
