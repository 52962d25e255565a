"""The API process's side of the engine: hands requests over, spreads what comes back, and supervises.

One asyncio loop owns a client; nothing here is thread-safe. A request ends exactly once, through its `Sink`: by an
output with a finish reason, or by a failure. What had produced nothing and was still queued when an engine died is
handed to the next one; the rest fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from socket import socket
from typing import Literal

import msgspec

from tailrace.engine.held import Held, HeldRequests, Sink
from tailrace.engine.protocol import (
    Abort,
    Adapted,
    Control,
    Encode,
    Fatal,
    FromEngine,
    Gauges,
    Heartbeat,
    LoadAdapter,
    Output,
    Ready,
    Spans,
    Submit,
    ToEngine,
    Tokens,
    UnloadAdapter,
)
from tailrace.engine.spec import AdapterSpec, EngineSpec
from tailrace.engine.supervisor import (
    Backoff,
    Bounds,
    Child,
    EngineProcess,
    Pulse,
    begin,
    death_notice,
    hand_over,
    spawn,
)
from tailrace.engine.wire import Peer
from tailrace.terms import EngineDied, Event, EventKind, InvalidInput, Overloaded, TailraceError

State = Literal["new", "starting", "ready", "sleeping", "asleep", "down", "failed", "closed"]
"""`sleeping`: on the way to `asleep`, where there is no engine, but a process that has imported what one needs."""
TICK = 0.5
"""Seconds between two looks at the engine's pulse."""
SLEEP_LIMIT = 15.0
"""Longest that an engine may take to store what it has cached and to end; then it is ended."""
STANDBY = "tailrace.engine.early"
"""What a process runs that is to be an engine later."""
Listener = Callable[[Sequence[Event]], None]
EngineLog = Literal["debug", "info", "warning", "error"]


class EngineClient:
    """Spawns, feeds, watches and restarts one engine."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        bounds: Bounds | None = None,
        backoff: Backoff | None = None,
        report: Callable[[str], object] | None = None,
    ) -> None:
        """`report` takes the lines that tell of deaths and restarts; by default they go to standard error."""
        self.spec = spec
        self._report = report or _to_stderr
        self.bounds = bounds or Bounds()
        self.backoff = backoff or Backoff()
        self.state: State = "new"
        self.ready: Ready | None = None
        self.gauges = Gauges()
        self.baseline: Gauges | None = None  # the counters that the current engine started from
        self.error = ""  # why the last engine ended
        self._invalid = False  # it was told to do what cannot be
        self.restarts = 0
        self.wakes = 0
        self.log_level: EngineLog = "warning"
        self.on_spans: Callable[[Spans], None] | None = None
        """Gets the pieces of a profile."""
        self.refused = False  # draining: nothing new is taken
        self.on_adapters: Callable[[list[Adapted]], object] = lambda _news: None
        """Hears, at the start of each engine, what has become of the adapters that it was to have."""
        self._loads: dict[int, asyncio.Future[Adapted]] = {}  # that no engine has answered yet
        self._listeners: list[Listener] = []
        self._held = HeldRequests(self._tell)
        self._process: EngineProcess | None = None
        self._pulse = Pulse(0.0)
        self._peer: Peer | None = None
        self._pid_fd = -1
        self._first = True  # no engine has been ready yet
        self._waking = False
        self._standby: tuple[Child, socket] | None = None  # that the next engine will be, once it is told what to serve
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._watch: asyncio.Task[None] | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    # Life cycle

    def spawn(self) -> None:
        """Starts the engine process; returns at once. Optional before `start`: gives it a head start."""
        if self._process is None:
            self.adopt(spawn(self.spec))

    def adopt(self, process: EngineProcess) -> None:
        """Takes over a process that `supervisor.spawn` has started with this client's spec."""
        self._process = process
        self._pulse = self._pulse.successor(process.spawned_at)

    async def start(self) -> None:
        """Begins to listen and to supervise. Returns at once; `wait_ready` waits."""
        self.spawn()
        self._open()
        self._watch = asyncio.create_task(self._watch_pulse(), name="engine watch")

    async def wait_ready(self) -> Ready:
        """Waits until the engine has warmed up. Where its first start fails raises InvalidInput if what it was told is
        the reason, else EngineDied."""
        while self.ready is None:
            if self.state in ("failed", "closed"):
                raise InvalidInput(self.error) if self._invalid else EngineDied(self.error or "the engine is closed")
            await self._change()
        return self.ready

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def drain(self) -> None:
        """Takes nothing new and waits until nothing is held."""
        self.refused = True
        self._send(Control("drain"))
        await self._held.idle.wait()

    async def sleep(self) -> None:
        """Ends the engine, once it has stored what it has cached in the tiers below the pool: all of its memory goes
        back to the system. A process that has imported what an engine needs waits for `wake`. Raises EngineDied where
        there is no engine that could sleep, Overloaded where it holds requests."""
        if self.state == "asleep":
            return
        if self.state != "ready" or self._process is None:
            raise EngineDied(f"there is no engine that could sleep: it is {self.state}")
        if self._held:
            raise Overloaded(f"{len(self._held)} requests are held")
        self.state = "sleeping"
        self._send(Control("sleep"))
        process = self._process
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLEEP_LIMIT):
                while process.exit_code() is None and self._sleeping:
                    await asyncio.sleep(0.005)
        if not self._sleeping:  # closed meanwhile
            return
        self._shut()
        process.kill()
        self._process = None
        self.gauges, self.baseline = Gauges(), None
        self.state = "asleep"
        with contextlib.suppress(OSError):  # then `wake` starts one
            self._standby = begin(STANDBY)
        self._changed.set()

    @property
    def _sleeping(self) -> bool:
        return self.state == "sleeping"

    async def wake(self) -> Ready:
        """Starts the engine again after `sleep`, with the sizes that it had, and waits until it is ready. Raises
        EngineDied where there is none to be started or it dies; the next one is then started with back-off, as ever."""
        if self.state == "asleep":
            waiting, self._standby = self._standby, None
            if waiting is not None and waiting[0].poll() is not None:
                waiting[1].close()
                waiting = None
            self.wakes += 1
            self._waking = True
            self.error = ""
            self.spec = self._as_before()
            self.adopt(hand_over(*(waiting or begin(STANDBY)), self.spec))
            self._open()
        while self.state == "starting":
            await self._change()
        if self.state != "ready" or self.ready is None:
            raise EngineDied(f"the engine did not wake: {self.error or self.state}")
        return self.ready

    def _as_before(self) -> EngineSpec:
        """The spec, with what an engine chooses by the memory that is free as the last one chose it: answers depend on
        the served context where the model's positions do."""
        if self.ready is None:
            return self.spec
        return dataclasses.replace(self.spec, kv_tokens=self.ready.kv_tokens, max_context=self.ready.max_context)

    @property
    def incarnation(self) -> int:
        """Grows with every engine that is started: each counts from nothing."""
        return self.restarts + self.wakes

    @property
    def standby(self) -> int | None:
        """While asleep: the id of the process that waits."""
        return self._standby[0].pid if self._standby is not None else None

    async def close(self) -> None:
        """Ends the engine at once; whatever is still held fails."""
        self.state = "closed"
        if self._restart is not None:
            self._restart.cancel()
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        self._dismiss()
        if self._process is not None and self.ready is not None:
            self._send(Control("stop"))
        if self._process is not None:
            process = self._process
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    while process.exit_code() is None:
                        await asyncio.sleep(0.01)
            self._shut()
            process.kill()
        self._held.fail("the server is shutting down", queue_survives=False)
        self._changed.set()

    def kill(self) -> None:
        """Ends the engine process without waiting for anything; only for a parent that ends right after."""
        if self._process is not None:
            self._process.kill()
        self._dismiss()

    def _dismiss(self) -> None:
        """Ends the process that waits to be an engine."""
        waiting, self._standby = self._standby, None
        if waiting is not None:
            process, connection = waiting
            EngineProcess(process, connection, 0.0).kill()

    # Requests

    @property
    def healthy(self) -> bool:
        """Ready, with a fresh heartbeat, and making progress where it holds requests."""
        return (
            self.state == "ready"
            and self._pulse.verdict(time.monotonic(), self.bounds, held=bool(self._held)) is None
            and self._process is not None
            and self._process.exit_code() is None
        )

    @property
    def held(self) -> int:
        """Requests that have not ended."""
        return len(self._held)

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.process.pid if self._process else None

    def listen(self, listener: Listener) -> None:
        """Calls it with every event, in order, before the outputs of the same step are handed on."""
        self._listeners.append(listener)

    def submit(self, submit: Submit | Encode, sink: Sink) -> None:
        """Hands a request over. Raises Overloaded (queue full, draining) or EngineDied (no engine to hand it to);
        after that the sink hears of everything."""
        if self.refused:
            raise Overloaded("the server is shutting down", retry_after=5.0)
        if self.state != "ready" or self.ready is None:
            raise EngineDied("the engine is not ready" if self.state == "starting" else f"no engine: {self.error}")
        if self._held.not_admitted >= self.ready.max_waiting + self.ready.max_running:
            raise Overloaded(f"the queue is full ({self.ready.max_waiting} requests are waiting)")
        if not self._held:
            self._pulse.stood = 0.0
        self._hand_over(self._held.add(submit, sink))

    async def generate(self, submit: Submit) -> AsyncIterator[Output]:
        """`submit` as an iterator of outputs; leaving it early aborts the request. Raises as `submit`, and what the
        sink would hear of."""
        queue: asyncio.Queue[Output | TailraceError] = asyncio.Queue()
        self.submit(submit, _QueueSink(queue))
        finished = False
        try:
            while not finished:
                item = await queue.get()
                if isinstance(item, TailraceError):
                    finished = True
                    raise item
                finished = item.finish is not None
                yield item
        finally:
            if not finished:
                self.abort([submit.request])

    def abort(self, requests: Iterable[str]) -> None:
        """Their clients have left: the sinks hear nothing more, and the engine frees what they hold."""
        sent = self._held.leave(requests)
        if sent:
            self._send(Abort(sent))

    def reset_prefix(self) -> None:
        """Forgets every cached prefix that no request holds."""
        self._send(Control("reset_prefix"))

    async def load_adapter(self, adapter: AdapterSpec) -> Adapted:
        """Has the engine load an adapter, and each that comes after it. Returns what has become of it, which may be an
        `error`. Raises EngineDied, and TimeoutError where its files take too long to be read."""
        if self.state != "ready":
            raise EngineDied(f"there is no engine that could load an adapter: it is {self.state}")
        loaded: asyncio.Future[Adapted] = asyncio.get_running_loop().create_future()
        self._loads[adapter.id] = loaded
        try:
            self._send(LoadAdapter(adapter))
            async with asyncio.timeout(self.spec.lora_seconds):
                news = await loaded
        except (asyncio.CancelledError, TimeoutError):
            self._send(UnloadAdapter(adapter.id))
            raise
        finally:
            del self._loads[adapter.id]
        if not news.error:
            self.spec = dataclasses.replace(self.spec, adapters=(*self.spec.adapters, adapter))
        return news

    def unload_adapter(self, adapter: int) -> None:
        """No later request has it, and no later engine."""
        left = tuple(one for one in self.spec.adapters if one.id != adapter)
        self.spec = dataclasses.replace(self.spec, adapters=left)
        self._send(UnloadAdapter(adapter))

    def _adapted(self, news: list[Adapted]) -> None:
        """A new engine has these; it does without those that could not be loaded, and so do later ones."""
        lost = {one.id: one.error for one in news if one.error}
        for adapter in self.spec.adapters:
            if adapter.id in lost:
                self._report(f"tailrace: the adapter {adapter.name} is no longer served: {lost[adapter.id]}")
        left = tuple(one for one in self.spec.adapters if one.id not in lost)
        self.spec = dataclasses.replace(self.spec, adapters=left, adapters_wanted=False)
        self.on_adapters(news)

    def set_log_level(self, level: EngineLog) -> None:
        """Of the engine's own log, also of those that come after it."""
        self.log_level = level
        self._send(Control("log_level", level=level))

    def profile(self, steps: int = 0) -> None:
        """Asks for `Spans` (`on_spans`), of so many steps or until `end_profile`."""
        self._send(Control("profile", steps=steps))

    def end_profile(self) -> None:
        """The last piece comes then; nothing where there is no profile."""
        self._send(Control("profile_end"))

    def _hand_over(self, held: Held) -> None:
        if self.state == "ready":  # otherwise it is handed over when the next engine is
            held.sent = self._send(held.submit)

    def _hand_over_unsent(self) -> None:
        for held in self._held.unsent():
            self._hand_over(held)

    # Messages

    def _send(self, message: ToEngine) -> bool:
        """False where there is no engine to take it: its end is noticed elsewhere."""
        return self._peer is not None and self._peer.send(self._encode(message))

    def _take(self, data: memoryview | bytes) -> None:
        self._receive(self._decode(data))

    def _receive(self, message: FromEngine) -> None:
        now = time.monotonic()
        match message:
            case Tokens(outputs=outputs, events=events, gauges=gauges):
                self._pulse.moved(now)
                self.gauges = gauges
                plain = all(event.kind is EventKind.TOKEN for event in events)
                if not plain:
                    self._held.note(events)
                if events:
                    self._tell(events)
                for output in outputs:
                    self._held.spread(output)
                if not plain:
                    self._held.ended(events)
            case Heartbeat(gauges=gauges):
                self._pulse.beat(now, message)
                if self._pulse.stuck >= self._pulse.patience(self.bounds):  # it is told of at once
                    asyncio.get_running_loop().call_soon(self._look)
                self.gauges = gauges
                self.baseline = self.baseline or gauges
            case Ready() if self.state == "starting":
                self._pulse.ready_at = now
                self._pulse.moved(now)
                self.ready = message
                self._adapted(message.adapters)
                self.state = "ready"
                self._first = False
                if self.log_level != "warning":
                    self._send(Control("log_level", level=self.log_level))
                self._hand_over_unsent()
                self._changed.set()
                waking, self._waking = self._waking, False
                if self.restarts and not waking:
                    took = now - self._pulse.spawned_at
                    self._report(f"tailrace: the engine is ready again after {took:.2f} s (restart {self.restarts})")
            case Spans() if self.on_spans is not None:
                self.on_spans(message)
            case Adapted(id=adapter) if adapter in self._loads and not self._loads[adapter].done():
                self._loads[adapter].set_result(message)
            case Fatal(error=error, invalid=invalid):
                self.error, self._invalid = error, invalid

    def _tell(self, events: Sequence[Event]) -> None:
        for listener in self._listeners:
            listener(events)

    # Supervision

    def _open(self) -> None:
        """Listens to the current process."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        self.state = "starting"
        self._peer = Peer(self._process.connection, loop, self._take)
        with contextlib.suppress(ProcessLookupError):  # it may have ended already; the next tick sees that
            self._pid_fd = os.pidfd_open(self._process.process.pid)
            loop.add_reader(self._pid_fd, self._exited)

    def _shut(self) -> None:
        if self._pid_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._pid_fd)
            os.close(self._pid_fd)
            self._pid_fd = -1
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        for load in self._loads.values():
            if not load.done():
                load.set_exception(EngineDied("the engine ended while it loaded the adapter"))

    def _exited(self) -> None:
        assert self._process is not None
        if self._peer is not None:
            self._peer.read()  # its last words
        if self._sleeping:
            self._shut()
            return
        code = self._process.exit_code()
        self._died(f"the engine process ended: {self.error or death_notice(code)}")

    async def _watch_pulse(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            late, before = now - before > 3 * TICK, now
            if not late:  # when this process itself was stopped, the engine is not to blame
                self._look()

    def _look(self) -> None:
        """Ends an engine with which something is wrong."""
        if self.state not in ("starting", "ready") or self._process is None:
            return
        if self._process.exit_code() is not None:
            self._exited()
            return
        wrong = self._pulse.verdict(time.monotonic(), self.bounds, held=bool(self._held))
        if wrong is not None:
            self._died(wrong)

    def _died(self, why: str) -> None:
        """Fails what the engine held, and arranges for the next one."""
        if self.state in ("down", "failed", "closed", "sleeping", "asleep"):
            return
        first = self._first
        self._waking = False
        now = time.monotonic()
        lived = now - self._pulse.ready_at if self._pulse.ready_at is not None else 0.0
        self.state = "failed" if first else "down"
        self.error = self.error or why
        self.ready = None
        self.gauges, self.baseline = Gauges(), None
        self._shut()
        assert self._process is not None
        self._process.kill()
        again = not first and not self.refused
        lost = self._held.fail(why, queue_survives=again)
        self._changed.set()
        delay = self.backoff.died(lived) if again else 0.0
        then = f"the next one starts in {delay:g} s" if again else "no other one is started"
        counts = f"{lost} requests were lost, {len(self._held)} kept"
        if not first:  # then whoever waits for it says so
            self._report(f"tailrace: an engine was ended after {lived:.1f} s of service ({why}); {counts}; {then}")
        if again:
            self._restart = asyncio.get_running_loop().call_later(delay, self._start_again)

    def _start_again(self) -> None:
        if self.state != "down":
            return
        self.restarts += 1
        self.error = ""
        self.adopt(spawn(self.spec))
        self._open()


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _QueueSink:
    queue: asyncio.Queue[Output | TailraceError]

    def queued(self) -> None:
        """Nothing to do: an iterator only sees outputs."""

    def output(self, output: Output) -> None:
        self.queue.put_nowait(output)

    def failed(self, error: TailraceError) -> None:
        self.queue.put_nowait(error)
