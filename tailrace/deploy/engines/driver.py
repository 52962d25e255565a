"""What is known of an engine: how it is found, started, and asked how it is.

A `Driver` decides and does nothing: it gives a `Found` and a `Command`, which `deploy.local` runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from tailrace.terms import InvalidInput, TailraceError


class NotFound(TailraceError):
    """The engine is not installed where it was looked for; the message says where that was, and what would help."""


@dataclass(frozen=True)
class Found:
    """An installed engine: the words that begin its command line, its version in its own words, and where it lies.
    `python` is the interpreter that it lives in, where it is a Python package."""

    argv: tuple[str, ...]
    version: str
    where: str
    python: str | None = None


@dataclass(frozen=True)
class Options:
    """What is wanted of a server, in words that are no engine's own. None leaves a thing as the engine has it.

    `model` is a file or a folder, or a name that the engine itself knows. `context`: tokens, prompt and answer, that
    one request may have. `parallel`: requests that are to run at a time. `dtype`: how weights are computed or rounded
    at load, in the engine's words. `extra`: further words of the engine's own command line, which win over all else.
    """

    model: str
    served: str = "model"
    context: int | None = None
    parallel: int | None = None
    threads: int | None = None
    prefix_cache: bool | None = None
    dtype: str | None = None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command line that serves on `port` of the loopback address. `env` are changes to the environment; None takes a
    variable out. `health`: a GET of it has status 200 once a request would be served. `served`: the model's name in
    requests. `body`: parameters that every request to this engine should have; `ignore_eos`: it takes that one."""

    name: str
    argv: tuple[str, ...]
    port: int
    served: str
    health: str = "/health"
    env: Mapping[str, str | None] = field(default_factory=dict)
    body: Mapping[str, object] = field(default_factory=dict)
    ignore_eos: bool = True


class Gauges(msgspec.Struct, frozen=True):
    """Where an engine tells how it is: a page in Prometheus' format, and what there is called how. Each is a list of
    names of which the first that is there counts; where it has several series, they are added up. `kv_use` is a share,
    0 to 1. Of cache hits there are two counters in tokens: `cache_hits` of `cache_queries`."""

    path: str = "/metrics"
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    kv_use: tuple[str, ...] = ()
    cache_hits: tuple[str, ...] = ()
    cache_queries: tuple[str, ...] = ()


class Driver(Protocol):
    """One engine."""

    @property
    def name(self) -> str:
        """What it is called on command lines."""

    @property
    def formats(self) -> str:
        """In words, which models it takes."""

    @property
    def gauges(self) -> Gauges | None:
        """What it tells; None where that is nothing."""

    def find(self, given: str | None) -> Found:
        """The engine at the path that was given (an executable, an interpreter or a virtual environment), or where
        such things are. Raises NotFound."""

    def unfit(self, model: str) -> str | None:
        """Why it cannot serve that file, folder or name, as a sentence; None where it can."""

    def command(self, found: Found, options: Options, port: int) -> Command:
        """The command line. Raises InvalidInput for what it cannot do."""


def flags(pairs: Mapping[str, object]) -> list[str]:
    """Flags and their values as words; those whose value is None are left out."""
    return [word for flag, value in pairs.items() if value is not None for word in (flag, str(value))]


def cannot(name: str, what: str) -> InvalidInput:
    """The error for an option that an engine has nothing like."""
    return InvalidInput(f"{name} cannot be told {what}", param=what.split()[0])


def is_gguf(model: str) -> bool:
    """Whether it is a GGUF file, by its first bytes."""
    try:
        with Path(model).expanduser().open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def is_checkpoint(model: str) -> bool:
    """Whether it is a folder as Hugging Face's: a configuration and weights as safetensors."""
    path = Path(model).expanduser()
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def unfit_checkpoint(name: str, formats: str, model: str) -> str | None:
    """Of an engine that takes Hugging Face's folders, or names on its hub: why not that one."""
    there = Path(model).expanduser().exists()
    if is_checkpoint(model) or (not there and re.fullmatch(r"[\w.-]+/[\w.-]+", model)):
        return None
    return f"{name} takes {formats}, and {model} is {'none' if there else 'not there'}"


def threads_of(count: int | None) -> dict[str, str | None]:
    """The environment by which OpenMP and MKL are told how many threads to use."""
    return {} if count is None else dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(count))
