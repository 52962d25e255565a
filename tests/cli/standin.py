"""A stand-in for the server: the few endpoints that the command line uses, with answers that a test scripts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass
class Refusal:
    """An error status instead of an answer."""

    status: int
    message: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Answer:
    """A streamed answer. `deltas` go before the pieces of a chat's. `complete` False hangs up before the finish; `hold`
    is waited for before the last piece."""

    pieces: list[str]
    finish: str = "stop"
    complete: bool = True
    error: str = ""
    hold: threading.Event | None = None
    deltas: list[dict[str, Any]] = field(default_factory=list)


def echo(body: Body) -> Answer:
    """Says the last words of the prompt again."""
    prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    return Answer(["you said: ", str(prompt)])


@dataclass
class StandIn:
    """What the server was asked, and how it answers."""

    answer: Callable[[Body], Answer | Refusal] = echo
    models: list[str] = field(default_factory=lambda: ["tiny"])
    requests: list[tuple[str, Body]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    @property
    def bodies(self) -> list[Body]:
        return [body for _, body in self.requests]


@contextmanager
def serving(standin: StandIn) -> Iterator[StandIn]:
    """Runs the stand-in on a free port."""
    handler = type("Bound", (_Handler,), {"standin": standin})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    standin.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield standin
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    standin: StandIn

    def do_GET(self) -> None:
        if self.path == "/health":
            self._json(200, {"status": "ready"})
        elif self.path == "/v1/models":
            self._json(200, {"data": [{"id": name} for name in self.standin.models]})
        else:
            self._json(404, {"error": {"message": f"no {self.path} here"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.standin.requests.append((self.path, body))
        self.standin.keys.append(self.headers["Authorization"])
        answer = self.standin.answer(body)
        if isinstance(answer, Refusal):
            self._json(answer.status, {"error": {"message": answer.message}}, answer.headers)
            return
        try:
            self._stream(answer, chat=self.path.endswith("/chat/completions"))
        except OSError:
            self.standin.hung_up.set()

    def _stream(self, answer: Answer, *, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for delta in answer.deltas:
            self._event({"choices": [{"index": 0, "delta": delta}]})
        for number, piece in enumerate(answer.pieces):
            if answer.hold is not None and number == len(answer.pieces) - 1:
                self._comment_until(answer.hold)
            self._event({"choices": [{"index": 0, **({"delta": {"content": piece}} if chat else {"text": piece})}]})
        if answer.error:
            self._event({"error": {"message": answer.error}})
        if not answer.complete or answer.error:
            return
        last: Body = {"index": 0, "finish_reason": answer.finish, **({"delta": {}} if chat else {"text": ""})}
        self._event({"choices": [last]})
        tokens = len(answer.pieces)
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        self._event({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 3}}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _comment_until(self, event: threading.Event) -> None:
        """Keeps writing, so that a client that leaves is noticed."""
        while not event.wait(0.01):
            self.wfile.write(b": waiting\n\n")
            self.wfile.flush()

    def _event(self, data: Body) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, data: Body, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass
