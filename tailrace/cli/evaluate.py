"""`tailrace eval`: what makes a model cheaper to serve, and what that costs in quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli import output, serve
from tailrace.cli.pull import complete

if TYPE_CHECKING:
    from tailrace.improve.kv import Outcome, Setting
    from tailrace.improve.text import Passage

app = typer.Typer(help="What makes a model cheaper, and its cost.", no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def _eval() -> None:
    pass  # without a callback, typer would take the only command for the group itself


@app.command()
def kv(
    model: Annotated[
        str, typer.Argument(help="A known name (it is pulled when absent), or a path.", autocompletion=complete)
    ],
    kv_dtype: Annotated[
        str, typer.Option(help="Types of KV, with commas, as serve has them.", metavar="TYPES")
    ] = "fp16,int8,k8v4,int4",
    kv_dtype_skip: Annotated[
        str, typer.Option(help="Layers that stay bf16 in all of them: 0,1 or 0-3,29.", metavar="LAYERS")
    ] = "",
    text: Annotated[
        Path | None, typer.Option(help="Text to measure with. Default: Python's language reference.", metavar="FILE")
    ] = None,
    tokens: Annotated[int, typer.Option(min=16, max=1 << 20, help="Most tokens of a passage.")] = 512,
    passages: Annotated[int, typer.Option(min=1, max=1000, help="Most passages of the text.")] = 4,
    budget: Annotated[str, typer.Option(help="Memory for KV that users share.", metavar="SIZE")] = "4GiB",
    context: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens that each user has.")] = 2048,
    sequences: Annotated[int, typer.Option(min=1, max=256, help="Users of a timed decode step.")] = 8,
    pairs: Annotated[int, typer.Option(min=0, max=1000, help="Timed steps of each kind; 0: no speed.")] = 9,
    exact: Annotated[
        bool, typer.Option("--exact", help="Quality in float32 arithmetic: what KV alone costs. Slow.")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads. Default: one a core.")] = None,
    kernels: Annotated[str | None, typer.Option(help="Instruction path. Default: the best.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Hold KV in fewer bits against bf16: quality, memory, users, speed.

    Quality is the KL divergence of the next token's distribution from that with
    bf16, and the change of perplexity, on real text. Users are those who fit the
    budget with so many tokens each. Speed is that of steps that each type takes
    in turn with bf16: a ratio below 1 is quicker.

    [bold]Examples[/bold]

      tailrace eval kv smollm2-135m
      tailrace eval kv ./model.gguf --kv-dtype k8v4 --text book.txt --json
    """
    from tailrace.backends.kvdtype import parse
    from tailrace.improve.compare import PREFILL
    from tailrace.improve.kv import Setting, evaluate
    from tailrace.improve.text import passages as read
    from tailrace.models import load_model, open_checkpoint
    from tailrace.models.entry import prepared_dir
    from tailrace.text import load_text

    kinds = list(dict.fromkeys(parse(name.strip(), kv_dtype_skip) for name in kv_dtype.split(",")))
    size = serve.size_of(budget, "budget")
    path = serve.find_model(model)
    checkpoint = open_checkpoint(path)
    made = load_model(checkpoint, max_context=max(tokens, context + PREFILL))
    texts = read(load_text(checkpoint.text, vocab=made.vocab), text, tokens=tokens, count=passages)
    setting = Setting(size, context, sequences, pairs, threads, kernels, prepared_dir(path), exact)
    with output.measuring() as report:
        outcomes = evaluate(made, kinds, texts, setting, report)
    if as_json:
        import msgspec

        found = {
            "model": checkpoint.name,
            "text": [{"name": passage.name, "tokens": len(passage.ids)} for passage in texts],
            "budget_bytes": size,
            "exact": exact,
            "context": context,
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        show(outcomes, texts, setting)


def show(outcomes: Sequence[Outcome], texts: Sequence[Passage], setting: Setting) -> None:
    """Prints the tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    names = ", ".join(passage.name for passage in texts)
    console.print(f"{outcomes[0].quality.tokens:,} tokens of {escape(names)}\n", soft_wrap=True)
    users = f"users of {setting.context:,} tokens in {output.size(setting.budget)}"
    table = Table(box=None, header_style="bold")
    for at, name in enumerate(("KV", "mean KL", "99 %", "perplexity", "change", "same choice", "bytes a token", users)):
        table.add_column(name, justify="right" if at else "left")
    for outcome in outcomes:
        quality = outcome.quality
        table.add_row(
            outcome.kv_dtype, f"{quality.mean_kl:.5f}", f"{quality.p99_kl:.4f}", f"{quality.perplexity:.3f}",
            f"{quality.perplexity_change:+.2%}", f"{quality.same_choice:.1%}",
            f"{outcome.bytes_per_token:,} ({outcome.memory:.0%})", f"{outcome.users:,} ({outcome.users_gained:.2f} x)",
        )  # fmt: skip
    console.print(table)
    if outcomes[0].speed:
        _show_speed(outcomes)


def _show_speed(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "bf16, ms", *(f"{outcome.kv_dtype}, x" for outcome in outcomes[1:]), box=None,
                  header_style="bold")  # fmt: skip
    for at, step in enumerate(outcomes[0].speed):
        many = f"{step.sequences} at {step.context:,}" if step.phase == "decode" else f"at {step.context:,}"
        ratios = [outcome.speed[at] for outcome in outcomes[1:]]
        table.add_row(
            f"{step.phase} {many}", f"{step.seconds * 1e3:.1f}",
            *(f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})" for found in ratios),
        )  # fmt: skip
    console = Console(highlight=False)
    console.print()
    console.print(table)
    console.print(
        f"\n[dim]x: time beside bf16's, median of {outcomes[0].speed[0].pairs} pairs and its quartiles[/dim]",
        soft_wrap=True,
    )
