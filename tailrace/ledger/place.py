"""Where a database is: a path or a URL, and the user's own ledger."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from tailrace.terms import InvalidInput

OFF = "off"
VARIABLE = "TAILRACE_LEDGER"


def data_home() -> Path:
    """Where a user's data lies."""
    given = os.environ.get("XDG_DATA_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".local" / "share") / "tailrace"


def default() -> str:
    """The ledger where nothing is said: what the environment says (TAILRACE_LEDGER), else a file of the user's; "off"
    for a user without a home."""
    try:
        return os.environ.get(VARIABLE) or str(data_home() / "ledger.db")
    except RuntimeError:
        return OFF


def sqlite_path(url: str) -> Path | None:
    """The file of sqlite:///FILE; None for any other URL."""
    scheme, found, rest = url.partition("://")
    if scheme == "sqlite" and found and rest.startswith("/") and len(rest) > 1 and not rest.endswith("/"):
        return Path(unquote(rest[1:])).expanduser()
    return None


def is_postgresql(url: str) -> bool:
    """Whether it is postgresql://..."""
    scheme, _, rest = url.partition("://")
    return scheme in ("postgresql", "postgres") and bool(rest)


def ledger_file(given: str) -> Path | None:
    """The file of a ledger, given as a path or a URL; None for one in PostgreSQL. Raises InvalidInput."""
    if is_postgresql(given):
        return None
    path = sqlite_path(given) if "://" in given else Path(given).expanduser()
    if path is None or not given.strip() or given.endswith("/"):
        raise InvalidInput(
            "--ledger is a file, sqlite:///FILE (sqlite:////FILE from the root), postgresql://USER@HOST/DATABASE, or "
            f"off; not {given.partition('@')[0]!r}",
            param="ledger",
        )
    return path


def private_file(path: Path) -> None:
    """Makes a file that only its owner may read, and its directories, where they are not there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def shown(given: str) -> str:
    """As a person may see it: a URL without what stands before the host."""
    scheme, found, rest = given.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}" if found else given
