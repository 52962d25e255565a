"""`tailrace size`: what a model is to the byte, and on which devices it fits with how many users."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli import sizeshow

if TYPE_CHECKING:
    from tailrace.twin.catalogue.devices import Device
    from tailrace.twin.fit import Fit, Reserve
    from tailrace.twin.shapes.sources import Described
    from tailrace.twin.shapes.split import Parallel, Weights


def command(
    model: Annotated[
        str,
        typer.Argument(help="A config.json or its folder, a .gguf file, a name of `pull`, or OWNER/NAME (hub)."),
    ],
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="How it fits: one of `tailrace devices`, this (machine), or all.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism: ranks that divide each layer.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallelism: stages that divide the layers.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data parallelism: copies of attention.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallelism: groups of the TP x DP ranks.")] = 1,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of each user. Default: 8192, or all.")] = None,
    users: Annotated[int, typer.Option(min=1, help="Users at a time.")] = 1,
    weights: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="As if stored so: bf16, fp8, fp8-block, int8, int4, nvfp4 ...")
    ] = None,
    kv: Annotated[str, typer.Option(metavar="TYPE", help="How KV is kept: bf16, fp8, int8.")] = "bf16",
    usable: Annotated[float, typer.Option(min=0.1, max=1.0, help="Share of memory that the engine takes.")] = 0.9,
    overhead: Annotated[
        float, typer.Option(metavar="GB", min=0.0, help="Assumed for activations and the runtime, on each device.")
    ] = 1.24,
    text_only: Annotated[bool, typer.Option("--text-only", help="Leave encoders of images and sounds out.")] = False,
    headers: Annotated[bool, typer.Option("--headers", help="On the hub: read every file's header.")] = False,
    devices: Annotated[Path | None, typer.Option(metavar="FILE", help="More devices, as TOML (docs/twin.md).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:  # fmt: skip
    """Size a model: parameters, weights, KV, and which devices hold it.

    From its configuration, or from headers of its files: weights are never read,
    and the model need not be one that Tailrace can serve. GB are 10^9 bytes.

    [bold]Examples[/bold]

      tailrace size ./config.json
      tailrace size Qwen/Qwen3-8B --device h100 --users 80 --context 8192
      tailrace size ./model --device h200 --tp 8 --weights fp8 --kv fp8
      tailrace size ./model --device all --json
    """
    from tailrace.twin import fit
    from tailrace.twin.shapes.split import Parallel

    found = _described(model, weights, text_only=text_only, headers=headers)
    trained = found.shape.context
    tokens = context if context is not None else min(8192, trained or 8192)
    reserve = fit.Reserve(usable, int(overhead * 1e9))
    parallel = Parallel(tp, pp, dp, ep)
    chosen = _devices(device, devices)
    fits = _fits(found.weights, chosen, parallel, tokens, users, kv, reserve)
    if as_json:
        import json

        typer.echo(json.dumps(sizeshow.plain(found, fits, tokens, kv), indent=2))
    else:
        from rich.console import Console

        sizeshow.show(Console(highlight=False), found, fits, tokens, kv)
        if len(fits) == 1:
            sizeshow.show_fit(Console(highlight=False), found, fits[0], chosen[fits[0].device], kv)
    if fits and not any(one.fits for one in fits):
        raise typer.Exit(1)


def _described(model: str, weights: str | None, *, text_only: bool, headers: bool) -> Described:
    """The model; a name that `pull` knows is where that has put it."""
    from tailrace.models import catalogue
    from tailrace.terms import ModelError
    from tailrace.twin.shapes import sources

    where = model
    if "/" not in model and not Path(model).expanduser().exists():
        try:
            where = str(catalogue.resolve(model))
        except ModelError as error:
            raise ModelError(f"{error} A model on the hub is OWNER/NAME.") from None
    return sources.describe(where, weights=weights, text_only=text_only, headers=headers)


def _devices(name: str | None, override: Path | None) -> dict[str, Device]:
    """The devices that are asked for."""
    from tailrace.twin.catalogue import devices

    if name is None:
        return {}
    known = devices.load(override)
    if name == "this":
        from tailrace.models import catalogue
        from tailrace.twin.catalogue import machine

        known = machine.measured(catalogue.cache_dir())
    return known.devices if name == "all" else dict([known.find(name)])


def _fits(
    weights: Weights, chosen: dict[str, Device], parallel: Parallel, context: int, users: int, kv: str, reserve: Reserve
) -> list[Fit]:
    from tailrace.twin import fit
    from tailrace.twin.shapes.split import check

    fit.check(weights, context, users, kv)
    check(weights, parallel)
    return [fit.fit(weights, key, one, parallel, context=context, users=users, kv=kv, reserve=reserve)
            for key, one in chosen.items()]  # fmt: skip
