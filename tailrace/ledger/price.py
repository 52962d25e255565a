"""What a device costs an hour, and what others ask for a million tokens: a small TOML file, each value with its source.

name = "one H100 of ours"

[rented]                      # an hour's price...
usd_per_hour = 3.29
source = "..."                # where from, and when it was read
date = 2026-11-09

[owned]                       # ...or what it costs to own
price_usd = 28000
years = 4                     # written off over
watts = 900                   # drawn, with its share of cooling
usd_per_kwh = 0.18
usd_per_year = 1200           # anything else: place, network, people

[api.some-name]               # what a public API asks for; any number of them
usd_per_million_input = 0.15
usd_per_million_cached = 0.075   # of the input, where it was cached; left out: as the rest of the input
usd_per_million_output = 0.60
source = "..."
date = 2026-11-09
"""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from tailrace.terms import InvalidInput

HOURS_PER_YEAR = 365.25 * 24


class Rented(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A price an hour."""

    usd_per_hour: float
    source: str = ""
    date: datetime.date | None = None


class Owned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device of one's own. It is paid for by the hour of its life, whether it works or not."""

    price_usd: float
    years: float
    watts: float = 0.0
    usd_per_kwh: float = 0.0
    usd_per_year: float = 0.0
    source: str = ""
    date: datetime.date | None = None

    @property
    def usd_per_hour(self) -> float:
        """All of it, an hour."""
        fixed = (self.price_usd / self.years + self.usd_per_year) / HOURS_PER_YEAR
        return fixed + self.watts / 1000 * self.usd_per_kwh


class Api(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a public API asks for a million tokens."""

    usd_per_million_input: float
    usd_per_million_output: float
    usd_per_million_cached: float | None = None
    source: str = ""
    date: datetime.date | None = None

    def usd(self, prompt: int, cached: int, output: int) -> float:
        """What it would have asked for so many tokens; `cached` are some of the prompt's."""
        of_cached = self.usd_per_million_cached
        dear = self.usd_per_million_input
        inputs = (prompt - cached) * dear + cached * (dear if of_cached is None else of_cached)
        return (inputs + output * self.usd_per_million_output) / 1e6


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A price file."""

    name: str = ""
    rented: Rented | None = None
    owned: Owned | None = None
    api: dict[str, Api] = {}

    @property
    def usd_per_hour(self) -> float | None:
        """Of the device; None where the file only has prices of APIs."""
        device = self.rented or self.owned
        return None if device is None else device.usd_per_hour

    @property
    def source(self) -> str:
        """Where the device's price is from, and when it was read."""
        device = self.rented or self.owned
        return "" if device is None else sourced(device.source, device.date)


def sourced(source: str, date: datetime.date | None) -> str:
    """A source and its date in words."""
    return ", ".join(filter(None, (source, f"read on {date.isoformat()}" if date else "")))


def read(path: Path) -> Profile:
    """A price file. Raises InvalidInput, which says what is wrong."""
    try:
        made = msgspec.convert(tomllib.loads(path.expanduser().read_text()), Profile)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidInput(f"the price file {path}: {error}", param="price") from None
    if made.rented is not None and made.owned is not None:
        raise InvalidInput(f"the price file {path} has [rented] and [owned]: one device is either", param="price")
    prices: list[tuple[str, Any]] = [("rented", made.rented), ("owned", made.owned)]
    for name, table in [*prices, *((f"api.{name}", api) for name, api in made.api.items())]:
        for field in () if table is None else table.__struct_fields__:
            value = getattr(table, field)
            if isinstance(value, float | int) and not 0 <= value < 1e12:
                raise InvalidInput(f"the price file {path}: {name}.{field} is {value}", param="price")
    if made.owned is not None and not made.owned.years:
        raise InvalidInput(f"the price file {path}: owned.years must be above 0", param="price")
    return made
