"""Questions to the ledger, on a thread of their own, one at a time: no page keeps the server's loop waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from tailrace.api.errors import HttpError, unavailable
from tailrace.ledger import place
from tailrace.terms import InvalidInput, TailraceError

if TYPE_CHECKING:
    from tailrace.ledger.store import Ledger

MOST_WAITING = 32
"""Questions that wait for their answer at the same time."""

T = TypeVar("T")


class Reader:
    """One ledger, opened when it is first asked."""

    def __init__(self, given: str, *, own: bool = False) -> None:
        """`given`: a path or a URL. `own`: this server writes it, so it is made where it is not there yet. Raises
        InvalidInput where it is neither."""
        place.ledger_file(given)
        self.shown = place.shown(given)
        self._given = given
        self._own = own
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dashboard")
        self._waiting = 0
        self._ledger: Ledger | None = None

    async def ask(self, question: Callable[[Ledger], T]) -> T:
        """The answer. Raises HttpError 503 where the ledger cannot be read, or too many ask; InvalidInput."""
        if self._waiting >= MOST_WAITING:
            raise unavailable("too many questions to the ledger at once")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, question)
        except (HttpError, InvalidInput):
            raise
        except TailraceError as error:
            raise HttpError(
                503, str(error), kind="service_unavailable", code="ledger_unavailable", retry_after=5.0
            ) from None
        finally:
            self._waiting -= 1

    def _answer(self, question: Callable[[Ledger], T]) -> T:
        if self._ledger is None:
            from tailrace.ledger.store import Ledger  # with SQLAlchemy, for which no start waits

            if self._own:
                made = Ledger(self._given)
                made.content()
                made.close()
            self._ledger = Ledger(self._given, read_only=True)
        return question(self._ledger)

    def close(self) -> None:
        """Ends the thread when it has answered; does not wait for it."""
        if self._ledger is not None:
            self._pool.submit(self._ledger.close)
        self._pool.shutdown(wait=False)
