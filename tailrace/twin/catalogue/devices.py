"""Devices: memory, bandwidth, dense rates, links; checked when they are read."""

from __future__ import annotations

import datetime
import importlib.resources
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from tailrace.terms import InvalidInput

UNITS = {
    "B": 1.0, "MiB": 2.0**20, "GiB": 2.0**30, "GB": 1e9, "GB/s": 1e9, "TB/s": 1e12, "GFLOP/s": 1e9, "TFLOP/s": 1e12,
    "W": 1.0,
}  # fmt: skip
"""What a unit stands for, in bytes, bytes a second, operations a second, watts."""

KINDS = {
    "sold": ("GB", "GiB"), "memory": ("B", "MiB", "GiB", "GB"), "bandwidth": ("GB/s", "TB/s"), "link": ("GB/s", "TB/s"),
    "power": ("W",), "rates": ("TFLOP/s", "GFLOP/s"),
}  # fmt: skip
"""Units that each value may have."""

TYPES = ("fp32", "bf16", "fp16", "fp8", "int8", "fp4")
"""Types that matrix units multiply."""

DENSE = {"fp8": 2.0, "fp4": 4.0}
"""How much faster than BF16 (FP16) hardware multiplies these, without sparsity. Half as much again is Blackwell Ultra's
FP4; twice is FP4 of consumer cards, whose other types accumulate at half rate. More is a rate with sparsity."""

MOST = {"fp8": 1.0, "fp4": 2.0}
"""Times that by which a rate may be above `DENSE`."""


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where values are from, and when they were read."""

    title: str
    read: datetime.date
    url: str = ""


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number with its unit and the name of its source."""

    value: Annotated[float, msgspec.Meta(gt=0)]
    unit: str
    source: str

    @property
    def amount(self) -> float:
        """In bytes, bytes a second, operations a second, or watts."""
        return self.value * UNITS[self.unit]


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device. `rates` are dense, by type; `memory` is what programs can address; `link` is one direction between
    two devices of a server, of which `domain` see each other so."""

    name: str
    vendor: str
    architecture: str
    native: tuple[str, ...]
    sold: Value
    memory: Value
    bandwidth: Value
    rates: dict[str, Value]
    power: Value | None = None
    link: Value | None = None
    link_name: str = ""
    domain: Annotated[int, msgspec.Meta(ge=1)] = 1
    aliases: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        return int(self.memory.amount)

    def computes(self, weights: str) -> str:
        """The type in which products with weights of this type are computed: their own where the hardware multiplies
        it, else BF16 (FP16): such weights are widened first, and save memory and reading only."""
        found = (needed for prefix, *needed in _COMPUTED if weights.startswith(prefix))
        kind, *others = next(found, ["bf16"])
        if kind in self.native and all(other in self.native for other in others):
            return kind
        return "bf16" if "bf16" in self.native else "fp16"


_COMPUTED = (
    ("fp8", "fp8"),
    ("mxfp8", "fp8", "fp4"),
    ("int8", "int8"),
    ("mxfp4", "fp4"),
    ("nvfp4", "fp4"),
    ("fp16", "fp16"),
    ("fp32", "fp32"),
)
"""Formats of weights, and the type that multiplies them natively. INT4 has none that is served. Scales of blocks
of 32 came with FP4: matrix units with FP8 alone do not apply them."""


class Devices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of devices."""

    devices: dict[str, Device] = {}
    sources: dict[str, Source] = {}

    def find(self, name: str) -> tuple[str, Device]:
        """A device by its name or an alias, whatever the case, and that name. Raises InvalidInput."""
        wanted = name.lower()
        for key, device in self.devices.items():
            if wanted in (key.lower(), *(alias.lower() for alias in device.aliases)):
                return key, device
        raise InvalidInput(f"no device {name!r} is known; known are {', '.join(self.devices)}", param="device")


def parse(text: str, where: str) -> Devices:
    """The devices of a TOML text. Raises InvalidInput, which names the value that is wrong."""
    try:
        made = msgspec.convert(tomllib.loads(text), Devices)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidInput(f"{where}: {error}", param="devices") from None
    for key, device in made.devices.items():
        for wrong in _faults(device, made.sources):
            raise InvalidInput(f"{where}: {key}: {wrong}", param="devices")
    return made


def _faults(device: Device, sources: dict[str, Source]) -> list[str]:
    """What is wrong with a device."""
    found = []
    values = {field: getattr(device, field) for field in ("sold", "memory", "bandwidth", "link", "power")}
    values |= {f"rates.{kind}": value for kind, value in device.rates.items()}
    for name, value in values.items():
        if value is None:
            continue
        if value.unit not in KINDS[name.partition(".")[0]]:
            found.append(f"{name} is in {value.unit!r}; expected {' or '.join(KINDS[name.partition('.')[0]])}")
        if value.source not in sources:
            found.append(f"{name} has the source {value.source!r}, which [sources] does not have")
    unknown = [kind for kind in (*device.rates, *device.native) if kind not in TYPES]
    if unknown:
        found.append(f"{unknown[0]!r} is no type of a matrix unit; known are {', '.join(TYPES)}")
    if not found:
        found += _sparse(device)
    if not found and not 0.9 < device.memory.amount / device.sold.amount < 1.1:
        found.append(f"memory is {device.memory.amount / 1e9:.1f} GB, but {device.sold.value:g} GB are sold")
    return found


def _sparse(device: Device) -> list[str]:
    """Rates that only structured sparsity can explain. BF16 and FP16 are the same; FP8 is twice that, FP4 four
    times."""
    base = device.rates.get("bf16") or device.rates.get("fp16")
    if base is None:
        return ["rates has neither bf16 nor fp16"]
    found = []
    both = [device.rates[kind].amount for kind in ("bf16", "fp16") if kind in device.rates]
    if max(both) > 1.01 * min(both):
        found.append("rates.bf16 and rates.fp16 differ: one of them is with sparsity, or accumulates in FP16")
    for kind, ratio in DENSE.items():
        rate = device.rates.get(kind)
        if rate is not None and not 0.98 * ratio <= rate.amount / base.amount <= 1.02 * ratio * MOST[kind]:
            times = rate.amount / base.amount
            found.append(f"rates.{kind} is {times:.2f} times that of bf16; without sparsity it is {ratio:g} times")
    return found


@cache
def builtin() -> Devices:
    """The devices that come with Tailrace."""
    text = importlib.resources.files(__package__).joinpath("devices.toml").read_text()
    return parse(text, "devices.toml")


def load(override: Path | None = None) -> Devices:
    """The devices that come with Tailrace, and those of a user's file before them. Raises InvalidInput."""
    own = builtin()
    if override is None:
        return own
    try:
        text = override.expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the file of devices {override}: {error}", param="devices") from None
    given = parse(text, str(override))
    return Devices({**own.devices, **given.devices}, {**own.sources, **given.sources})
