"""A batch, as it is stored and as it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: frozenset[str] = frozenset(("validating", "in_progress", "finalizing", "cancelling"))
"""States in which there is still something to do."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Times are whole seconds since the epoch. `key` and `group` say with whose key it runs; `tenant` is the row's."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    key: str = ""
    group: str = ""
    output_seconds: int | None = None
    status: Status = "validating"
    total: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    completed: int = 0
    failed: int = 0
    error: dict[str, Any] | None = None

    @property
    def open(self) -> bool:
        """Whether there is still something to do."""
        return self.status in OPEN


decode = msgspec.json.Decoder(Batch).decode
encode = msgspec.json.encode
SHOWN = (
    "id", "endpoint", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id", "created_at",
    "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip


def moved(batch: Batch, status: Status, now: float, **changes: Any) -> Batch:
    """The batch in another state, from now on."""
    at = {} if status == "validating" else {f"{status}_at": int(now)}
    return msgspec.structs.replace(batch, status=status, **at, **changes)


def shown(batch: Batch, metadata: Mapping[str, str] | None, counts: tuple[int, int] | None = None) -> dict[str, Any]:
    """OpenAI's object. `counts`: lines answered and lines that failed so far, where it still runs."""
    completed, failed = (batch.completed, batch.failed) if counts is None else counts
    return {
        **{name: getattr(batch, name) for name in SHOWN},
        "object": "batch",
        "errors": None if batch.error is None else {"object": "list", "data": [batch.error]},
        "request_counts": {"total": batch.total, "completed": completed, "failed": failed},
        "metadata": metadata,
    }
