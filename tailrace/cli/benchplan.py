"""The command line of `tailrace bench`, made into what is measured. Wrong values are refused by the option's name."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tailrace.measure import slo
from tailrace.measure.counting import Plan
from tailrace.measure.slo import Slo
from tailrace.models import catalogue
from tailrace.terms import InvalidInput
from tailrace.workload import spec
from tailrace.workload.arrivals import Arrivals, Closed, Constant, Gamma, Poisson, Ramp, Recorded
from tailrace.workload.spec import Workload

CONCURRENCY = 8
REQUESTS = 100


@dataclass(frozen=True)
class Load:
    """When requests come: the options of that panel."""

    concurrency: int | None
    rate: float | None
    even: bool
    burstiness: float | None
    ramp: str | None
    speed: float | None


@dataclass(frozen=True)
class Much:
    """How much is measured: the options of that panel."""

    requests: int | None
    duration: float | None
    warmup: str | None
    sustain: bool
    timeout: float
    seed: int


@dataclass(frozen=True)
class More:
    """More than one run: the options of that panel."""

    sweep: str | None
    find: str | None
    against: str | None
    pairs: int


def workload(name: str, input_tokens: int | None, output_tokens: int | None) -> Workload:
    """The workload of a name, with other lengths where these are given."""
    found = _texts(name) if catalogue.texts(name) else spec.load(name)
    given = {"input": input_tokens, "output": output_tokens}
    lengths = {key: value for key, value in given.items() if value is not None}
    if lengths and found.trace is not None:
        raise InvalidInput("--input and --output are not for a trace, which has its own", param="input")
    return msgspec.structs.replace(found, **lengths)


def _texts(name: str) -> Workload:
    """A workload of texts that are fetched by their name, where they are not here yet."""
    from tailrace.cli import pull

    return msgspec.structs.replace(spec.load(str(pull.show(name))), name=name)


def _arrivals(workload: Workload, load: Load) -> Arrivals:
    ways = {"--concurrency": load.concurrency, "--rate": load.rate, "--ramp": load.ramp, "--speed": load.speed}
    chosen = [name for name, value in ways.items() if value is not None]
    if len(chosen) > 1:
        raise InvalidInput(f"{' and '.join(chosen)} exclude each other", param=chosen[0].removeprefix("--"))
    if load.rate is None and (load.even or load.burstiness is not None):
        raise InvalidInput("--even and --burstiness are for --rate", param="rate")
    if load.rate is not None:
        _positive("--rate", load.rate)
        if load.burstiness is not None:
            return Gamma(load.rate, _positive("--burstiness", load.burstiness))
        return Constant(load.rate) if load.even else Poisson(load.rate)
    if load.ramp is not None:
        return _ramp(load.ramp)
    if load.speed is not None or (workload.trace is not None and workload.trace.format == "mooncake" and not chosen):
        if workload.trace is None or workload.trace.format != "mooncake":
            raise InvalidInput("--speed is for a trace that has times", param="speed")
        return Recorded(_positive("--speed", load.speed or 1.0))
    if load.concurrency is not None or workload.arrivals is None:
        return Closed(load.concurrency or CONCURRENCY)
    return workload.arrivals


def _ramp(text: str) -> Arrivals:
    parts = [_number(part) for part in text.split(":")]
    if len(parts) != 3 or not (parts[0] >= 0 and parts[1] > 0 and parts[2] > 0):
        raise InvalidInput(
            f"--ramp is as in 0:10:60 (from none to ten a second in a minute), not {text!r}", param="ramp"
        )
    return Ramp(*parts)


def plan(workload: Workload, load: Load, much: Much) -> Plan:
    """How the workload is sent."""
    arrivals = _arrivals(workload, load)
    if much.requests is not None and much.duration is not None:
        raise InvalidInput("--requests and --duration exclude each other", param="duration")
    if much.duration is not None:
        _positive("--duration", much.duration)
    _positive("--timeout", much.timeout)
    sessions = much.requests if much.duration is None else None
    if sessions is None and much.duration is None and workload.trace is None:
        sessions = REQUESTS
    warmup, seconds = 0, 0.0
    if much.warmup is not None:
        warmup, seconds = _warmup(much.warmup)
    elif isinstance(arrivals, Closed):
        warmup = arrivals.concurrency
    elif much.duration is not None:
        seconds = much.duration / 10
    elif sessions is not None:
        warmup = -(-sessions // 10)
    return Plan(
        arrivals, sessions, much.duration, warmup, seconds, timeout=much.timeout, sustain=much.sustain, seed=much.seed
    )


def _warmup(text: str) -> tuple[int, float]:
    if text.isdecimal():
        return int(text), 0.0
    seconds = _number(text.removesuffix("s")) if text.endswith("s") else math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidInput(f"--warmup is a number of requests (20) or of seconds (5s), not {text!r}", param="warmup")
    return 0, seconds


def bounds(texts: Sequence[str] | None, attain: str) -> Slo | None:
    """What a request has to keep; None where there is nothing."""
    share = _number(attain.removesuffix("%")) / (100 if attain.endswith("%") else 1)
    return slo.parse(texts or [], share)


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise InvalidInput(f"{name} must be above 0, not {value:g}", param=name.removeprefix("--"))
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def parameters(body: str | None) -> dict[str, Any]:
    """What every request has beside its own."""
    if body is None:
        return {}
    try:
        parsed = json.loads(body)
    except ValueError as error:
        raise InvalidInput(f"--body is no JSON: {error}", param="body") from error
    if not isinstance(parsed, dict):
        raise InvalidInput('--body is an object, as in {"temperature": 0}', param="body")
    return parsed


def headers(given: Sequence[str] | None) -> dict[str, str]:
    """By name."""
    made = {}
    for text in given or []:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise InvalidInput(f'--header is as in "x-team: blue", not {text!r}', param="header")
        made[name.strip()] = value.strip()
    return made


def files(given: Sequence[Path] | None) -> list[Path]:
    """Of --out."""
    for path in given or []:
        if path.suffix not in (".json", ".csv", ".html"):
            raise InvalidInput(
                f"--out {path}: its name ends in .json, .csv or .html, which says what it is", param="out"
            )
    return list(given or [])


def levels(text: str) -> list[float]:
    """Of --sweep."""
    found = [_number(part) for part in text.split(",")]
    if not all(0 < level < math.inf for level in found):
        raise InvalidInput(f"--sweep is as in 1,2,4,8, not {text!r}", param="sweep")
    return found


def between(text: str) -> tuple[float, float]:
    """Of --find."""
    parts = [_number(part) for part in text.split(":")]
    if len(parts) != 2 or not 0 < parts[0] < parts[1] < math.inf:
        raise InvalidInput(f"--find is as in 1:32, not {text!r}", param="find")
    return parts[0], parts[1]
