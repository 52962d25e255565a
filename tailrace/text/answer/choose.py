"""Which formats a model writes in, told from its chat template: by what the template does with a call, not by how it is
written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tailrace.terms import InvalidInput
from tailrace.text.answer.formats import (
    HERMES,
    JSON,
    LLAMA3,
    MISTRAL,
    MISTRAL_THINK,
    THINK,
    ReasoningFormat,
    ToolFormat,
)

if TYPE_CHECKING:
    from tailrace.text.template import Rendered

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], "Rendered"]
"""Messages, tools, and whether the prompt goes on to the answer. Raises InvalidInput where the template objects."""

_OFFERED, _CALLED = "probe_offered", "probe_called"
_SHORT_ID, _LONG_ID = "probe0000", "call_0123456789abcdefghijkl"
_USER = {"role": "user", "content": "Probe."}
_TOOL = {
    "type": "function",
    "function": {
        "name": _OFFERED,
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "Probe."}}},
    },
}
_OBJECT = re.compile(r'\{\s*(?:"type":\s*"function",\s*)?"name":\s*"$')
_AFTER = re.compile(r'",\s*"(arguments|parameters)":\s*"?\{')
_HEADED = re.compile(r"(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*\{")


def _conversation(ident: str) -> list[dict[str, Any]]:
    function = {"name": _CALLED, "arguments": {"key": "value"}}
    call = {"id": ident, "type": "function", "function": function}
    answer = {"role": "tool", "tool_call_id": ident, "name": _CALLED, "content": "Probe."}
    return [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answer]


def tool_format(render: Render) -> ToolFormat | None:
    """The format of calls that the template lays out; None where it shows none, or in a way that no parser knows."""
    try:
        made = render(_conversation(_SHORT_ID), [_TOOL], False)
    except InvalidInput:
        return None
    before, found, after = made.text.partition(_CALLED)
    if not found:
        return None
    if before.rstrip().endswith(MISTRAL.opener) and _HEADED.match(after):
        return MISTRAL
    named = _OBJECT.search(before)
    key = _AFTER.match(after)
    if named is None or key is None:
        return None
    lead = before[: named.start()].rstrip()
    if lead.endswith(HERMES.opener):
        return HERMES
    if lead.endswith(LLAMA3.opener):
        return LLAMA3
    listed = lead.removesuffix("[").rstrip()
    if listed.endswith(MISTRAL.opener):
        return MISTRAL
    if not _begins_answer(listed, made, render):
        return None
    return LLAMA3 if key[1] == "parameters" else JSON


def _begins_answer(lead: str, made: Rendered, render: Render) -> bool:
    """Whether what follows the lead is the first thing that the assistant says."""
    for fence in JSON.fences:
        lead = lead.removesuffix(fence).rstrip()
    if any(control.special and end == len(lead) for _, end, control in made.controls):
        return True
    try:
        prompt = render([_USER], [_TOOL], True).text.rstrip()
    except InvalidInput:
        return False
    return prompt != "" and lead.endswith(prompt[-24:])


def wants_short_ids(render: Render) -> bool:
    """Whether the template takes ids of nine letters and digits, and no longer ones."""
    try:
        render(_conversation(_LONG_ID), [_TOOL], False)
    except InvalidInput:
        try:
            render(_conversation(_SHORT_ID), [_TOOL], False)
        except InvalidInput:
            return False
        return True
    return False


def reasoning_format(sources: Iterable[str]) -> ReasoningFormat | None:
    """The tags of reasoning that the text of a template names; None where it names none."""
    text = "\n".join(sources)
    return next((one for one in (THINK, MISTRAL_THINK) if one.closer in text), None)
