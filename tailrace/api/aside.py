"""Work that may never end, such as looking into a directory of a file system whose server is gone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, cast

from tailrace.api.errors import HttpError

T = TypeVar("T")

NAME = "aside"
MOST = 8
"""Threads that may be held up at a time; nobody can end them."""


async def aside(work: Callable[[], T], seconds: float) -> T:
    """Does it on a thread of its own: one that may never end, so none of those that others need. Raises TimeoutError,
    and HttpError 503 where too many have not ended yet."""
    if sum(thread.name == NAME for thread in threading.enumerate()) >= MOST:
        raise HttpError(
            503,
            "too much is held up already by a file system that does not answer",
            kind="service_unavailable",
            code="timeout",
            retry=False,
        )
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", result))

    def run() -> None:
        try:
            result, error = work(), None
        except Exception as raised:  # noqa: BLE001 - handed over
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=NAME, daemon=True).start()
    async with asyncio.timeout(seconds):
        return await done
