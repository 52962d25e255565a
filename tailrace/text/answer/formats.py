"""The formats in which models write tool calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes its calls.

    `opener` begins calls anywhere in the answer, `closer` may follow each. `bare`: calls may also stand at the very
    beginning of the answer, with nothing or one of `fences` before them; what stands there could be an answer in JSON,
    so only names of tools that were offered make it a call. `listed`: several calls can be one JSON array. `headed`:
    the name may stand before the arguments, outside of the JSON (`head_tags` may follow it; the text after the first
    one, up to the second, is an id). `between` may separate calls.
    """

    name: str
    opener: str = ""
    closer: str = ""
    bare: bool = False
    fences: tuple[str, ...] = ()
    listed: bool = False
    headed: bool = False
    head_tags: tuple[str, str] = ("", "")
    between: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """What has to be seen of the text even where the tokenizer has a control token for it."""
        return tuple(tag for tag in (self.opener, self.closer, *self.head_tags) if tag)


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its reasoning. `begins`: the answer begins inside it even where the prompt has not opened it
    (models that only close it). `gap` stands between the closer and the answer, in what such models have read."""

    name: str
    opener: str
    closer: str
    begins: bool = False
    gap: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """What has to be seen of the text even where the tokenizer has a control token for it."""
        return (self.opener, self.closer)


@dataclass(frozen=True)
class Layout:
    """How calls are written, to the letter: `opening` before the first; of each `begin`, its name, `middle`, its
    arguments and `end`; `between` two of them (None: there is only ever one); `closing` after the last. `ident` is a
    tag before an id of nine letters and digits, between name and `middle`."""

    begin: str
    middle: str
    end: str
    between: str | None = None
    opening: str = ""
    closing: str = ""
    ident: str = ""


HERMES = ToolFormat("hermes", opener="<tool_call>", closer="</tool_call>")
LLAMA3 = ToolFormat("llama3", opener="<|python_tag|>", bare=True, between=";")
MISTRAL = ToolFormat("mistral", opener="[TOOL_CALLS]", listed=True, headed=True, head_tags=("[CALL_ID]", "[ARGS]"))
JSON = ToolFormat("json", bare=True, fences=("```json", "```"), listed=True, between=";,")
TOOL_FORMATS = {one.name: one for one in (HERMES, LLAMA3, MISTRAL, JSON)}

LAYOUTS = {
    "hermes": Layout('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"),
    "llama3": Layout('{"name": "', '", "parameters": ', "}"),
    "mistral": Layout('{"name": "', '", "arguments": ', "}", between=", ", opening="[TOOL_CALLS] [", closing="]"),
    "json": Layout('{"name": "', '", "arguments": ', "}"),
}
"""By the format's name: the usual layout, for models whose template shows none."""

THINK = ReasoningFormat("think", "<think>", "</think>", gap="\n\n")
THINK_CLOSE = ReasoningFormat("think-close", "<think>", "</think>", begins=True, gap="\n\n")
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
REASONING_FORMATS = {one.name: one for one in (THINK, THINK_CLOSE, MISTRAL_THINK)}

TOOL_PARSERS = ("auto", *TOOL_FORMATS, "none")
REASONING_PARSERS = ("auto", *REASONING_FORMATS, "none")
"""What a server can be told."""
