"""A server of our own for the time of one command: a child `tailrace serve` on a free port of the loopback address."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from tailrace.cli import serve
from tailrace.cli.client import DEFAULT_URL, Client, CutOff, ServerError, Unreachable
from tailrace.terms import InvalidInput, TailraceError

_POLL = 0.05
_PATIENCE = 300.0


@contextlib.contextmanager
def connected(
    url: str | None,
    model: str | None,
    key: str | None,
    say: Callable[[str], None],
    *,
    quantize: str | None = None,
    lora: tuple[str, str] | None = None,
    chat_template: str | None = None,
) -> Iterator[Client]:
    """A server to talk to: the one at `url`; else one that runs at the default address and has the model; else our own.

    `quantize`, `lora` (an adapter's name and directory) and `chat_template` are for our own, so they always get one.
    `say` gets a line when something takes long. Raises `Unreachable` when the server at `url` is not there,
    InvalidInput when it does not have the model.
    """
    if url is not None:
        for name, value in (("quantize", quantize), ("lora", lora), ("chat-template", chat_template)):
            if value is not None:
                raise InvalidInput(
                    f"--{name} is for a server that is started here, but --url {url} names one that runs: leave one "
                    "out",
                    param=name,
                )
        client = Client(url, key=key)
        _insist(client)
        served = client.models() if model is not None else []
        if model is not None and model not in served:
            raise InvalidInput(f"the server has no model {model!r}; it has {', '.join(served)}", param="model")
        yield client
        return
    running = Client(DEFAULT_URL, key=key)
    if quantize is None and lora is None and chat_template is None and _serves(running, model):
        yield running
        return
    from tailrace.models import catalogue

    name = model or catalogue.DEFAULT
    rounded = () if quantize is None else ("--quantize", quantize)
    adapter = () if lora is None else ("--lora", "=".join(lora))
    template = () if chat_template is None else ("--chat-template", chat_template)
    with started(name, options=(*rounded, *adapter, *template), say=say) as client:
        yield client


@contextlib.contextmanager
def started(
    model: str, *, options: Sequence[str] = (), say: Callable[[str], None] = lambda _: None
) -> Iterator[Client]:
    """Serves the model until the block ends. Raises `TailraceError` with its last words if it does not start."""
    serve.find_model(model)  # pulled here, where progress can be shown
    say(f"Starting a server for {model} ...")
    key = os.urandom(16).hex()  # other users of this machine can reach the port too
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "tailrace.cli",
        "serve",
        model,
        "--port",
        str(port),
        "--no-log-requests",
    ]
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [*command, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_end_with_parent,
            env={**os.environ, "TAILRACE_API_KEY": key},
            start_new_session=True,  # Ctrl-C is for the answer, not for the server
        )  # fmt: skip
        try:
            client = Client(f"http://127.0.0.1:{port}", key=key)
            _wait(client, child, log)
            yield client
        finally:
            _end(child)


def _insist(client: Client) -> None:
    try:
        client.get("/health")
    except Unreachable as error:
        raise Unreachable(f"{error} Start one: tailrace serve. Or name no URL, and one is started.") from error
    except ServerError as error:
        if error.status == 503:
            raise TailraceError(f"The server at {client.url} is not ready: {error}") from error
        # 404 and the like: another maker's server, which need not have /health


def _serves(client: Client, model: str | None) -> bool:
    """Whether a server answers with this model. A bare path names no served model: it wants a server of its own."""
    try:
        return client.ready() and (model is None or model in client.models())
    except (ServerError, Unreachable, CutOff, KeyError, TypeError, ValueError):
        return False


def _wait(client: Client, child: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    limit = time.monotonic() + _PATIENCE
    while not client.ready():
        if child.poll() is not None:
            raise TailraceError(f"The server ended while it started (status {child.returncode}):\n{_tail(log)}")
        if time.monotonic() > limit:
            raise TailraceError(f"The server was not ready after {_PATIENCE:.0f} s:\n{_tail(log)}")
        time.sleep(_POLL)


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").strip().splitlines()[-8:]) or "(it said nothing)"


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM twice: nobody waits for what still runs; SIGKILL if that is not enough."""
    for sent, patience in ((signal.SIGTERM, 2.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        if child.poll() is not None:
            return
        child.send_signal(sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)


def _end_with_parent() -> None:
    """In the child, before it becomes the server: Linux ends it when we die, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
