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
    LAYOUTS,
    LLAMA3,
    MISTRAL,
    MISTRAL_THINK,
    THINK,
    Layout,
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
_GAP = "[ \\t\\n]{0,8}"
_NAME_KEY = rf'(?:"type":{_GAP}"function",{_GAP})?"name":{_GAP}"'
_MIDDLE = rf'",{_GAP}"(?:arguments|parameters)":{_GAP}'
_VALUE = rf'\{{{_GAP}"key":{_GAP}"value"{_GAP}\}}'
_IDENT = rf'(?:,{_GAP}"id":{_GAP}"\w*")?'
_BEGIN = rf"\{{{_GAP}{_NAME_KEY}"
_TAGGED = re.compile(rf"(<tool_call>{_GAP}{_BEGIN}){_CALLED}({_MIDDLE}){_VALUE}({_GAP}\}}{_GAP}</tool_call>)")
_LISTED = re.compile(
    rf"(\[TOOL_CALLS\]{_GAP}\[{_GAP})({_BEGIN}){_CALLED}({_MIDDLE}){_VALUE}{_IDENT}({_GAP}\}})({_GAP}\])"
)
_NAMED = re.compile(rf"(\[TOOL_CALLS\]{_GAP}){_CALLED}(?:(\[CALL_ID\])\w+)?((?:\[ARGS\])?{_GAP}){_VALUE}")
_BARE = re.compile(
    rf"((?:```(?:json)?{_GAP})?(?:\[{_GAP})?)({_BEGIN}){_CALLED}"
    rf"({_MIDDLE}){_VALUE}({_GAP}\}})({_GAP}\])?({_GAP}```)?"
)


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


def tool_layout(render: Render, form: ToolFormat) -> Layout:
    """How the template lays out a call in this format, without what only servers add (ids in JSON); the usual layout
    where it does so in another way."""
    usual = LAYOUTS[form.name]
    try:
        text = render(_conversation(_SHORT_ID), [_TOOL], False).text
    except InvalidInput:
        return usual
    if form == HERMES:
        found = _TAGGED.search(text)
        return Layout(found[1], found[2], found[3], between="\n") if found else usual
    if form == MISTRAL:
        found = _NAMED.search(text)
        if found:
            return Layout(found[1], found[3], "", between="", ident=found[2] or "")
        found = _LISTED.search(text)
        return Layout(found[2], found[3], found[4], ", ", found[1], found[5]) if found else usual
    found = _BARE.search(text)
    if found is None:
        return usual
    before, after = found[1], (found[5] or "") + (found[6] or "")
    opening, closing = (before, after) if bool(before) == bool(after) else ("", "")
    return Layout(found[2], found[3], found[4], ", " if found[5] and opening else None, opening, closing)


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
