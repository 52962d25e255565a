"""Calls of tools, held to the tools' own schemas."""

import pytest

from tailrace.text.grammar import check
from tailrace.text.toolgrammar import Format, tool_grammar
from tests.text.test_grammar import compiler, encode  # noqa: F401 - a fixture

TOOLS = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    {"name": "now"},
]
CALLS: list[tuple[Format, str, bool]] = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', True),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', True),
    ("hermes", '<tool_call>\n{"name": "then", "arguments": {}}\n</tool_call>', False),
    ("llama3", '{"name": "weather", "parameters": {"city": "Oslo"}}', True),
    ("llama3", '{"name": "weather", "parameters": {"town": "Oslo"}}', False),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', True),
    ("mistral", "[TOOL_CALLS][]", False),
    ("mistral", "Let me see", False),
]


@pytest.mark.parametrize(("form", "text", "fits"), CALLS)
def test_only_calls_of_the_tools_fit(compiler, form: Format, text: str, fits: bool) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    grammar = tool_grammar(TOOLS, form)
    assert check(grammar) == ""
    matcher = compiler.compile(grammar)
    ids = [1 + byte for byte in text.encode()]
    taken = matcher._matcher.try_consume_tokens(ids)
    assert (taken == len(ids) and matcher._matcher.is_accepting()) == fits


def test_one_call_only_where_they_are_not_to_be_parallel(compiler) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    twice = "<tool_call>\n" + '{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>'
    ids = [1 + byte for byte in twice.encode()]
    assert compiler.compile(tool_grammar(TOOLS, "hermes"))._matcher.try_consume_tokens(ids) == len(ids)
    single = compiler.compile(tool_grammar(TOOLS, "hermes", parallel=False))
    assert single._matcher.try_consume_tokens(ids) < len(ids)
