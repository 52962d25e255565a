"""One server from its start to its end, as the ledger knows it."""

from __future__ import annotations

import msgspec


class Run(msgspec.Struct, frozen=True):
    """`started` is in microseconds since 1970; `hardware` says kernels and threads. No two have the same name."""

    name: str
    started: int
    host: str = ""
    model: str = ""
    hardware: str = ""
    usd_per_hour: float | None = None
