"""`tailrace info`: what a model is."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli import output, serve
from tailrace.cli.options import QUANTIZE_HELP, Quantize
from tailrace.cli.pull import complete

if TYPE_CHECKING:
    from tailrace.models import ModelInfo


def command(
    model: Annotated[
        str, typer.Argument(help="A known name (it is pulled when absent), or a path.", autocompletion=complete)
    ],
    quantize: Annotated[Quantize | None, typer.Option(help=f"As serve has it: {QUANTIZE_HELP}")] = None,
    kv_dtype: Annotated[
        str, typer.Option(help="How keys and values are kept, as serve has it.", metavar="TYPE")
    ] = "bf16",
    kv_dtype_skip: Annotated[
        str, typer.Option(help="Layers that keep them as bf16 all the same.", metavar="LAYERS")
    ] = "",
    kv_tokens: Annotated[
        int | None, typer.Option(min=32, help="Show the KV pool too that serve makes for so many tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show what a model is: shapes, parameters, bytes of weights and of KV.

    Nothing is loaded but headers. KV is that of one sequence. With --quantize, weights
    are those that serve would compute with.

    [bold]Examples[/bold]

      tailrace info smollm2-135m
      tailrace info ./model.gguf --json
      tailrace info ./checkpoint --quantize int4 --kv-dtype k8v4
    """
    from tailrace.backends.kvdtype import parse
    from tailrace.models import describe, open_checkpoint
    from tailrace.models.quantise import unchanged

    kept = parse(kv_dtype, kv_dtype_skip)
    info = describe(open_checkpoint(serve.find_model(model)), quantize=quantize and quantize.value, kv_dtype=kept)
    if quantize is not None and not info.quantised:
        print(unchanged(quantize.value, info.name), file=sys.stderr)
    if as_json:
        typer.echo(json.dumps(plain(info, kv_tokens), indent=2))
    else:
        show(info, kv_tokens)


def plain(info: ModelInfo, kv_tokens: int | None = None) -> dict[str, Any]:
    """The same as JSON's own types."""
    made = dataclasses.asdict(info)
    made["path"] = str(info.path)
    del made["kept"]
    made["kv_dtype"] = info.kv_dtype
    made["formats"] = {
        str(kind): {"tensors": tensors, "bytes": stored} for kind, (tensors, stored) in info.formats.items()
    }
    made["groups"] = [{"window": group.window, "layers": len(group.layers)} for group in info.groups]
    if kv_tokens is not None:
        made["kv_pool_bytes"] = info.pool_bytes(kv_tokens)
    return made


def show(info: ModelInfo, kv_tokens: int | None = None) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows(info, kv_tokens):
        table.add_row(name, escape(value))
    console = Console(highlight=False)
    console.print(f"[bold]{escape(info.name)}[/bold]  [dim]{escape(str(info.path))}[/dim]", soft_wrap=True)
    console.print(table)


def rows(info: ModelInfo, kv_tokens: int | None = None) -> list[tuple[str, str]]:
    """The table's rows."""
    config = info.config
    active = "" if info.active_parameters == info.parameters else f", {output.count(info.active_parameters)} active"
    bits = 8 * info.weight_bytes / info.parameters
    kv = f"{output.size(info.kv_bytes_per_token)} a token, {output.size(info.kv_bytes_per_context)} a full context"
    formats = [f"{kind}: {output.size(stored)} in {tensors}" for kind, (tensors, stored) in info.formats.items()]
    return [
        ("architecture", f"{config.model_type}, read from {info.source_format}"),
        ("parameters", output.count(info.parameters) + active),
        ("layers", f"{config.layers} of width {config.hidden}, feed-forward {config.intermediate}"),
        ("attention", f"{config.heads} heads on {config.kv_heads} KV heads of {config.head_dim}{_windows(info)}"),
        ("vocabulary", f"{config.vocab:,}, output head {'tied to the embedding' if config.tied else 'of its own'}"),
        ("context", f"{config.max_context:,} tokens, rope {_rope(info)}"),
        ("weights", f"{output.size(info.weight_bytes)} ({bits:.2f} bits a parameter){_rounded(info)}"),
        *(("", line) for line in formats),
        ("KV", f"{info.kv_dtype}: {kv}" if info.kv_dtype != "bf16" else kv),
        *_pool(info, kv_tokens),
    ]


def _pool(info: ModelInfo, kv_tokens: int | None) -> list[tuple[str, str]]:
    if kv_tokens is None:
        return []
    return [("KV pool", f"{output.size(info.pool_bytes(kv_tokens))} for {kv_tokens:,} tokens")]


def _rounded(info: ModelInfo) -> str:
    return f", {info.quantised} matrices quantised from {output.size(info.stored_bytes)}" if info.quantised else ""


def _windows(info: ModelInfo) -> str:
    windows = info.config.windows
    sliding = [window for window in windows if window is not None]
    if not sliding:
        return ""
    which = "" if len(sliding) == len(windows) else f" in {len(sliding)} of {len(windows)} layers"
    return f", window {min(sliding):,}{which}"


def _rope(info: ModelInfo) -> str:
    rope = info.config.rope
    scaled = "" if rope.kind == "default" else f", factor {rope.factor:g}, up to {info.config.extended_context:,}"
    return f"{rope.kind}, base {rope.theta:,.0f}{scaled}"
