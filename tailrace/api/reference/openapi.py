"""The OpenAPI document (3.1)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, get_args

import msgspec
from msgspec import Raw

import tailrace
from tailrace.api.front import MESSAGES, Route, route_of
from tailrace.api.reference import ENDPOINTS, answers
from tailrace.api.reference.declare import MODEL, Endpoint, Json, Parameter
from tailrace.api.schema import Body
from tailrace.api.settings import Settings

REF = "#/components/schemas/{name}"
INFO = (
    "OpenAI's and Anthropic's endpoints, and Tailrace's own. A parameter works as it does there, or its description "
    "says what differs, or it is refused by name (`x-status`: supported, different, refused). Others are refused, too. "
    "Bounds are those of a server with the limits that it has by default. Every answer has an `x-request-id`."
)
STATUSES = {
    400: "Something in the request is wrong; `param` names it.",
    401: "No key, or one that is none.",
    403: "The key is not for this.",
    404: "There is nothing of that name.",
    408: "The request did not arrive in time.",
    409: "The server is busy with what contradicts this.",
    413: "The body is too large.",
    415: "The body is of another content type.",
    429: "A limit, or a full queue; `retry-after` says when to try again.",
    431: "The headers are too large.",
    500: "An error of the server's.",
    503: "The server cannot serve now; `retry-after` says when to try again.",
    507: "The content store is full.",
}
END = "[DONE]"
"""The data of the last event, where streams have one that says so."""
ALWAYS = (400, 431, 500, 503)
KEYED = (401, 403)
SENDING = (408, 413, 415, 429)


def document(settings: Settings) -> Json:
    """The endpoints of a server with these settings."""
    schemas, refs = components(settings.names)
    paths: dict[str, Json] = {}
    for endpoint in ENDPOINTS:
        for path in endpoint.paths:
            paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path, refs, settings.names)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tailrace",
            "version": tailrace.__version__,
            "description": INFO,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {
                f"{shape}{status}": _error(status, shape) for status in STATUSES for shape in ("Error", "MessagesError")
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "A key with the scope inference."},
                "messagesKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
                "adminKey": {"type": "http", "scheme": "bearer", "description": "A key with the scope admin."},
            },
        },
    }


# --- types


def _types() -> list[Any]:
    found: dict[Any, None] = {}
    for endpoint in ENDPOINTS:
        found |= dict.fromkeys(filter(_is_struct, (endpoint.body, endpoint.answer, endpoint.events)))
    return [*found, answers.Error, answers.MessagesError]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def components(names: tuple[str, ...]) -> tuple[dict[str, Json], dict[Any, Json]]:
    """The schemas by name, and what refers to each type."""
    types = _types()
    found, schemas = msgspec.json.schema_components(types, ref_template=REF)
    refs = dict(zip(types, found, strict=True))
    for endpoint in ENDPOINTS:
        if endpoint.body is not None:
            name = refs[endpoint.body]["$ref"].removeprefix(REF.format(name=""))
            _tell(schemas[name], endpoint, endpoint.body, names)
    renamed = {_plain(name): _renamed(schema) for name, schema in schemas.items()}
    return renamed, {kind: _renamed(ref) for kind, ref in refs.items()}


def _plain(name: str) -> str:
    """Names of types that several modules have begin with the module's."""
    return "".join(part[:1].upper() + part[1:] for part in name.removeprefix("tailrace.api.").split("."))


def _renamed(value: Any) -> Any:
    """With plain names, and without defaults that only say that something is optional."""
    if isinstance(value, list):
        return [_renamed(one) for one in value]
    if not isinstance(value, dict):
        return value
    made = {key: _renamed(one) for key, one in value.items() if (key, one) != ("default", None)}
    if isinstance(made.get("$ref"), str):
        prefix = REF.format(name="")
        made["$ref"] = prefix + _plain(made["$ref"].removeprefix(prefix))
    return made


def _tell(schema: Json, endpoint: Endpoint, body: type[Body], names: tuple[str, ...]) -> None:
    """Writes what is said of the parameters into the schema of their body."""
    fields = {one.encode_name: one for one in msgspec.structs.fields(body)}
    required = set(schema.get("required", ()))
    for one in endpoint.parameters:
        if one.place != "body" or one.nested:
            continue
        kinds = {fields[one.name].type, *get_args(fields[one.name].type)}
        known = one.schema or {}
        if not known.keys() & {"type", "anyOf", "enum"}:
            known = {**schema["properties"][one.name], **known}
        nullable = not one.required and bool(kinds & {type(None), Raw})
        if one.example == MODEL:
            known = {"type": "string", "enum": list(names)}
        if one.schema is not None or one.example == MODEL:
            known = _nullable(known) if nullable else known
        schema["properties"][one.name] = {**known, **_told(one, names)}
        if one.required:
            required.add(one.name)
    if required:
        schema["required"] = sorted(required)


def _nullable(schema: Json) -> Json:
    if schema == {"type": "null"} or None in schema.get("enum", ()):
        return schema
    return {"anyOf": [schema, {"type": "null"}]}


def _told(one: Parameter, names: tuple[str, ...]) -> Json:
    told: Json = {"x-status": one.status}
    if one.note:
        told["description"] = one.note
    if one.example is not None and one.only is None:
        told["examples"] = [names[0] if one.example == MODEL else one.example]
    return told


# --- operations


def _operation(endpoint: Endpoint, path: str, refs: dict[Any, Json], names: tuple[str, ...]) -> Json:
    route = route_of(path, endpoint.method)
    what = endpoint.what if not endpoint.needs else f"{endpoint.what} Needs {endpoint.needs}."
    made: Json = {
        "operationId": f"{endpoint.method.lower()}{path.replace('{id}', 'id').replace('/', '_').replace('.', '_')}",
        "summary": what,
        "tags": [route.name],
        "security": _security(route, path),
        "responses": {"200": _good(endpoint, refs), **_bad(endpoint, route, path)},
    }
    found = [_parameter(one) for one in endpoint.parameters if one.place in ("query", "path")]
    if found:
        made["parameters"] = found
    if endpoint.body is not None:
        content: Json = {"schema": refs[endpoint.body]}
        if least := endpoint.request(names[0]):
            content["example"] = least
        made["requestBody"] = {"required": route.scope != "admin", "content": {"application/json": content}}
    elif form := [one for one in endpoint.parameters if one.place == "form"]:
        schema: Json = {
            "type": "object",
            "properties": {one.name: {**(one.schema or {}), "description": one.note} for one in form},
            "required": [one.name for one in form if one.required],
            "additionalProperties": False,
        }
        made["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return made


def _security(route: Route, path: str) -> list[Json]:
    """A server without keys asks for none."""
    if route.open:
        return []
    if route.scope == "admin":
        return [{"adminKey": []}]
    keys: list[Json] = [{"key": []}]
    if path.startswith(MESSAGES):
        keys.append({"messagesKey": []})
    if route.scope is None:
        keys.append({"adminKey": []})
    return [*keys, {}]


def _good(endpoint: Endpoint, refs: dict[Any, Json]) -> Json:
    content: Json = {}
    if isinstance(endpoint.answer, str):
        content[endpoint.answer] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": refs.get(endpoint.answer, {"type": "object"})}
    if endpoint.events is not None:
        content["text/event-stream"] = {"schema": _event(refs[endpoint.events])}
    return {"description": HTTPStatus.OK.phrase, "content": content}


def _event(data: Json) -> Json:
    """One of a stream's events: what readers of such documents that know streams look for."""
    return {
        "type": "object",
        "description": "One event of the stream.",
        "properties": {
            "event": {"type": "string"},
            "data": {"anyOf": [{"const": END}, {"contentMediaType": "application/json", "contentSchema": data}]},
        },
        "required": ["data"],
    }


def statuses(endpoint: Endpoint, path: str) -> list[int]:
    """Of errors that it may answer with."""
    route = route_of(path, endpoint.method)
    found = {*ALWAYS, *endpoint.errors}
    if not route.open:
        found |= {*KEYED}
    if endpoint.method == "POST":
        found |= {*SENDING}
    if any(one.example == MODEL for one in endpoint.parameters):
        found |= {404}
    return sorted(found)


def _bad(endpoint: Endpoint, route: Route, path: str) -> Json:
    shape = "MessagesError" if path.startswith(MESSAGES) else "Error"
    bad = {str(status): {"$ref": f"#/components/responses/{shape}{status}"} for status in statuses(endpoint, path)}
    if 503 in endpoint.errors:  # health says so in its own words
        bad["503"] = {**_good(endpoint, {endpoint.answer: {"$ref": REF.format(name=endpoint.answer.__name__)}})}
        bad["503"]["description"] = STATUSES[503]
    return bad


def _error(status: int, shape: str) -> Json:
    made: Json = {
        "description": STATUSES[status],
        "content": {"application/json": {"schema": {"$ref": REF.format(name=shape)}}},
    }
    if status in (429, 503):
        made["headers"] = {"retry-after": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
    return made


def _parameter(one: Parameter) -> Json:
    made: Json = {"name": one.name, "in": one.place, "required": one.required, "schema": one.schema}
    if one.note:
        made["description"] = one.note
    if one.place != "path":
        made["x-status"] = one.status
    return made
