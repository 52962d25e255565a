"""`tailrace compare`: engines side by side on this machine, and which one for this workload."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.bench import ApiName, FormName
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.measure.engines.turns import Contest, Entrant, Setup
    from tailrace.measure.result import Bench, Side

ALL = "tailrace,llama.cpp,vllm,openvino,transformers,sglang,tensorrt-llm"

_WHO = "Engines"
_ASKED = "What is asked"
_HOW = "How they are measured"
_SERVER = "How each is started"
_RESULT = "Results"


class BetweenName(StrEnum):
    """What happens to an engine between its turns."""

    AUTO = "auto"
    SUSPEND = "suspend"
    RESTART = "restart"


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Files, folders or names; each engine serves the first that it takes, or its own: ENGINE=MODEL.",
        ),
    ] = None,
    engines: Annotated[
        str,
        typer.Option(
            "--engines", "-e", help="Who takes part. ENGINE:NAME is one configuration of an engine.",
            metavar="LIST", rich_help_panel=_WHO,
        ),
    ] = ALL,
    listing: Annotated[
        bool, typer.Option("--list", help="Say which engines are found, and where.", rich_help_panel=_WHO)
    ] = False,
    engine_path: Annotated[
        list[str] | None,
        typer.Option(
            help="Where an engine is: a program, an interpreter, a virtual environment; may be repeated.",
            metavar="ENGINE=PATH", rich_help_panel=_WHO,
        ),
    ] = None,
    engine_args: Annotated[
        list[str] | None,
        typer.Option(
            help="More of an engine's own flags: vllm='--max-num-seqs 64'; may be repeated.",
            metavar="ENGINE=FLAGS", rich_help_panel=_WHO,
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="How an engine's weights are computed or rounded, in its words: tailrace=int8, vllm=bfloat16.",
            metavar="ENGINE=TYPE", rich_help_panel=_WHO,
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            help="Dollars an hour of the machine, or of one engine's: gives the cost.",
            metavar="[ENGINE=]DOLLARS", rich_help_panel=_WHO,
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            "--workload", "-w", help="As of tailrace bench: a name, a .toml file, a trace.", rich_help_panel=_ASKED
        ),
    ] = "chat",
    input_tokens: Annotated[
        int | None,
        typer.Option("--input", min=1, help="Tokens of every prompt.", metavar="TOKENS", rich_help_panel=_ASKED),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option("--output", min=1, help="Tokens of every answer.", metavar="TOKENS", rich_help_panel=_ASKED),
    ] = None,
    api: Annotated[ApiName, typer.Option(help="Endpoint.", rich_help_panel=_ASKED)] = ApiName.CHAT,
    prompts: Annotated[
        FormName, typer.Option(help="Prompts as text, or as token ids (completions).", rich_help_panel=_ASKED)
    ] = FormName.TEXT,
    exact: Annotated[
        bool,
        typer.Option("--exact/--no-exact", help="Ask for answers of exactly the length.", rich_help_panel=_ASKED),
    ] = True,
    body: Annotated[
        str | None,
        typer.Option(
            help='Parameters of every request, as JSON. Default: {"temperature": 0}.', metavar="JSON",
            rich_help_panel=_ASKED,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "-c", min=1, help="Closed loop: so many at a time. Default: 8.", rich_help_panel=_ASKED
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", "-r", help="Open loop: so many a second, at random times.", rich_help_panel=_ASKED),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed is another load.", rich_help_panel=_ASKED)] = 0,
    requests: Annotated[
        int | None,
        typer.Option("--requests", "-n", min=1, help="Measured, in each turn. Default: 100.", rich_help_panel=_HOW),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration", "-d", help="Measure what begins within so many seconds of each turn.", metavar="SECONDS",
            rich_help_panel=_HOW,
        ),
    ] = None,
    warmup: Annotated[
        str | None,
        typer.Option(help="First of each turn, not measured: so many requests, or 5s.", rich_help_panel=_HOW),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Longest that a request may take.", metavar="SECONDS", rich_help_panel=_HOW)
    ] = 600.0,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="Turns. Default: the fewest that can show a difference (2 engines: 6, 3: 7, 4: 8).",
            rich_help_panel=_HOW,
        ),
    ] = None,
    between: Annotated[
        BetweenName,
        typer.Option(
            help="What engines do between their turns. auto: suspend, unless memory is short or there is a GPU.",
            rich_help_panel=_HOW,
        ),
    ] = BetweenName.AUTO,
    slo: Annotated[
        list[str] | None,
        typer.Option(help="Bounds that make a request a good one: ttft=500ms,tpot=50ms,e2e=20s.", rich_help_panel=_HOW),
    ] = None,
    attain: Annotated[str, typer.Option(help="Share of the requests that must be good.", rich_help_panel=_HOW)] = "95%",
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of prompt and answer that one request may have. Default: as the workload needs.",
            metavar="TOKENS", rich_help_panel=_SERVER,
        ),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests that may run at a time. Default: as the load has; 32 in an open loop.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads. Default: one a core.", rich_help_panel=_SERVER)
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache", help="Of all engines. Default: as each has it.",
            rich_help_panel=_SERVER, show_default=False,
        ),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(help="Longest that a start may take.", metavar="SECONDS", rich_help_panel=_SERVER)
    ] = 600.0,
    logs: Annotated[
        Path | None,
        typer.Option(help="Folder for the engines' logs. Default: that for temporary files.", rich_help_panel=_SERVER),
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out", "-o", help="Write .json (all), .csv (a line a request), .html (a report); may be repeated.",
            metavar="FILE", rich_help_panel=_RESULT,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON, for programs; requests are in --out's only.", rich_help_panel=_RESULT),
    ] = False,
) -> None:  # fmt: skip
    """Measure engines side by side, and say which one for this workload.

    Starts each engine that is installed here on the same model, sends all of them
    the same requests in turns, and compares: what users wait, what it gives a second,
    what fails, memory, processor time, how long a start takes. Says what these runs
    show and what they do not. docs/compare.md has the rules.

    [bold]Examples[/bold]

      tailrace compare --list
      tailrace compare smollm2-135m --engines tailrace,llama.cpp -w chat -c 4 -n 16
      tailrace compare model.gguf ./checkpoint --engine-path vllm=~/venvs/vllm --slo ttft=1s,tpot=80ms
      tailrace compare ./checkpoint -e tailrace,tailrace:int8 --engine-args tailrace:int8='--quantize int8'
    """
    from tailrace.cli import benchplan, benchshow, compareplan, compareshow

    if listing:
        said = compareplan.given(engine_path or [], [], [], [], [], compareplan.labels(ALL))
        compareshow.listing(compareplan.listing(said))
        return
    outs = benchplan.files(out)
    asked = compareplan.labels(engines)
    if not models:
        raise InvalidInput("name a model: a file, a folder, or a name as of tailrace pull", param="model")
    said = compareplan.given(engine_path or [], engine_args or [], dtype or [], price or [], models, asked)
    task = benchplan.workload(workload, input_tokens, output_tokens)
    plan = benchplan.plan(
        task, benchplan.Load(concurrency, rate, False, None, None, None),
        benchplan.Much(requests, duration, warmup, True, timeout, seed),
    )  # fmt: skip
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us started with it ignored
    from tailrace.deploy.engines.driver import Options
    from tailrace.measure import statistics
    from tailrace.measure.engines import sizes
    from tailrace.measure.engines.turns import Entrant, Setup

    if prompts == FormName.IDS and api == ApiName.CHAT:
        raise InvalidInput("--prompts ids is for --api completions", param="prompts")
    turns = repeats or statistics.least_pairs(max(1, len(asked) * (len(asked) - 1) // 2))
    options = Options(
        "", context=context or sizes.context(task, plan, turns), parallel=parallel or sizes.parallel(task, plan),
        threads=threads or compareplan.cores(), prefix_cache=prefix_cache,
    )  # fmt: skip
    sides = [compareplan.entrant(label, said, options) for label in asked]
    entrants = [side for side in sides if isinstance(side, Entrant)]
    turns = repeats or statistics.least_pairs(max(1, len(entrants) * (len(entrants) - 1) // 2))
    setup = Setup(
        task, plan, benchplan.bounds(slo, attain), api.value, prompts.value, turns=turns, exact=exact,
        between=between.value, limit=start_timeout, logs=logs,
        body={"temperature": 0} if body is None else benchplan.parameters(body),
    )  # fmt: skip
    bench, interrupted = _run(entrants, sides, setup, on=not as_json and sys.stderr.isatty())
    for path in outs:
        benchshow.write(bench, path)
    if as_json:
        typer.echo(benchshow.as_json(bench))
    else:
        compareshow.show(bench)
        for path in outs:
            print(f"Written: {path}", file=sys.stderr)
    if interrupted:
        raise typer.Exit(130)
    if not any(run.summary.outcomes.get("ok") for run in bench.runs):
        raise typer.Exit(1)


def _run(entrants: Sequence[Entrant], sides: Sequence[Entrant | Side], setup: Setup, *, on: bool) -> tuple[Bench, bool]:
    import dataclasses

    from tailrace.cli.benchshow import Progress
    from tailrace.measure.engines.turns import Contest
    from tailrace.measure.http import more_files

    more_files()
    with Progress(on=on) as progress:
        contest = Contest(entrants, dataclasses.replace(setup, begin=progress.begin, say=progress.say))
        contest.run()
    return _bench(contest, sides, setup), contest.interrupted


def _bench(contest: Contest, sides: Sequence[Entrant | Side], setup: Setup) -> Bench:
    from tailrace import __version__
    from tailrace.measure.engines import judge
    from tailrace.measure.result import Bench, Side

    measured = {side.label: side for side in contest.sides}
    every = [side if isinstance(side, Side) else measured[side.label] for side in sides]
    differences = judge.differences(every, contest.runs)
    return Bench(
        kind="engines", runs=contest.runs, slo=setup.slo, differences=differences, sides=every,
        decision=judge.decide(every, contest.runs, differences, setup.slo), setting=_setting(contest, setup),
        version=__version__,
    )  # fmt: skip


def _setting(contest: Contest, setup: Setup) -> dict[str, Any]:
    import platform

    import msgspec

    from tailrace.cli import compareplan

    plan = setup.plan
    return {
        "workload": msgspec.to_builtins(setup.workload), "arrivals": msgspec.to_builtins(plan.arrivals),
        "requests": plan.sessions, "duration": plan.seconds, "warmup": plan.warmup,
        "warmup_seconds": plan.warmup_seconds, "timeout": plan.timeout, "seed": plan.seed, "turns": setup.turns,
        "between turns": "suspended" if contest.suspends else "stopped", "api": setup.api, "prompts": setup.form,
        "python": platform.python_version(), "machine": platform.machine(), "cores": compareplan.cores(),
    }  # fmt: skip
