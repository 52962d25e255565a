"""`tailrace cost`: what requests cost, busy and amortised, beside what public APIs would have asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli import ledgers, usage
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.ledger.cost import Bill, Rates
    from tailrace.ledger.price import Api, Profile
    from tailrace.ledger.usage import Paid


def command(
    by: ledgers.By = "",
    since: ledgers.Since = None,
    until: ledgers.Until = None,
    price: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What the machine costs and APIs ask for (docs/ledger.md).")
    ] = None,
    per_hour: Annotated[
        float | None, typer.Option(metavar="USD", min=0, help="What the machine costs an hour, instead of a file.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Or the cheapest public price of a device: H100-SXM.")
    ] = None,
    api: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=IN/OUT]", help="What an API asks for a million tokens; known ones by name."),
    ] = None,
    prices: Annotated[bool, typer.Option("--prices", help="List the public prices of devices that are known.")] = False,
    ledger: ledgers.Place = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:  # fmt: skip
    """Say what requests cost, from a server's ledger.

    Busy: the device time that they took. Amortised: what the servers cost for
    all the time that they ran, idle or not. At the SLO: the same money over the
    requests that met theirs. Without a price, the one that `serve --price` was
    told counts.

    [bold]Examples[/bold]

      tailrace cost --per-hour 3.29
      tailrace cost --price machine.toml --by workload --since 7d
      tailrace cost --device H100-SXM --api some-api=0.15/0.60
    """
    from tailrace.ledger import cost
    from tailrace.ledger import usage as sums

    if prices:
        show_prices(as_json=as_json)
        return
    profile = profile_of(price, per_hour, device)
    apis = dict(profile.api) | dict(map(api_of, api or []))
    names = ledgers.names(by)
    span = ledgers.span(since, until)
    found = ledgers.opened(ledger)
    try:
        lines = sums.usage(found, names, span)
        paid = sums.paid(found, span, profile.usd_per_hour)
    finally:
        found.close()
    rate, source = rate_of(profile, paid)
    bill = cost.bill(lines, paid, rate, source=source, apis=apis)
    if as_json:
        typer.echo(ledgers.as_json(bill))
    else:
        show(names, bill)


def profile_of(price: Path | None, per_hour: float | None, device: str | None) -> Profile:
    """The prices that a command line means. Raises InvalidInput."""
    from tailrace.ledger import price as prices

    profile = prices.read(price) if price is not None else prices.Profile()
    if sum(one is not None for one in (profile.usd_per_hour, per_hour, device)) > 1:
        raise InvalidInput("--price (with [rented] or [owned]), --per-hour and --device: choose one", param="price")
    if per_hour is not None:
        return prices.Profile("", prices.Rented(per_hour, "--per-hour"), api=profile.api)
    if device is not None:
        from tailrace.twin.catalogue import prices as known

        rent = known.load().of(device)[0].profile
        return prices.Profile(rent.name, rent.rented, api=profile.api)
    return profile


def rate_of(profile: Profile, paid: Paid) -> tuple[float, str]:
    """What an hour costs, and who says so. Raises InvalidInput where nobody does."""
    from tailrace.ledger.cost import known_rate

    found = known_rate(profile, paid)
    if found is None:
        raise InvalidInput(
            "what the machine costs is not known: give --per-hour, --price FILE or --device NAME, or serve with "
            "--price",
            param="price",
        )
    return found


def api_of(text: str) -> tuple[str, Api]:
    """An API's name and price, of "NAME=IN/OUT" or of the catalogue. Raises InvalidInput."""
    from tailrace.ledger import price

    name, equals, prices = text.partition("=")
    if name and not equals:
        from tailrace.twin.catalogue import prices as known

        return name, known.load().api(name)
    try:
        dear, out = (float(one) for one in prices.split("/"))
    except ValueError:
        dear = out = -1.0
    if not name or not (0 <= dear < 1e6 and 0 <= out < 1e6):
        raise InvalidInput(f"--api is NAME=IN/OUT, US dollars a million tokens, not {text!r}", param="api")
    return name, price.Api(dear, out, source="--api")


def show_prices(*, as_json: bool) -> None:
    """Prints the public prices."""
    from tailrace.cli import devices
    from tailrace.twin.catalogue import prices

    devices.show_rents(prices.load().of("", None), as_json=as_json)


def show(names: list[str], bill: Bill) -> None:
    """Prints the tables."""
    if not bill.lines:
        typer.echo("No request ended in that time.")
        return
    used = "-" if bill.utilisation is None else f"{bill.utilisation:.1%}"
    source = f" ({bill.source})" if bill.source else ""
    typer.echo(
        f"${bill.usd_per_hour:g} an hour{source}; servers ran for {usage.duration(bill.paid_seconds)}, of which the "
        f"device worked {usage.duration(bill.busy_seconds)}: {used}\n"
    )
    heads = [*names, "", "$", "$/request", "$/M in", "$/M out", "$/request\nat SLO", "$/M out\nat SLO"]
    rows = []
    for line in bill.lines:
        group = usage.shown(names, line.usage)
        rows.append([*group, "busy", *money(line.busy)])
        rows.append([*("" for _ in names), "amortised", *money(line.amortised)])
        rows += [[*("" for _ in names), name, dollars(usd)] for name, usd in line.apis.items()]
    ledgers.table(heads, rows, left=len(names) + 1)
    for name, api in bill.apis.items():
        from tailrace.ledger.price import sourced

        said = sourced(api.source, api.date) or "no source given"
        typer.echo(f"{name}: ${api.usd_per_million_input:g} and ${api.usd_per_million_output:g} a million in and out "
                   f"({said}); other tokens may be counted there")  # fmt: skip


def money(rates: Rates) -> list[str]:
    """Rates in words."""
    values = (rates.usd, rates.per_request, rates.per_million_input, rates.per_million_output, rates.per_good_request,
              rates.per_million_good_output)  # fmt: skip
    return [dollars(value) for value in values]


def dollars(value: float | None) -> str:
    """Three digits that say something."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}" if value >= 0.0001 or not value else f"{value:.1e}"
