"""The engine process: `python -m tailrace.engine.process`, with its line to the API process as standard input.

The first message says what to serve. It loads the model, warms up both phases through the real path, says `Ready`, and
then steps: take in what has arrived, run a step, send the news. One helper thread reads, so that a step costs no look
at the socket; another sends heartbeats, so that a long step is not taken for a hang. It ends with its parent. Imports
no tokenizer, template or HTTP code.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import msgspec

from tailrace.engine.protocol import (
    Abort,
    Adapted,
    Control,
    Encode,
    Fatal,
    FromEngine,
    Gauges,
    Heartbeat,
    KvPool,
    LoadAdapter,
    Ready,
    SamplingParams,
    Submit,
    Task,
    TierGauges,
    ToEngine,
    Tokens,
    UnloadAdapter,
)
from tailrace.engine.spec import AdapterSpec, EngineSpec
from tailrace.engine.wire import Line
from tailrace.terms import InvalidInput, ModelError, TailraceError

if TYPE_CHECKING:
    from tailrace.engine.profile import Profile

BEAT = 0.5
"""Seconds between heartbeats, idle or not."""
IDLE = 1.0
"""Seconds of rest after which an engine looks over its books, once until it works again."""
LOOK = 0.02
"""Seconds between two looks at deadlines while every request waits for pages, or for what a tier has."""
SAVE_SECONDS = 10.0
"""Longest that an engine which is to sleep takes to store what it has cached."""
WARM_PROMPT = 16
"""A page, and as many rows as the products of longer prompts take at once."""
WARM_OUTPUT = 2
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


class Core(Protocol):
    """What the loop needs of `EngineCore`."""

    draining: bool
    wake: Callable[[], None]
    on_adapted: Callable[[Adapted], object]

    @property
    def idle(self) -> bool: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def progress(self) -> int: ...

    @property
    def work(self) -> int | None: ...

    @property
    def gauges(self) -> Gauges: ...

    @property
    def tier_gauges(self) -> dict[str, TierGauges]: ...

    def submit(self, request: Submit) -> None: ...

    def encode(self, request: Encode) -> None: ...

    def abort(self, requests: Iterable[str]) -> None: ...

    def load_adapter(self, adapter: AdapterSpec) -> None: ...

    def unload_adapter(self, adapter: int) -> None: ...

    def reset_prefix(self) -> None: ...

    def step(self, intake: Callable[[], None] | None = None) -> Tokens | None: ...

    def interrupt(self) -> None: ...

    def check_integrity(self) -> None: ...

    def settle(self) -> None: ...

    def save(self, seconds: float) -> None: ...

    def parts(self) -> Sequence[tuple[object, str, str]]: ...

    @property
    def backend(self) -> object: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Loaded:
    """A core, and the sizes that it serves. `phases` are seconds of what building it took."""

    core: Core
    max_context: int
    kv_tokens: int
    page_size: int
    kernels: str
    threads: int
    weight_bytes: int
    kv_bytes: int
    warm_tokens: tuple[
        int, int
    ]  # the warm-up prompt is made of these ids: first and count; ordinary ones where there are
    phases: dict[str, float]
    kv_pools: tuple[KvPool, ...] = ()
    task: Task = "generate"
    width: int = 0
    dimensions: tuple[int, ...] = ()
    unit: bool = False
    sigmoid: bool = False
    adapters: tuple[Adapted, ...] = ()
    parity: float = 0.0


Loader = Callable[[EngineSpec], Loaded]


class Phases:
    """A stopwatch whose laps have names."""

    def __init__(self, start: float) -> None:
        self.laps: dict[str, float] = {}
        self._last = start

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`."""
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now


def loader_of(spec: EngineSpec) -> Loader:
    """The function that builds the core: `spec.loader` ("module:function"), or the built-in one."""
    if not spec.loader:
        from tailrace.engine.loading import load

        return load
    import importlib

    module, _, name = spec.loader.partition(":")
    loader: Loader = getattr(importlib.import_module(module), name)
    return loader


def warm_up(loaded: Loaded, request: str = "warm-up") -> None:
    """A short prompt and a decode step, or a short text, through the core itself; its pages are forgotten."""
    core = loaded.core
    length = max(1, min(WARM_PROMPT, loaded.max_context - WARM_OUTPUT - 1))
    first, count = loaded.warm_tokens
    prompt = [first + i % count for i in range(length)]
    if loaded.task == "generate":
        params = SamplingParams(max_tokens=WARM_OUTPUT, min_tokens=WARM_OUTPUT, temperature=0.0, ignore_eos=True)
        core.submit(Submit(request, prompt, params))
    else:
        core.encode(Encode(request, array("i", prompt).tobytes(), [length]))
    finished = False
    while not finished:
        news = core.step()
        for output in news.outputs if news is not None else ():
            if output.finish == "error":
                raise ModelError(f"the warm-up request failed: {output.error}")
            finished = finished or output.finish is not None
    while core.has_work:
        core.step()
    core.reset_prefix()


class Serving:
    """The loop between the line and the core."""

    def __init__(self, loaded: Loaded, line: Line) -> None:
        self._core = loaded.core
        self._line = line
        self._encode = msgspec.msgpack.Encoder().encode
        self._inbox: SimpleQueue[ToEngine | None] = SimpleQueue()  # None only wakes
        self._leaving = False
        self.sleepy = False  # what is cached is to be stored before the end
        self._profile: Profile | None = None
        self._checked = False  # the books, since the last request
        self._turns = 0
        self._busy = False  # whether the loop does anything but wait for news
        self._stopped = threading.Event()
        self._told: Callable[[str, str], None] | None = None  # of each step, where the log is to have them
        self._gauges = loaded.core.gauges
        loaded.core.wake = lambda: self._inbox.put(None)
        loaded.core.on_adapted = self.send

    def send(self, message: FromEngine) -> None:
        """Hands a message over."""
        self._line.send(self._encode(message))

    def leave(self) -> None:
        """Takes nothing new, and ends the loop when nothing is held. May be called from a signal handler."""
        self._core.draining = True
        self._leaving = True
        self._inbox.put(None)

    def begin(self, ready: Ready) -> None:
        """Says that it may be asked. A heartbeat before that tells the counters from which this engine starts: whoever
        asks for them at once is told."""
        self.send(self._heartbeat())
        self.send(ready)

    def run(self) -> None:
        """Until stopped, or drained."""
        beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beats.start()
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        core, take_in = self._core, self._take_in
        while not self._stopped.is_set():
            self._busy = True
            self._turns += 1
            if not core.has_work:
                if self._leaving and core.idle:
                    break
                self._rest()
            news = core.step(take_in)
            if news is not None:
                self._gauges = news.gauges
                self.send(news)
                if self._told is not None:
                    self._told("tailrace: %s", step_line(news))
        self._stopped.set()
        beats.join()

    def _rest(self) -> None:
        """Waits for a message. An engine that has rested a while checks that all it lent has come back."""
        idle = self._core.idle
        self._busy = False
        try:
            message = self._inbox.get(timeout=LOOK if not idle else None if self._checked else IDLE)
            self._busy = True
        except Empty:
            if not idle:
                return
            self._core.check_integrity()
            self._checked = True
            return
        self._checked = False
        self._handle(message)

    def _take_in(self) -> None:
        """Everything that has arrived; the core calls this right before it launches a step."""
        inbox = self._inbox
        while not inbox.empty():
            self._handle(inbox.get())

    def _handle(self, message: ToEngine | None) -> None:
        match message:
            case Submit():
                self._core.submit(message)
            case Encode():
                self._core.encode(message)
            case Abort(requests=requests):
                self._core.abort(requests)
            case LoadAdapter(adapter=adapter):
                self._core.load_adapter(adapter)
            case UnloadAdapter(adapter=gone):
                self._core.unload_adapter(gone)
            case Control(verb="drain"):
                self._core.draining = True
            case Control(verb="stop"):
                self._stopped.set()
            case Control(verb="reset_prefix"):
                self._core.reset_prefix()
            case Control(verb="sleep"):
                self.sleepy = True
                self.leave()
            case Control(verb="log_level", level=level):
                self._log(level)
            case Control(verb="profile", steps=steps):
                from tailrace.engine.profile import Profile

                if self._profile is None:
                    self._profile = Profile(self._core, self.send, self._profiled, steps)
            case Control(verb="profile_end"):
                if self._profile is not None:
                    self._profile.end()

    def _profiled(self) -> None:
        self._profile = None

    def _log(self, level: str) -> None:
        import logging

        logging.basicConfig(format="%(message)s")  # to standard error; does nothing the second time
        logging.getLogger("tailrace").setLevel(level.upper())
        self._told = logging.getLogger("tailrace").debug if level == "debug" else None

    def _read(self) -> None:
        """Everything that the API process says, until that is gone: then there is nothing left to live for."""
        decode = msgspec.msgpack.Decoder(ToEngine).decode
        while (data := self._line.receive()) is not None:
            self._inbox.put(decode(data))
            self._core.interrupt()
        if not self._stopped.is_set():
            os._exit(1)

    def _heartbeat(self) -> Heartbeat:
        gauges = msgspec.structs.replace(self._gauges, tiers=self._core.tier_gauges)
        work = self._core.work
        return Heartbeat(
            time.monotonic(),
            self._core.progress,
            gauges,
            work=-1 if work is None else work,
            turns=self._turns,
            busy=self._busy,
        )

    def _beat(self) -> None:
        """Signs of life, whatever the main thread is busy with."""
        while not self._stopped.wait(BEAT):
            self.send(self._heartbeat())


def step_line(news: Tokens) -> str:
    """What a step gave, for the log: counts, never text."""
    gauges = news.gauges
    tokens = sum(len(output.tokens) for output in news.outputs)
    return (
        f"step {gauges.steps}: {tokens} tokens for {len(news.outputs)} requests; {gauges.running} running, "
        f"{gauges.waiting} waiting, {gauges.used_pages} of {gauges.pages} pages used, {gauges.cached_pages} cached"
    )


def die_with_parent(parent: int) -> None:
    """Asks the kernel to end this process when its parent ends, and ends it now where that has happened. Where there is
    no such kernel, the end of the line tells it (`Serving`), though only once it has started."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def name_process() -> None:
    """Tells this process from its parent, of which it may be a fork, in `ps` and `top`."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"tailrace-engine", 0, 0, 0)


class Start(msgspec.Struct, frozen=True):
    """The first message (JSON): what to serve, for which process, and when it decided so (monotonic seconds)."""

    spec: EngineSpec
    parent: int
    spawned_at: float


def main() -> int:
    """Runs one engine until it is told to stop; returns the exit status."""
    line = Line.inherited()
    told = line.receive()
    if told is None:
        return 0  # nobody wants an engine after all
    start = msgspec.json.decode(told, type=Start)
    spec = start.spec
    phases = Phases(start.spawned_at)
    phases.lap("imports")
    gc.disable()  # nothing that start-up makes is garbage worth looking for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(start.parent)
    name_process()
    try:
        loaded = loader_of(spec)(spec)
        phases.lap("load")
        laps = {"imports": 0.0, **loaded.phases}
        laps["imports"] += phases.laps["imports"]  # and what was left of the interpreter's start
        laps["other"] = max(0.0, phases.laps["load"] - sum(loaded.phases.values()))
        if spec.warm_up:
            warm_up(loaded)
        phases.lap("warm_up")
        laps["warm_up"] = phases.laps["warm_up"]
        serving = Serving(loaded, line)

        def on_term(_signal: int, _frame: FrameType | None) -> None:
            serving.leave()

        signal.signal(signal.SIGTERM, on_term)
        gc.freeze()  # what start-up made stays: later collections need not look at it
        gc.enable()
        serving.begin(ready_message(spec, loaded, laps))
        loaded.core.settle()
        serving.run()
        if serving.sleepy:
            loaded.core.save(SAVE_SECONDS)
        loaded.core.close()
    except ConnectionError:  # the API process is gone
        return 1
    except Exception as error:  # noqa: BLE001 - last words: whatever it was, the parent must hear of it
        if not isinstance(error, TailraceError):
            traceback.print_exc()
        why = str(error) if isinstance(error, TailraceError) else repr(error)
        with contextlib.suppress(ConnectionError):
            line.send(msgspec.msgpack.encode(Fatal(why, invalid=isinstance(error, InvalidInput))))
        return 1
    line.close()
    return 0


def ready_message(spec: EngineSpec, loaded: Loaded, phases: dict[str, float]) -> Ready:
    """What the API process may tell the world."""
    return Ready(
        phases=phases,
        max_context=loaded.max_context,
        kv_tokens=loaded.kv_tokens,
        page_size=loaded.page_size,
        max_running=spec.max_running,
        max_waiting=spec.max_waiting,
        step_tokens=spec.step_tokens,
        kernels=loaded.kernels,
        threads=loaded.threads,
        weight_bytes=loaded.weight_bytes,
        kv_bytes=loaded.kv_bytes,
        kv_pools=list(loaded.kv_pools),
        task=loaded.task,
        width=loaded.width,
        dimensions=list(loaded.dimensions),
        unit=loaded.unit,
        sigmoid=loaded.sigmoid,
        adapters=list(loaded.adapters),
        parity=loaded.parity,
    )


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # worker threads of a native backend must not hold the exit up
