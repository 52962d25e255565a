"""Tool calls in an answer, read as it comes.

The answer is read once, from left to right. What may still become a call is held back; where it turns out to be none,
it is text up to the place where it went wrong, and reading goes on from there. White space between text and a call is
layout: it is kept only where text stands on both sides.
"""

from __future__ import annotations

import enum
import re

from tailrace.text.answer.call import MAX_NAME, CallReader, is_name
from tailrace.text.answer.formats import ToolFormat
from tailrace.text.answer.parts import Arguments, Content, Part, merged

BLANKS = " \t\r\n"

_NAME = rf"[\w.:/-]{{1,{MAX_NAME}}}"
_ID = "[A-Za-z0-9]{1,64}"


def overlap(text: str, tag: str) -> int:
    """Characters at the end of the text that the tag begins with, fewer than all of it."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


def _beginning(tag: str, rest: str = "") -> str:
    """A pattern of every beginning of the tag, the empty one too; after the whole tag may come `rest`."""
    pattern = rest
    for char in reversed(tag):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return pattern


class _State(enum.Enum):
    START = enum.auto()  # nothing but white space has come, and calls may stand here
    TEXT = enum.auto()
    OPEN = enum.auto()  # after a tag
    HEAD = enum.auto()  # in a name that stands before its arguments
    ITEM = enum.auto()  # before an element of a list
    NEXT = enum.auto()  # after what separates calls
    CALL = enum.auto()
    LIST = enum.auto()  # after an element of a list
    BETWEEN = enum.auto()  # after a call
    SPILL = enum.auto()  # in arguments that have turned out not to be JSON


class ToolParser:
    """Takes the text of one answer in pieces; gives `Content`, `Call` and `Arguments`.

    `known`: names of the tools that were offered. `most`: calls beyond so many are left out. `calls` counts those that
    were given.
    """

    def __init__(self, form: ToolFormat, known: frozenset[str], most: int | None = None) -> None:
        self.calls = 0
        self._form = form
        self._names = known if form.bare else None
        self._most = most
        self._state = _State.START if form.bare else _State.TEXT
        self._rest = ""  # text not looked at, or not decided on
        self._held = ""  # taken from it already, and text unless a call comes of it
        self._gap = ""  # white space that may be layout
        self._said = False  # there has been text
        self._after_call = False  # since the last call there has been none
        self._listed = False
        self._closer = form.closer
        self._call: CallReader | None = None
        self._parts: list[Part] = []
        tags = form.head_tags
        self._head = re.compile(f"{_NAME}(?:{re.escape(tags[0])}{_ID})?(?:{re.escape(tags[1])})?[{BLANKS}]{{0,64}}")
        self._begun_head = re.compile(
            f"{_NAME}{_beginning(tags[0], f'(?:{_ID})?')}{_beginning(tags[1])}[{BLANKS}]{{0,64}}"
        )

    def push(self, text: str) -> list[Part]:
        """The next piece of the answer; what is certain of it."""
        self._rest += text
        while self._rest and self._step():
            pass
        return self._taken()

    def finish(self) -> list[Part]:
        """The end of the answer; whatever was held back."""
        rest, self._rest = self._rest, ""
        if self._call is not None:
            rest = self._call.raw
        if self._state is _State.SPILL:
            self._parts.append(Arguments(self.calls - 1, rest))
        else:
            self._say(self._held + rest)
        if not self._after_call:
            self._parts.append(Content(self._gap))
        self._held = self._gap = ""
        self._call = None
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        if self._most is not None:
            parts = [part for part in parts if isinstance(part, Content) or getattr(part, "index", 0) < self._most]
        return merged(parts)

    def _say(self, text: str) -> None:
        """Text that is none of a call. White space at its end waits for what follows."""
        core = text.rstrip(BLANKS)
        if not core:
            self._gap += text
            return
        whole = self._gap + core
        self._parts.append(Content(whole if self._said or not self.calls else whole.lstrip(BLANKS)))
        self._gap = text[len(core) :]
        self._said, self._after_call = True, False

    def _take(self, size: int) -> str:
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def _give_up(self, state: _State = _State.TEXT) -> bool:
        """What was held is text."""
        held, self._held = self._held, ""
        self._listed = False
        self._closer = self._form.closer
        self._say(held)
        return self._go(state)

    def _go(self, state: _State) -> bool:
        self._state = state
        return True

    def _step(self) -> bool:
        """Goes on as far as one state leads; False where more text is needed."""
        match self._state:
            case _State.START:
                return self._start()
            case _State.TEXT:
                return self._text()
            case _State.CALL:
                return self._in_call()
            case _State.HEAD:
                return self._in_head()
            case _State.LIST:
                return self._after_item()
            case _State.BETWEEN:
                return self._between()
            case _State.SPILL:
                return self._spill()
            case _:
                return self._before_call()

    def _start(self) -> bool:
        rest = self._rest.lstrip(BLANKS)
        self._gap += self._take(len(self._rest) - len(rest))
        if not rest:
            return False
        for fence in self._form.fences:
            if rest.startswith(fence):
                self._held += self._take(len(fence))
                self._closer = self._form.fences[-1]
                return self._go(_State.OPEN)
            if fence.startswith(rest):
                return False
        return self._go(_State.OPEN if rest[0] == "{" or (rest[0] == "[" and self._form.listed) else _State.TEXT)

    def _text(self) -> bool:
        opener = self._form.opener
        at = self._rest.find(opener) if opener else -1
        if at < 0:
            kept = overlap(self._rest, opener) if opener else 0
            self._say(self._take(len(self._rest) - kept))
            return False
        self._say(self._take(at))
        self._held = self._take(len(opener))
        return self._go(_State.OPEN)

    def _before_call(self) -> bool:
        """Before the brace of a call, or the bracket of a list of them."""
        rest = self._rest.lstrip(BLANKS)
        self._held += self._take(len(self._rest) - len(rest))
        if not rest:
            return False
        if rest[0] == "{":
            return self._begin_call(None)
        if self._state is _State.OPEN and rest[0] == "[" and self._form.listed:
            self._held += self._take(1)
            self._listed = True
            return self._go(_State.ITEM)
        if self._state is _State.OPEN and self._form.headed and self._begun_head.fullmatch(rest[0]):
            return self._go(_State.HEAD)
        return self._give_up()

    def _begin_call(self, name: str | None) -> bool:
        self._call = CallReader(self.calls, self._names, name)
        return self._go(_State.CALL)

    def _in_head(self) -> bool:
        """A name, up to the brace of its arguments."""
        at = 0
        while at < len(self._rest) and self._rest[at] != "{":
            if self._begun_head.fullmatch(self._held_head + self._rest[: at + 1]) is None:
                break
            at += 1
        head = self._held_head + self._rest[:at]
        self._held += self._take(at)
        if not self._rest:
            return False
        name = re.match(_NAME, head)
        if self._rest[0] != "{" or not self._head.fullmatch(head) or name is None or not is_name(name[0]):
            return self._give_up()
        return self._begin_call(name[0])

    @property
    def _held_head(self) -> str:
        return self._held.removeprefix(self._form.opener).lstrip(BLANKS)

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        given = call.given
        at, parts = call.read(self._rest, 0)
        self._take(at)
        self._parts += parts
        if call.given and not given:
            self.calls += 1
            self._held = ""
            self._after_call = True
            if not self._said:
                self._gap = ""
        if not call.done and not call.fault:
            return False
        self._call = None
        if not call.given:
            self._held += call.raw
            return self._give_up()
        if call.unfinished:
            return self._go(_State.SPILL)
        return self._go(_State.LIST if self._listed else _State.BETWEEN)

    def _after_item(self) -> bool:
        rest = self._rest.lstrip(BLANKS)
        if not rest:
            return False
        if rest[0] == ",":
            self._held = self._take(len(self._rest) - len(rest) + 1)
            return self._go(_State.ITEM)
        if rest[0] == "]":
            self._take(len(self._rest) - len(rest) + 1)
            self._listed = False
            return self._go(_State.BETWEEN)
        return self._give_up()

    def _between(self) -> bool:
        rest = self._rest.lstrip(BLANKS)
        if not rest:
            return False
        if self._closer and rest.startswith(self._closer):
            self._take(len(self._rest) - len(rest) + len(self._closer))
            return self._give_up()
        if self._closer.startswith(rest):
            return False
        if rest[0] == "{" or rest[0] in self._form.between:
            self._held = self._take(len(self._rest) - len(rest) + (rest[0] != "{"))
            return self._go(_State.NEXT)
        return self._give_up()

    def _spill(self) -> bool:
        """Arguments that are no JSON go on up to the next tag, or to the end: the client sees what the model wrote."""
        tag = self._closer or self._form.opener
        at = self._rest.find(tag) if tag else -1
        if at < 0:
            kept = overlap(self._rest, tag) if tag else 0
            self._parts.append(Arguments(self.calls - 1, self._take(len(self._rest) - kept)))
            return False
        self._parts.append(Arguments(self.calls - 1, self._take(at)))
        if self._closer:
            self._take(len(tag))
        return self._give_up()
