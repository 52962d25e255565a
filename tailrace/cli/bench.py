"""`tailrace bench`: how quick a server is, measured from outside."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.client import DEFAULT_URL
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.cli.benchplan import More
    from tailrace.measure.bench import Bed
    from tailrace.measure.counting import Plan
    from tailrace.measure.result import Bench
    from tailrace.measure.slo import Slo
    from tailrace.workload.spec import Workload

_LOAD = "When requests come"
_MUCH = "How much is measured"
_ASKED = "What is asked"
_SERVER = "The server"
_MORE = "More than one run"
_RESULT = "Results"


class ApiName(StrEnum):
    """Endpoints."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class FormName(StrEnum):
    """Of prompts."""

    TEXT = "text"
    IDS = "ids"


def command(
    url: Annotated[str, typer.Argument(help="Any OpenAI-compatible server.")] = DEFAULT_URL,
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            "-w",
            help="A name (--list), a .toml file, a trace (.jsonl, also of one's own ledger), ShareGPT (.json).",
            rich_help_panel=_ASKED,
        ),
    ] = "chat",
    listing: Annotated[
        bool, typer.Option("--list", help="Say which workloads have names.", rich_help_panel=_ASKED)
    ] = False,
    input_tokens: Annotated[
        int | None,
        typer.Option(
            "--input",
            min=1,
            help="Tokens of every prompt, in place of the workload's.",
            metavar="TOKENS",
            rich_help_panel=_ASKED,
        ),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            "--output",
            min=1,
            help="Tokens of every answer, in place of the workload's.",
            metavar="TOKENS",
            rich_help_panel=_ASKED,
        ),
    ] = None,
    api: Annotated[ApiName, typer.Option(help="Endpoint.", rich_help_panel=_ASKED)] = ApiName.CHAT,
    prompts: Annotated[
        FormName, typer.Option(help="Prompts as text, or as token ids (completions).", rich_help_panel=_ASKED)
    ] = FormName.TEXT,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact/--no-exact",
            help="Ask for answers of exactly the length (ignore_eos), where the server can.",
            rich_help_panel=_ASKED,
        ),
    ] = True,
    body: Annotated[
        str | None,
        typer.Option(help="More parameters of every request, as JSON.", metavar="JSON", rich_help_panel=_ASKED),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Another seed is another load; the same is the same.", rich_help_panel=_ASKED)
    ] = 0,
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
            "--requests",
            "-n",
            min=1,
            help="Measured (sessions, where these have turns). Default: 100.",
            rich_help_panel=_MUCH,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            "-d",
            help="Measure what begins within so many seconds.",
            metavar="SECONDS",
            rich_help_panel=_MUCH,
        ),
    ] = None,
    warmup: Annotated[
        str | None,
        typer.Option(
            help="First, not measured: so many requests, or 5s. Default: as many as run at a time, or a tenth.",
            rich_help_panel=_MUCH,
        ),
    ] = None,
    sustain: Annotated[
        bool,
        typer.Option(
            "--sustain/--no-sustain",
            help="Keep the load up until the last measured request has ended.",
            rich_help_panel=_MUCH,
        ),
    ] = True,
    timeout: Annotated[
        float, typer.Option(help="Longest that a request may take.", metavar="SECONDS", rich_help_panel=_MUCH)
    ] = 600.0,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Bounds that make a request a good one: ttft=500ms,tpot=50ms,e2e=20s,gap=1s.", rich_help_panel=_MUCH
        ),
    ] = None,
    attain: Annotated[
        str, typer.Option(help="Share of the requests that must be good.", rich_help_panel=_MUCH)
    ] = "95%",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Default: the first that it serves.", rich_help_panel=_SERVER)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="TAILRACE_API_KEY", show_envvar=True, help="The server's key.", rich_help_panel=_SERVER),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="NAME: VALUE, of every request; may be repeated.", rich_help_panel=_SERVER)
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            help="Dollars an hour of what serves: gives the cost.", metavar="DOLLARS", rich_help_panel=_SERVER
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="A run at each of these levels (1,2,4,8): a second if --rate is given, else at a time.",
            metavar="LEVELS",
            rich_help_panel=_MORE,
        ),
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            help="Find the highest level that keeps the --slo, likewise.", metavar="LOW:HIGH", rich_help_panel=_MORE
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Compare with another server, in turns.", metavar="URL", rich_help_panel=_MORE)
    ] = None,
    pairs: Annotated[
        int, typer.Option(min=1, help="With --against: so many turns of both.", rich_help_panel=_MORE)
    ] = 10,
    imported: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            help="Show results instead: ours, vLLM's, GuideLLM's, AIPerf's; may be repeated.",
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
    """Measure how quick a server is.

    Sends a workload to any OpenAI-compatible server and says how long its
    users wait: for the first token (TTFT), for each further one (TPOT, ITL), for
    the whole answer (E2E); what it gives a second; what fails; and whether this
    program was what held it up. Percentiles have intervals, and warm-up is not
    in them. docs/bench.md has every definition.

    [bold]Examples[/bold]

      tailrace bench http://127.0.0.1:8000 --workload chat --concurrency 8
      tailrace bench http://127.0.0.1:8000 -w rag --rate 2 --duration 60 --out report.html
      tailrace bench http://127.0.0.1:8000 --sweep 1,2,4,8,16,32 --out sweep.html
      tailrace bench http://127.0.0.1:8000 --rate 1 --find 0.5:20 --slo ttft=1s,tpot=80ms
      tailrace bench http://127.0.0.1:8000 --against http://127.0.0.1:8001 --pairs 10
    """
    if listing:
        _list()
        return
    from tailrace.cli import benchplan, benchshow

    outs = benchplan.files(out)
    if imported:
        from tailrace.measure import importing

        bench = importing.read(imported, price=price)
    else:
        asked = benchplan.workload(workload, input_tokens, output_tokens)
        load = benchplan.Load(concurrency, rate, even, burstiness, ramp, speed)
        plan = benchplan.plan(asked, load, benchplan.Much(requests, duration, warmup, sustain, timeout, seed))
        what = _What(
            url, asked, plan, benchplan.bounds(slo, attain), model, api.value, prompts.value, exact,
            benchplan.parameters(body), api_key, benchplan.headers(header), price, not as_json and sys.stderr.isatty(),
        )  # fmt: skip
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us started with it ignored
        bench = _run(what, benchplan.More(sweep, find, against, pairs))
    for path in outs:
        benchshow.write(bench, path)
    if as_json:
        typer.echo(benchshow.as_json(bench))
    else:
        benchshow.show(bench)
        for path in outs:
            print(f"Written: {path}", file=sys.stderr)
    if any(run.summary.interrupted for run in bench.runs):
        raise typer.Exit(130)
    if bench.runs and not any(run.summary.outcomes.get("ok") for run in bench.runs):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _What:
    """What is measured, and where."""

    url: str
    workload: Workload
    plan: Plan
    slo: Slo | None
    model: str | None
    api: Any
    form: Any  # literals that typer has checked
    exact: bool
    extra: dict[str, Any]
    key: str | None
    headers: dict[str, str] = field(repr=False)
    price: float | None
    progress: bool


def _list() -> None:
    from tailrace.models import catalogue
    from tailrace.workload import spec

    for name in spec.names():
        print(f"{name:14} {spec.load(name).about}")
    for entry in catalogue.known():
        if entry.texts:
            print(f"{entry.name:14} {entry.about}")


def _run(what: _What, more: More) -> Bench:
    from tailrace.cli import benchplan
    from tailrace.cli.benchshow import Progress
    from tailrace.measure import bench as measuring
    from tailrace.measure.http import more_files

    chosen = [name for name in ("sweep", "find", "against") if getattr(more, name) is not None]
    if len(chosen) > 1:
        raise InvalidInput(f"--{' and --'.join(chosen)} exclude each other", param=chosen[0])
    levels = benchplan.levels(more.sweep) if more.sweep is not None else []
    low, high = benchplan.between(more.find) if more.find is not None else (0.0, 0.0)
    if more.find is not None and what.slo is None:
        raise InvalidInput("--find needs --slo: what it is to keep", param="slo")
    more_files()
    with Progress(on=what.progress) as progress:
        return measuring.drive(_measure(what, more, levels, (low, high), progress.begin))


async def _measure(
    what: _What, more: More, levels: list[float], between: tuple[float, float], begin: Callable[..., Any]
) -> Bench:
    from tailrace import __version__
    from tailrace.measure import bench as measuring
    from tailrace.measure.result import Bench

    beds = [await _bed(what, what.url, begin)]
    setting = _setting(what, beds[0])
    shared: dict[str, Any] = {"slo": what.slo, "price": what.price, "setting": setting, "version": __version__}
    try:
        if more.against is not None:
            beds.append(await _bed(what, more.against, begin))
            a, b = (replace(bed, label=label) for bed, label in zip(beds, "AB", strict=True))
            runs, differences = await measuring.compare(a, b, more.pairs)
            return Bench(kind="compare", runs=runs, differences=differences, **shared)
        if levels:
            runs, knee = await measuring.sweep(beds[0], levels)
            return Bench(kind="sweep", runs=runs, knee=knee, **shared)
        if more.find is not None:
            runs, found = await measuring.search(beds[0], *between)
            return Bench(kind="search", runs=runs, found=found, **shared)
        return Bench(kind="run", runs=[await measuring.once(beds[0])], **shared)
    finally:
        for bed in beds:
            bed.pool.close()


async def _bed(what: _What, url: str, begin: Callable[..., Any]) -> Bed:
    from tailrace.measure import probe
    from tailrace.measure.bench import Bed
    from tailrace.measure.http import Pool

    if what.form == "ids" and what.api == "chat":
        raise InvalidInput("--prompts ids is for --api completions", param="prompts")
    pool = Pool(url, key=what.key, headers={"x-tailrace-timeline": "1", **what.headers})
    try:
        target, notes = await probe.prepare(
            pool, model=what.model, api=what.api, form=what.form, extra=what.extra, exact=what.exact
        )
    except BaseException:
        pool.close()
        raise
    return Bed(pool, target, what.workload, what.plan, what.slo, notes=tuple(notes), begin=begin)


def _setting(what: _What, bed: Bed) -> dict[str, Any]:
    import platform

    import msgspec

    plan = what.plan
    return {
        "workload": msgspec.to_builtins(what.workload), "arrivals": msgspec.to_builtins(plan.arrivals),
        "requests": plan.sessions, "duration": plan.seconds, "warmup": plan.warmup,
        "warmup_seconds": plan.warmup_seconds, "sustain": plan.sustain, "timeout": plan.timeout, "seed": plan.seed,
        "target": msgspec.to_builtins(bed.target), "python": platform.python_version(), "machine": platform.machine(),
    }  # fmt: skip
