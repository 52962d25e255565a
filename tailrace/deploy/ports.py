"""TCP ports of the loopback address."""

from __future__ import annotations

import socket


def free() -> int:
    """One that nobody listened on a moment ago: another program may take it before a server does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def taken(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
