"""The table of the API says what is so: each row is tried with the official clients, and nothing is missing."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import anthropic
import httpx2 as httpx
import jsonschema
import openai
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import batch_create_params, completion_create_params, embedding_create_params, file_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from openapi_spec_validator import validate
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tailrace.api import front
from tailrace.api.reference import ENDPOINTS, Endpoint
from tailrace.api.reference.declare import Parameter
from tailrace.api.reference.openapi import document
from tailrace.api.reference.page import page
from tailrace.api.settings import Settings
from tests.api.conftest import NO_TLS, ROOT, Running, serving
from tests.models import random_bert

KEY, OPERATOR = "a-key", "an-operator"
BY_PATH = {(endpoint.method, path): endpoint for endpoint in ENDPOINTS for path in endpoint.paths}
GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
READ = ("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score")
OFFICIAL: list[tuple[str, Any]] = [
    ("/v1/chat/completions", chat_create_params.CompletionCreateParamsStreaming),
    ("/v1/completions", completion_create_params.CompletionCreateParamsStreaming),
    ("/v1/embeddings", embedding_create_params.EmbeddingCreateParams),
    ("/v1/responses", response_create_params.ResponseCreateParamsStreaming),
    ("/v1/batches", batch_create_params.BatchCreateParams),
    ("/v1/files", file_create_params.FileCreateParams),
    ("/v1/messages", message_create_params.MessageCreateParamsStreaming),
    ("/v1/messages", beta_message_create_params.MessageCreateParamsStreaming),
    ("/v1/messages/count_tokens", message_count_tokens_params.MessageCountTokensParams),
    ("/v1/messages/count_tokens", beta_count_tokens_params.MessageCountTokensParams),
]
HEADERS = {"betas"}
"""What clients send as a header, which is not looked at."""
ELSEWHERE = {"user_profile_id", "workspace_id", "output_format"}
"""What they put into a header or into another parameter, and what this test wants in the body."""


# --- what is in it


def test_the_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == page(), "run `make docs`"


def test_the_document_is_openapi() -> None:
    validate(document(Settings("x")))


def test_every_route_is_in_the_table() -> None:
    routes = {(route.method, path) for path, route in front.ROUTES.items()} | set(front.LATER)
    routes |= {("GET", "/v1/models/{id}"), ("GET", "/admin/requests/{id}")}
    for name, (method, function) in front.ADMIN_ROUTES.items():
        routes |= {(method, f"/admin/{name}")}
        routes |= {(method, alias) for alias, known in front.ALIASES.items() if known == function}
    assert BY_PATH.keys() == routes


@pytest.mark.parametrize(("path", "params"), OFFICIAL, ids=lambda one: one if isinstance(one, str) else one.__module__)
def test_every_parameter_of_the_official_clients_is_in_the_table(path: str, params: Any) -> None:
    known = {one.name.partition("[")[0] for one in BY_PATH["POST", path].parameters}
    names = set(params.__annotations__)
    assert names - HEADERS <= known, "a new version of the client has parameters that the table does not know"
    assert names  # the client's types are where they were


# --- what it says


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    store = f"sqlite:////{tmp_path_factory.mktemp('content')}/content.db"
    keys = {"api_keys": [KEY], "admin_keys": [OPERATOR]}
    with serving(model="infill", served_names=["stand"], content_store=store, **keys) as running:
        running.key = KEY
        yield running


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = random_bert.write(tmp_path_factory.mktemp("embed") / "tiny", matryoshka_dimensions=[32, 64])
    cache_dir = str(tmp_path_factory.mktemp("cache"))
    with serving(model=str(model), loader="", served_names=["stand"], cache_dir=cache_dir, api_keys=[KEY]) as running:
        running.key = KEY
        yield running


@cache
def described() -> tuple[dict[str, Any], Registry[Any]]:
    made = document(Settings("x", served_names=("stand",)))
    return made, Registry().with_resource("urn:api", Resource.from_contents(made, DRAFT202012))


def conforms(endpoint: Endpoint, answer: httpx.Response) -> None:
    """Status, content type and body are what the document says of them."""
    made, registry = described()
    responses = made["paths"][endpoint.path][endpoint.method.lower()]["responses"]
    assert str(answer.status_code) in responses, answer.text
    said = responses[str(answer.status_code)]
    if "$ref" in said:
        said = made["components"]["responses"][said["$ref"].rpartition("/")[2]]
    kind = answer.headers["content-type"].partition(";")[0]
    content = said["content"][kind]
    bodies = [answer.text]
    if kind == "text/event-stream":
        content = {"schema": content["schema"]["properties"]["data"]["anyOf"][1]["contentSchema"]}
        bodies = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        assert bodies
    elif kind != "application/json":
        return
    schema = absolute(content["schema"])
    for body in bodies:
        jsonschema.Draft202012Validator(schema, registry=registry).validate(json.loads(body))


def absolute(schema: dict[str, Any]) -> dict[str, Any]:
    return {"$ref": f"urn:api{schema['$ref']}"} if "$ref" in schema else schema


def ask(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    """Calls an endpoint with the client that it is for, each parameter as that client takes it."""
    if path.startswith("/v1/messages"):
        with httpx.Client(verify=NO_TLS) as http:
            client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, http_client=http)
            create = client.messages.create if path == "/v1/messages" else client.messages.count_tokens
            return called(create, body)
    client = server.client(KEY)
    calls: dict[str, Callable[..., Any]] = {
        "/v1/chat/completions": client.chat.completions.create,
        "/v1/completions": client.completions.create,
        "/v1/responses": client.responses.create,
        "/v1/embeddings": client.embeddings.create,
    }
    return called(calls[path], body) if path in calls else server.post(path, body)


def called(create: Callable[..., Any], body: dict[str, Any]) -> httpx.Response:
    known = inspect.signature(create).parameters
    plain = {name: value for name, value in body.items() if name in known and name not in ELSEWHERE}
    extra = {name: value for name, value in body.items() if name not in plain}
    kept: list[httpx.Response] = []
    client = create.__self__._client._client
    client.event_hooks = {"response": [lambda answer: (answer.read(), kept.append(answer))]}
    with suppress(openai.APIStatusError, anthropic.APIStatusError):
        create(**plain, extra_body=extra)
    return kept[-1]


def rows(*paths: str) -> list[Any]:
    return [
        pytest.param(path, one, id=f"{path}-{one.name}")
        for path in paths
        for one in BY_PATH["POST", path].parameters
        if one.place == "body"
    ]


def given(one: Parameter, value: Any) -> dict[str, Any]:
    """The parameter as a part of a body."""
    name, _, inner = one.name.partition(".")
    return {**one.within, name: {inner: value} if inner else value}


def check(server: Running, path: str, one: Parameter) -> None:
    endpoint = BY_PATH["POST", path]
    least = endpoint.request("stand")
    if path in ("/v1/responses", "/v1/chat/completions"):  # so that nothing takes long
        least["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 8
    if one.name == "max_completion_tokens":
        del least["max_tokens"]
    taken = [*(one.only.values if one.only else [] if one.example is None else [one.example])]
    for value in taken:
        body = {**least, **given(one, "stand" if value == "MODEL" else value)}
        answer = ask(server, path, body)
        assert answer.status_code == 200, answer.text
        conforms(endpoint, answer)
    if one.only is not None:
        answer = ask(server, path, {**least, **given(one, one.example)})
        assert answer.status_code == 400, answer.text
        conforms(endpoint, answer)
        error = answer.json()["error"]
        if path.startswith("/v1/messages"):
            assert one.name in error["message"]
        else:
            assert error["param"] == one.name
            assert error["code"] == "unsupported_parameter"
    elif one.required:
        answer = server.post(path, {name: value for name, value in least.items() if name != one.name})
        assert answer.status_code == 400, answer.text
        conforms(endpoint, answer)
        assert f"missing parameter: {one.name}" in answer.text or f"{one.name} is missing" in answer.text


@pytest.mark.parametrize(("path", "one"), rows(*GENERATE, "/tokenize", "/detokenize"))
def test_what_generates_does_as_the_table_says(generating: Running, path: str, one: Parameter) -> None:
    if one.name == "previous_response_id":
        first = generating.client(KEY).responses.create(model="stand", input="a", max_output_tokens=4)
        one = Parameter(one.name, one.note, first.id)
    if path == "/tokenize" and not one.within and one.name not in ("prompt", "messages"):
        one = Parameter(one.name, one.note, one.example, within={"prompt": "a"})
    check(generating, path, one)


@pytest.mark.parametrize(("path", "one"), rows(*READ))
def test_what_reads_texts_does_as_the_table_says(reading: Running, path: str, one: Parameter) -> None:
    check(reading, path, one)


def test_null_is_absence_wherever_the_document_says_so(generating: Running) -> None:
    made, _ = described()
    for path in (*GENERATE, "/detokenize"):
        endpoint = BY_PATH["POST", path]
        least = endpoint.request("stand")
        content = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = made["components"]["schemas"][content["$ref"].rpartition("/")[2]]
        _, registry = described()
        nulls = dict.fromkeys(schema["properties"].keys() - set(schema["required"]))
        jsonschema.Draft202012Validator(absolute(content), registry=registry).validate({**least, **nulls})
        if "max_tokens" in nulls or "max_output_tokens" in nulls:
            nulls |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 4}
        answer = generating.post(path, {**least, **nulls})
        assert answer.status_code == 200, answer.text


# --- what is stored, and the server


@pytest.fixture(scope="module")
def stored(generating: Running) -> dict[str, str]:
    """Ids of one of each, by the beginning of their paths."""
    client = generating.client(KEY)
    chat = client.chat.completions.create(
        model="stand", messages=[{"role": "user", "content": "a"}], max_tokens=4, store=True
    )
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "stand", "prompt": "a"}}
    file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
    response = client.responses.create(model="stand", input="a", max_output_tokens=4)
    return {"chat": chat.id, "files": file.id, "batches": batch.id, "responses": response.id, "models": "stand"}


GETS = [endpoint for endpoint in ENDPOINTS if endpoint.method == "GET" and "requests/{id}" not in endpoint.path]


@pytest.mark.parametrize("endpoint", GETS, ids=lambda endpoint: endpoint.path)
def test_what_is_got_is_as_the_document_says(generating: Running, stored: dict[str, str], endpoint: Endpoint) -> None:
    admin = "admin" in endpoint.path
    headers = {"Authorization": f"Bearer {OPERATOR if admin else KEY}"}
    path = endpoint.path.replace("{id}", stored.get(endpoint.path.split("/")[2], "") if "{id}" in endpoint.path else "")
    queries = [{}] + [{one.name: one.example} for one in endpoint.parameters if one.place == "query" and one.example]
    for query in queries:
        answer = generating.get(path, headers=headers, params=query)
        assert answer.status_code == 200, answer.text
        conforms(endpoint, answer)
    if not front.route_of(endpoint.path, "GET").open:
        for wrong, status in (("wrong", 401), (KEY if admin else "nobody", 403 if admin else 401)):
            answer = generating.get(path, headers={"Authorization": f"Bearer {wrong}"})
            assert answer.status_code == status
            conforms(endpoint, answer)
    if "{id}" in endpoint.path:
        answer = generating.get(endpoint.path.replace("{id}", "nothing"), headers=headers)
        assert answer.status_code == 404
        conforms(endpoint, answer)


def test_what_is_stored_is_changed_and_deleted_as_is_said(generating: Running, stored: dict[str, str]) -> None:
    with generating.http() as client:
        for endpoint in ENDPOINTS:
            if "{id}" not in endpoint.path or endpoint.method not in ("POST", "DELETE"):
                continue
            body = endpoint.request("stand") or None
            made = client.post("/v1/responses", json={"model": "stand", "input": "a", "max_output_tokens": 4})
            ids = {**stored, "responses": made.json()["id"]}
            path = endpoint.path.replace("{id}", ids[endpoint.path.split("/")[2]])
            answer = client.request(endpoint.method, path, json=body)
            ended = endpoint.path.endswith("/cancel") or endpoint.path == "/v1/files/{id}"
            assert answer.status_code == 200 or (answer.status_code == 400 and ended), answer.text
            conforms(endpoint, answer)
            answer = client.request(endpoint.method, endpoint.path.replace("{id}", "nothing"), json=body)
            assert answer.status_code == 404
            conforms(endpoint, answer)


ABSENT = {"/admin/load_lora_adapter": 403, "/admin/unload_lora_adapter": 404}
"""What a server answers that has no directory of adapters and none of that name (how it goes otherwise: test_lora)."""


def test_an_operator_is_served_as_the_document_says(generating: Running) -> None:
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    posts = [endpoint for endpoint in ENDPOINTS if endpoint.method == "POST" and endpoint.path.startswith("/admin/")]
    for endpoint in posts:
        if endpoint.path == "/admin/drain":
            continue
        least = endpoint.request("stand")
        bodies: list[dict[str, Any]] = [
            {**least, **one.within, one.name: one.example}
            for one in endpoint.parameters
            if one.place == "body" and one.example
        ]
        for path in endpoint.paths:
            for body in bodies or [{}]:
                answer = generating.post(path, body, headers=headers)
                assert answer.status_code == ABSENT.get(endpoint.path, 200), (path, body, answer.text)
                conforms(endpoint, answer)
            answer = generating.post(path, {"nothing": 1}, headers=headers)
            assert answer.status_code == 400
            conforms(endpoint, answer)
            assert generating.post(path, {}).status_code == 403
        if endpoint.path == "/admin/sleep":
            assert generating.post("/admin/wake", {}, headers=headers).status_code == 200


def test_the_served_document_is_the_servers_own(generating: Running) -> None:
    served = generating.get("/openapi.json").json()
    assert served == document(Settings("infill", served_names=("stand",)))
    model = served["components"]["schemas"]["Chat"]["properties"]["model"]
    assert model["enum"] == ["stand"]
