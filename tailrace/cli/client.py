"""A small HTTP client for a running server: JSON and server-sent events, over the standard library.

One connection a request; what goes wrong is told apart by whether the server answered (`ServerError`), could not be
reached (`Unreachable`), or stopped in the middle (`CutOff`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from tailrace.terms import InvalidInput, TailraceError

DEFAULT_URL = "http://127.0.0.1:8000"


class ServerError(TailraceError):
    """The server's own error. `retry_after`: seconds it asked for, None where it did not."""

    def __init__(self, message: str, *, status: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class Unreachable(TailraceError):
    """Nobody answers at the address."""


class CutOff(TailraceError):
    """The answer ended before it was complete."""


class Client:
    """Talks to one server. `url` may end in /v1; `timeout` is the longest silence, in seconds. Safe to share between
    threads: it holds no connection."""

    def __init__(self, url: str = DEFAULT_URL, *, key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(f"{url!r} is no address of a server; it looks like {DEFAULT_URL}", param="url")
        self.address = url
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._timeout = timeout

    def get(self, path: str) -> Any:
        """The JSON at a path (None when the answer is empty)."""
        with self._answer("GET", path, None) as response:
            text = _read(response)
        return json.loads(text) if text.strip() else None

    def text(self, path: str) -> str:
        """The text at a path."""
        with self._answer("GET", path, None) as response:
            return _read(response).decode()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers a JSON body."""
        with self._answer("POST", path, body) as response:
            return json.loads(_read(response))

    def ready(self) -> bool:
        """Whether a server answers there and can take requests."""
        try:
            self.get("/health")
        except (ServerError, Unreachable, CutOff, ValueError):
            return False
        return True

    def models(self) -> list[str]:
        """The names that the server serves."""
        return [model["id"] for model in self.get("/v1/models")["data"]]

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed answer, up to [DONE]. Closing the iterator hangs up, which aborts the request."""
        with self._answer("POST", path, {**body, "stream": True}) as response:
            while True:
                try:
                    line = response.readline()
                except (OSError, http.client.HTTPException) as error:
                    raise CutOff(f"the connection broke in the middle of the answer: {error}") from error
                if not line:
                    raise CutOff("the server ended the answer before it was complete")
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(_message(chunk, "the server failed"), status=500)
                yield chunk

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        try:
            try:
                content = None if body is None else json.dumps(body).encode()
                connection.request(method, self._prefix + path, content, self._headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise Unreachable(f"No server answers at {self.url} ({error or type(error).__name__}).") from error
            if response.status >= 400:
                raise _refusal(response)
            yield response
        finally:
            connection.close()


def _refusal(response: http.client.HTTPResponse) -> ServerError:
    text = _read(response)
    try:
        message = _message(json.loads(text), "")
    except ValueError:
        message = text.decode(errors="replace").strip()
    try:
        retry = float(response.headers["Retry-After"])
    except (TypeError, ValueError):
        retry = None
    return ServerError(message or f"the server answered {response.status}", status=response.status, retry_after=retry)


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read()
    except (OSError, http.client.HTTPException) as error:
        raise CutOff(f"the connection broke in the middle of the answer: {error}") from error


def _message(answer: Any, otherwise: str) -> str:
    """The text of an OpenAI-shaped error."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or otherwise)
    return str(error or otherwise)
