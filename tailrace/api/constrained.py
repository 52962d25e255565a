"""The grammar of a chat's whole answer, made of all that asks for one: the form of its text, calls that are required or
held to their schemas, and the reasoning that may come before either."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from tailrace.api.grammars import GrammarDesk, Wanted
from tailrace.api.tools import functions, parameters_at
from tailrace.terms import InvalidInput

if TYPE_CHECKING:
    from tailrace.api.answers import Reading
    from tailrace.api.params import Asked
    from tailrace.api.tools import Tools
    from tailrace.text import Text
    from tailrace.text.grammar import Grammar
    from tailrace.text.toolgrammar import Calls, Tags, Thinking


async def constrained(
    desk: GrammarDesk, text: Text, asked: Asked, tools: Tools, reading: Reading | None, budget: int | None = None
) -> Asked:
    """The same request with the grammar of its answer, where it needs one. `asked.form` has been admitted; `budget` is
    the most tokens of reasoning. Raises InvalidInput that names the tool whose schema cannot be served."""
    if reading is None or (asked.form is None and not tools.bound and budget is None):
        return asked
    form = None if asked.form is None else asked.form.grammar
    tokens = {tag: ident for tag in reading.tags if (ident := text.tag_id(tag)) is not None}
    silent = text.control_tags(reading.tags).keys()

    def make() -> tuple[Grammar | None, Calls | None, Tags]:
        from tailrace.text.toolgrammar import Tags, answer_grammar

        tags = Tags(tokens, silent)
        wanted = tools.bound or (form is not None and tools.offered is not None)
        calls = _calls(text, tools, reading) if wanted else None
        return answer_grammar(thinking=_thinking(reading, budget), calls=calls, form=form, tags=tags), calls, tags

    # It may be half a megabyte, and the first one looks at the template.
    grammar, calls, tags = await asyncio.to_thread(make)
    if grammar is None or grammar == form:
        return asked
    whole = Wanted(grammar, "tools" if asked.form is None else asked.form.param)
    try:
        await desk.admit(whole)
    except InvalidInput:
        if calls is not None:
            await _blame(desk, tools, calls, tags)
        raise
    return replace(asked, params=msgspec.structs.replace(asked.params, grammar=grammar), form=whole)


def _calls(text: Text, tools: Tools, reading: Reading) -> Calls:
    from tailrace.text.toolgrammar import Calls

    assert reading.tools is not None
    layout = text.tool_layout(reading.tools)
    return Calls(functions(tools), reading.tools, layout, tools.required, tools.parallel)


def _thinking(reading: Reading, budget: int | None) -> Thinking | None:
    from tailrace.text.answer.reasoning import Opened
    from tailrace.text.toolgrammar import Thinking

    if reading.reasoning is None or reading.opened is Opened.CLOSED:
        return None
    return Thinking(reading.reasoning, reading.opened, budget)


async def _blame(desk: GrammarDesk, tools: Tools, calls: Calls, tags: Tags) -> None:
    """Raises InvalidInput for the first tool that cannot be served by itself."""
    from tailrace.text.toolgrammar import answer_grammar

    names = [tool["function"]["name"] for tool in tools.offered or ()]
    for function in calls.functions:
        alone = replace(calls, functions=[function], required=True)
        grammar = answer_grammar(thinking=None, calls=alone, form=None, tags=tags)
        assert grammar is not None
        await desk.admit(Wanted(grammar, parameters_at(names.index(function.name))))
