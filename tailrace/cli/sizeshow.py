"""What `tailrace size` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.twin.catalogue.devices import Device
    from tailrace.twin.fit import Fit
    from tailrace.twin.shapes.sources import Described
    from tailrace.twin.shapes.split import Weights

CONTEXTS = (2_048, 8_192, 32_768, 131_072, 1_048_576)
"""Contexts that tables show, as far as the model has them."""

BAR = 48
"""Characters of a memory bar."""


def plain(found: Described, fits: list[Fit], context: int, kv: str) -> dict[str, Any]:
    """All of it as JSON's own types. Bytes are exact."""
    import dataclasses

    from tailrace.twin.shapes.precision import KV_FORMATS

    shape, weights, value = found.shape, found.weights, KV_FORMATS[kv]
    return {
        "model": shape.name,
        "source": found.source,
        "model_type": shape.model_type,
        "layers": len(shape.layers),
        "hidden": shape.hidden,
        "vocab": shape.vocab,
        "tied": shape.tied,
        "max_context": shape.context,
        "parameters": shape.parameters,
        "text_parameters": shape.text_parameters,
        "active_parameters": shape.active,
        "multiplied_parameters": shape.multiplied,
        "parameters_by_part": {str(part): count for part, count in shape.by_part.items()},
        "weights": weights.scheme.name,
        "weight_bytes": weights.bytes,
        "weight_bytes_by_format": weights.by_format,
        "mtp_parameters": sum(tensor.parameters for tensor in shape.mtp),
        "mtp_bytes": weights.mtp_bytes,
        "kv": kv,
        "kv_bytes_per_token": shape.kv_bytes_per_token(value),
        "kv_by_kind": kinds(found, value),
        "context": context,
        "kv_bytes_per_request": shape.kv_bytes(context, value),
        "stored": None if found.stored is None else dataclasses.asdict(found.stored),
        "assumed": shape.assumed,
        "not_counted": list(shape.unsized),
        "valid_tp": valid_tp(weights),
        "fits": [dataclasses.asdict(one) | {"fits": one.fits} for one in fits],
    }


def kinds(found: Described, value_bytes: float) -> list[dict[str, Any]]:
    """What layers keep, by kind: how many of them, and bytes."""
    sums: dict[tuple[str, int, int | None, int, float], int] = {}
    for _, cache in found.shape.caches:
        size = cache.state_bytes or cache.token_bytes(value_bytes)
        key = (str(cache.kind), cache.heads, cache.window, cache.every, size)
        sums[key] = sums.get(key, 0) + 1
    return [
        {"kind": kind, "layers": count, "heads": heads, "window": window, "tokens_an_entry": every,
         "bytes_a_request" if kind == "state" else "bytes_a_token": size * count}
        for (kind, heads, window, every, size), count in sums.items()
    ]  # fmt: skip


def valid_tp(weights: Weights) -> list[int]:
    """Degrees of tensor parallelism up to 64 that divide the model."""
    from tailrace.twin.shapes.split import Parallel, objections

    return [tp for tp in range(1, 65) if not objections(weights, Parallel(tp))]


def show(console: Console, found: Described, fits: list[Fit], context: int, kv: str) -> None:
    """Prints the tables."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows(found, context, kv):
        table.add_row(name, escape(value))
    console.print(f"[bold]{escape(found.shape.name)}[/bold]  [dim]{escape(found.source)}[/dim]", soft_wrap=True)
    console.print(table)
    if len(fits) > 1:
        _show_all(console, fits)


def rows(found: Described, context: int, kv: str) -> list[tuple[str, str]]:
    """The table's rows."""
    from tailrace.cli import output
    from tailrace.twin.shapes.precision import KV_FORMATS

    shape, weights, value = found.shape, found.weights, KV_FORMATS[kv]
    beside = shape.parameters - shape.text_parameters
    active = f", {output.count(shape.active)} active ({output.count(shape.multiplied)} without the embedding)"
    parts = weights.by_format if len(weights.by_format) > 1 else {}
    made = [
        ("architecture", f"{shape.model_type}, {len(shape.layers)} layers of width {shape.hidden:,}"),
        ("parameters", output.count(shape.parameters) + (active if shape.experts else "")),
    ]
    if beside:
        made.append(("", f"of which encoders of images: {output.count(beside)}"))
    made.append(
        ("vocabulary", f"{shape.vocab:,}, output head {'tied to the embedding' if shape.tied else 'of its own'}")
    )
    made.append(("weights", f"{gigabytes(weights.bytes)} as {weights.scheme.name}"))
    if parts:
        made.append(("", ", ".join(f"{gigabytes(size)} {name}" for name, size in list(parts.items())[:4])))
    made.append(("KV", f"{shape.kv_bytes_per_token(value):,.0f} B a token as {kv}; "
                       f"{gigabytes(shape.kv_bytes(context, value))} for {context:,} tokens"))  # fmt: skip
    made += [("", _kind(one)) for one in kinds(found, value)]
    if shape.mtp:
        held = (
            f"{output.count(sum(tensor.parameters for tensor in shape.mtp))} parameters, {gigabytes(weights.mtp_bytes)}"
        )
        made.append(("beside", f"multi-token prediction, {held}: not loaded unless it is used"))
    made += [("not counted", what) for what in shape.unsized]
    if found.stored is not None:
        made.append(("files", _stored(found)))
    made.append(("divides by TP", ", ".join(map(str, valid_tp(weights)))))
    if shape.assumed:
        said = ", ".join(f"{name} {value}" for name, value in shape.assumed.items())
        made.append(("assumed", f"{said}: not in the file, as the architecture's own code has it"))
    return made


def _kind(one: dict[str, Any]) -> str:
    """One kind of cache in words."""
    layers = f"{one['layers']} layer{'s' * (one['layers'] > 1)}"
    if one["kind"] == "state":
        return f"{layers} with a state: {gigabytes(one['bytes_a_request'])} a request"
    heads = f" of {one['heads']} KV heads" if one["heads"] else ", the same on every rank"
    window = f", the last {one['window']:,} tokens" if one["window"] else ""
    every = f", one entry for {one['tokens_an_entry']} tokens" if one["tokens_an_entry"] > 1 else ""
    return f"{layers}, {one['kind']}{heads}{window}{every}: {one['bytes_a_token']:,.0f} B a token"


def _stored(found: Described) -> str:
    held = found.stored
    assert held is not None
    said = f"{gigabytes(held.bytes)} in {held.files} file{'s' * (held.files > 1)}"
    if held.values is None:
        return f"{said}, by their index"
    types = ", ".join(
        f"{kind} {gigabytes(size)}" for kind, size in sorted(held.by_type.items(), key=lambda i: -i[1])[:4]
    )
    return f"{said}, by their headers: {types}"


def show_fit(console: Console, found: Described, one: Fit, device: Device, kv: str) -> None:
    """One device: its bar, and how many users fit at each context."""
    from rich.markup import escape

    where = f"On {one.parallel.devices} x {escape(one.device)}"
    how = f"{gigabytes(one.device_bytes)} each, {one.parallel}"
    console.print(f"\n[bold]{where}[/bold] ({how}), {_asked(one)}", soft_wrap=True)
    if not one.fits:
        console.print(f"[bold red]{verdict(one)}[/bold red]", soft_wrap=True)
        return
    free = one.kv_budget - one.kv_bytes
    kept = one.device_bytes - one.weight_bytes - one.reserve.overhead_bytes - one.kv_budget
    parts = (
        ("weights", one.weight_bytes, "█", "blue"),
        ("overhead (assumed)", one.reserve.overhead_bytes, "▓", "magenta"),
        ("KV", one.kv_bytes, "▒", "green"),
        ("free for KV", free, "░", "dim"),
        (f"left alone (assumed: {1 - one.reserve.usable:.0%})", kept, "·", "dim"),
    )
    bar = "".join(f"[{style}]{mark * width}[/{style}]" for (_, _, mark, style), width in
                  zip(parts, widths([size for _, size, _, _ in parts], BAR), strict=True))  # fmt: skip
    console.print(f"  {bar}")
    for name, size, mark, style in parts:
        console.print(f"  [{style}]{mark}[/{style}] {gigabytes(size):>9}  {name}")
    computed = {name: device.computes(name) for name in found.weights.by_format}
    plain = ("bf16", "fp16")
    widened = [n for n, kind in computed.items() if kind in plain and n not in ("fp32", *plain) and n.islower()]
    if widened:
        console.print(f"  {', '.join(widened)}: {escape(device.name)} has no such products; weights are widened to "
                      f"{computed[widened[0]]} first", soft_wrap=True)  # fmt: skip
    _show_users(console, found, one, device, kv)


def _show_users(console: Console, found: Described, one: Fit, device: Device, kv: str) -> None:
    """How many users fit at each context."""
    from rich.table import Table

    from tailrace.twin import fit
    from tailrace.twin.shapes.precision import KV_FORMATS

    table = Table("context", "most users", "KV a user", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in table.columns:
        column.justify = "right"
    asked = sorted({one.context, *(c for c in CONTEXTS if c <= (found.shape.context or one.context))})
    for context in asked:
        at = fit.fit(found.weights, one.device, device, one.parallel, context=context, kv=kv, reserve=one.reserve)
        mark = "[bold]" if context == one.context else ""
        whole = found.shape.kv_bytes(context, KV_FORMATS[kv])
        table.add_row(f"{mark}{context:,}", f"{mark}{at.users:,}", f"{mark}{gigabytes(whole)}")
    console.print(table)


def _show_all(console: Console, fits: list[Fit]) -> None:
    """Every device in a line."""
    from rich.table import Table

    first = fits[0]
    assumed = f"{first.reserve.usable:.0%} of memory used and {gigabytes(first.reserve.overhead_bytes)} of overhead"
    console.print(f"\n{_asked(first)}, {first.parallel}; {assumed} are assumed", soft_wrap=True)
    table = Table("device", "memory", "weights", "most users", "", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for one in fits:
        said = f"{one.users:,}" if one.fits else "-"
        table.add_row(
            one.device, gigabytes(one.device_bytes), gigabytes(one.weight_bytes), said, "" if one.fits else needs(one)
        )
    console.print(table)


def _asked(one: Fit) -> str:
    """What has to fit."""
    return f"{one.wanted} user{'s' * (one.wanted > 1)} with {one.context:,} tokens"


def verdict(one: Fit) -> str:
    """Why it does not fit, and what it needs."""
    if one.kv_budget < 0:
        room = max(int(one.device_bytes * one.reserve.usable) - one.reserve.overhead_bytes, 0)
        why = f"weights take {gigabytes(one.weight_bytes)} a device, where there is room for {gigabytes(room)}"
    else:
        why = f"KV takes {gigabytes(one.kv_bytes)} a device, where {gigabytes(one.kv_budget)} are left"
    return f"does not fit: {why}; {needs(one)}"


def needs(one: Fit) -> str:
    """The least that would do."""
    if one.needs is None:
        return "no number of these devices up to 1,024 would do"
    return f"needs at least {one.needs.devices} of them ({one.needs})"


def widths(sizes: list[int], total: int) -> list[int]:
    """Characters of each part of a bar: what is there at all has one."""
    whole = sum(sizes)
    shares = [size * total / whole for size in sizes]
    made = [max(int(share), 1 if size > 0 else 0) for share, size in zip(shares, sizes, strict=True)]
    while sum(made) < total:
        most = max(range(len(made)), key=lambda n: shares[n] - made[n])
        made[most] += 1
    while sum(made) > total:
        made[max(range(len(made)), key=lambda n: made[n] - shares[n])] -= 1
    return made


def gigabytes(size: float) -> str:
    """Bytes in powers of a thousand, as devices are sold."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB" if size < 99.95 else f"{size:,.0f} GB"
