"""Structured output: does every text parse and validate, and what does it cost?

`pairs`: 25 schemas times 20 prompts through one engine, eight at a time, drawn at temperature 0.8; each text must be
valid by `jsonschema`, or have been cut by max_tokens. `rate`: the tokens per second of one stream with a strict schema
and of one without, in turns. `watch`: microseconds of what the engine does for a constrained token.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tailrace.engine.constrain import Constraint
from tailrace.engine.core import EngineCore
from tailrace.engine.loading import load
from tailrace.engine.protocol import SamplingParams, Submit
from tailrace.engine.spec import EngineSpec
from tailrace.models import open_checkpoint
from tailrace.text import Text, load_text
from tailrace.text.grammar import Grammar

FIELDS: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 40},
    "age": {"type": "integer", "minimum": 0, "maximum": 130},
    "price": {"type": "number", "minimum": 0, "maximum": 1000},
    "active": {"type": "boolean"},
    "colour": {"enum": ["red", "green", "blue", None]},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    "place": {
        "anyOf": [{"type": "string", "maxLength": 20}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]
    },
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "when": {"type": "string", "format": "date"},
    "parent": {"$ref": "#/$defs/node"},
}
NODE = {
    "type": "object",
    "properties": {
        "label": {"type": "string", "maxLength": 10},
        "child": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["label", "child"],
    "additionalProperties": False,
}
THINGS = [
    "a person",
    "a book",
    "a city",
    "a recipe",
    "a bird",
    "a car",
    "a song",
    "an invoice",
    "a planet",
    "a meeting",
]
PROMPTS = [f"{verb} {thing} as JSON." for verb in ("Describe", "Invent") for thing in THINGS]


def schemas(count: int = 25) -> list[dict[str, Any]]:
    """Objects of three to five of the fields, each a different choice, a third of them with optional fields."""
    names = list(FIELDS)
    made = []
    for n in range(count):
        chosen = [names[(n * 3 + k * (1 + n % 4)) % len(names)] for k in range(3 + n % 3)]
        chosen = list(dict.fromkeys(chosen))
        required = chosen if n % 3 else chosen[:1]
        properties = {name: FIELDS[name] for name in chosen}
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        made.append({**schema, "$defs": {"node": NODE}})
    return made


def drain(core: EngineCore, requests: Iterable[Submit]) -> dict[str, tuple[list[int], str | None]]:
    """Runs these requests together; the tokens and the finish of each."""
    got: dict[str, tuple[list[int], str | None]] = {}
    for request in requests:
        got[request.request] = ([], None)
        core.submit(request)
    while not core.idle or core.has_work:
        if not core.has_work:
            time.sleep(0.001)  # a grammar is compiled
        news = core.step()
        for output in news.outputs if news else ():
            if output.error:
                raise RuntimeError(output.error)
            got[output.request] = (got[output.request][0] + output.tokens, output.finish)
    return got


def pairs(core: EngineCore, text: Text, prompts: list[str]) -> None:
    """Prints how many of the texts are valid."""
    import jsonschema

    valid = cut = tokens = 0
    wrong: list[str] = []
    begin = time.perf_counter()
    todo = []
    for at, schema in enumerate(schemas()):
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=160, temperature=0.8, seed=number, grammar=Grammar("json", json.dumps(schema))
            )
            ids = text.encode_chat([{"role": "user", "content": prompt}])
            todo.append((schema, Submit(f"{at}-{number}", ids, params)))
    for first in range(0, len(todo), 8):
        part = todo[first : first + 8]
        got = drain(core, [request for _, request in part])
        for schema, request in part:
            ids, finish = got[request.request]
            tokens += len(ids)
            if finish == "length":
                cut += 1
                continue
            said = text.decode(ids)
            try:
                jsonschema.validate(json.loads(said), schema)
                valid += 1
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append(f"{said!r}: {error}")
    print(f"{len(todo)} pairs: {valid} valid, {cut} cut by max_tokens, {len(wrong)} wrong", flush=True)
    print(f"{tokens} tokens in {time.perf_counter() - begin:.1f} s")
    for line in wrong[:5]:
        print("  ", line[:300])


def rate(core: EngineCore, text: Text, turns: int) -> None:
    """Prints tokens per second with and without a schema, and their ratio turn by turn."""
    ids = text.encode_chat([{"role": "user", "content": "Describe a person as JSON."}])
    ratios: list[float] = []
    rates: dict[str, list[float]] = {"schema": [], "free": []}
    for turn in range(turns):
        for kind in ("schema", "free") if turn % 2 else ("free", "schema"):
            grammar = Grammar("json", json.dumps(schemas(3)[turn % 3])) if kind == "schema" else None
            count, spent = 0, 0.0
            for number in range(4):
                length = 60 if grammar is None else 160
                params = SamplingParams(
                    max_tokens=length,
                    temperature=0.8,
                    seed=turn * 10 + number,
                    grammar=grammar,
                    ignore_eos=grammar is None,
                )
                core.submit(Submit(f"{kind}-{turn}-{number}", ids, params))
                begin, seen = 0.0, 0
                while not core.idle or core.has_work:
                    news = core.step()
                    for output in news.outputs if news else ():
                        if not seen:
                            begin, seen = time.perf_counter(), len(output.tokens)
                        else:
                            count += len(output.tokens)
                            end = time.perf_counter()
                spent += end - begin
            rates[kind].append(count / spent)
        ratios.append(rates["schema"][-1] / rates["free"][-1])
    for kind, values in rates.items():
        print(f"{kind}: {statistics.median(values):.0f} tokens/s (median of {turns} turns)")
    quartiles = statistics.quantiles(ratios, n=4)
    print(f"schema against free: {quartiles[1]:.2f} x (quartiles {quartiles[0]:.2f} to {quartiles[2]:.2f})", flush=True)


def watch() -> dict[str, list[float]]:
    """Times what is done for each constrained token, from now on."""
    spent: dict[str, list[float]] = {"take": [], "fill": []}

    def timed(name: str) -> None:
        plain = getattr(Constraint, name)

        def wrapped(self: Constraint, argument: Any) -> Any:
            begin = time.perf_counter()
            result = plain(self, argument)
            spent[name].append(time.perf_counter() - begin)
            return result

        setattr(Constraint, name, wrapped)

    for name in spent:
        timed(name)
    return spent


def run(model: Path, threads: int | None, turns: int = 9, prompts: int = len(PROMPTS)) -> None:
    """All of it."""
    loaded = load(EngineSpec(model=str(model), threads=threads, max_running=8))
    core = loaded.core
    assert isinstance(core, EngineCore)
    text = load_text(open_checkpoint(model).text, vocab=49_152)
    drain(core, [Submit("first", [1, 2, 3], SamplingParams(max_tokens=2, grammar=Grammar("regex", "[a-z]+")))])
    rate(core, text, turns)
    spent = watch()
    pairs(core, text, PROMPTS[:prompts])
    for name, values in spent.items():
        cuts = statistics.quantiles(values, n=100)
        print(f"{name}: {1e6 * statistics.median(values):.0f} us a token, 99 % within {1e6 * cuts[98]:.0f} us")
    core.close()
