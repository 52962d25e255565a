"""Prices: an hour of a device, a million tokens of an API; read and checked, and handed to the ledger as its
profiles."""

from __future__ import annotations

import datetime
import importlib.resources
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tailrace.ledger.price import Api, Profile, Rented
from tailrace.terms import InvalidInput
from tailrace.twin.catalogue import devices

Term = Literal["on-demand", "reserved", "spot"]
TERMS: tuple[Term, ...] = ("on-demand", "reserved", "spot")


class Rent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What somebody asked for an hour of a device when the page was read."""

    device: str
    usd_per_hour: Annotated[float, msgspec.Meta(gt=0, lt=1e6)]
    seller: str
    source: str
    read: datetime.date
    term: Term = "on-demand"

    @property
    def profile(self) -> Profile:
        """As if it were in a price file of the ledger's."""
        said = self.seller if self.term == "on-demand" else f"{self.seller}, {self.term}"
        return Profile(self.device, Rented(self.usd_per_hour, said, self.read))


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of prices."""

    rents: tuple[Rent, ...] = ()
    apis: dict[str, Api] = {}

    def of(self, device: str = "", term: Term | None = "on-demand") -> list[Rent]:
        """Rents of a device (all where it is ""), cheapest first. Raises InvalidInput where none is known."""
        key = devices.load().find(device)[0] if device and not any(r.device == device for r in self.rents) else device
        found = [rent for rent in self.rents if (not key or rent.device == key) and term in (None, rent.term)]
        if not found:
            known = ", ".join(sorted({rent.device for rent in self.rents}))
            what = f"{term} price" if term else "price"
            raise InvalidInput(f"no {what} of {device!r} is known; there are prices of: {known}", param="device")
        return sorted(found, key=lambda rent: (rent.device, rent.usd_per_hour))

    def api(self, name: str) -> Api:
        """What an API asks for, by name. Raises InvalidInput."""
        if name not in self.apis:
            raise InvalidInput(f"no API {name!r} is known; known are {', '.join(self.apis)}", param="api")
        return self.apis[name]


def parse(text: str, where: str, known: devices.Devices | None = None) -> Prices:
    """The prices of a TOML text. Raises InvalidInput, which names the value that is wrong."""
    try:
        made = msgspec.convert(tomllib.loads(text), Prices)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidInput(f"{where}: {error}", param="prices") from None
    there = (known or devices.builtin()).devices
    for rent in made.rents:
        if rent.device not in there:
            raise InvalidInput(
                f"{where}: a rent is of {rent.device!r}, which is no device of the catalogue", param="prices"
            )
    for name, api in made.apis.items():
        for field in ("usd_per_million_input", "usd_per_million_output", "usd_per_million_cached"):
            value = getattr(api, field)
            if value is not None and not 0 <= value < 1e6:
                raise InvalidInput(f"{where}: apis.{name}.{field} is {value}", param="prices")
        if not api.source or api.date is None:
            raise InvalidInput(f"{where}: apis.{name} needs a source and a date", param="prices")
    return made


@cache
def builtin() -> Prices:
    """The prices that come with Tailrace."""
    text = importlib.resources.files(__package__).joinpath("prices.toml").read_text()
    return parse(text, "prices.toml")


def load(override: Path | None = None, known: devices.Devices | None = None) -> Prices:
    """The prices that come with Tailrace, and those of a user's file too. Raises InvalidInput."""
    own = builtin()
    if override is None:
        return own
    try:
        text = override.expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the file of prices {override}: {error}", param="prices") from None
    given = parse(text, str(override), known)
    return Prices((*given.rents, *own.rents), {**own.apis, **given.apis})
