"""The real model under grammars: valid JSON, the same tokens whatever else is in flight."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tailrace.backends.cpu import CpuBackend
from tailrace.engine.config import EngineConfig
from tailrace.engine.constrain import Grammars
from tailrace.engine.core import EngineCore
from tailrace.engine.loading import open_compiler
from tailrace.engine.protocol import SamplingParams, Submit
from tailrace.engine.spec import EngineSpec
from tailrace.models import Model, load_model, open_checkpoint
from tailrace.text import load_text
from tailrace.text.answer.formats import LAYOUTS, TOOL_FORMATS
from tailrace.text.answer.parts import Arguments, Call, Content, merged
from tailrace.text.answer.tools import ToolParser
from tailrace.text.grammar import Compiler, Grammar, choice
from tailrace.text.toolgrammar import NO_ARGUMENTS, Calls, Function, Tags, answer_grammar

CONTEXT = 512
VOCAB = 49_152
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return load_model(open_checkpoint(smollm2), max_context=CONTEXT)


class Engine:
    """An engine over the cpu backend that can follow grammars."""

    def __init__(self, model: Model, compiler: Compiler, cache: Path, *, kv_tokens: int = 2048, **config: int) -> None:
        self.config = EngineConfig(**{"kv_tokens": kv_tokens, "max_context": CONTEXT, "step_tokens": 128, **config})
        backend = CpuBackend(
            model,
            pages=self.config.pages,
            max_context=CONTEXT,
            step_tokens=self.config.step_tokens,
            max_running=self.config.max_running,
            threads=2,
            cache_dir=cache,
        )
        self.grammars = Grammars(lambda: compiler, thread=False)
        self.core = EngineCore(backend, self.config, eos_ids=(2,), vocab_size=VOCAB, grammars=self.grammars)

    def run(self, *requests: Submit) -> dict[str, tuple[list[int], str | None]]:
        """The tokens and the finish of each."""
        for request in requests:
            self.core.submit(request)
        while self.grammars.work():
            pass
        got: dict[str, tuple[list[int], str | None]] = {request.request: ([], None) for request in requests}
        while self.core.has_work:
            news = self.core.step()
            self.core.check_integrity()
            for output in news.outputs if news else ():
                assert output.error == ""
                got[output.request] = (got[output.request][0] + output.tokens, output.finish)
        assert self.core.idle
        return got


@pytest.fixture(scope="module")
def setting(smollm2: Path, model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Compiler, Path]:
    checkpoint = open_checkpoint(smollm2)
    table = load_text(checkpoint.text, vocab=VOCAB).token_bytes()
    compiler = open_compiler(EngineSpec(model=str(smollm2)), table, VOCAB)
    return model, compiler, tmp_path_factory.mktemp("tiles")


def test_grammars_and_free_requests_side_by_side_get_what_they_get_alone(
    setting: tuple[Model, Compiler, Path], smollm2: Path
) -> None:
    text = load_text(open_checkpoint(smollm2).text, vocab=VOCAB)
    prompt = text.encode_chat([{"role": "user", "content": "Describe a person as JSON: name, age and colours."}])
    form = Grammar("json", json.dumps(SCHEMA))

    def asks(name: str, grammar: Grammar | None, **params: object) -> Submit:
        values = {"max_tokens": 80, "temperature": 0.9, "seed": 5, "grammar": grammar, **params}
        return Submit(name, prompt, SamplingParams(**values))  # type: ignore[arg-type]

    requests = [
        asks("greedy", form, temperature=0.0),
        asks("drawn", form),
        asks("told", form, temperature=0.0, logprobs=1),
        asks("choice", choice(["Paris, the capital of France", "Berlin"])),
        asks("free", None, max_tokens=30),
    ]
    engine = Engine(*setting, prefix_cache=0)
    alone = {request.request: engine.run(request)[request.request] for request in requests}
    for name in ("greedy", "drawn"):
        said = json.loads(text.decode(alone[name][0]))
        assert set(said) == {"name", "age", "colours"}
        assert 0 <= said["age"] <= 120
        assert set(said["colours"]) <= {"red", "green", "blue"}
        assert alone[name][1] == "stop"
    assert alone["told"] == alone["greedy"]
    assert text.decode(alone["choice"][0]) in ("Paris, the capital of France", "Berlin")
    assert Engine(*setting).run(*requests) == alone
    assert Engine(*setting, step_tokens=16, max_running=4).run(*reversed(requests)) == alone
    assert Engine(*setting, kv_tokens=192, max_context=176).run(*requests) == alone


PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/Unit"},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}},
}


def test_required_calls_parse_and_are_valid_in_each_format(
    setting: tuple[Model, Compiler, Path], smollm2: Path
) -> None:
    text = load_text(open_checkpoint(smollm2).text, vocab=VOCAB)
    functions = [Function("get_weather", PARAMETERS, lenient=False), Function("now", NO_ARGUMENTS)]
    prompts = [
        text.encode_chat([{"role": "user", "content": words}]) for words in ("What is the weather in Oslo?", "Say no.")
    ]
    requests = []
    for name, form in TOOL_FORMATS.items():
        calls = Calls(functions, form, LAYOUTS[name], required=True)
        grammar = answer_grammar(thinking=None, calls=calls, form=None, tags=Tags({}))
        for at, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=160, temperature=0.8, seed=at, grammar=grammar)
            requests.append(Submit(f"{name}.{at}", prompt, params))
    engine = Engine(*setting)
    answers = engine.run(*requests)
    for request in requests:
        tokens, finish = answers[request.request]
        parser = ToolParser(TOOL_FORMATS[request.request.split(".")[0]], frozenset({"get_weather", "now"}))
        parts = [*parser.push(text.decode(tokens)), *parser.finish()]
        assert parser.calls > 0 or finish == "length"
        assert not any(isinstance(part, Content) and part.text.strip() for part in parts) or finish == "length"
        if finish == "stop":
            names = [part.name for part in parts if isinstance(part, Call)]
            told = [part.text for part in merged(parts) if isinstance(part, Arguments)]
            for name, arguments in zip(names, told, strict=True):
                jsonschema.validate(json.loads(arguments), PARAMETERS if name == "get_weather" else NO_ARGUMENTS)
    assert sum(finish == "stop" for _, finish in answers.values()) > len(requests) // 2
    assert Engine(*setting).run(requests[0])[requests[0].request] == answers[requests[0].request]
