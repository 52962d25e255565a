"""What is said of a parameter, and of an endpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from tailrace.api.params import BOUNDS, INT_BOUNDS
from tailrace.api.schema import Body, Only

Status = Literal["supported", "different", "refused"]
Place = Literal["body", "query", "path", "form", "header"]
Json = dict[str, Any]
MODEL = "MODEL"
"""Stands in examples for a name of the served model."""


@dataclass(frozen=True)
class Parameter:
    """One parameter. `schema`: its JSON schema, where the body's type says too little, or keywords to be added to what
    that says; null is possible wherever it is for the type. `example`: a value that is accepted, or, of what is
    refused, one that is not; `within`: what else the request then says. `only`: the values that are taken, and what is
    said of any other."""

    name: str
    note: str
    example: Any = None
    status: Status = "supported"
    schema: Json | None = None
    place: Place = "body"
    required: bool = False
    within: Mapping[str, Any] = field(default_factory=dict)
    only: Only | None = None

    @property
    def nested(self) -> bool:
        """Whether it lies in another parameter (a.b), whose schema has it."""
        return "." in self.name and self.place == "body"


def row(note: str, example: Any, schema: Json | None = None, **within: Any) -> Parameter:
    """What is said of a parameter that works as it does elsewhere."""
    return Parameter("", note, example, schema=schema, within=within)


def needed(note: str, example: Any, schema: Json | None = None) -> Parameter:
    """And of one that must be there, though the body's type does not say so: its error is a better one."""
    return Parameter("", note, example, schema=schema, required=True)


def differs(note: str, example: Any, schema: Json | None = None, **within: Any) -> Parameter:
    """And of one that does not: the note says what differs."""
    return Parameter("", note, example, "different", schema, within=within)


def parameters(body: type[Body], said: Mapping[str, Parameter]) -> tuple[Parameter, ...]:
    """The parameters of a body, in its order; those that are not served at the end. Raises ValueError for fields that
    nothing is said of, and for what is said of none."""
    fields = {one.encode_name: one for one in msgspec.structs.fields(body)}
    plain = {name for name in body.unserved if "." not in name}
    if fields.keys() - plain != said.keys():
        raise ValueError(f"{body.__name__}: what is said is not of its fields: {fields.keys() - plain ^ said.keys()}")
    made = [
        replace(said[name], name=name, required=one.required or said[name].required, schema=_bounded(name, said[name]))
        for name, one in fields.items()
        if name in said
    ]
    return (*made, *(_unserved(name, only) for name, only in sorted(body.unserved.items())))


def _bounded(name: str, said: Parameter) -> Json | None:
    """With the bounds that are checked."""
    if said.schema is not None or (name not in BOUNDS and name not in INT_BOUNDS):
        return said.schema
    if name in BOUNDS:
        return {"type": "number", "minimum": BOUNDS[name][0], "maximum": BOUNDS[name][1]}
    return {"type": "integer", "minimum": INT_BOUNDS[name][0], "maximum": INT_BOUNDS[name][1]}


def _unserved(name: str, only: Only) -> Parameter:
    status: Status = "different" if only.values else "refused"
    schema: Json = {"enum": [*only.values, None]} if only.values else {"type": "null"}
    example = _other(only.values[0]) if only.values else "x"
    note = f"{name} {only.why}"
    if only.values and "only" not in only.why:
        note += f"; {', '.join(msgspec.json.encode(one).decode() for one in only.values)} is taken"
    within = {"stream": True} if name.startswith("stream_options.") else {}
    return Parameter(name, note, example, status, schema, within=within, only=only)


def _other(value: Any) -> Any:
    """A value of the same type that is not this one."""
    match value:
        case bool():
            return not value
        case float():
            return value + 1.0
        case list():
            return [*value, "audio"]
        case _:
            return f"{value}-x"


def queries(names: Collection[str], said: Mapping[str, Parameter]) -> tuple[Parameter, ...]:
    """The parameters of a query. Raises ValueError as `parameters` does."""
    if set(names) != said.keys():
        raise ValueError(f"what is said is not of {sorted(names)}: {set(names) ^ said.keys()}")
    return tuple(replace(said[name], name=name, place="query") for name in names)


def identified(note: str) -> Parameter:
    """The {id} in a path."""
    return Parameter("id", note, schema={"type": "string"}, place="path", required=True)


@dataclass(frozen=True)
class Endpoint:
    """One method of one path, and of those that mean the same. `answer` is a type, or a content type where the answer
    is no JSON; `events` the type of a stream's events. `errors`: statuses besides those that all have. `needs`: what
    the server must have been started with."""

    method: Literal["GET", "POST", "DELETE"]
    paths: tuple[str, ...]
    what: str
    answer: Any
    parameters: tuple[Parameter, ...] = ()
    body: type[Body] | None = None
    events: Any = None
    errors: tuple[int, ...] = ()
    needs: str = ""

    @property
    def path(self) -> str:
        """The first of its paths."""
        return self.paths[0]

    def request(self, model: str) -> Json:
        """The least body that is accepted."""
        least = {one.name: one.example for one in self.parameters if one.required and one.place == "body"}
        return {name: model if value == MODEL else value for name, value in least.items()}
