"""One answer on its way to the store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

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
        self._rest = {
            "id": name,
            "kind": kind,
            "tenant": tenant,
            "created": created,
            "expires": store.expiry(created),
            "model": model,
            "metadata": metadata,
        }

    async def answered(self, data: bytes) -> str:
        """Stores it. Returns a code that says why it could not; "" where it is stored."""
        stored = Stored(body=self._make(data), **self._rest)  # type: ignore[arg-type]  # named as its fields are
        try:
            await self._store.run(lambda shelf: shelf.put(stored))
        except HttpError as error:
            print(f"tailrace: {self._rest['id']} was not stored: {error}", file=sys.stderr, flush=True)
            self._failed()
            return error.code or "failed"
        return ""
