"""`tailrace simulate`: what replicas of this engine would do with a load, before there are any."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.engine.config import EngineConfig
    from tailrace.measure.counting import Plan
    from tailrace.measure.result import Bench, Measured
    from tailrace.measure.slo import Slo
    from tailrace.twin.simulate.cost import Linear
    from tailrace.twin.simulate.fleet import Answered
    from tailrace.workload.spec import Workload

_LOAD = "When requests come"
_MUCH = "How much counts"
_REPLICAS = "The replicas"
_RESULT = "Results"


class PlaceName(StrEnum):
    """Placements (`fleet.placement`)."""

    TURNS = "turns"
    LOAD = "load"
    PREFIX = "prefix"


class PolicyName(StrEnum):
    """Of cached pages (`kv.retention`)."""

    LRU = "lru"
    LFU = "lfu"
    TTL = "ttl"
    COST = "cost"


def command(
    workload: Annotated[
        str,
        typer.Argument(help="A name (bench --list), a .toml file, a Mooncake trace (.jsonl), ShareGPT (.json)."),
    ],
    cost: Annotated[
        Path,
        typer.Option(help="TOML file that says how long a step takes (docs/simulator.md).", rich_help_panel=_REPLICAS),
    ],
    kv_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that the KV pool of a replica holds.", rich_help_panel=_REPLICAS)
    ],
    replicas: Annotated[int, typer.Option(min=1, help="So many, all alike.", rich_help_panel=_REPLICAS)] = 1,
    place: Annotated[
        PlaceName,
        typer.Option(
            help="Where a request goes: to each in turn, to the least loaded, or to where its prefix is cached and "
            "there is room.",
            rich_help_panel=_REPLICAS,
        ),
    ] = PlaceName.LOAD,
    max_context: Annotated[
        int, typer.Option(help="Longest prompt plus output; 0: what the pool holds.", rich_help_panel=_REPLICAS)
    ] = 0,
    step_tokens: Annotated[int, typer.Option(help="Token budget of a step.", rich_help_panel=_REPLICAS)] = 512,
    max_running: Annotated[int, typer.Option(help="Most requests in a step.", rich_help_panel=_REPLICAS)] = 32,
    max_waiting: Annotated[
        int, typer.Option(help="Most requests in the queue; more are refused.", rich_help_panel=_REPLICAS)
    ] = 1024,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache/--no-prefix-cache", rich_help_panel=_REPLICAS, help="As of tailrace serve.")
    ] = True,
    kv_policy: Annotated[
        PolicyName, typer.Option(help="As of tailrace serve.", rich_help_panel=_REPLICAS)
    ] = PolicyName.LRU,
    kv_ttl: Annotated[
        float, typer.Option(help="Likewise, with --kv-policy ttl.", metavar="SECONDS", rich_help_panel=_REPLICAS)
    ] = 0.0,
    input_tokens: Annotated[
        int | None, typer.Option("--input", min=1, help="Tokens of every prompt.", metavar="TOKENS")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output", min=1, help="Tokens of every answer.", metavar="TOKENS")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed is another load; the same is the same.")] = 0,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "-c", min=1, help="Closed loop: so many at a time. Default: 8.", rich_help_panel=_LOAD
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", "-r", help="Open loop: so many a second, at random times (Poisson).", rich_help_panel=_LOAD
        ),
    ] = None,
    even: Annotated[bool, typer.Option("--even", help="With --rate: at even times.", rich_help_panel=_LOAD)] = False,
    burstiness: Annotated[
        float | None,
        typer.Option(help="With --rate: below 1 in bursts, above 1 more evenly (gamma).", rich_help_panel=_LOAD),
    ] = None,
    ramp: Annotated[
        str | None, typer.Option(help="Open loop whose rate grows: FIRST:LAST:SECONDS.", rich_help_panel=_LOAD)
    ] = None,
    speed: Annotated[
        float | None, typer.Option(help="Of a trace: so many times as fast as recorded.", rich_help_panel=_LOAD)
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", "-n", min=1, help="Sessions that count. Default: 100, of a trace all.", rich_help_panel=_MUCH
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            "-d",
            help="Count what begins within so many seconds.",
            metavar="SECONDS",
            rich_help_panel=_MUCH,
        ),
    ] = None,
    warmup: Annotated[
        str | None,
        typer.Option(
            help="First, not counted: so many requests, or 5s. Default: as of tailrace bench.", rich_help_panel=_MUCH
        ),
    ] = None,
    sustain: Annotated[
        bool,
        typer.Option(
            "--sustain/--no-sustain",
            help="Keep the load up until the last request that counts has ended.",
            rich_help_panel=_MUCH,
        ),
    ] = True,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Bounds that make a request a good one: ttft=500ms,tpot=50ms,e2e=20s,gap=1s.", rich_help_panel=_MUCH
        ),
    ] = None,
    attain: Annotated[
        str, typer.Option(help="Share of the requests that must be good.", rich_help_panel=_MUCH)
    ] = "95%",
    price: Annotated[
        float | None,
        typer.Option(help="Dollars an hour of a replica: gives the cost.", metavar="DOLLARS", rich_help_panel=_RESULT),
    ] = None,
    timelines: Annotated[
        Path | None,
        typer.Option(
            help="Write where each request's time went: a line of JSON a request.",
            metavar="FILE",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            "-o",
            help="Write .json (all), .csv (a line a request), .html (a report); may be repeated.",
            metavar="FILE",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON, for programs; requests are in --out's only.", rich_help_panel=_RESULT),
    ] = False,
) -> None:
    """Predict what replicas of this engine would do with a load.

    Runs the engine's own scheduler and KV bookkeeping, with every request of the
    workload or trace, on a clock that is moved by what --cost says of each step:
    no model, no device. One replica or many. Shows the same as tailrace bench.
    docs/simulator.md says what is in it, and what is not.

    [bold]Examples[/bold]

      tailrace simulate chat --cost cost.toml --kv-tokens 65536 --rate 2
      tailrace simulate trace.jsonl --cost cost.toml --kv-tokens 500000 --replicas 8 --place prefix
      tailrace simulate agent --cost cost.toml --kv-tokens 65536 -c 64 --replicas 4 --out report.html
    """
    from tailrace.cli import benchplan, benchshow
    from tailrace.engine.config import EngineConfig
    from tailrace.twin.simulate import cost as costs

    outs = benchplan.files(out)
    asked = benchplan.workload(workload, input_tokens, output_tokens)
    load = benchplan.Load(concurrency, rate, even, burstiness, ramp, speed)
    plan = benchplan.plan(asked, load, benchplan.Much(requests, duration, warmup, sustain, 600.0, seed))
    config = EngineConfig(
        kv_tokens=kv_tokens, max_context=max_context, step_tokens=step_tokens, max_running=max_running,
        max_waiting=max_waiting, prefix_cache=prefix_cache, kv_policy=kv_policy.value, kv_ttl=kv_ttl, draft_tokens=0,
    )  # fmt: skip
    what = _What(asked, plan, benchplan.bounds(slo, attain), costs.read(cost), config, replicas, place.value, price)
    result = _run(what, timelines)
    for path in outs:
        benchshow.write(result, path)
    if as_json:
        typer.echo(benchshow.as_json(result))
    else:
        benchshow.show(result)
        for path in [*outs, *([timelines] if timelines is not None else [])]:
            print(f"Written: {path}", file=sys.stderr)
    if not any(run.summary.outcomes.get("ok") for run in result.runs):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _What:
    """What is simulated."""

    workload: Workload
    plan: Plan
    slo: Slo | None
    cost: Linear
    config: EngineConfig
    replicas: int
    place: str
    price: float | None


def _run(what: _What, timelines: Path | None) -> Bench:
    from tailrace import __version__
    from tailrace.measure.result import Bench

    with ExitStack() as stack:
        write = None
        if timelines is not None:
            try:
                write = stack.enter_context(timelines.open("wb")).write
            except OSError as error:
                raise _unwritten(timelines, error) from error
        try:
            run = _measured(what, write)
        except OSError as error:
            if timelines is None:
                raise
            raise _unwritten(timelines, error) from error
    price = None if what.price is None else what.price * what.replicas
    return Bench(kind="run", runs=[run], slo=what.slo, price=price, setting=_setting(what), version=__version__)


def _unwritten(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(f"{path} cannot be written: {error.strerror}", param="timelines")


def _measured(what: _What, write: Any) -> Measured:
    import msgspec

    from tailrace.fleet import placement
    from tailrace.ledger import timeline
    from tailrace.measure import bench, predict
    from tailrace.measure.result import Measured
    from tailrace.measure.summary import summarise
    from tailrace.twin.simulate.fleet import Fleet

    fleet = Fleet(what.replicas, what.config, what.cost, placement.make(what.place))
    spread: Counter[int] = Counter()

    def observe(one: Answered) -> None:
        spread[one.replica] += 1
        if write is not None and one.ended:
            line = {"replica": one.replica, **timeline.as_json(one.timeline)}
            write(msgspec.json.encode(line) + b"\n")

    run = predict.run(fleet, what.workload, what.plan, observe)
    arrivals = what.plan.arrivals
    many = f"{what.replicas} replicas, placed by {what.place}" if what.replicas > 1 else "one replica"
    notes = [*predict.notes(fleet, spread), *([f"Cost: {what.cost.about}"] if what.cost.about else [])]
    return Measured(
        label=bench.spoken(arrivals), url=many, model="tailrace", workload=what.workload.name,
        load=bench.spoken(arrivals), level=bench.level(arrivals), open_loop=run.open_loop,
        summary=summarise(run, what.slo), window=run.window, records=run.records, notes=notes, source="predicted",
    )  # fmt: skip


def _setting(what: _What) -> dict[str, Any]:
    import msgspec

    plan = what.plan
    return {
        "workload": msgspec.to_builtins(what.workload), "arrivals": msgspec.to_builtins(plan.arrivals),
        "requests": plan.sessions, "duration": plan.seconds, "warmup": plan.warmup,
        "warmup_seconds": plan.warmup_seconds, "sustain": plan.sustain, "seed": plan.seed,
        "cost": msgspec.to_builtins(what.cost), "engine": msgspec.to_builtins(what.config),
        "replicas": what.replicas, "place": what.place,
    }  # fmt: skip
