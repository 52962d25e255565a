"""`tailrace lab`: the classic experiments on serving language models, one command each."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.options import QUANTIZE_HELP, Quantize
from tailrace.cli.pull import complete
from tailrace.terms import InvalidInput, ModelError

if TYPE_CHECKING:
    from tailrace.deploy.local import Replica
    from tailrace.ledger.price import Api
    from tailrace.measure.lab.experiment import Experiment
    from tailrace.measure.lab.inside import Inside
    from tailrace.measure.lab.perform import Chapter, Report
    from tailrace.measure.lab.stand import Stand

SECONDS, QUICK = 60.0, 12.0
"""About how long an experiment may measure."""
SERVER = 8.0
"""About what starting, warming and ending servers takes on top."""

app = typer.Typer(
    help="Experiments that show how serving works, on any model.", no_args_is_help=True, rich_markup_mode="rich"
)

EXAMPLES = ("gpt-4o-mini", "claude-sonnet-4.5")
"""APIs of the catalogue whose prices are shown where none is named."""
NAMES = {
    "shapes": "Short and long prompts and answers: where a request's time goes.",
    "batch": "1, 4 and 8 requests at once: what all gain and each one loses.",
    "context": "Memory, first token and throughput against context and users.",
    "kv": "The memory of keys and values: predicted, and measured to the page.",
    "prefix": "Prompts that begin alike, with the prefix cache and without.",
    "agent": "An agent's loop: time of each step, and its cost against one call.",
    "precision": "Weights in bf16, int8 and int4: memory, speed, quality.",
    "roofline": "What holds prefill and decode back: memory or arithmetic.",
    "all": "All of them, as one report.",
}


@app.command("list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say which experiments there are, and the question that each answers."""
    from tailrace.measure.lab.experiments import EXPERIMENTS

    if as_json:
        import msgspec

        known = [{"name": one.name, "question": one.question, "does": one.does, "needs": one.needs,
                  "seconds": SECONDS, "quick_seconds": QUICK} for one in EXPERIMENTS]  # fmt: skip
        typer.echo(msgspec.json.format(msgspec.json.encode(known), indent=2))
        return
    for one in EXPERIMENTS:
        typer.echo(f"{one.name:10} {one.question}")
        where = "any server: --url works" if one.needs == "server" else "this machine alone"
        typer.echo(f"{'':10} {one.does} ({where}; about {_minutes(SECONDS)}, {_minutes(QUICK)} with --quick)\n")


def command(name: str) -> Callable[..., None]:
    """The command of one experiment, or of all."""

    def run(
        model: Annotated[
            str,
            typer.Argument(help="A known name (it is pulled when absent), or a path.", autocompletion=complete),
        ] = "smollm2-135m",
        url: Annotated[
            str | None,
            typer.Option(
                help="Measure a server that runs, of any engine with OpenAI's API, in place of one of our own."
            ),
        ] = None,
        api_key: Annotated[
            str | None, typer.Option(envvar="TAILRACE_API_KEY", show_envvar=True, help="Its key, with --url.")
        ] = None,
        quick: Annotated[
            bool, typer.Option("--quick", help="Fewer and smaller runs: about a fifth of the time.")
        ] = False,
        seconds: Annotated[
            float | None,
            typer.Option(min=1, max=36_000, help=f"About how long an experiment measures. Default: {SECONDS:g}."),
        ] = None,
        api: Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME=IN/OUT",
                help="What a public API asks for a million tokens, USD, or NAME=IN/CACHED/OUT; may be repeated. "
                "For the agent's bill. Default: two examples.",
            ),
        ] = None,
        quantize: Annotated[Quantize | None, typer.Option(help=f"For our own server: {QUANTIZE_HELP}")] = None,
        threads: Annotated[int | None, typer.Option(min=1, help="Compute threads. Default: one a core.")] = None,
        html: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Write the report: one page with plots and what they say.")
        ] = None,
        as_json: Annotated[
            Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - prints it.")
        ] = None,
    ) -> None:
        _run(_Asked(name, model, url, api_key, SECONDS if not quick else QUICK, seconds, tuple(api or ()),
                    quantize and quantize.value, threads), html, as_json)  # fmt: skip

    return run


@dataclass(frozen=True)
class _Asked:
    """The command line."""

    name: str
    model: str
    url: str | None
    key: str | None
    default: float
    seconds: float | None
    apis: tuple[str, ...]
    quantize: str | None
    threads: int | None

    @property
    def budget(self) -> float:
        """Seconds of an experiment."""
        return self.seconds if self.seconds is not None else self.default


def _run(asked: _Asked, html: Path | None, as_json: Path | None) -> None:
    import time

    from tailrace import __version__
    from tailrace.measure.bench import drive
    from tailrace.measure.lab.experiments import EXPERIMENTS
    from tailrace.measure.lab.perform import Report, perform

    chosen = [one for one in EXPERIMENTS if asked.name in (one.name, "all")]
    _check(asked)
    for path in filter(None, (html, as_json)):
        _writable(path)
    stand = _stand(asked, chosen)
    printed = as_json is not None and str(as_json) == "-"
    _say_plan(chosen, asked)
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us started with it ignored
    begun, began = time.perf_counter(), time.time()
    from tailrace.cli import labshow

    chapters: list[Chapter] = []
    interrupted = False
    try:
        with labshow.progress() as say:
            drive(perform(chosen, replace(stand, say=say), chapters.append))
    except KeyboardInterrupt:  # what is done is told
        interrupted = True
        if not chapters:
            raise
    report = Report(
        model=asked.model, where=asked.url or _machine(), began=began, seconds=time.perf_counter() - begun,
        budget=asked.budget, chapters=chapters, version=__version__,
    )  # fmt: skip
    _write(report, html, as_json)
    if not printed:
        labshow.show(report)
    for path in filter(None, (html, None if printed else as_json)):
        print(f"Written: {path}", file=sys.stderr)
    if interrupted or all(one.lesson is None for one in chapters):
        raise typer.Exit(130 if interrupted else 1)


def _check(asked: _Asked) -> None:
    """Raises InvalidInput for an option that would be for nothing."""
    if asked.apis and asked.name not in ("agent", "all"):
        raise InvalidInput(f"--api is for the agent's bill, which {asked.name} does not have", param="api")
    if asked.quantize is not None and asked.name == "precision":
        raise InvalidInput("--quantize is not for precision, which measures every kind of weights", param="quantize")


def _writable(path: Path) -> None:
    """Raises InvalidInput for a place that cannot be written: not only after minutes."""
    if str(path) != "-" and not path.parent.is_dir():
        raise InvalidInput(f"{path} cannot be written: there is no directory {path.parent}", param="html")


def _say_plan(chosen: Sequence[Experiment[Any]], asked: _Asked) -> None:
    """What will be done, and for about how long."""
    about = len(chosen) * (asked.budget + SERVER)
    names = ", ".join(one.name for one in chosen)
    print(f"{names}: about {_minutes(about)}. {chosen[0].does if len(chosen) == 1 else ''}".rstrip(), file=sys.stderr)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _stand(asked: _Asked, chosen: Sequence[Experiment[Any]]) -> Stand:
    """What the experiments get. Raises InvalidInput and ModelError where that cannot be had."""
    from tailrace.measure.http import Pool
    from tailrace.measure.lab.stand import Stand

    if asked.url is None:
        from tailrace.cli import labinside, serve

        path = serve.find_model(asked.model)
        inside = labinside.of(path, asked.threads, asked.quantize)
        return Stand(asked.model, asked.budget, start=_starter(asked, path), inside=inside, prices=_prices(asked.apis))
    for option, value in (("quantize", asked.quantize), ("threads", asked.threads)):
        if value is not None:
            raise InvalidInput(f"--{option} is for a server that is started here, but --url names one that runs",
                               param=option)  # fmt: skip
    if all(one.needs == "local" for one in chosen):
        raise InvalidInput(f"{chosen[0].name} measures this machine, not a server: leave --url out", param="url")
    Pool(asked.url).close()  # an address that is none is said before anything runs
    return Stand(asked.model, asked.budget, url=asked.url, key=asked.key, inside=_known(asked.model),
                 prices=_prices(asked.apis))  # fmt: skip


def _known(model: str) -> Inside | None:
    """What is known of a model that somebody else serves: nothing, unless its files are here, too."""
    from tailrace.cli import labinside
    from tailrace.models import catalogue

    try:
        if not Path(model).expanduser().exists() and catalogue.missing(model):
            return None
        return labinside.of(catalogue.resolve(model), None, None)
    except (ModelError, InvalidInput):
        return None


def _starter(asked: _Asked, path: Path) -> Callable[[Sequence[str]], AbstractContextManager[Replica]]:
    from tailrace.deploy.engines.driver import Options
    from tailrace.deploy.engines.tailrace import DRIVER
    from tailrace.deploy.local import Replica

    found = DRIVER.find(None)

    @contextlib.contextmanager
    def start(options: Sequence[str]) -> Iterator[Replica]:
        wanted = Options(str(path), asked.model, threads=asked.threads, dtype=asked.quantize, extra=tuple(options))
        replica = Replica.start(lambda port: DRIVER.command(found, wanted, port))
        with replica:
            yield replica
        replica.log.unlink(missing_ok=True)  # it is kept where something went wrong

    return start


def _prices(given: Sequence[str]) -> dict[str, Api]:
    from tailrace.ledger import price
    from tailrace.twin.catalogue import prices

    made = {}
    for text in given or EXAMPLES:
        name, equals, amounts = text.partition("=")
        if not equals:
            made[name] = prices.load().api(name)
            continue
        try:
            numbers = [float(part) for part in amounts.split("/")]
        except ValueError:
            numbers = []
        if not name or len(numbers) not in (2, 3) or not all(0 <= one < 1e6 for one in numbers) or not any(numbers):
            raise InvalidInput(
                f"--api is as in some-api=0.15/0.60 or some-api=0.15/0.075/0.60, not {text!r}", param="api"
            )
        made[name] = price.Api(numbers[0], numbers[-1], numbers[1] if len(numbers) == 3 else None, source="--api")
    return made


def _machine() -> str:
    from tailrace.backends.cpu.machine import this_machine

    machine = this_machine(None, None)
    return f"{machine.cpu}, {machine.cores} cores, {machine.kernels} kernels"


def _write(report: Report, html: Path | None, as_json: Path | None) -> None:
    from tailrace.cli import labshow
    from tailrace.measure import result

    if html is not None:
        from tailrace.measure.lab import page

        result.write(html, page.html(report).encode())
    if as_json is not None:
        content = labshow.as_json(report)
        if str(as_json) == "-":
            sys.stdout.buffer.write(content + b"\n")
        else:
            result.write(as_json, content)


for _name, _help in NAMES.items():
    app.command(_name, help=_help)(command(_name))
