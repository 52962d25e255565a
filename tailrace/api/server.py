"""The server process: starts the engine first, then everything else beside it; serves; drains.

Light at import, so that `run` can spawn the engine before anything heavy loads here.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tailrace.api.settings import LOOPBACK, Settings
from tailrace.engine.supervisor import EngineProcess, spawn
from tailrace.terms import InvalidInput, ModelError, TailraceError

if TYPE_CHECKING:
    import asyncio
    import ssl

    from tailrace.api.connection import Connections
    from tailrace.api.mount import MakeMount, Mount
    from tailrace.api.service import Service
    from tailrace.engine.client import EngineClient
    from tailrace.ledger.writer import Writer
    from tailrace.text import Text

TICK = 1.0
"""Seconds between housekeeping: the Date header, slow clients, the accounts."""
BACKLOG = 2048
UNSENT = 128 << 10
"""Bytes that the system takes for a client beyond what is on its way. Without a bound it takes megabytes, and a client
that reads nothing looks like one that reads."""
FILES = 65_536
"""Most descriptors that the process asks the system for."""
WARM_AFTER = 0.1
"""Seconds from readiness to compiling the chat template, unless a request has done so: the first request goes first."""

FIRST = {
    "generate": ("/v1/chat/completions", '{"model": "NAME", "messages": [{"role": "user", "content": "Hello!"}]}'),
    "embed": ("/v1/embeddings", '{"model": "NAME", "input": "Hello!"}'),
    "rank": ("/rerank", '{"model": "NAME", "query": "Hello!", "documents": ["Good morning", "A wheel"]}'),
}
"""Path and body of a first request, for the start-up report."""

SPARE_FILES = 64
"""Descriptors that are kept for other things than connections."""

TextLoader = Callable[[Settings], "Text"]
Print = Callable[[str], object]


def run(
    settings: Settings,
    *,
    engine: EngineProcess | None = None,
    load_text: TextLoader | None = None,
    started_at: float | None = None,
    report: Print | None = None,
    mount: MakeMount | None = None,
) -> int:
    """Serves until told to stop; returns the exit status (0 after a drain; where it could not start 2 if what it was
    told to serve cannot be, 1 for any other reason).

    `engine`: a process that `supervisor.spawn(settings.engine())` has started already. `started_at`: monotonic time at
    which the person pressed return. `report` prints the start-up lines. `mount` makes what a room above
    serves beside the API. Raises InvalidInput where the settings contradict themselves; the engine, if one was handed
    in, is then ended.
    """
    started = time.monotonic() if started_at is None else started_at
    try:
        settings.check()
        tls = tls_of(settings)
        listener = listen(settings.host, settings.port)
    except BaseException:
        if engine is not None:
            engine.kill()
        raise
    engine = engine or spawn(settings.engine())
    gc.disable()  # until start-up is over: nothing that it makes is garbage worth looking for
    laps = Laps(started)
    laps.lap("spawn")
    try:
        import asyncio

        import uvloop

        laps.lap("imports")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            server = Server(settings, listener, engine, load_text or text_of, laps, report or to_stderr, tls, mount)
            return runner.run(server.main())
    finally:
        engine.kill()
        listener.close()
        gc.enable()


def to_stderr(line: str) -> None:
    """Prints one line at once."""
    print(line, file=sys.stderr, flush=True)


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, bound at once so that clients may queue. Raises TailraceError where that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise TailraceError(
            f"cannot listen on {host}:{port}: {error.strerror}. "
            "Is another server running there? Give another --port, or 0 for any"
        ) from None
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)  # connections inherit it
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def more_files() -> int:
    """Lets the process hold as many descriptors as the system permits: shells and services often give 1,024, which is
    fewer than the clients that may wait. Returns how many it may hold."""
    import resource

    soft, hard = (FILES if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft < min(FILES, hard):
        soft = min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return soft


def tls_of(settings: Settings) -> ssl.SSLContext | None:
    """The context of a server with a certificate; None for plain HTTP. Raises InvalidInput."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    from tailrace.api import tls

    return tls.load(settings.tls_cert, settings.tls_key)


def text_of(settings: Settings) -> Text:
    """Tokenizer and template of the model. At its first start the template is compiled now, so a model whose template
    is wrong is not served; later ones know that from the prepared entry. A template that is given in its place is tried
    each time, and says nothing of the model's own. Raises ModelError, InvalidInput."""
    from dataclasses import replace
    from pathlib import Path

    from tailrace.engine.assets import keep, open_text
    from tailrace.text.tokenizer import load_text

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time, each in a thread of ours
    cache = Path(settings.cache_dir) if settings.cache_dir is not None else None
    assets, rows, table, opened = open_text(Path(settings.model), cache)
    text, given = None, settings.chat_template
    if given is not None:
        from tailrace.text import templates

        told = replace(assets, chat_template=templates.source_of(given))
        text = load_text(told, vocab=rows, token_bytes=table)
        templates.check(text, given)
    if text is None or opened is not None:
        own = load_text(assets, vocab=rows, token_bytes=table)
        try:
            if opened is not None:
                own.warm()
                keep(opened)
        except InvalidInput:
            if text is None:
                raise
        text = text or own
    return text


@dataclass
class Laps:
    """Start-up phases of this process, in seconds."""

    last: float
    laps: dict[str, float] = field(default_factory=dict)

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`."""
        now = time.monotonic()
        self.laps[name] = now - self.last
        self.last = now


class Server:
    """One replica's API process on its loop."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        engine: EngineProcess,
        load_text: TextLoader,
        laps: Laps,
        report: Print,
        tls: ssl.SSLContext | None = None,
        mount: MakeMount | None = None,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._engine = engine
        self._load_text = load_text
        self._laps = laps
        self._tls = tls
        self._make_mount = mount
        self._mount: Mount | None = None
        self._report = report
        self._started = laps.last - sum(laps.laps.values())
        self._signals = 0
        self._failed = 1  # the exit status where it cannot start

    async def main(self) -> int:
        """From the sockets to the exit status."""
        import asyncio

        from tailrace.engine.client import EngineClient
        from tailrace.engine.supervisor import Bounds

        settings, times = self._settings, self._settings.timeouts
        bounds = Bounds(heartbeat=times.heartbeat, stuck=times.stuck, hang=times.hang, start=times.start)
        self._client = client = EngineClient(settings.engine(), bounds=bounds)
        client.adopt(self._engine)
        await client.start()
        self._stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loading = asyncio.create_task(asyncio.to_thread(self._load_text, settings), name="text")
        await asyncio.sleep(0)  # let its thread begin

        from tailrace.api.connection import Connections
        from tailrace.api.front import Front
        from tailrace.api.service import Service

        service = Service(settings, client, stop=self._stop.set)
        if settings.content_store is not None:
            from tailrace.api.batches.runner import Runner
            from tailrace.api.content.store import ContentStore

            service.content = ContentStore(
                settings.content_store,
                retention=settings.content_retention,
                most_bytes=settings.content_bytes,
                report=to_stderr,
            )
            service.batches = Runner(service, service.content)
        if self._make_mount is not None:
            self._mount = self._make_mount(service)
            self._mount.open()
        most = max(1, min(settings.limits.connections, more_files() - SPARE_FILES))
        connections = Connections(
            Front(service, self._mount), times, service.metrics.answered, service.malformed, most=most
        )
        listening = await self._listen(loop, connections)
        self._laps.lap("http")
        housekeeping = asyncio.create_task(self._housekeeping(service, connections))
        following = asyncio.create_task(service.guard.follow(to_stderr)) if service.guard.follows else None
        try:
            started = await self._start(service, loading)
            if started:
                service.accounts.writer = self._account(client)
                if service.batches is not None:
                    service.batches.start()
                warming = asyncio.create_task(self._warm(service), name="warm")
                await self._stop.wait()
                warming.cancel()
                await self._drain(service)
            return 0 if started or self._signals else self._failed
        finally:
            housekeeping.cancel()
            if following is not None:
                following.cancel()
            listening.close()
            if self._mount is not None:
                await self._mount.close()
            connections.close()
            await client.close()
            if service.accounts.writer is not None:
                await asyncio.to_thread(service.accounts.writer.close)
            if service.content is not None:
                await service.content.close()
            await asyncio.sleep(0)

    async def _listen(self, loop: asyncio.AbstractEventLoop, connections: Connections) -> asyncio.Server:
        if self._tls is None:
            return await loop.create_server(connections.accept, sock=self._listener, backlog=BACKLOG)
        loop.add_signal_handler(signal.SIGHUP, self._renew)
        return await loop.create_server(
            connections.accept,
            sock=self._listener,
            backlog=BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=self._settings.timeouts.header,
        )

    def _renew(self) -> None:
        """Reads the certificate again."""
        from tailrace.api import tls

        assert self._tls is not None
        assert self._settings.tls_cert is not None
        assert self._settings.tls_key is not None
        try:
            tls.reload(self._tls, self._settings.tls_cert, self._settings.tls_key)
        except TailraceError as error:
            to_stderr(f"tailrace: {error}; the certificate that was read before still is the one")
        else:
            to_stderr("tailrace: the certificate was read again")

    async def _start(self, service: Service, loading: asyncio.Task[Text]) -> bool:
        """Waits for the text and the engine; prints the report. False where the server cannot start."""
        import asyncio

        client = service.client
        ready = asyncio.create_task(client.wait_ready(), name="ready")
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            if service.content is not None:
                await service.content.open()
            pending: set[asyncio.Task[Any]] = {loading, ready}
            while pending:
                done, _ = await asyncio.wait({*pending, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if stopped in done:
                    return False
                pending -= done
                for task in done:
                    task.result()
                if loading in done:
                    service.text = loading.result()
                    service.table(service.text)
                    self._laps.lap("text")
        except TailraceError as error:
            model, why = self._settings.model, str(error)
            self._report(f"tailrace: cannot serve {model}: {why.removeprefix(f'{model}: ')}")
            self._failed = 2 if isinstance(error, InvalidInput) else 1
            return False
        finally:
            for task in (loading, ready, stopped):
                task.cancel()
        settle_memory()
        self._announce(service)
        if (warning := self._settings.exposed()) is not None:
            to_stderr(f"tailrace: {warning}")
        return True

    def _account(self, client: EngineClient) -> Writer | None:
        """Begins to keep the ledger."""
        from tailrace.api import accounts

        assert client.ready is not None
        began = time.time() - (time.monotonic() - self._started)
        return accounts.begin(self._settings, client.ready, began, to_stderr)

    async def _warm(self, service: Service) -> None:
        """Gets ready what only some requests need: those that come before do it themselves, or wait for it."""
        import asyncio

        assert service.text is not None
        await asyncio.sleep(WARM_AFTER)
        try:
            await asyncio.to_thread(service.text.warm)
        except TailraceError as error:
            self._report(f"tailrace: chat requests cannot be served: {error}")
        settle_memory()

    def _announce(self, service: Service) -> None:
        ready = service.client.ready
        assert ready is not None
        took = time.monotonic() - self._started
        here = " ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in self._laps.laps.items())
        there = " ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in ready.phases.items())
        host = self._settings.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::", *LOOPBACK) else host
        scheme = "http" if self._tls is None else "https"
        url = f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{self._listener.getsockname()[1]}"
        name = service.settings.model_name
        key = ' -H "Authorization: Bearer $TAILRACE_API_KEY"' if self._settings.api_keys or self._settings.keys else ""
        path, body = FIRST[ready.task]
        body = body.replace("NAME", name)
        kv = f"KV pool {ready.kv_tokens} tokens ({ready.kv_bytes / 2**20:.0f} MiB)"
        kind = kv if ready.task == "generate" else f"{ready.task}s texts, {ready.width} numbers each"
        lines = (
            f"Ready in {took:.2f} s. Milliseconds here: {here}; in the engine: {there}",
            f"{name}: context {ready.max_context}, {kind},"
            f" weights {ready.weight_bytes / 2**20:.0f} MiB, {ready.kernels} kernels on {ready.threads} threads",
            *self._tiers(),
            *self._ledger(),
            f"Serving on {url}  (OpenAI base URL: {url}/v1)",
            *([f"{self._mount.title}: {url}{self._mount.prefix}"] if self._mount is not None else []),
            "Try:",
            f"  curl {url}{path}{key} -H 'Content-Type: application/json' -d '{body}'",
        )
        for line in (*lines[:2], *adapter_lines(service), *lines[2:]) if not self._settings.quiet else ():
            self._report(line)

    def _tiers(self) -> Iterator[str]:
        """Where KV pages are kept beside the pool."""
        settings = self._settings
        if settings.kv_disk is not None:
            folder, most = os.path.abspath(os.path.expanduser(settings.kv_disk)), settings.kv_disk_bytes / 2**20
            yield f"KV pages are also kept in {folder} (at most {most:.0f} MiB)"
        if settings.kv_valkey is not None:
            from tailrace.kv.tiers import valkey

            yield f"KV pages are shared through {valkey.check(settings.kv_valkey)}"

    def _ledger(self) -> Iterator[str]:
        """Where the ledger is."""
        if self._settings.ledger is not None:
            from tailrace.ledger import place

            where = place.shown(self._settings.ledger)
            yield f"Requests are accounted for in {where} (tailrace usage, cost, explain)"

    async def _housekeeping(self, service: Service, connections: Connections) -> None:
        import asyncio

        while True:
            await asyncio.sleep(TICK)
            connections.tick()
            service.settle()
            service.rest()

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            self._report("tailrace: stopping at once")
            self._client.kill()
            os._exit(130)

    async def _drain(self, service: Service) -> None:
        """Refuses what is new, waits for what runs, for so long."""
        import asyncio

        service.draining = True
        if service.batches is not None:
            await service.batches.stop()
        held = service.client.held
        limit = self._settings.timeouts.drain
        if held:
            self._report(f"tailrace: finishing {held} requests (at most {limit:g} s; a second signal stops at once)")
        try:
            async with asyncio.timeout(limit):
                await service.client.drain()
                while not service.drained():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            self._report(f"tailrace: {service.client.held} requests were cut off after {limit:g} s")


def adapter_lines(service: Service) -> list[str]:
    """What the start-up report says of adapters: nothing where there are none."""
    loaded = service.adapters.all
    if not loaded:
        return []
    each = ", ".join(f"{one.name} (rank {one.rank}, {one.bytes / 2**20:.1f} MiB)" for one in loaded)
    return [f"adapters: {each}; at most {service.settings.max_loras}"]


def settle_memory() -> None:
    """What start-up made stays: later collections need not look at it, and come less often."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


__all__ = ["ModelError", "Settings", "run"]
