"""One client's connection: uvicorn's protocol, with a bound on what is not a body, and errors in OpenAI's shape."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tailrace.api.errors import HttpError
from tailrace.api.exchange import LINGER_BYTES, LINGER_SECONDS

HEAD_BYTES = 64 << 10
"""Most bytes of a request's line and headers, and of anything else that lies between two pieces of bodies."""
SLICE = 16 << 10
"""Bytes that are parsed before it is looked at whether they are too many."""


class Connection(HttpToolsProtocol):
    """`answered` hears of the statuses of refusals that never become an exchange."""

    def __init__(self, *, answered: Callable[[str, int], None], **options: Any) -> None:
        super().__init__(**options)
        self._answered = answered
        self._idle_bytes = 0  # parsed since a head ended or a piece of a body came
        self._moved = False
        self._refused = False
        self._discarded = 0

    def data_received(self, data: bytes) -> None:
        """Parses it, in slices while it is long."""
        for at in range(0, len(data), SLICE):
            if self._refused or self.parser is None:
                self._discard(len(data) - at)
                return
            piece = data if len(data) <= SLICE else data[at : at + SLICE]
            self._moved = False
            super().data_received(piece)
            self._idle_bytes = 0 if self._moved else self._idle_bytes + len(piece)
            if self._idle_bytes > HEAD_BYTES:
                self._refuse_head()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._moved = True
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > HEAD_BYTES:
            self._refuse_head()
        elif not self._refused:  # what follows a refusal in the same slice is not served
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._moved = True
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a body."""
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP."""
        self._refuse(HttpError(400, msg, code="invalid_http", close=True))

    def _refuse_head(self) -> None:
        message = f"the request line and headers are larger than {HEAD_BYTES} bytes"
        self._refuse(HttpError(431, message, code="headers_too_large", close=True))

    def _refuse(self, error: HttpError) -> None:
        """Answers, and goes on reading for a moment: a client that is still sending would lose the answer."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # an answer is under way, and what follows it is no request
            return
        self._answered("other", error.status)
        body = error.body()
        rows = [*self.server_state.default_headers, *error.headers()]
        rows += [(b"x-request-id", f"req-{secrets.token_hex(12)}".encode())]
        rows += [(b"content-length", str(len(body)).encode())]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in rows)
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self._end)

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > LINGER_BYTES:
            self._end()

    def _end(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
