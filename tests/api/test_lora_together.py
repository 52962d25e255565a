"""Adapters with all that a request can ask for beside: tools, structured output, batches.

SmolLM2 and an adapter of random numbers: what it writes makes no sense, and has to be what was asked for all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tailrace.models import load_model, open_checkpoint
from tests.api.batches.test_batches import begin, ended, line, rows_of
from tests.api.conftest import Running, serving
from tests.models import random_lora

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["river", "mill"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": SCHEMA}} for name in ("keep", "drop")
]
NAMES = ("smol", "odd")
ASKED: list[dict[str, Any]] = [
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "drop"}}},
    {"response_format": FORM},
    {},
]


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("together")
    adapter = random_lora.make(root / "odd", load_model(open_checkpoint(smollm2), max_context=64), 3)
    with serving(
        model=str(smollm2),
        loader="",
        served_names=["smol"],
        kv_tokens=16384,
        chat_template="hermes",
        loras=[("odd", str(adapter))],
        content_store=f"sqlite:////{root}/content.db",
    ) as running:
        yield running


def body(name: str, number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Who lives at the mill?"}]
    return {"model": name, "messages": messages, "max_tokens": 100, "temperature": 0, **ASKED[number]}


def ask(server: Running, name: str, number: int) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", body(name, number))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    return plain(answer.json()["choices"][0])


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """An answer without what is another one each time."""
    for call in choice["message"].get("tool_calls") or ():
        del call["id"]
    return choice


@pytest.fixture(scope="module")
def alone(server: Running) -> dict[tuple[str, int], dict[str, Any]]:
    """Each answer while nothing else runs."""
    return {(name, number): ask(server, name, number) for name in NAMES for number in range(len(ASKED))}


def test_calls_of_an_adapter_are_valid(alone: dict[tuple[str, int], dict[str, Any]]) -> None:
    for name in NAMES:
        for number in (0, 1):
            choice = alone[name, number]
            assert choice["finish_reason"] in ("tool_calls", "length")
            calls = choice["message"]["tool_calls"]
            whole = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
            for call in whole:
                assert call["function"]["name"] in (("keep", "drop") if number == 0 else ("drop",))
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert alone["odd", 1] != alone["smol", 1]


def test_structured_output_of_an_adapter_is_valid(alone: dict[tuple[str, int], dict[str, Any]]) -> None:
    for name in NAMES:
        choice = alone[name, 2]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert alone["odd", 2] != alone["smol", 2]


def test_streams_say_the_same(server: Running, alone: dict[tuple[str, int], dict[str, Any]]) -> None:
    for (name, number), whole in alone.items():
        text, arguments = "", ""
        for chunk in server.client().chat.completions.create(**body(name, number), stream=True):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            arguments += "".join(call.function.arguments or "" for call in delta.tool_calls or ())
        message = whole["message"]
        assert text == (message["content"] or "")
        assert arguments == "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())


def test_together_they_get_what_each_gets_alone(server: Running, alone: dict[tuple[str, int], dict[str, Any]]) -> None:
    wanted = list(alone) * 2
    with ThreadPoolExecutor(len(wanted)) as pool:
        found = list(pool.map(lambda one: ask(server, *one), wanted))
    assert found == [alone[one] for one in wanted]


def test_a_batch_may_name_adapters_in_its_lines(server: Running, alone: dict[tuple[str, int], dict[str, Any]]) -> None:
    client = server.client()
    rows = [line(f"{name}-{number}", body(name, number)) for name, number in alone]
    rows.append(line("gone", body("nobody", 3)))
    batch = ended(client, begin(client, rows))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", len(alone), 1)
    found = {row["custom_id"]: row["response"]["body"] for row in rows_of(client, batch.output_file_id)}
    for (name, number), answer in alone.items():
        made = found[f"{name}-{number}"]
        assert made["model"] == name
        assert plain(made["choices"][0]) == answer
    (failed,) = rows_of(client, batch.error_file_id)
    assert failed["custom_id"] == "gone"
    assert failed["response"]["status_code"] == 404
    assert failed["response"]["body"]["error"]["code"] == "model_not_found"
