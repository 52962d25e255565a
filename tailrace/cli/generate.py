"""`tailrace generate`: many prompts from a file, JSONL out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tailrace.cli import local, output
from tailrace.cli.batch import Outcome, Prompts, Results, Runner
from tailrace.cli.options import LORA_HELP, QUANTIZE_HELP, Quantize, adapter_of
from tailrace.cli.pull import complete
from tailrace.terms import InvalidInput


def command(
    prompts: Annotated[Path, typer.Argument(help=".txt: one prompt a line. .jsonl: one object a line.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="JSONL file for the results; appended to.", metavar="FILE")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A known name or a path.", autocompletion=complete)
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running server. Default: the one on port 8000, else one is started.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Send each prompt as a user's message (chat template).")] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus: keep the likeliest tokens up to this mass.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every prompt that gives none itself.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, max=1024, help="Requests at a time.")] = 16,
    retries: Annotated[int, typer.Option(min=0, help="More tries when the server is busy or gone.")] = 5,
    restart: Annotated[bool, typer.Option("--restart", help="Forget what FILE holds and begin anew.")] = False,
    quantize: Annotated[Quantize | None, typer.Option(help=QUANTIZE_HELP)] = None,
    lora: Annotated[str | None, typer.Option(help=LORA_HELP, metavar="DIR")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TAILRACE_API_KEY", show_envvar=True, help="The server's key.")
    ] = None,
) -> None:  # fmt: skip
    """Answer every prompt of a file; JSONL out. Run it again to resume.

    A JSONL line has "prompt" or "messages", and may have "id" and any parameter
    of the API (max_tokens, temperature, seed, stop, logit_bias, ...), which wins
    over the options here. A result has index, id, text, finish_reason, usage and
    timing, or error. Results are appended as they are done, in no order. When the
    same command runs again, finished lines are skipped and failed ones tried
    again (the last result of an index counts).

    [bold]Examples[/bold]

      tailrace generate prompts.txt --chat --max-tokens 64 --out answers.jsonl
      tailrace generate tasks.jsonl -m ./model.gguf -c 32 -o results.jsonl
    """
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop or None}
    defaults: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    work = Prompts.read(prompts, defaults, chat=chat or system is not None, system=system)
    with Results(out, restart=restart) as results:
        left = results.left(work)
        done = len(work) - len(left)
        if done:
            print(f"{done} of {len(work)} are done already", file=sys.stderr)
        failed = 0
        if left:
            adapter = adapter_of(lora)
            with local.connected(
                url, model, api_key, _note, quantize=quantize and quantize.value, lora=adapter
            ) as client:
                served = client.models()
                if url is not None and model is not None and model not in served:
                    raise InvalidInput(f"the server has no model {model!r}; it has {', '.join(served)}", param="model")
                name = adapter[0] if adapter else model if model in served else served[0]
                runner = Runner(client, name, retries=retries)
                try:
                    failed = _work(runner, left, results, concurrency)
                except KeyboardInterrupt:
                    print(f"Stopped. What is done is in {out}; the same command goes on from there.", file=sys.stderr)
                    raise
    print(f"{len(work) - failed} answered, {failed} failed: {out}", file=sys.stderr)
    if failed:
        output.error(f"{failed} of {len(work)} prompts failed (their lines in {out} say why). Run again to retry them.")
        raise typer.Exit(1)


def _work(runner: Runner, left: list[Any], results: Results, concurrency: int) -> int:
    """Runs what is left with a progress bar; how many failed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    failed, tokens = 0, 0
    columns = (TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("", total=len(left), rate="")

        def finished(outcome: Outcome) -> None:
            nonlocal failed, tokens
            results.append(outcome.record)
            failed += "error" in outcome.record
            tokens += outcome.tokens
            elapsed = bars.tasks[0].elapsed or 0.0
            bars.update(task, advance=1, rate=f"{tokens / elapsed:.0f} tokens/s" if elapsed else "")

        runner.run(left, concurrency, finished)
    return failed


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
