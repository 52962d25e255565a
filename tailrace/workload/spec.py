"""A workload as a small TOML file: read, checked, and found by name."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tailrace.terms import InvalidInput
from tailrace.workload import amounts
from tailrace.workload.amounts import Amount
from tailrace.workload.arrivals import Arrivals

Count = Annotated[int, msgspec.Meta(ge=1)]


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A system prompt of `tokens` tokens at the front of every request; `groups` different ones, each as likely."""

    tokens: Count
    groups: Count = 1


class Turns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session of `count` turns, each of which carries all that was said before.

    From the second on a turn adds `added` tokens (default: as the first's `input`), `pause` seconds after the answer: a
    user who reads and types, or a tool's result. Every `branch_every`-th turn is asked `branches` times at once, each
    with an addition of its own, and the next one carries all of their answers.
    """

    count: Amount
    added: Amount | None = None
    pause: Amount = 0.0
    branches: Count = 1
    branch_every: Count = 2


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sessions from a file: "mooncake" (JSON lines) or "sharegpt" (JSON). `path` is relative to the workload's file.
    `turns` bounds the turns taken of a conversation, `block_tokens` are those of a trace's block, found out
    where it is None."""

    format: Literal["mooncake", "sharegpt"]
    path: str
    turns: Count = 1
    block_tokens: Count | None = None


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is asked: lengths in tokens, what is shared, and when. Either `input` and `output`, or `trace`."""

    about: str = ""
    input: Amount | None = None
    output: Amount | None = None
    shared: Shared | None = None
    turns: Turns | None = None
    trace: Trace | None = None
    arrivals: Arrivals | None = None
    name: str = ""


def names() -> list[str]:
    """The workloads that come with Tailrace."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def load(name: str) -> Workload:
    """A workload by its name, or from a .toml file; a .jsonl file is a Mooncake trace, a .json file ShareGPT.

    Raises InvalidInput, which names what is wrong.
    """
    if name in names():
        return parse((_folder() / f"{name}.toml").read_text(encoding="utf-8"), name)
    path = Path(name)
    if path.suffix == ".jsonl":
        return Workload(name=path.stem, trace=Trace("mooncake", str(path)))
    if path.suffix == ".json":
        return Workload(name=path.stem, trace=Trace("sharegpt", str(path)))
    if path.suffix != ".toml":
        known = ", ".join(names())
        raise InvalidInput(f"there is no workload {name!r}; there are {known}, and .toml files", param="workload")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}", param="workload") from error
    workload = parse(text, path.stem)
    if workload.trace is None:
        return workload
    where = msgspec.structs.replace(workload.trace, path=str(path.parent / workload.trace.path))
    return msgspec.structs.replace(workload, trace=where)


def parse(text: str, name: str) -> Workload:
    """A workload from TOML. Raises InvalidInput."""
    try:
        workload = msgspec.toml.decode(text, type=Workload)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidInput(f"workload {name}: {error}", param="workload") from error
    workload = msgspec.structs.replace(workload, name=workload.name or name)
    check(workload)
    return workload


def check(workload: Workload) -> None:
    """Raises InvalidInput where parts contradict each other."""
    made = workload.input is not None and workload.output is not None
    if made == (workload.trace is not None) or (not made and (workload.input, workload.output) != (None, None)):
        raise InvalidInput(f"workload {workload.name}: give input and output, or else trace", param="workload")
    if workload.trace is not None and (workload.shared or workload.turns):
        raise InvalidInput(f"workload {workload.name}: shared and turns cannot be added to a trace", param="workload")
    turns = workload.turns
    for place, amount in (
        ("input", workload.input), ("output", workload.output), ("turns.count", turns.count if turns else None),
        ("turns.added", turns.added if turns else None), ("turns.pause", turns.pause if turns else None),
    ):  # fmt: skip
        if amount is not None:
            amounts.check(amount, place)


def _folder() -> resources.abc.Traversable:
    return resources.files("tailrace.workload") / "builtin"
