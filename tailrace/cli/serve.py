"""`tailrace serve`: turns the command line into settings and runs the server."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.api.mount import Mount
    from tailrace.api.server import TextLoader
    from tailrace.api.service import Service
    from tailrace.api.settings import Limits, Settings
    from tailrace.engine.early import Waiting

DOC = """Serve a model on the OpenAI API.

The model is pulled first when its name is known and it is not there yet.
Ctrl-C or SIGTERM finishes the running requests, then ends.

[bold]Examples[/bold]

  [dim]# the default model on http://127.0.0.1:8000[/dim]
  tailrace serve

  [dim]# a file of yours, for other machines, with a key from the environment[/dim]
  TAILRACE_API_KEY=... tailrace serve ./model.gguf --host 0.0.0.0

  [dim]# keys with limits, which can be revoked while it runs; over HTTPS[/dim]
  tailrace keys create ada --keys keys.json --tokens-per-minute 20000
  tailrace serve --host 0.0.0.0 --keys keys.json --tls-cert cert.pem --tls-key key.pem

  [dim]# room for 16,384 tokens of KV, 16 requests at a time[/dim]
  tailrace serve smollm2-135m --kv-tokens 16384 --max-running 16

  [dim]# a bfloat16 checkpoint in half of its memory[/dim]
  tailrace serve ./checkpoint --quantize int8

  [dim]# with a dashboard on http://127.0.0.1:8000/ui[/dim]
  tailrace serve --ui

  [dim]# an embedding model[/dim]
  tailrace serve all-minilm-l6-v2

  [dim]# cached prompts for ten minutes, and the system prompt's KV for good[/dim]
  tailrace serve --kv-policy ttl --kv-ttl 600 --kv-pin system.txt
"""


def run(values: Mapping[str, Any], engine: Waiting | None = None) -> int:
    """Serves until told to end. `values` are those of `options.SERVE`; `engine` is a process that `early.fork` started
    (None: one is started here)."""
    from tailrace.engine import early

    engine = engine or early.begin()
    try:
        made, text = _with_pins(_found(values), values["kv_pin"])
    except BaseException:
        early.give_up(engine)
        raise
    from tailrace.api import server

    waiting = early.hand_over(engine, made.engine())
    return server.run(
        made, engine=waiting, load_text=text, started_at=_process_start(), mount=_dashboard if values["ui"] else None
    )


def _dashboard(service: Service) -> Mount:
    """The dashboard, whose room is imported when it is asked for."""
    from tailrace.web.mount import Dashboard

    return Dashboard(service)


def _found(values: Mapping[str, Any]) -> Settings:
    """The checked settings, with the model where it lies; it is pulled if need be."""
    if values["cache"]:
        os.environ["TAILRACE_CACHE"] = values["cache"]
    made = settings(values)
    for name in ("TAILRACE_API_KEY", "TAILRACE_ADMIN_KEY"):
        os.environ.pop(name, None)  # no process that is started from here on needs to know
    made.check()  # before anything is downloaded
    return dataclasses.replace(made, model=str(find_model(values["model"])))


def _with_pins(made: Settings, files: Sequence[str]) -> tuple[Settings, TextLoader | None]:
    """The settings with the token ids of the files whose prefixes are pinned, and how the server gets the text that may
    have been needed for that, and so is loaded before the engine is told what to serve."""
    if not files:
        return made, None
    from tailrace.api import pins, server

    text = functools.cache(server.text_of)
    return dataclasses.replace(made, kv_pin=pins.read(files, lambda: text(made))), lambda _settings: text(made)


def settings(values: Mapping[str, Any]) -> Settings:
    """The settings that a command line means, but for the model's path: it is still what was typed."""
    from tailrace.api.settings import Settings, Timeouts
    from tailrace.models import catalogue

    for name in (
        "request_timeout", "drain_timeout", "stuck_timeout", "hang_timeout", "start_timeout", "wake_timeout",
        "sleep_after", "lora_timeout",
    ):  # fmt: skip
        if not 0 <= values[name] < math.inf:
            flag = "--" + name.replace("_", "-")
            raise InvalidInput(f"{flag} must be a number of seconds, at least 0, not {values[name]}", param=name)
    keys = _keys(values["api_key"], values["api_key_file"], "api_key_file", "TAILRACE_API_KEY")
    admin_keys = _keys([], values["admin_key_file"], "admin_key_file", "TAILRACE_ADMIN_KEY")
    plain = (
        "host", "port", "kv_tokens", "max_context", "step_tokens", "draft_tokens", "max_running", "max_waiting",
        "threads", "kernels", "kv_dtype", "kv_dtype_skip", "quantize", "pooling", "backend", "prefix_cache",
        "kv_policy", "kv_ttl", "kv_tenant_share", "kv_disk", "kv_valkey", "kv_valkey_ttl", "kv_valkey_password_file",
        "kv_key_file", "kv_events", "kv_events_replay", "kv_events_key", "log_requests", "quiet", "template_args",
        "keys", "tls_cert", "tls_key", "log_prompts", "unknown_parameters", "tool_parser", "reasoning_parser",
        "content_store", "ledger_spool", "ledger_rows", "ledger_fingerprints", "wake_on_request", "lora_dir",
        "max_loras", "chat_template",
    )  # fmt: skip
    return Settings(
        model=values["model"],
        served_names=tuple(values["served_name"]) or catalogue.names(values["model"]),
        api_keys=keys,
        admin_keys=admin_keys,
        cors_origins=tuple(values["cors_origin"]),
        limits=limits(values["limit"]),
        loras=adapters(values["lora"]),
        cache_dir=values["cache"],
        kv_disk_bytes=size_of(values["kv_disk_bytes"], "kv_disk_bytes"),
        content_bytes=size_of(values["content_bytes"], "content_bytes"),
        ledger=ledger_of(values["ledger"]),
        ledger_retention=duration_of(values["ledger_retention"], "ledger_retention"),
        slo=values["slo"] or "",
        usd_per_hour=usd_per_hour(values["price"]),
        content_retention=duration_of(values["content_retention"], "content_retention"),
        timeouts=Timeouts(
            request=values["request_timeout"],
            drain=values["drain_timeout"],
            stuck=values["stuck_timeout"],
            hang=values["hang_timeout"],
            start=values["start_timeout"],
            lora=values["lora_timeout"],
            wake=values["wake_timeout"],
            sleep_after=values["sleep_after"],
        ),
        **{name: values[name] for name in plain},
    )


def ledger_of(given: str | None) -> str | None:
    """The ledger that is meant: the user's own where nothing is said; None for none."""
    from tailrace.ledger import place

    meant = place.default() if given is None else given
    return None if meant == place.OFF else meant


def usd_per_hour(file: str | None) -> float | None:
    """What a price file says of the machine. Raises InvalidInput where it says nothing."""
    if file is None:
        return None
    from tailrace.ledger import price

    found = price.read(Path(file)).usd_per_hour
    if found is None:
        raise InvalidInput(f"--price {file} has neither [rented] nor [owned]", param="price")
    return found


def adapters(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Names and paths of adapters, of "NAME=PATH" each; InvalidInput for anything else."""
    found = []
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise InvalidInput(f"--lora is NAME=PATH, not {text!r}", param="lora")
        found.append((name, path))
    return tuple(found)


def size_of(text: str, param: str) -> int:
    """Bytes, of "4096", "500MB" or "4GiB"; InvalidInput for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kMGT])(i?)B)?", text)
    if not found:
        raise InvalidInput(f"--{param.replace('_', '-')} is a size such as 500MB or 4GiB, not {text}", param=param)
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kMGT".index(prefix or " "))


def duration_of(text: str, param: str) -> float:
    """Seconds, of "30d", "12h", "30m" or "0"; InvalidInput for anything else."""
    found = re.fullmatch(r"(\d{1,6})([dhm])|0", text)
    if not found:
        raise InvalidInput(f"--{param.replace('_', '-')} is a time such as 30d, 12h or 30m, not {text}", param=param)
    number, unit = found.groups()
    return float(number or 0) * {"d": 86400, "h": 3600, "m": 60}[unit or "m"]


def find_model(name: str) -> Path:
    """Where the model lies; a known one that is absent is pulled, with progress shown."""
    from tailrace.models import catalogue

    if catalogue.missing(name):
        import gc

        from tailrace.cli import pull

        gc.enable()  # `main` disabled it for a start that takes no time; this one does
        return pull.show(name)
    return catalogue.resolve(name)


def _process_start() -> float:
    """When this process began, on the monotonic clock: the start-up report covers the interpreter's start too."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # no Linux
        return now
    return now - max(0.0, age)


def limits(given: Sequence[str]) -> Limits:
    """The limits with those that the command line changes. Raises InvalidInput."""
    from tailrace.api.settings import Limits

    known = [field.name for field in dataclasses.fields(Limits)]
    changed: dict[str, int] = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in known or not (number.isascii() and number.isdigit()):
            raise InvalidInput(f"--limit is NAME=NUMBER with one of {', '.join(known)}; not {text!r}", param="limit")
        changed[name] = int(number)
    return Limits(**changed)


def _keys(given: list[str], file: str | None, param: str, variable: str) -> tuple[str, ...]:
    """Keys from the options, from the file, and, when there are none of these, from a variable of the environment."""
    flag = "--" + param.replace("_", "-")
    keys = list(given)
    if file is not None:
        try:
            lines = Path(file).expanduser().read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{flag} {file} cannot be read: {error}", param=param) from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise InvalidInput(f"{flag} {file} has no key in it", param=param)
        keys += found
    if not keys and (key := os.environ.get(variable)):
        keys.append(key)
    return tuple(keys)
