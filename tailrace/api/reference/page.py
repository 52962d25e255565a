"""docs/api.md: every endpoint, and every parameter of each."""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.api.front import Route, route_of
from tailrace.api.params import MOST
from tailrace.api.reference import ENDPOINTS, Endpoint
from tailrace.api.reference.declare import MODEL, Json, Parameter
from tailrace.api.reference.openapi import REF, components
from tailrace.api.schema import Only

HEAD = """# The API, parameter by parameter

Made by `make docs` from what the server checks requests with; every row is tested against it with the official clients.
`GET /openapi.json` has the same as an OpenAPI document.

- **supported**: works as it does with whoever invented it.
- **different**: works, but for what the note says; a value that is not taken is a 400 that names the parameter.
- **refused**: any value but null is a 400 that names the parameter.

What is in no table is refused as unknown (or passed over and named in a header: `--unknown-parameters warn`).
Parameters that may be absent may be null. Numbers are those of a server with its default limits.

Every parameter that OpenAI's and Anthropic's clients know for these endpoints is here, beta ones included.
"""
KEYS = {"inference": "a key with the scope `inference`", "admin": "a key with the scope `admin`", None: "any key"}


def page() -> str:
    """The whole page."""
    schemas, refs = components((MODEL,))
    return HEAD + "".join(_section(endpoint, schemas, refs) for endpoint in ENDPOINTS)


def _section(endpoint: Endpoint, schemas: Json, refs: dict[Any, Json]) -> str:
    route = route_of(endpoint.path, endpoint.method)
    lines = [f"\n## {endpoint.method} {endpoint.path}\n", f"{endpoint.what} {_terms(endpoint, route)}\n"]
    if endpoint.parameters:
        known = {} if endpoint.body is None else _target(refs[endpoint.body], schemas).get("properties", {})
        lines += ["| parameter | type | status | |", "|---|---|---|---|"]
        lines += [_row(one, known, schemas) for one in sorted(endpoint.parameters, key=lambda one: not one.required)]
        lines.append("")
    return "\n".join(lines)


def _terms(endpoint: Endpoint, route: Route) -> str:
    said = []
    if len(endpoint.paths) > 1:
        said.append(f"Also at {', '.join(f'`{path}`' for path in endpoint.paths[1:])}.")
    if endpoint.needs:
        said.append(f"Needs {endpoint.needs}.")
    said.append("Open to everybody." if route.open else f"Takes {KEYS[route.scope]}.")
    return " ".join(said)


def _row(one: Parameter, known: Json, schemas: Json) -> str:
    place = "" if one.place == "body" else f" ({one.place})"
    status = "required" if one.required and one.status == "supported" else one.status
    note = one.note.removeprefix(f"{one.name} ")
    schema = known.get(one.name, one.schema or {})
    kind = "" if one.nested or one.status == "refused" else kind_of(schema, schemas)
    if one.example == MODEL:
        kind = "string"
    return f"| `{one.name}`{place} | {kind} | {status} | {_escaped('' if note == Only.why else note)} |"


def _target(ref: Json, schemas: Json) -> Json:
    found: Json = schemas[ref["$ref"].removeprefix(REF.format(name=""))]
    return found


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def kind_of(schema: Json, schemas: Json) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return kind_of(_target(schema, schemas), schemas)
    if "enum" in schema:
        return ", ".join(f"`{_shown(one)}`" for one in schema["enum"] if one is not None)
    if "anyOf" in schema:
        kinds = [kind_of(one, schemas) for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(dict.fromkeys(filter(None, kinds)))
    kind = schema.get("type", "")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        inner = kind_of(schema.get("items", {}), schemas).partition(", from")[0]
        return f"list of {inner}" if inner else "list"
    return f"{kind}{_bounds(schema)}"


def _bounds(schema: Json) -> str:
    low: Any = schema.get("minimum", schema.get("exclusiveMinimum"))
    high: Any = schema.get("maximum")
    if low is None and high is None:
        return ""
    if high is None or high == MOST:
        return f", from {low:g}"
    return ", of 64 bits" if high > MOST else f", {_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
