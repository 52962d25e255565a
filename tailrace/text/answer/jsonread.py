"""One JSON object, read as it comes: where its members are, where it ends, and the first character that is wrong."""

from __future__ import annotations

import enum
import re

MAX_DEPTH = 64
"""Levels of nesting; deeper is a fault."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_BLANK = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_WORD_BEGINS = frozenset("tfn-0123456789")


class Mark(enum.Enum):
    """Where reading pauses: places of the outermost object's members."""

    KEY = enum.auto()
    """A key has been read, `key_start` to `offset`, quotes included."""
    BEGIN = enum.auto()
    """The next character is the first of a member's value (`value_start`)."""
    END = enum.auto()
    """A member's value has been read, `value_start` to `offset`."""


class _State(enum.Enum):
    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()  # a value, or the end of the array
    FIRST_KEY = enum.auto()  # a key, or the end of the object
    KEY = enum.auto()
    COLON = enum.auto()
    AFTER = enum.auto()  # a comma, or the end
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    WORD = enum.auto()  # a number, true, false, null


class JsonReader:
    """Reads one object by RFC 8259, strictly, in time linear in its text.

    `offset` counts the characters read so far, `key_start` and `value_start` are such counts. `done`: the object has
    ended with the last character read. `fault`: the next character cannot follow; nothing more is read. Both depend on
    the text alone, not on how it is cut.
    """

    def __init__(self) -> None:
        self.offset = 0
        self.key_start = 0
        self.value_start = 0
        self.done = False
        self.fault = False
        self._state = _State.VALUE
        self._stack: list[str] = []
        self._key = False  # the string that is being read is a key
        self._begun = False  # the value that comes next has been announced
        self._word = ""
        self._digits = 0
        self._base = 0

    def read(self, text: str, at: int, end: int) -> tuple[int, Mark | None]:
        """Reads text[at:end] up to the next mark; returns where it stopped, and the mark."""
        start = at
        self._base = self.offset - at
        mark = None
        while at < end and mark is None and not self.done and not self.fault:
            at, mark = self._next(text, at, end)
        self.offset += at - start
        return at, mark

    def _next(self, text: str, at: int, end: int) -> tuple[int, Mark | None]:
        state = self._state
        if state is _State.STRING:
            return self._string(text, at, end)
        if state is _State.WORD:
            return self._scalar(text, at, end)
        if state is _State.ESCAPE or state is _State.HEX:
            return self._escape(text[at], at), None
        found = _BLANK.match(text, at, end)
        at = found.end() if found else at
        if at == end:
            return at, None
        return self._sign(text[at], at)

    def _sign(self, char: str, at: int) -> tuple[int, Mark | None]:
        """A character between values."""
        state = self._state
        if state is _State.VALUE or state is _State.FIRST_ITEM:
            if state is _State.FIRST_ITEM and char == "]":
                return self._close(at)
            return self._value(char, at)
        if state is _State.FIRST_KEY and char == "}":
            return self._close(at)
        if state in (_State.FIRST_KEY, _State.KEY) and char == '"':
            self._key, self._state = True, _State.STRING
            if len(self._stack) == 1:
                self.key_start = self._base + at
            return at + 1, None
        if state is _State.COLON and char == ":":
            self._state, self._begun = _State.VALUE, False
            return at + 1, None
        if state is _State.AFTER and char == ",":
            self._state = _State.KEY if self._stack[-1] == "{" else _State.VALUE
            return at + 1, None
        if state is _State.AFTER and char == ("}" if self._stack[-1] == "{" else "]"):
            return self._close(at)
        self.fault = True
        return at, None

    def _value(self, char: str, at: int) -> tuple[int, Mark | None]:
        if self._stack == ["{"] and not self._begun:
            self._begun = True
            self.value_start = self._base + at
            return at, Mark.BEGIN
        if char in "{[" and len(self._stack) < MAX_DEPTH and (self._stack or char == "{"):
            self._stack.append(char)
            self._state = _State.FIRST_KEY if char == "{" else _State.FIRST_ITEM
        elif char == '"' and self._stack:
            self._key, self._state = False, _State.STRING
        elif char in _WORD_BEGINS and self._stack:
            self._word, self._state = char, _State.WORD
        else:
            self.fault = True
            return at, None
        return at + 1, None

    def _string(self, text: str, at: int, end: int) -> tuple[int, Mark | None]:
        found = _PLAIN.match(text, at, end)
        at = found.end() if found else at
        if at == end:
            return at, None
        if text[at] == '"':
            if not self._key:
                return self._ended(at + 1)
            self._state = _State.COLON
            return at + 1, Mark.KEY if len(self._stack) == 1 else None
        if text[at] == "\\":
            self._state = _State.ESCAPE
            return at + 1, None
        self.fault = True
        return at, None

    def _escape(self, char: str, at: int) -> int:
        if self._state is _State.ESCAPE:
            if char == "u":
                self._state, self._digits = _State.HEX, 4
            elif char in '"\\/bfnrt':
                self._state = _State.STRING
            else:
                self.fault = True
                return at
            return at + 1
        if char not in _HEX:
            self.fault = True
            return at
        self._digits -= 1
        if self._digits == 0:
            self._state = _State.STRING
        return at + 1

    def _scalar(self, text: str, at: int, end: int) -> tuple[int, Mark | None]:
        found = _WORD.match(text, at, end)
        stop = found.end() if found else at
        self._word += text[at:stop]
        if stop == end:
            return stop, None
        if _SCALAR.fullmatch(self._word) is None:
            self.fault = True
            return stop, None
        return self._ended(stop)

    def _close(self, at: int) -> tuple[int, Mark | None]:
        self._stack.pop()
        return self._ended(at + 1)

    def _ended(self, at: int) -> tuple[int, Mark | None]:
        """A value has ended before `at`."""
        self._state = _State.AFTER
        self.done = not self._stack
        return at, Mark.END if self._stack == ["{"] else None


def is_object(text: str) -> bool:
    """Whether the text is one JSON object, white space around it apart."""
    reader = JsonReader()
    at, end = 0, len(text)
    while at < end and not reader.done and not reader.fault:
        at, _ = reader.read(text, at, end)
    return reader.done and not text[at:].strip(" \t\r\n")
