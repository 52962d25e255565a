"""The dashboard by itself: a ledger's pages on a loopback address, without a server that runs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

from tailrace.api.connection import Connections
from tailrace.api.errors import HttpError, as_http
from tailrace.api.exchange import ClientGone, Exchange, request_id
from tailrace.api.front import below
from tailrace.api.server import BACKLOG, TICK, listen
from tailrace.api.settings import Timeouts
from tailrace.terms import TailraceError
from tailrace.web import files, mount
from tailrace.web.desk import Desk, endpoint_of
from tailrace.web.reader import Reader

HOST = "127.0.0.1"
CONNECTIONS = 256


class Pages:
    """The application: files and JSON, to who came by address."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def __call__(self, exchange: Exchange) -> None:
        """One exchange."""
        exchange.id = request_id(exchange.header(b"x-request-id"), lambda: f"req-{os.urandom(12).hex()}")
        try:
            if exchange.fault is not None:
                raise exchange.fault
            await self._answer(exchange)
        except TailraceError as error:
            await exchange.refuse(as_http(error))
        except ClientGone:
            exchange.status = 499
        except Exception:  # noqa: BLE001 - a fault in one request must not reach the others
            traceback.print_exc(file=sys.stderr)
            await exchange.refuse(HttpError(500, "an internal error; the terminal has more", kind="server_error"))

    async def _answer(self, exchange: Exchange) -> None:
        path = exchange.path
        mount.only_get(path, exchange.method)
        if path == "/":
            path = exchange.path = files.PREFIX
        if not below(path, files.PREFIX):
            raise HttpError(
                404, f"there is nothing at {path[:100]}: the dashboard is at {files.PREFIX}", code="not_found"
            )
        if not path.startswith(mount.API):
            await mount.send_file(exchange)
            return
        mount.need_address(exchange, HOST)
        await endpoint_of(path.removeprefix(mount.API))(self._desk, exchange)


def run(ledger: str, port: int, report: Callable[[str], object]) -> int:
    """Serves until told to end; returns the exit status. Raises InvalidInput where that is no place of a ledger,
    LedgerDown where it cannot be read, TailraceError where the port is taken."""
    from tailrace.ledger.store import Ledger

    first = Ledger(ledger, read_only=True)  # said now, rather than on every page
    try:
        first.content()
    finally:
        first.close()
    listener = listen(HOST, port)
    reader = Reader(ledger)
    desk = Desk(reader, None, dict)
    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report(f"Dashboard of the ledger {reader.shown}: http://{HOST}:{listener.getsockname()[1]}{files.PREFIX}")
            report("It only reads; every user of this machine can open it, and nobody else. Ctrl-C ends it.")
            runner.run(_serve(desk, listener))
    finally:
        desk.close()
        listener.close()
    return 0


async def _serve(desk: Desk, listener: socket.socket) -> None:
    connections = Connections(Pages(desk), Timeouts(), lambda _name, _status: None, most=CONNECTIONS)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = await loop.create_server(connections.accept, sock=listener, backlog=BACKLOG)
    try:
        while not stop.is_set():
            connections.tick()
            try:
                await asyncio.wait_for(stop.wait(), TICK)
            except TimeoutError:
                continue
    finally:
        serving.close()
        connections.close()
        await asyncio.sleep(0)
