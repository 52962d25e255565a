"""A router's side of KV events, over real sockets: as docs/kv.md tells it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

from tests.kv.view import View

END = b"\xff" * 8
PATIENCE = 20.0


class Follower:
    """A subscriber that keeps a view. `keys` are its own public and secret one, and the server's public one."""

    def __init__(
        self, events: str, replay: str = "", keys: tuple[bytes, bytes, bytes] | None = None, *, high_water: int = 0
    ) -> None:
        self.view = View()
        self.number = -1  # of the last batch that the view has
        self.numbers: list[int] = []  # as they came
        self.greeted = 0
        self._context = zmq.Context()
        self._sub = self._socket(zmq.SUB, keys)
        self._sub.set_hwm(high_water)
        if high_water:
            self._sub.setsockopt(zmq.RCVBUF, 1 << 18)
        self._sub.subscribe(b"")
        self._sub.connect(events)
        self._ask = self._socket(zmq.DEALER, keys)
        if replay:
            self._ask.connect(replay)

    def _socket(self, kind: int, keys: tuple[bytes, bytes, bytes] | None) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        if keys is not None:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys
        return socket

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def hear(self, wait: float = PATIENCE) -> tuple[int, list[Any]] | None:
        """The next batch; None where none comes in time."""
        if not self._sub.poll(int(wait * 1000)):
            return None
        topic, number, payload = self._sub.recv_multipart()
        assert topic == b""
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        assert ts > 1e9
        self.numbers.append(int.from_bytes(number, "big"))
        return self.numbers[-1], events

    def follow(self, until: int, wait: float = PATIENCE) -> None:
        """Folds batches up to this number, and repairs what was missed."""
        while self.number < until:
            heard = self.hear(wait)
            assert heard is not None, f"waited for batch {until}, got to {self.number}"
            number, events = heard
            if number <= self.number:
                continue
            if number != self.number + 1:
                self.repair()
            if number == self.number + 1:
                self.view.fold(events)
                self.number = number

    def repair(self) -> None:
        """Asks for what was missed, and where that is no longer kept, for everything."""
        for number, events in self.ask((self.number + 1).to_bytes(8, "big")) if self.number >= 0 else ():
            if number != self.number + 1 and events[0] != ["AllBlocksCleared"]:
                break
            self.view.fold(events)
            self.number = number
        else:
            if self.number >= 0:
                return
        self.take_snapshot()

    def take_snapshot(self) -> None:
        """Begins anew from the state of the server."""
        for number, events in self.ask(b"snapshot/1"):
            self.view.fold(events)
            self.number = number

    def ask(self, request: bytes) -> list[tuple[int, list[Any]]]:
        """A whole answer."""
        self._ask.send_multipart([b"", request])
        answer = []
        end = time.monotonic() + PATIENCE
        while True:
            assert self._ask.poll(max(0, int((end - time.monotonic()) * 1000))), "no answer"
            empty, number, payload = self._ask.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b"", payload
                return answer
            answer.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1]))

    def refused(self, request: list[bytes]) -> bytes:
        """What is wrong with a request, which has no other answer."""
        self._ask.send_multipart(request)
        assert self._ask.poll(int(PATIENCE * 1000)), "no answer"
        _, number, payload = self._ask.recv_multipart()
        assert number == END
        return bytes(payload)
