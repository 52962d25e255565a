"""Publishes an index's KV events over ZeroMQ (`kv.events` has what is in them), from a thread of its own.

The engine hands over what each step has changed, as references and without waiting (`flush`); the thread makes messages
of it. A subscriber that is slow loses messages once its queue is full, and nobody waits for it; where even this thread
is too slow, whole batches are dropped and counted. Either shows as a gap in the numbers. docs/kv.md says how a
subscriber notices and repairs it; `Publisher.answer` says what can be asked for.

Numbers begin at the time of the start, so each engine's are above those of the engine before it: whoever has followed
that one sees a gap instead of numbers that happen to go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import zmq

from tailrace.engine.subscribers import Keys
from tailrace.kv.events import Batch, Changes, EventLog, events_of, snapshot
from tailrace.kv.prefix import Node, PrefixIndex
from tailrace.terms import ModelError

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

_log = logging.getLogger("tailrace")

TOPIC = b""
END = b"\xff" * 8
"""The number of the message that ends an answer."""
SNAPSHOT = b"snapshot/1"
"""The request for all that the index holds."""
QUEUED = 1 << 17
"""Most changed pages that wait for the thread; more are dropped."""
KEPT = 10_000
KEPT_BYTES = 32 << 20
"""Most batches that are kept for replay, and most bytes of them."""
HIGH_WATER = 4096
"""Most messages that wait for one subscriber."""
AT_ONCE = 128
"""Pages of one message of a snapshot: the engine's thread may have to wait while Python makes one."""
MOST_ANSWERS = 32
"""Most answers that are being sent."""
PATIENCE = 10.0
"""Seconds after which an answer is given up whose asker takes none of it."""
REPEAT = 5.0
"""Seconds without anything new after which the latest batch is sent again, to those that have missed it."""
RETRY = 10
"""Milliseconds until an asker whose queue is full is tried again."""
REQUEST_BYTES = 4096


class Step(NamedTuple):
    """What a step has changed."""

    number: int
    ts: float
    changes: Changes


class State(NamedTuple):
    """All that the index holds after the batch `number`."""

    number: int
    nodes: list[Node]


@dataclass
class Answer:
    """Messages (number, payload) that are left of an answer; `following` could not be sent yet."""

    asker: bytes
    messages: Iterator[tuple[bytes, bytes]]
    deadline: float
    following: tuple[bytes, bytes] | None = None


class Publisher:
    """The sockets and their thread, from the start on. One thread (the engine's) calls it.

    ModelError where an address cannot be bound, or keys are given and this ZeroMQ has no CURVE.
    """

    def __init__(
        self,
        events: str,
        replay: str | None = None,
        keys: Keys | None = None,
        *,
        high_water: int = HIGH_WATER,
        queued: int = QUEUED,
        kept: int = KEPT,
        repeat: float = REPEAT,
    ) -> None:
        self._queued, self._most_kept, self._repeat = queued, kept, repeat
        self.published = 0  # batches, ever
        self.dropped = 0
        self._event_log = EventLog()
        self._index: PrefixIndex | None = None
        self._wake_engine: Callable[[], None] = lambda: None
        self._number = int(time.time() * 1000) << 12  # below 2**53 until 2039; an engine makes fewer than 4096 in a ms
        self._queue: deque[Step | State] = deque()
        self._put = 0  # pages handed over, ever; and below those taken: each is written by one thread
        self._got = 0
        self._asked = False  # for the state
        self._closing = False
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._waiting: list[bytes] = []  # who wait for the state
        self._answers: list[Answer] = []
        self._encode = msgspec.msgpack.Encoder().encode
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._context = zmq.Context(io_threads=1)
        self._auth = authenticator(self._context, keys) if keys is not None else None
        self._events = self._bind(zmq.XPUB, events, keys, high_water)
        self._events.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replay = self._bind(zmq.ROUTER, replay, keys, high_water) if replay is not None else None
        if self._replay is not None:
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self.flush()

    @property
    def addresses(self) -> tuple[str, str]:
        """Where events, and requests, are really bound ("" for none)."""
        return tuple(
            "" if socket is None else socket.getsockopt_string(zmq.LAST_ENDPOINT)
            for socket in (self._events, self._replay)
        )  # type: ignore[return-value]  # of two

    def attach(self, index: PrefixIndex, wake: Callable[[], None]) -> None:
        """Follows an index from now on. `wake` may be called from any thread and makes the engine call `flush` soon."""
        self._index, self._wake_engine = index, wake
        for node in index.nodes():
            self._event_log.stored(node)
        index.listener = self._event_log
        self.flush()

    def flush(self) -> None:
        """A step has ended: hands over what has changed, and the state if somebody has asked. Never waits."""
        changes = self._event_log.take()
        if changes is not None:
            self._number += 1
            if self._put - self._got + len(changes.changes) > self._queued or not self._thread.is_alive():
                self.dropped += 1
            else:
                self.published += 1
                self._put += len(changes.changes)
                self._queue.append(Step(self._number, time.time(), changes))
        elif not self._asked:
            return
        if self._asked:
            self._asked = False
            self._queue.append(State(self._number, self._index.nodes() if self._index is not None else []))
        self._signal()

    def close(self) -> None:
        """Sends what waits, as far as it can be sent at once, and ends."""
        self._closing = True
        self._signal()
        self._thread.join(timeout=1.0)

    # --- the thread

    def _signal(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            os.write(self._woken, b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not (self._closing and not self._queue):
                ready = dict(poller.poll(self._pause()))
                if self._wake in ready:
                    os.read(self._wake, 4096)
                self._publish()
                if (self._events in ready and self._joined()) or not (ready or self._answers):
                    self._tell_latest()
                if self._replay in ready and self._replay is not None:
                    self.answer(self._replay.recv_multipart())
                self._send_answers()
        except Exception:  # noqa: BLE001 - whatever it is, the engine serves on
            _log.exception("tailrace: KV events are no longer published: the engine goes on without")
        finally:
            self._release()

    def _pause(self) -> int:
        """Milliseconds until there is something to do without being told."""
        if not self._answers:
            return int(self._repeat * 1000)
        return 0 if any(answer.following is None for answer in self._answers) else RETRY

    def _publish(self) -> None:
        """Everything that the engine has handed over."""
        queue = self._queue
        while queue:
            handed = queue.popleft()
            if isinstance(handed, State):
                self._answer_state(handed)
                continue
            self._got += len(handed.changes.changes)
            payload = self._encode(Batch(handed.ts, events_of(handed.changes)))
            self._kept.append((handed.number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > self._most_kept or self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])
            self._send(handed.number, payload)

    def _send(self, number: int, payload: bytes) -> None:
        """To all subscribers whose queues have room; such a socket never waits for any."""
        self._events.send_multipart([TOPIC, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def _joined(self) -> bool:
        """Whether the message from a subscriber is that it has subscribed."""
        return self._events.recv().startswith(b"\1")

    def _tell_latest(self) -> None:
        """Sends the latest batch again, by whose number one sees what one has missed."""
        if self._kept:
            self._send(*self._kept[-1])

    # --- requests

    def answer(self, frames: list[bytes]) -> None:
        """A request is an empty frame and one more: a number (8 bytes, big-endian) asks for the batches from that one
        on, as far as they are kept; `SNAPSHOT` for the state, in batches that have the number of the last one that is
        contained in it. Each message of an answer is an empty frame, a number and a batch; the last one has the number
        `END`, and for a batch nothing, or what was wrong with the request."""
        asker, request = frames[0], frames[-1]
        if len(frames) != 3 or frames[1] or not (request == SNAPSHOT or len(request) == 8):
            self._begin(asker, [(END, b"a request is an empty frame, and a number of 8 bytes or " + SNAPSHOT)])
        elif len(self._answers) + len(self._waiting) >= MOST_ANSWERS:
            self._begin(asker, [(END, b"too many requests are being answered")])
        elif request == SNAPSHOT:
            self._waiting.append(asker)
            if len(self._waiting) == 1:
                self._asked = True
                self._wake_engine()
        else:
            kept = list(self._kept)
            first = bisect_left(kept, (int.from_bytes(request, "big"), b""))
            batches = ((number.to_bytes(8, "big"), payload) for number, payload in kept[first:])
            self._begin(asker, chain(batches, [(END, b"")]))

    def _answer_state(self, state: State) -> None:
        number, now = state.number.to_bytes(8, "big"), time.time()

        def messages() -> Iterator[tuple[bytes, bytes]]:
            for events in snapshot(state.nodes, AT_ONCE):
                yield number, self._encode(Batch(now, events))
            yield END, b""

        waiting, self._waiting = self._waiting, []
        for asker in waiting:
            self._begin(asker, messages())

    def _begin(self, asker: bytes, messages: Iterable[tuple[bytes, bytes]]) -> None:
        self._answers.append(Answer(asker, iter(messages), time.monotonic() + PATIENCE))

    def _send_answers(self) -> None:
        """One message of each answer; the engine's events go between."""
        self._answers = [answer for answer in self._answers if self._send_one(answer)]

    def _send_one(self, answer: Answer) -> bool:
        """Whether there is more of it to send."""
        message = answer.following or next(answer.messages, None)
        if message is None or self._replay is None:
            return False
        now = time.monotonic()
        try:
            self._replay.send_multipart([answer.asker, b"", *message], zmq.NOBLOCK)
        except zmq.Again:
            answer.following = message
            return now < answer.deadline
        except zmq.ZMQError:  # it has left
            return False
        answer.following, answer.deadline = None, now + PATIENCE
        return True

    # --- sockets

    def _bind(self, kind: int, address: str, keys: Keys | None, high_water: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(high_water)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)  # of what comes in
        socket.setsockopt(zmq.IPV6, int("[" in address))
        if keys is not None:
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_publickey = zmq.curve_public(keys.secret.encode())
            socket.curve_server = True
        try:
            socket.bind(address.replace("//localhost:", "//127.0.0.1:"))
        except zmq.ZMQError as error:
            self._release()
            raise ModelError(f"KV events cannot be published on {address}: {error.strerror}") from None
        return socket

    def _release(self) -> None:
        if self._auth is not None:
            self._auth.stop()
        self._context.destroy(linger=0)


def authenticator(context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> ThreadAuthenticator:
    """Lets only these subscribers into the sockets of a context that ask for keys. ModelError where that cannot be."""
    if not zmq.has("curve"):
        raise ModelError("--kv-events-key needs a ZeroMQ with CURVE, and the one that is installed has none")
    from zmq.auth.thread import ThreadAuthenticator

    auth = ThreadAuthenticator(context)
    auth.start()
    auth.configure_curve_callback(domain="*", credentials_provider=Allowed(keys.subscribers))
    return auth


class Allowed:
    """What pyzmq asks whether a client may come in."""

    def __init__(self, keys: frozenset[str]) -> None:
        self._keys = keys

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether this public key (Z85) is one of those allowed."""
        return key.decode() in self._keys
