"""`tailrace keys`: makes, shows, limits and revokes the API keys of a server."""

from __future__ import annotations

import enum
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.api.priority import MOST_URGENT
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.api.access.store import Key, Quota

app = typer.Typer(
    help="API keys: who may use a server (tailrace serve --keys FILE), and how much.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


class Scope(enum.StrEnum):
    """What a key is for."""

    INFERENCE = "inference"
    ADMIN = "admin"


File = Annotated[
    Path,
    typer.Option("--keys", envvar="TAILRACE_KEYS", show_envvar=True, help="The file of keys.", metavar="FILE"),
]
DEFAULT = Path("~/.config/tailrace/keys.json")
Requests = Annotated[int | None, typer.Option(min=0, help="Requests in any minute; 0 is no limit.", metavar="N")]
Tokens = Annotated[
    int | None, typer.Option(min=0, help="Tokens of prompts and answers in any minute; 0 is no limit.", metavar="N")
]
Concurrent = Annotated[int | None, typer.Option(min=0, help="Requests at a time; 0 is no limit.", metavar="N")]
LeastPriority = Annotated[
    int | None,
    typer.Option(
        min=MOST_URGENT,
        max=0,
        help="The lowest priority that its requests may ask for; lower goes first, before other tenants too. "
        "service_tier priority is -30. Default: 0.",
        metavar="N",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is, or for what.", metavar="NAME")],
    keys: File = DEFAULT,
    tenant: Annotated[
        str | None,
        typer.Option(help="Who shares cached prompts and limits. Default: the key is alone.", metavar="TENANT"),
    ] = None,
    scope: Annotated[list[Scope] | None, typer.Option(help="What it is for; may be repeated.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="When it ends: 90d, 12h, or 2030-01-31 (UTC).", metavar="WHEN")
    ] = None,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    concurrent: Concurrent = None,
    least_priority: LeastPriority = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is printed now and never again: the file has its SHA-256 only.

    The key alone goes to standard output, everything else to standard error.

    [bold]Examples[/bold]

      tailrace keys create ada --tenant research --expires 90d

      tailrace keys create ops --scope admin

      tailrace keys create pager --least-priority -30
    """
    from tailrace.api.access import store

    entry, key = store.create(
        keys.expanduser(),
        name,
        tenant=tenant,
        scopes=tuple(dict.fromkeys(one.value for one in scope or [Scope.INFERENCE])),
        expires=_when(expires, datetime.now(UTC)) if expires is not None else None,
        limits=_quota(store.NO_QUOTA, requests_per_minute, tokens_per_minute, concurrent),
        least_priority=least_priority or 0,
    )
    if as_json:
        _print_json({"key": key, **_as_json(entry)})
        _tell_of_others(keys.expanduser(), entry)
        return
    typer.echo(key)
    typer.echo(f"Key {entry.id} for {name} is in {keys}. It cannot be shown again.", err=True)
    _tell_of_others(keys.expanduser(), entry)


def _tell_of_others(file: Path, made: Key) -> None:
    """Says which other keys of the same name can still be used: a name alone tells them apart no more."""
    from tailrace.api.access import store

    now = datetime.now(UTC)
    every = store.read(file).keys
    same = [key.id for key in every if key.name == made.name and key.id != made.id and key.state(now) == "active"]
    if same:
        others = ", ".join(same)
        typer.echo(
            f"{made.name} had a key before, which still works: {others}. Where the new one is to replace it: "
            f"tailrace keys revoke {same[-1]}",
            err=True,
        )


@app.command("list")
def list_keys(
    keys: File = DEFAULT,
    everything: Annotated[bool, typer.Option("--all", help="Also those that were revoked or have expired.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the keys: what is known of them, never the keys themselves."""
    from tailrace.api.access import store

    found = store.read(keys.expanduser())
    now = datetime.now(UTC)
    shown = [key for key in found.keys if everything or key.state(now) == "active"]
    if as_json:
        tenants = {name: _limits(quota) for name, quota in found.tenants.items()}
        _print_json({"keys": [_as_json(key) for key in shown], "tenants": tenants})
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # a line for a key
    table = Table(box=None, header_style="bold")
    for column in ("id", "name", "tenant", "scopes", "created", "expires", "state", "limits"):
        fixed = column not in ("name", "limits")  # what is copied from here must stay in one piece
        table.add_column(column, overflow="fold", no_wrap=fixed)
    for key in shown:
        table.add_row(
            key.id, key.name, key.tenant or "-", ", ".join(key.scopes), f"{key.created:%Y-%m-%d}",
            f"{key.expires:%Y-%m-%d %H:%M}" if key.expires else "never", key.state(now),
            _in_words(key.limits, key.least_priority),
        )  # fmt: skip
    for name, quota in found.tenants.items():
        table.add_row("-", "(all keys)", name, "", "", "", "", _in_words(quota))
    console.print(table)
    hidden = len(found.keys) - len(shown)
    if hidden:
        console.print(f"[dim]{hidden} more were revoked or have expired (--all)[/dim]")


@app.command()
def show(
    key: Annotated[str, typer.Argument(help="An id, or a name.", metavar="KEY")],
    keys: File = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Show one key's entry."""
    from tailrace.api.access import store

    entry = _as_json(store.read(keys.expanduser()).find(key))
    if as_json:
        _print_json(entry)
        return
    for name, value in entry.items():
        typer.echo(f"{name:14}  {', '.join(value) if isinstance(value, list) else _plain(value)}")


@app.command()
def revoke(
    key: Annotated[list[str], typer.Argument(help="Ids, or names.", metavar="KEY...")],
    keys: File = DEFAULT,
) -> None:
    """End keys for good.

    A server that follows the file refuses them within a second, and ends
    what runs with them.
    """
    from tailrace.api.access import store

    for one in key:
        entry = store.revoke(keys.expanduser(), one)
        typer.echo(f"Key {entry.id} ({entry.name}) was revoked at {entry.revoked:%Y-%m-%d %H:%M:%S} UTC.")


@app.command()
def limit(
    key: Annotated[str | None, typer.Argument(help="An id, or a name.", metavar="KEY")] = None,
    tenant: Annotated[str | None, typer.Option(help="All keys of a tenant together.", metavar="TENANT")] = None,
    keys: File = DEFAULT,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    concurrent: Concurrent = None,
    least_priority: LeastPriority = None,
) -> None:
    """Set what a key, or all keys of a tenant together, may use.

    What is not given stays as it is. Servers notice within a second, and
    what was used in the last minute still counts.

    [bold]Examples[/bold]

      tailrace keys limit ada --requests-per-minute 60 --concurrent 4

      tailrace keys limit --tenant research --tokens-per-minute 100000
    """
    from tailrace.api.access import store

    if (key is None) == (tenant is None):
        raise InvalidInput("give either a key or --tenant", param="key")
    file = keys.expanduser()
    found = store.read(file)
    least = 0
    if tenant is not None:
        if least_priority is not None:
            raise InvalidInput("--least-priority is of a key, not of a tenant", param="least_priority")
        before = found.tenants.get(tenant, store.NO_QUOTA)
    else:
        assert key is not None
        entry = found.find(key)
        before, least = entry.limits, entry.least_priority if least_priority is None else least_priority
    after = _quota(before, requests_per_minute, tokens_per_minute, concurrent)
    name = tenant if tenant is not None else key
    assert name is not None
    store.limit(file, name, after, tenant=tenant is not None, least_priority=least)
    typer.echo(f"{'Tenant' if tenant is not None else 'Key'} {name}: {_in_words(after, least)}")


def _quota(before: Quota, requests: int | None, tokens: int | None, concurrent: int | None) -> Quota:
    import msgspec

    given = {"requests_per_minute": requests, "tokens_per_minute": tokens, "concurrent": concurrent}
    changes = {name: value or None for name, value in given.items() if value is not None}
    return msgspec.structs.replace(before, **changes)


def _when(text: str, now: datetime) -> datetime:
    found = re.fullmatch(r"(\d{1,6})([dhm])", text)
    try:
        if found:
            unit = {"d": "days", "h": "hours", "m": "minutes"}[found[2]]
            return (now + timedelta(**{unit: int(found[1])})).replace(microsecond=0)
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidInput(
            f"--expires is a time from now (90d, 12h, 30m) or a date (2030-01-31), not {text!r}", param="expires"
        ) from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _as_json(key: Key) -> dict[str, Any]:
    """What may be shown of a key; its digest is of no use to anybody."""
    return {
        "id": key.id,
        "name": key.name,
        "tenant": key.tenant,
        "scopes": list(key.scopes),
        "created": key.created.isoformat(),
        "expires": key.expires.isoformat() if key.expires else None,
        "revoked": key.revoked.isoformat() if key.revoked else None,
        "state": key.state(datetime.now(UTC)),
        "limits": _limits(key.limits),
        "least_priority": key.least_priority,
    }


def _limits(quota: Quota) -> dict[str, int]:
    return {name: value for name in quota.__struct_fields__ if (value := getattr(quota, name)) is not None}


def _in_words(quota: Quota, least_priority: int = 0) -> str:
    units = {"requests_per_minute": "requests/min", "tokens_per_minute": "tokens/min", "concurrent": "at a time"}
    words = [f"{value} {units[name]}" for name, value in _limits(quota).items()]
    return ", ".join(words + ([f"priority from {least_priority}"] if least_priority else [])) or "none"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items()) or "none"
    return "-" if value is None else str(value)


def _print_json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))
