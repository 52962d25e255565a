"""Options declared once, for the two parsers that `serve` has: the quick one here, and typer's, made by `command`.

The quick parser knows only valid command lines: on anything else it gives up (None), and typer, which is slow to
import, explains what is wrong.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tailrace.kv.retention import POLICIES

if TYPE_CHECKING:
    import inspect

Value = str | int | float | bool | list[str] | None


class Option(NamedTuple):
    """One option. A bool `--x` also has `--no-x`; `many` may be repeated; `choices` are the only values."""

    flag: str
    kind: type[str] | type[int] | type[float] | type[bool]
    help: str
    panel: str
    default: str | int | float | bool | None = None
    choices: tuple[str, ...] = ()
    many: bool = False
    metavar: str | None = None

    @property
    def name(self) -> str:
        """The Python name of its value."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def unset(self) -> Value:
        """Its value when it is not given."""
        return [] if self.many else self.default


class Argument(NamedTuple):
    """The one positional argument, which may be left out."""

    name: str
    help: str
    default: str


class Declaration(NamedTuple):
    """A command's argument and options."""

    argument: Argument
    options: tuple[Option, ...]


class Quantize(enum.StrEnum):
    """To what float weights are rounded at load."""

    INT8 = "int8"
    INT4 = "int4"


QUANTIZE_HELP = (
    "Round float weights (F32, F16, BF16) in blocks of 32 at the first start, and keep the result. int4 leaves "
    "embedding and output head at int8. Weights that are quantised already stay as they are. Default: as stored."
)

CHAT_TEMPLATE_HELP = (
    "Chat template instead of the model's: hermes, llama3 or mistral, for a model of that family whose own knows no "
    "tools, or a file."
)

LORA_HELP = "LoRA adapter (a PEFT directory) for a server that is started here."


def adapter_of(folder: str | None) -> tuple[str, str] | None:
    """An adapter's name, for a server of our own, and its directory."""
    return None if folder is None else ("adapter", folder)


TOOL_PARSERS = ("auto", "hermes", "llama3", "mistral", "json", "none")
REASONING_PARSERS = ("auto", "think", "think-close", "mistral", "none")
"""Those of `text.answer.formats`, which a start need not import."""

_NETWORK, _CAPACITY, _COMPUTE, _TIME, _OTHER = "Network", "Capacity", "Compute", "Time limits", "Other"

SERVE = Declaration(
    Argument("model", "A known name (it is pulled when absent), a .gguf file, or a directory with safetensors.",
             "smollm2-135m"),
    (
        Option("--host", str, "Address to listen on. Anything but loopback wants an API key.", _NETWORK, "127.0.0.1"),
        Option("--port", int, "Port to listen on; 0 takes a free one.", _NETWORK, 8000),
        Option("--api-key", str, "Key that clients must send; may be repeated. Safer: TAILRACE_API_KEY in the "
               "environment, or --api-key-file.", _NETWORK, many=True, metavar="KEY"),
        Option("--api-key-file", str, "File with one key a line.", _NETWORK, metavar="FILE"),
        Option("--keys", str, "File of keys with tenants and limits, made by `tailrace keys create`; changes to it are "
               "followed.", _NETWORK, metavar="FILE"),
        Option("--admin-key-file", str, "File with one key a line for the admin endpoints. Default: "
               "TAILRACE_ADMIN_KEY in the environment.", _NETWORK, metavar="FILE"),
        Option("--tls-cert", str, "Certificate (PEM) to serve HTTPS with; SIGHUP reads it again.", _NETWORK,
               metavar="FILE"),
        Option("--tls-key", str, "The certificate's private key (PEM, no password).", _NETWORK, metavar="FILE"),
        Option("--cors-origin", str, "Origin whose web pages may use the API, or *; may be repeated.", _NETWORK,
               many=True, metavar="ORIGIN"),
        Option("--ui", bool, "Serve the dashboard at /ui too; with keys it takes one with the scope admin.", _NETWORK,
               False),
        Option("--served-name", str, "Name that clients ask for; may be repeated, the first one is in the answers.",
               _NETWORK, many=True, metavar="NAME"),
        Option("--kv-events", str, "Address to publish KV events at, for routers: tcp://127.0.0.1:5557.", _NETWORK,
               metavar="ADDRESS"),
        Option("--kv-events-replay", str, "Address for those that have missed KV events, or begin to follow them.",
               _NETWORK, metavar="ADDRESS"),
        Option("--kv-events-key", str, "File with the server's CURVE key and those of who may follow KV events. Any "
               "address but loopback wants one.", _NETWORK, metavar="FILE"),
        Option("--kv-tokens", int, "Tokens that the KV pool holds. Default: from the memory that is free.", _CAPACITY),
        Option("--max-context", int, "Longest prompt plus output. Default: the model's, at most the pool.", _CAPACITY),
        Option("--step-tokens", int, "Token budget of a step; longer prompts are computed in chunks of it.", _CAPACITY,
               512),
        Option("--draft-tokens", int, "Most tokens that a step computes for a request beside the next one where text "
               "that repeats itself makes them likely (a step has eight with those drawn); the answers are the same. "
               "0: none.", _CAPACITY, 7),
        Option("--max-running", int, "Most requests in a step.", _CAPACITY, 32),
        Option("--max-waiting", int, "Most requests in the queue; more get 429.", _CAPACITY, 1024),
        Option("--prefix-cache", bool, "Reuse the KV pages of prompts that begin alike.", _CAPACITY, True),
        Option("--kv-policy", str, "Which cached KV page goes first where room is needed: least recently used, least "
               "often used, not used for --kv-ttl seconds, or cheapest to compute again.", _CAPACITY, "lru",
               choices=POLICIES),
        Option("--kv-ttl", float, "With --kv-policy ttl: seconds after which a page that nobody uses is forgotten.",
               _CAPACITY),
        Option("--kv-tenant-share", float, "Most of the KV pool that one API key's cached pages may be, those "
               "apart that running requests hold.", _CAPACITY, 1.0, metavar="FRACTION"),
        Option("--kv-pin", str, "File with the beginning of prompts whose KV is kept for good once computed: text, as "
               "the chat template renders it, or a JSON list of token ids; may be repeated.", _CAPACITY, many=True,
               metavar="FILE"),
        Option("--kv-disk", str, "Directory where KV pages are kept beyond the pool and a restart. It holds what was "
               "said in the clear. Default: none is kept.", _CAPACITY, metavar="DIR"),
        Option("--kv-disk-bytes", str, "Most bytes of that directory: a number, or as in 500MB or 4GiB.", _CAPACITY,
               "4GiB", metavar="SIZE"),
        Option("--kv-valkey", str, "URL of a Valkey server in which replicas share KV pages: valkey://host:6379/0, "
               "valkeys:// with TLS, or unix:///socket. It gets what was said in the clear.", _CAPACITY, metavar="URL"),
        Option("--kv-valkey-ttl", float, "Seconds after which that server forgets a page; 0 for never.", _CAPACITY,
               86400.0, metavar="SECONDS"),
        Option("--kv-valkey-password-file", str, "File with the password for that server.", _CAPACITY, metavar="FILE"),
        Option("--kv-key-file", str, "File with the key that pages on disk or in Valkey are authenticated with, at "
               "least 32 bytes. Valkey needs one, the same for all replicas. Default: one in the directory, made at "
               "the first start.", _CAPACITY, metavar="FILE"),
        Option("--lora", str, "LoRA adapter (a PEFT directory) for requests whose model is NAME; may be repeated.",
               _CAPACITY, many=True, metavar="NAME=PATH"),
        Option("--lora-dir", str, "Directory from below which adapters may be loaded while the server runs, with an "
               "admin key. Default: none may.", _CAPACITY, metavar="DIR"),
        Option("--max-loras", int, "Most adapters at a time.", _CAPACITY, 8),
        Option("--content-store", str, "Where responses, chat completions, files and batches are kept for callers who "
               "ask for it: sqlite:///FILE, or postgresql://USER@HOST/DATABASE (password: ~/.pgpass). Default: nothing "
               "is stored.", _CAPACITY, metavar="URL"),
        Option("--content-retention", str, "How long they are kept: 30d, 12h, 30m; 0 for no end.", _CAPACITY, "30d",
               metavar="TIME"),
        Option("--content-bytes", str, "Most bytes of them: a number, or as in 500MB or 4GiB.", _CAPACITY, "1GiB",
               metavar="SIZE"),
        Option("--ledger", str, "Where requests are accounted for, without their text: a file, postgresql://USER@HOST/"
               "DATABASE (password: ~/.pgpass), or off. Default: TAILRACE_LEDGER, or ledger.db in "
               "~/.local/share/tailrace.", _OTHER, metavar="PLACE"),
        Option("--ledger-spool", str, "Directory where requests wait while the ledger cannot be written. Default: "
               "beside its file, or ~/.local/share/tailrace/spool.", _OTHER, metavar="DIR"),
        Option("--ledger-retention", str, "How long a request's row is kept: 90d, 12h; 0 for no end. Sums stay.",
               _OTHER, "90d", metavar="TIME"),
        Option("--ledger-rows", int, "Most rows of requests; 0 for no bound.", _OTHER, 1_000_000),
        Option("--ledger-fingerprints", bool, "Note which prompts began alike, so that the ledger can be played again.",
               _OTHER, True),
        Option("--slo", str, "What every request is judged by: ttft=500ms,tpot=50ms,e2e=20s.", _OTHER,
               metavar="BOUNDS"),
        Option("--price", str, "File that says what this machine costs (docs/ledger.md).", _OTHER, metavar="FILE"),
        Option("--limit", str, "What a request may be at most: choices=8, body_bytes=1000000, stop_strings, logprobs "
               "and others (docs/keys.md); may be repeated.", _CAPACITY, many=True, metavar="NAME=NUMBER"),
        Option("--threads", int, "Compute threads. Default: one a core.", _COMPUTE),
        Option("--kernels", str, "Instruction path. Default: the best that this machine has.", _COMPUTE,
               choices=("portable", "avx2", "avx512", "avx512bf16", "amx", "neon", "dotprod")),
        Option("--kv-dtype", str, "How keys and values are kept: bf16, fp16, int8, int4, or the bits of keys and of "
               "values, as in k8v4.", _COMPUTE, "bf16", metavar="TYPE"),
        Option("--kv-dtype-skip", str, "Layers that keep them as bf16 all the same, counted from 0: 0,1 or 0-3,29.",
               _COMPUTE, "", metavar="LAYERS"),
        Option("--quantize", str, QUANTIZE_HELP, _COMPUTE, choices=tuple(kind.value for kind in Quantize)),
        Option("--pooling", str, "Serve embeddings: how a text's rows become one. Default: as an encoder's files say; "
               "a model that generates embeds only where this is given.", _COMPUTE, choices=("mean", "cls", "last")),
        Option("--backend", str, "cpu is native; reference is numpy, slow, and the oracle of the other.", _COMPUTE,
               "cpu", choices=("cpu", "reference")),
        Option("--request-timeout", float, "Longest that a request may take, in seconds; 0 is no bound.", _TIME, 0.0),
        Option("--drain-timeout", float, "Longest that running requests may take after SIGTERM, in seconds.", _TIME,
               60.0),
        Option("--stuck-timeout", float, "Seconds without a sign of work, within a step, after which the engine counts "
               "as stuck; more where pieces of work have taken long before.", _TIME, 4.0),
        Option("--hang-timeout", float, "Seconds without progress after which the engine counts as hung.", _TIME, 30.0),
        Option("--start-timeout", float, "Longest that the engine may take to get ready, in seconds.", _TIME, 300.0),
        Option("--lora-timeout", float, "Longest that reading an adapter may take, in seconds.", _TIME, 60.0),
        Option("--sleep-after", float, "Idle seconds after which the engine's memory is given back until a request "
               "comes; 0 is never.", _TIME, 0.0, metavar="SECONDS"),
        Option("--wake-on-request", str, "Which sleep a request ends: one that began by itself, any, or none; else it "
               "gets 503.", _TIME, "idle", choices=("idle", "always", "never")),
        Option("--wake-timeout", float, "Longest that a request waits for a server that wakes up for it.", _TIME, 60.0,
               metavar="SECONDS"),
        Option("--cache", str, "Where models and repacked weights are kept. Default: TAILRACE_CACHE, or "
               "~/.cache/tailrace.", _OTHER, metavar="DIR"),
        Option("--chat-template", str, CHAT_TEMPLATE_HELP, _OTHER, metavar="NAME|FILE"),
        Option("--tool-parser", str, "Format in which the model writes tool calls. Default: what its chat template "
               "shows.", _OTHER, "auto", choices=TOOL_PARSERS),
        Option("--reasoning-parser", str, "Tags around the model's reasoning. Default: those that its chat template "
               "names. think-close: the answer begins with reasoning, and only its end is marked.", _OTHER, "auto",
               choices=REASONING_PARSERS),
        Option("--template-args", bool, "Let clients pass chat_template_kwargs.", _OTHER, True),
        Option("--log-requests", bool, "Log one JSON line a request: times and sizes, never text.", _OTHER, True),
        Option("--log-prompts", bool, "Log what was asked, too: for debugging.", _OTHER, False),
        Option("--unknown-parameters", str, "What becomes of parameters that nobody knows: refuse the request, or pass "
               "over them and name them in a header.", _OTHER, "refuse", choices=("refuse", "warn")),
        Option("--quiet", bool, "Print no start-up report.", _OTHER, False),
    ),
)  # fmt: skip


def parse(arguments: Sequence[str], declaration: Declaration) -> dict[str, Value] | None:
    """The values of a valid command line, by name; None for one that the full parser should look at."""
    values: dict[str, Value] = {option.name: option.unset for option in declaration.options}
    values[declaration.argument.name] = declaration.argument.default
    flags = {option.flag: option for option in declaration.options}
    position, positional = 0, 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not word.startswith("-"):
            positional += 1
            values[declaration.argument.name] = word
            continue
        flag, equals, text = word.partition("=")
        option = flags.get(flag)
        if option is None or option.kind is bool:
            if equals or not _set_switch(flag, flags, values):
                return None
            continue
        if not equals:
            if position == len(arguments) or arguments[position].startswith("-"):
                return None
            text = arguments[position]
            position += 1
        if not _set(option, text, values):
            return None
    return values if positional <= 1 else None


def _set_switch(flag: str, flags: dict[str, Option], values: dict[str, Value]) -> bool:
    name, on = (flag, True) if flag in flags else (flag.replace("--no-", "--", 1), False)
    option = flags.get(name)
    if option is None or option.kind is not bool:
        return False
    values[option.name] = on
    return True


def _set(option: Option, text: str, values: dict[str, Value]) -> bool:
    if not text or (option.choices and text not in option.choices):
        return False
    if option.many:
        values[option.name] = [*_listed(values[option.name]), text]
        return True
    if option.kind is not str and not _is_plain_number(text, whole=option.kind is int):
        return False
    values[option.name] = option.kind(text)
    return True


def _is_plain_number(text: str, *, whole: bool) -> bool:
    """Digits, and for a float one point between digits: what every parser reads alike."""
    digits = text if whole else text.replace(".", "", 1)
    return digits.isascii() and digits.isdigit() and text[0] != "." and text[-1] != "."


def _listed(value: Value) -> list[str]:
    return value if isinstance(value, list) else []


def command(declaration: Declaration, run: Callable[[dict[str, Value]], int], doc: str) -> Callable[..., None]:
    """The declaration as a function that typer makes a command of; `run` gets the values that `parse` would give."""
    import typer

    def called(**values: Any) -> None:
        plain = {
            name: list(value or []) if isinstance(value, list | tuple) else getattr(value, "value", value)
            for name, value in values.items()
        }
        for option in declaration.options:
            if option.many:
                plain[option.name] = plain[option.name] or []
        raise typer.Exit(run(plain))

    signature = _signature(declaration)
    called.__signature__ = signature  # type: ignore[attr-defined]  # typer reads the parameters from here
    called.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    called.__doc__ = doc
    return called


def _signature(declaration: Declaration) -> inspect.Signature:
    import inspect
    from typing import Annotated

    import typer

    def parameter(name: str, kind: Any, default: Value) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    make_enum: Any = enum.StrEnum  # of names known at run time only
    argument = declaration.argument
    parameters = [parameter(argument.name, Annotated[str, typer.Argument(help=argument.help)], argument.default)]
    for option in declaration.options:
        kind: Any = option.kind
        default: Any = option.unset
        flags = [f"{option.flag}/--no-{option.flag.removeprefix('--')}"] if kind is bool else [option.flag]
        if option.choices:
            kind = make_enum(option.name, {choice: choice for choice in option.choices})
            default = kind(default) if default is not None else None
        if option.many:
            kind = list[str]
        if default is None:
            kind = kind | None
        info = typer.Option(*flags, help=option.help, rich_help_panel=option.panel, metavar=option.metavar,
                            show_default=default is not None and not option.many)  # fmt: skip
        parameters.append(parameter(option.name, Annotated[kind, info], default))
    return inspect.Signature(parameters)
