"""Errors as OpenAI's clients expect them: a status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math

import msgspec

from tailrace.terms import EngineDied, InvalidInput, Overloaded, TailraceError


class HttpError(TailraceError):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        allow: str | None = None,
        close: bool = False,
        retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.allow = allow
        self.retry = retry  # where false, the official clients do not send it again by themselves
        self.close = close  # what follows on this connection is not to be read

    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(
            {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that belong to it."""
        rows = [(b"content-type", b"application/json")]
        if self.retry_after is not None:
            rows.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        if not self.retry:
            rows.append((b"x-should-retry", b"false"))
        if self.status == 401:
            rows.append((b"www-authenticate", b"Bearer"))
        if self.allow is not None:
            rows.append((b"allow", self.allow.encode()))
        return rows


def unavailable(message: str, retry_after: float = 1.0) -> HttpError:
    """503: nothing is wrong with the request."""
    return HttpError(503, message, kind="service_unavailable", code="service_unavailable", retry_after=retry_after)


def as_http(error: TailraceError) -> HttpError:
    """The HTTP form of any error of ours."""
    match error:
        case HttpError():
            return error
        case InvalidInput():
            return HttpError(400, str(error), param=error.param, code=error.code)
        case Overloaded():
            return HttpError(429, str(error), kind="rate_limit_error", code="overloaded", retry_after=error.retry_after)
        case EngineDied():
            return HttpError(503, str(error), kind="service_unavailable", code="engine_unavailable", retry_after=2.0)
        case _:
            return HttpError(500, str(error), kind="server_error", code="internal_error")
