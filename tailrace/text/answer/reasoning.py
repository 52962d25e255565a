"""Reasoning and what follows it, told apart as the answer comes."""

from __future__ import annotations

import enum

from tailrace.text.answer.formats import ReasoningFormat
from tailrace.text.answer.parts import Content, Part, Reasoning
from tailrace.text.answer.tools import BLANKS, overlap


class Opened(enum.Enum):
    """What the prompt says of the reasoning: nothing, that it has begun, or that it is over."""

    NO = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class _State(enum.Enum):
    START = enum.auto()
    INSIDE_START = enum.auto()  # only white space of it has come
    INSIDE = enum.auto()
    AFTER_START = enum.auto()
    AFTER = enum.auto()


class ReasoningParser:
    """Takes the text of one answer in pieces; gives `Reasoning`, then `Content`.

    Reasoning stands at the beginning of the answer or nowhere: tags later on are text. White space beside the tags
    belongs to them. Reasoning that never ends is reasoning to the end.
    """

    def __init__(self, form: ReasoningFormat, opened: Opened) -> None:
        self._form = form
        self._rest = ""
        inside = opened is Opened.OPEN or (opened is Opened.NO and form.begins)
        self._may_open = opened is not Opened.CLOSED
        self._state = _State.INSIDE_START if inside else _State.START if self._may_open else _State.AFTER

    @property
    def inside(self) -> bool:
        """Whether what comes next is reasoning, unless it closes it."""
        return self._state in (_State.INSIDE_START, _State.INSIDE)

    def push(self, text: str) -> list[Part]:
        """The next piece of the answer; what is certain of it."""
        if self._state is _State.AFTER:
            return [Content(text)]
        self._rest += text
        parts: list[Part] = []
        while self._rest and self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The end of the answer; whatever was held back."""
        rest, self._rest = self._rest, ""
        if self.inside:
            return [Reasoning(rest)]
        return [Content(rest)] if self._state is _State.START else []

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case _State.START:
                return self._start(parts)
            case _State.INSIDE_START:
                return self._inside_start()
            case _State.INSIDE:
                return self._inside(parts)
            case _State.AFTER_START:
                self._rest = self._rest.lstrip(BLANKS)
                self._state = _State.AFTER if self._rest else _State.AFTER_START
                return bool(self._rest)
            case _:
                parts.append(Content(self._rest))
                self._rest = ""
                return False

    def _start(self, parts: list[Part]) -> bool:
        rest = self._rest.lstrip(BLANKS)
        if rest.startswith(self._form.opener):
            self._rest = rest.removeprefix(self._form.opener)
            self._may_open = False
            self._state = _State.INSIDE_START
            return True
        if self._form.opener.startswith(rest):
            return False
        self._state = _State.AFTER
        return True

    def _inside_start(self) -> bool:
        """White space, and the opening tag where it has only been taken for granted."""
        self._rest = self._rest.lstrip(BLANKS)
        opener = self._form.opener
        if self._may_open and self._rest and opener.startswith(self._rest) and self._rest != opener:
            return False
        if self._may_open and self._rest.startswith(opener):
            self._rest = self._rest.removeprefix(opener)
            self._may_open = False
            return True
        if not self._rest:
            return False
        self._state = _State.INSIDE
        return True

    def _inside(self, parts: list[Part]) -> bool:
        closer = self._form.closer
        at = self._rest.find(closer)
        if at < 0:
            certain = len(self._rest) - overlap(self._rest, closer)
            certain = len(self._rest[:certain].rstrip(BLANKS))
            parts.append(Reasoning(self._rest[:certain]))
            self._rest = self._rest[certain:]
            return False
        parts.append(Reasoning(self._rest[:at].rstrip(BLANKS)))
        self._rest = self._rest[at + len(closer) :]
        self._state = _State.AFTER_START
        return True
