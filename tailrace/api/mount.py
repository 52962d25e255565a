"""What a room above serves beside the API, below a prefix of its own: the dashboard. This room only knows its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tailrace.api.front import Route
    from tailrace.api.service import Service


class Mount(Protocol):
    """Every path that is `prefix`, or begins with it and a slash. `title` is for the start-up report."""

    @property
    def prefix(self) -> str:
        """As in "/ui"."""

    @property
    def title(self) -> str:
        """What it is, in a word."""

    def route(self, path: str, method: str) -> Route:
        """The route of a path. Raises HttpError 404 or 405."""

    def open(self) -> None:
        """Begins, on the server's loop."""

    async def close(self) -> None:
        """The server ends."""


MakeMount = Callable[["Service"], Mount]
