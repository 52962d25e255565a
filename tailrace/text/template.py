"""Chat templates: messages to text, together with the knowledge of which control tokens the template wrote."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailrace.terms import InvalidInput
from tailrace.text.guard import Control, Controls, Marks, guard_message, guard_value, pick_marker, strings_in

if TYPE_CHECKING:
    import jinja2

_REASONING = ("reasoning_content", "thinking", "reasoning")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_PROBES = ("tailrace-part-1", "tailrace-part-2")


@dataclass(frozen=True)
class Rendered:
    """`text`: what the template wrote. `controls`: the control tokens that are the template's own (and an assistant's
    own markup): start, end, which; in order."""

    text: str
    controls: tuple[tuple[int, int, Control], ...]


@dataclass(frozen=True)
class _Inputs:
    """What one rendering is given: plain dicts, lists and scalars."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    extra: dict[str, Any]
    add_generation_prompt: bool


class ChatTemplate:
    """One model's chat template, compiled on first use. Safe to use from several threads.

    `variables` are what templates may name besides the messages: bos_token, eos_token and their like.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], controls: Controls) -> None:
        self.source = source
        self._variables = dict(variables)
        self._controls = controls
        self._lock = threading.Lock()
        self._compiled: jinja2.Template | None = None
        self._takes_parts: bool | None = None
        self._free: frozenset[str] | None = None

    @property
    def supports_tools(self) -> bool:
        """Whether the template looks at tools at all."""
        return "tools" in self.source

    @property
    def variables(self) -> frozenset[str]:
        """What the template looks up that neither it nor every conversation sets. Raises `InvalidInput` naming
        `messages` where it cannot be compiled."""
        if self._free is None:
            from jinja2 import meta

            environment = self._template().environment
            set_anyway = {*_RESERVED, *environment.globals, *self._variables}
            names = meta.find_undeclared_variables(environment.parse(self.source)) - set_anyway
            self._free = frozenset(name for name in names if not name.endswith("_token"))
        return self._free

    def warm(self) -> None:
        """Compiles the template and probes it, so that the first request need not."""
        self._template()
        self._handles_parts()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
    ) -> Rendered:
        """Renders the conversation; raises `InvalidInput` naming `messages` when the template objects."""
        for name in _RESERVED[:2] + _RESERVED[3:]:
            if name in arguments:
                raise InvalidInput(
                    f"{name!r} cannot be set through the template's arguments", param="chat_template_kwargs"
                )
        plain = [_message(message, parts=self._handles_parts()) for message in messages]
        inputs = _Inputs(plain, None if tools is None else list(tools), dict(arguments), add_generation_prompt)
        try:
            return self._render_guarded(inputs)
        except InvalidInput:
            bare = [message for message in plain if "content" not in message]
            if not bare:
                raise
            # The template does not do without a content (Hugging Face would fail here as well): give it an empty one.
            for message in bare:
                message["content"] = ""
            return self._render_guarded(inputs)

    def _render_guarded(self, inputs: _Inputs) -> Rendered:
        """Renders the conversation as it is, and with marks to learn which control tokens are the template's."""
        texts = [*strings_in([inputs.messages, inputs.tools, inputs.extra]), self.source]
        marker = pick_marker([*texts, *strings_in(self._variables), *self._controls.by_text])
        text = self._render(inputs)
        try:
            strict = self._render_marked(inputs, marker, strict=True)
        except InvalidInput:
            return self._render_marked(inputs, marker, strict=False)
        if strict.text == text:
            return strict
        # The template looked at text with marks in it. Light marks disturb it less; they are enough if all special
        # tokens come out as they did under strict ones.
        light = self._render_marked(inputs, marker, strict=False)
        if _special_ids(light) == _special_ids(strict):
            return light
        return strict

    def _render_marked(self, inputs: _Inputs, marker: str, *, strict: bool) -> Rendered:
        controls = self._controls.by_text.values()
        names = [control.text for control in controls if control.special]
        markup = [control.text for control in controls if not control.special]
        every = Marks.of(marker, [*names, *markup], strict=strict)
        special = Marks.of(marker, names, strict=strict, allowed=markup)
        guarded = _Inputs(
            [guard_message(message, every, special) for message in inputs.messages],
            guard_value(inputs.tools, every),
            {name: guard_value(value, every) for name, value in inputs.extra.items()},
            inputs.add_generation_prompt,
        )
        return _unmark(self._render(guarded), every, self._controls)

    def _render(self, inputs: _Inputs, seconds: float | None = None) -> str:
        import jinja2

        from tailrace.text import sandbox

        variables = {
            "documents": None,
            **self._variables,
            **inputs.extra,
            "messages": inputs.messages,
            "tools": inputs.tools,
            "add_generation_prompt": inputs.add_generation_prompt,
        }
        try:
            return sandbox.render(self._template(), variables, seconds)
        except jinja2.TemplateError as error:
            raise InvalidInput(f"chat template: {error.message or error}", param="messages") from error
        except RecursionError as error:
            raise InvalidInput("chat template: nested too deeply", param="messages") from error
        except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
            raise InvalidInput(f"chat template: {type(error).__name__}: {error}", param="messages") from error

    def _template(self) -> jinja2.Template:
        import jinja2

        from tailrace.text import sandbox

        with self._lock:
            if self._compiled is None:
                try:
                    self._compiled = sandbox.Sandbox().from_string(self.source)
                except jinja2.TemplateSyntaxError as error:
                    message = f"chat template, line {error.lineno}: {error.message}"
                    raise InvalidInput(message, param="messages") from error
                except RecursionError as error:
                    raise InvalidInput("chat template: nested too deeply", param="messages") from error
            return self._compiled

    def _handles_parts(self) -> bool:
        """Whether the template renders a list of content parts as their text (else they are joined beforehand)."""
        if self._takes_parts is None:
            parts = [{"type": "text", "text": probe} for probe in _PROBES]
            inputs = _Inputs([{"role": "user", "content": parts}], None, {}, True)
            try:
                text = self._render(inputs, seconds=0.5)
            except InvalidInput:
                text = ""
            shown = all(probe in text for probe in _PROBES)
            self._takes_parts = shown and not any(sign in text for sign in ("'text'", '"text"'))
        return self._takes_parts


def _special_ids(rendered: Rendered) -> list[int]:
    return [control.id for _, _, control in rendered.controls if control.special]


def _unmark(marked: str, marks: Marks, controls: Controls) -> Rendered:
    """Takes the marks out again, noting where the control tokens are that none of them broke."""
    marked = marked.replace(marks.escaped, marks.marker)

    def stretches() -> Iterator[tuple[str, Control | None]]:
        at = 0
        for start, end, control in controls.find(marked):
            yield marked[at:start].replace(marks.marker, ""), None
            yield marked[start:end], control
            at = end
        yield marked[at:].replace(marks.marker, ""), None

    pieces: list[str] = []
    found: list[tuple[int, int, Control]] = []
    size = 0
    for piece, control in stretches():
        if control is not None:
            found.append((size, size + len(piece), control))
        pieces.append(piece)
        size += len(piece)
    return Rendered("".join(pieces), tuple(found))


def _message(message: Mapping[str, Any], *, parts: bool) -> dict[str, Any]:
    """A message as templates expect it: no keys that are None, tool arguments as objects, reasoning under every name
    it goes by, content parts joined unless the template takes them."""
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(plain.get("content"), list | tuple) and not parts:
        plain["content"] = _joined_parts(plain["content"])
    if isinstance(plain.get("tool_calls"), list | tuple):
        plain["tool_calls"] = [_tool_call(call) for call in plain["tool_calls"]]
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _joined_parts(parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise InvalidInput("content parts must be of the type 'text'", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: Any) -> Any:
    """Arguments that are a JSON object as text become the object; anything else stays as it is."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    arguments = inner.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    changed = {**inner, "arguments": parsed}
    return {**call, "function": changed} if inner is function else changed
