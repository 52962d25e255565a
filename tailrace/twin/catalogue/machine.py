"""This machine as a device: what `tailrace machine` measured of its processor, and what memory the process may use."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from tailrace.backends.cpu.machine import Ceilings, load, this_machine
from tailrace.terms import InvalidInput
from tailrace.twin.catalogue.devices import Device, Devices, Source, Value

NAME = "this"
"""What the device is called."""

KINDS = {
    "fp32": "fp32", "bf16": "bf16", "bf16_dot": "bf16", "amx_bf16": "bf16", "fp16": "fp16",
    "int8_by_int8": "int8", "amx_int8": "int8",
}  # fmt: skip
"""Kinds of multiply-add that are measured, and the types that they are of. The fastest of each counts."""

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def measured(cache: Path) -> Devices:
    """The device, of what was saved under the cache's root. Raises InvalidInput where nothing was measured here."""
    found = load(cache, this_machine())
    if found is None:
        raise InvalidInput("this machine has not been measured: run `tailrace machine --ceilings`", param="device")
    return described(found, memory_bytes())


def described(ceilings: Ceilings, memory: int) -> Devices:
    """A processor as a device: reading from memory and multiply-adds (two operations each), all threads together."""
    day = datetime.datetime.fromisoformat(ceilings.measured_at).date()
    threads = ceilings.machine.threads
    best: dict[str, float] = {}
    for kind in ceilings.kinds(threads):
        if kind in KINDS:
            best[KINDS[kind]] = max(best.get(KINDS[kind], 0.0), 2 * ceilings.multiply_adds(kind, threads) / 1e9)
    rates = {kind: Value(rate, "GFLOP/s", "measured") for kind, rate in best.items()}
    room = Value(float(memory), "B", "system")
    device = Device(
        name=ceilings.machine.cpu, vendor="", architecture=ceilings.machine.kernels, native=tuple(rates), sold=room,
        memory=room, bandwidth=Value(ceilings.bandwidth("memory", threads) / 1e9, "GB/s", "measured"), rates=rates,
    )  # fmt: skip
    sources = {
        "measured": Source("tailrace machine, here", day),
        "system": Source("the system, or the limit of this container", datetime.date.today()),
    }
    return Devices({NAME: device}, sources)


def memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or less where it is in a container with a limit."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _LIMITS:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            return min(whole, int(text))
    return whole
