"""`tailrace devices`: the catalogue of devices and prices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli import ledgers

if TYPE_CHECKING:
    from tailrace.twin.catalogue.devices import Device, Devices, Value
    from tailrace.twin.catalogue.prices import Prices, Rent


def command(
    name: Annotated[
        str | None, typer.Argument(help="One of them, or this (machine), with the source of every value.")
    ] = None,
    prices: Annotated[bool, typer.Option("--prices", help="What an hour costs, on demand, reserved and spot.")] = False,
    apis: Annotated[bool, typer.Option("--apis", help="What APIs ask for a million tokens.")] = False,
    devices: Annotated[Path | None, typer.Option(metavar="FILE", help="More devices, as TOML (docs/twin.md).")] = None,
    more: Annotated[Path | None, typer.Option("--more-prices", metavar="FILE", help="More prices, as TOML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List devices: memory, bandwidth, dense rates; and prices.

    Rates are without structured sparsity. Every value has a source and the day on
    which it was read; a name shows them.

    [bold]Examples[/bold]

      tailrace devices
      tailrace devices h100
      tailrace devices --prices
      tailrace devices --devices mine.toml --json
    """
    from tailrace.twin.catalogue import devices as catalogue
    from tailrace.twin.catalogue import prices as money

    known = catalogue.load(devices)
    if name == "this":
        from tailrace.models import catalogue as models
        from tailrace.twin.catalogue import machine

        known = machine.measured(models.cache_dir())
    chosen = known.find(name) if name else None
    if prices or apis:
        _prices(money.load(more, known), chosen[0] if chosen else "", apis=apis, as_json=as_json)
    elif chosen:
        _one(known, *chosen, as_json=as_json)
    elif as_json:
        typer.echo(ledgers.as_json(known))
    else:
        _all(known)


def _all(known: Devices) -> None:
    heads = ["device", "memory\nGB", "reads\nTB/s", "bf16\nTFLOP/s", "fp8", "fp4", "link\nGB/s", "W"]
    rows = []
    for key, one in known.devices.items():
        base = one.rates.get("bf16") or one.rates.get("fp16")
        rates = [_amount(base, 1e12), *(_amount(one.rates.get(kind), 1e12) for kind in ("fp8", "fp4"))]
        rows.append([key, f"{one.memory_bytes / 1e9:.1f}", _amount(one.bandwidth, 1e12), *rates, _amount(one.link, 1e9),
                     _amount(one.power, 1)])  # fmt: skip
    ledgers.table(heads, rows, left=1)
    typer.echo("\nDense rates (T4: fp16); memory as programs see it where known; a link is one direction.")


def _amount(value: Value | None, unit: float) -> str:
    if value is None:
        return "-"
    amount = value.amount / unit
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def _one(known: Devices, key: str, device: Device, *, as_json: bool) -> None:
    if as_json:
        typer.echo(ledgers.as_json({key: device, "sources": known.sources}))
        return
    typer.echo(f"{device.name} ({key}): {device.architecture}, multiplies {', '.join(device.native)}\n")
    values = [("memory as sold", device.sold), ("memory", device.memory), ("bandwidth", device.bandwidth),
              *((f"{kind}, dense", rate) for kind, rate in device.rates.items()),
              (f"link ({device.link_name})" if device.link_name else "link", device.link),
              ("power", device.power)]  # fmt: skip
    rows = []
    for name, value in values:
        if value is not None:
            source = known.sources[value.source]
            rows.append(
                [name, f"{value.value:,.10g} {value.unit}", source.read.isoformat(), source.url or source.title]
            )
    ledgers.table(["", "", "read on", "source"], rows, left=4)


def _prices(money: Prices, device: str, *, apis: bool, as_json: bool) -> None:
    if apis:
        if as_json:
            typer.echo(ledgers.as_json(money.apis))
            return
        rows = [[name, one.date.isoformat() if one.date else "", one.source, f"{one.usd_per_million_input:g}",
                 "-" if one.usd_per_million_cached is None else f"{one.usd_per_million_cached:g}",
                 f"{one.usd_per_million_output:g}"] for name, one in money.apis.items()]  # fmt: skip
        typer.echo("US dollars a million tokens, as public pages said on that day:\n")
        ledgers.table(["API", "read on", "source", "in", "cached", "out"], rows, left=3)
        return
    show_rents(money.of(device, None), as_json=as_json)


def show_rents(found: list[Rent], *, as_json: bool) -> None:
    """Prints what devices cost an hour."""
    if as_json:
        typer.echo(ledgers.as_json(found))
        return
    typer.echo("US dollars an hour, as public pages said on that day:\n")
    rows = [[one.device, one.term, one.seller, one.read.isoformat(), f"{one.usd_per_hour:.2f}"] for one in found]
    ledgers.table(["device", "term", "seller", "read on", "USD/h"], rows, left=4)
