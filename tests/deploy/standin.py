"""A server that starts in a moment and does what its flags say; run as a script, with the standard library alone.

It answers /health, /v1/models and completions, streamed, a word a token. `/die` ends it at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

WORDS = "HTTP/1.1 {} X\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n{}"


asked = 0


def answer(connection: socket.socket, flags: dict[str, str]) -> None:
    stream = connection.makefile("rb")
    while line := stream.readline():
        path, length = line.split()[1].decode(), 0
        while (header := stream.readline()) not in (b"\r\n", b""):
            if header.lower().startswith(b"content-length:"):
                length = int(header.split(b":")[1])
        body = stream.read(length)
        if path == "/die":
            os._exit(7)
        if path.startswith("/v1/") and path.endswith("completions"):
            complete(connection, json.loads(body), flags)
        elif path == "/v1/models":
            whole(connection, 200, json.dumps({"data": [{"id": flags.get("model", "model")}]}))
        elif path == flags.get("page", "/metrics"):
            whole(connection, 200, metrics(flags), "text/plain")
        else:
            whole(connection, int(flags.get("health", "200")), "{}")


def whole(connection: socket.socket, status: int, text: str, kind: str = "application/json") -> None:
    connection.sendall(WORDS.format(status, kind, len(text), text).encode())


def metrics(flags: dict[str, str]) -> str:
    return flags.get("metrics", "").replace(";", "\n") + "\n"


def complete(connection: socket.socket, body: dict[str, object], flags: dict[str, str]) -> None:
    told = body.get("messages") or [{"content": body.get("prompt", "")}]
    words = sum(len(str(message["content"]).split()) for message in told)  # type: ignore[attr-defined, index]
    count = int(body["max_tokens"])  # type: ignore[call-overload]
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    time.sleep(float(flags.get("first", "0")))
    event = {"choices": [{"index": 0, "delta": {"content": "x "}, "text": "x "}]}
    connection.sendall(head.encode() + f"data: {json.dumps(event)}\n\n".encode())
    global asked
    asked += 1
    if asked == int(flags.get("dies", "-1")):
        os._exit(9)
    for _ in range(count - 1):
        time.sleep(float(flags.get("gap", "0")))
        connection.sendall(f"data: {json.dumps(event)}\n\n".encode())
    usage = {"prompt_tokens": words, "completion_tokens": count, "total_tokens": words + count}
    connection.sendall(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
    connection.shutdown(socket.SHUT_RDWR)


def serve(port: int, flags: dict[str, str]) -> None:
    """`flags`: see `main`."""
    if "says" in flags:
        print(flags["says"], flush=True)
    if "ends" in flags:
        sys.exit(int(flags["ends"]))
    if "stubborn" in flags:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "children" in flags:  # one in its session, and one that leaves it
        for new in (False, True):
            subprocess.Popen(["/bin/sh", "-c", "sleep 600 & wait"], start_new_session=new)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    print(f"listening on {port}", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection, flags), daemon=True).start()


def main(words: list[str]) -> None:
    """PORT NAME=VALUE ...: says=TEXT, ends=STATUS, stubborn=1 (no end at SIGTERM), children=1, health=STATUS,
    dies=N (in the middle of the Nth answer), first=SECONDS, gap=SECONDS, metrics=TEXT with ; between lines."""
    serve(int(words[0]), dict(word.split("=", 1) for word in words[1:]))  # type: ignore[arg-type, misc]


if __name__ == "__main__":
    main(sys.argv[1:])
