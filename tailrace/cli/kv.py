"""`tailrace kv`: how long to keep cached KV pages, worked out from a recorded trace of requests; and whether a server's
cache works."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.kv.retention import ATTENTION_PARITY
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.kv.replay import Outcome, Trace

app = typer.Typer(help="Cached KV pages: how long to keep them, and whether they are found.", no_args_is_help=True,
                  rich_markup_mode="rich")  # fmt: skip


_SHOWN = {"ok": "ok", "failed": "FAILED", "skipped": "skipped", "note": "note"}


@app.command()
def check(
    url: Annotated[
        str | None,
        typer.Argument(help="A running server. Default: the one on port 8000, else one is started.", metavar="URL"),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Default: the first that it serves.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt, about.", metavar="TOKENS")] = 256,
    evict: Annotated[
        bool, typer.Option("--evict", help="Push its pages out of memory first, with prompts that fill the pool.")
    ] = False,
    other_key: Annotated[
        str | None, typer.Option(envvar="TAILRACE_OTHER_KEY", help="Another tenant's key, which must find nothing.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TAILRACE_API_KEY", show_envvar=True, help="The server's key.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check that a server finds what it has cached.

    Sends a prompt that nobody has sent before, sends it again, and says whether
    its tokens were found: in memory, with another tenant's key (which must find
    nothing), and in each tier below memory. What was not found is explained.
    With --evict, other prompts push its pages out of memory, so that the tiers
    have to give them back; that costs the prefill of a whole pool, and what
    everybody has cached in it. The exit status is 1 where something failed.

    [bold]Examples[/bold]

      tailrace kv check http://127.0.0.1:8000
      tailrace kv check http://127.0.0.1:8000 --evict --tokens 1500
    """
    from dataclasses import asdict

    from tailrace.cli import kvcheck, local
    from tailrace.cli.client import Client

    if other_key is not None and other_key == api_key:
        raise InvalidInput("--other-key is the same key as --api-key: nothing would be shown by it", param="other_key")
    findings = []
    with local.connected(url, model, api_key, lambda line: print(line, file=sys.stderr, flush=True)) as client:
        other = Client(client.address, key=other_key) if other_key is not None else None

        def say(line: str) -> None:
            if not as_json:
                print(line, file=sys.stderr, flush=True)

        asked = model if url is not None else None  # else it was chosen by its name, which may be a path
        for one in kvcheck.check(client, asked, tokens=tokens, other=other, evict=evict, say=say):
            findings.append(one)
            if not as_json:
                typer.echo(f"{_SHOWN[one.verdict]:8}{one.about}: {one.text}")
    failed = any(one.verdict == "failed" for one in findings)
    if as_json:
        import msgspec

        found = {"ok": not failed, "findings": [asdict(one) for one in findings]}
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    if failed:
        raise typer.Exit(1)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="JSON lines in Mooncake's format.", metavar="TRACE")],
    policies: Annotated[
        str, typer.Option(help="Which policies, with commas; optimal knows the future.", metavar="NAMES")
    ] = "lru,lfu,ttl,cost,optimal",
    sizes: Annotated[
        str, typer.Option(help="Pools: numbers of pages, or shares of the different pages.", metavar="SIZES")
    ] = "1%,2%,5%,10%,20%",
    ttl: Annotated[float, typer.Option(help="Time to live of the policy ttl, in seconds.", metavar="SECONDS")] = 600.0,
    parity: Annotated[
        float,
        typer.Option(help="Tokens over which attention costs as much as the rest of the model.", metavar="TOKENS"),
    ] = ATTENTION_PARITY,
    block_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a block of the trace. Default: what its lines say.", metavar="TOKENS"),
    ] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="Of KV (tailrace info says it): shows sizes in bytes.", metavar="BYTES")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Replay a trace of requests over the prefix cache.

    Runs the same index and policies as the server, for every policy in every
    size of pool, and shows the share of the prompts' tokens that each found.

    A line of the trace is one request:

      {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": \\[0, 1, 2]}

    with milliseconds, tokens, and a number for each block of the prompt.

    [bold]Examples[/bold]

      tailrace kv replay trace.jsonl
      tailrace kv replay trace.jsonl --policies lru,ttl --ttl 60 --sizes 1000,5%
    """
    from tailrace.kv import replay as replaying

    names = _names(policies, replaying.REPLAYED)
    if not 0.0 < ttl < float("inf"):
        raise InvalidInput(f"--ttl must be a number of seconds above 0, not {ttl:g}", param="ttl")
    if not parity > 0.0:
        raise InvalidInput(f"--parity must be a number of tokens above 0, not {parity:g}", param="parity")
    shares = [_share(text) for text in sizes.split(",")]
    recorded = replaying.read(trace, block_tokens)
    pools = list(dict.fromkeys(_pages(share, recorded.distinct_pages) for share in shares))
    outcomes = []
    with _without_collections(), _progress(len(names) * len(pools) * len(recorded.requests)) as report:
        for pages in pools:
            for name in names:
                outcomes.append(replaying.replay(recorded, name, pages, ttl=ttl, parity=parity, report=report))
    if as_json:
        import msgspec

        found = _as_json(recorded, outcomes, bytes_per_token)
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        _show(recorded, outcomes, bytes_per_token)


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise InvalidInput(f"--policies: {name!r} is not one of {', '.join(known)}", param="policies")
    return names


def _share(text: str) -> float | int:
    """A number of pages, or the share of the different ones that a percentage is."""
    text = text.strip()
    try:
        value = float(text.removesuffix("%")) / 100 if text.endswith("%") else int(text)
    except ValueError:
        value = 0
    if not 0 < value < 1 << 31:
        raise InvalidInput(f"--sizes: {text!r} is neither a number of pages (5000) nor a share (5%)", param="sizes")
    return value


def _pages(share: float, distinct: int) -> int:
    return share if isinstance(share, int) else max(1, round(share * distinct))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Python's collector would look at all of the trace again and again; there is next to nothing for it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], object]]:
    """A bar on standard error while requests are replayed, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("Replaying", total=total)
        yield lambda more: bars.advance(task, more)


def _as_json(trace: Trace, outcomes: Sequence[Outcome], bytes_per_token: int | None) -> dict[str, Any]:
    def sized(outcome: Outcome) -> dict[str, Any]:
        made = asdict(outcome) | {"pool_tokens": outcome.pages * trace.block_tokens}
        if bytes_per_token is not None:
            made["pool_bytes"] = made["pool_tokens"] * bytes_per_token
            made["hit_bytes"] = outcome.hit_tokens * bytes_per_token
        return made

    return {
        "requests": len(trace.requests),
        "input_tokens": trace.input_tokens,
        "block_tokens": trace.block_tokens,
        "distinct_pages": trace.distinct_pages,
        "outcomes": [sized(outcome) for outcome in outcomes],
    }


def _show(trace: Trace, outcomes: Sequence[Outcome], bytes_per_token: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from tailrace.cli import output

    console = Console(highlight=False)
    console.print(
        f"{len(trace.requests):,} requests with {output.count(trace.input_tokens)} tokens, "
        f"{trace.distinct_pages:,} different pages of {trace.block_tokens} tokens\n",
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold")
    for name in ("pages", *(["bytes"] if bytes_per_token else []), "policy", "hits", "tokens saved", "work saved",
                 "evictions", "most held"):  # fmt: skip
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for at, outcome in enumerate(outcomes):
        first = not at or outcome.pages != outcomes[at - 1].pages
        if first and at:
            table.add_section()
        size = [f"{outcome.pages:,}"]
        if bytes_per_token:
            size.append(output.size(outcome.pages * trace.block_tokens * bytes_per_token))
        table.add_row(
            *(size if first else [""] * len(size)), outcome.policy, f"{outcome.hit_rate:.1%}",
            f"{outcome.hit_tokens:,}", f"{outcome.work_saved:.1%}", f"{outcome.evictions:,}",
            f"{outcome.most_held:,}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "\n[dim]hits: share of the prompts' tokens that were found; work saved: the same with each token as what its "
        "prefill costs, attention included[/dim]",
        soft_wrap=True,
    )
