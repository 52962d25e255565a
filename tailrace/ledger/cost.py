"""What requests cost: busy, for the device time that they took, and amortised, for the time that was paid for.

Busy is device-seconds times the price. Amortised spreads what all servers cost, idle time included, over the requests
in proportion to their device time: a server that works half of the time costs twice a token.
"""

from __future__ import annotations

import msgspec

from tailrace.ledger.price import Api, Profile
from tailrace.ledger.usage import Paid, Usage


class Rates(msgspec.Struct, frozen=True):
    """US dollars; None where there was nothing to divide by. Input tokens are all of the prompt's, cached or not: what
    computing them cost is divided among them. "Good" are requests that met their SLO: the same money over them
    alone."""

    usd: float
    per_request: float | None
    per_million_input: float | None
    per_million_output: float | None
    per_good_request: float | None
    per_million_good_output: float | None


class Cost(msgspec.Struct, frozen=True):
    """One group's. `share` of the device time of all groups; `apis`: what each API would have asked for."""

    group: dict[str, str]
    usage: Usage
    share: float
    busy: Rates
    amortised: Rates
    apis: dict[str, float] = {}


class Bill(msgspec.Struct, frozen=True):
    """All of it. `utilisation`: device time over the time that was paid for."""

    usd_per_hour: float
    paid_seconds: float
    busy_seconds: float
    utilisation: float | None
    source: str  # of the price
    lines: list[Cost]
    apis: dict[str, Api] = {}


def known_rate(profile: Profile, paid: Paid) -> tuple[float, str] | None:
    """What an hour costs, and who says so: the profile, else what the servers were told. None where nobody does."""
    if profile.usd_per_hour is not None:
        return profile.usd_per_hour, profile.source
    if not paid.servers:
        return 0.0, ""
    if paid.usd is None:
        return None
    return paid.usd / paid.seconds * 3600, "what `serve --price` was told"


def bill(lines: list[Usage], paid: Paid, usd_per_hour: float, *, source: str = "", apis: dict[str, Api]) -> Bill:
    """The cost of each line, whose device times are those of everything that the servers did meanwhile."""
    busy = sum(line.device_seconds for line in lines)
    total = paid.seconds / 3600 * usd_per_hour
    costs = []
    for line in lines:
        share = line.device_seconds / busy if busy else 0.0
        costs.append(
            Cost(
                line.group,
                line,
                share,
                _rates(line, line.device_seconds / 3600 * usd_per_hour),
                _rates(line, total * share),
                {
                    name: api.usd(line.prompt_tokens, line.cached_tokens, line.output_tokens)
                    for name, api in apis.items()
                },
            )
        )
    used = busy / paid.seconds if paid.seconds else None
    return Bill(usd_per_hour, paid.seconds, busy, used, source, costs, apis)


def _rates(line: Usage, usd: float) -> Rates:
    prompt_share = line.device_prefill_seconds / line.device_seconds if line.device_seconds else 0.0
    for_prompts, for_output = usd * prompt_share, usd * (1 - prompt_share)
    return Rates(
        usd=usd,
        per_request=_over(usd, line.requests - line.refused),
        per_million_input=_over(for_prompts * 1e6, line.prompt_tokens),
        per_million_output=_over(for_output * 1e6, line.output_tokens),
        per_good_request=_over(usd, line.met),
        per_million_good_output=_over(for_output * 1e6, line.good_output_tokens),
    )


def _over(usd: float, count: int) -> float | None:
    return usd / count if count else None
