"""One tool call, read as it comes: a JSON object with a name and arguments, or arguments whose name is known."""

from __future__ import annotations

import json

from tailrace.text.answer.jsonread import JsonReader, Mark, is_object
from tailrace.text.answer.parts import Arguments, Call, Part

HELD_ARGUMENTS = 256
"""Characters of arguments that are held back until they turn out to be well formed; longer ones are passed on as they
come."""
MAX_HELD = 1 << 14
"""Characters of a call that are held back at most; what is no call by then is text."""
MAX_NAME = 128

_ROLES = {"name": "name", "arguments": "arguments", "parameters": "arguments"}


def is_name(name: object) -> bool:
    """Whether a tool can have this name."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable() and " " not in name


class CallReader:
    """Reads one call. `known` are the names that it may have (None: any), `name` is the name where the object is the
    arguments alone.

    A call is *given* once its name is known and its arguments have ended, or are longer than `HELD_ARGUMENTS`: from
    then on it is a call, whatever follows. Until then all of it is in `raw`, and a `fault` makes it text. Arguments may
    be an object, a string that holds one, or, where any name is taken, null or absent (then they are {}).
    """

    def __init__(self, index: int, known: frozenset[str] | None, name: str | None = None) -> None:
        self.raw = ""
        self.given = False
        self.done = False
        self.fault = False
        self.unfinished = False  # given, and its arguments have not ended
        self._index = index
        self._known = known
        self._name = name
        self._bare = name is not None
        self._role = "arguments" if self._bare else ""
        self._roles: set[str] = set()
        self._first = "{" if self._bare else ""  # first character of the member that is being read
        self._arguments: str | None = None
        self._json = JsonReader()

    def read(self, text: str, at: int) -> tuple[int, list[Part]]:
        """Reads text from `at`; returns where it stopped, and the parts. It stops before the end of the text only where
        the call is done or is at fault."""
        parts: list[Part] = []
        while at < len(text) and not self.done and not self.fault:
            end = len(text) if self.given else min(len(text), at + MAX_HELD - self._json.offset)
            stop, mark = self._json.read(text, at, end)
            if not self.given:
                self.raw += text[at:stop]
            elif self.unfinished:
                parts.append(Arguments(self._index, text[at:stop]))
            at = stop
            if not self._note(mark, text[at : at + 1]):
                self.fault = True
            parts += self._give()
            self._close()
        return at, parts

    def _close(self) -> None:
        if self._json.done and self.given:
            self.done = True
        elif self._json.fault or self._json.done or (not self.given and self._json.offset >= MAX_HELD):
            self.fault = True

    def _note(self, mark: Mark | None, following: str) -> bool:
        """Takes a member's place in; False where no call has such a member."""
        if self._bare:
            if self._json.done:
                self._end_arguments(self.raw)
            return True
        if mark is None:
            return True
        if mark is Mark.KEY and not self.given:
            key = _decoded(self.raw[self._json.key_start :])
            self._role = _ROLES.get(key, "") if isinstance(key, str) else ""
            repeated = self._role in self._roles
            self._roles |= {self._role} - {""}
            return not repeated
        if mark is Mark.BEGIN and not self.given:
            self._first = following
            allowed = {"name": '"', "arguments": '{"n' if self._known is None else '{"'}
            return not self._role or following in allowed[self._role]
        if mark is Mark.END:
            return self._end()
        return True

    def _end(self) -> bool:
        """The value of a member has been read."""
        if self.given:
            self.unfinished = False
            return True
        value = self.raw[self._json.value_start :]
        if self._role == "name":
            name = _decoded(value)
            if not is_name(name) or (self._known is not None and name not in self._known):
                return False
            self._name = str(name)
        elif self._role == "arguments":
            return self._end_arguments(value)
        return True

    def _end_arguments(self, value: str) -> bool:
        self.unfinished = False
        self._role = ""
        if self._first == '"':
            inner = _decoded(value)
            if not isinstance(inner, str) or not is_object(inner) or not _encodable(inner):
                return False
            value = inner
        elif self._first == "n":
            value = "{}"
        if not self.given:
            self._arguments = value
        return True

    def _give(self) -> list[Part]:
        """The parts of what has become a call."""
        if self.given or self._name is None:
            return []
        arguments = self._arguments
        if arguments is None and self._json.done and self._known is None and "arguments" not in self._roles:
            arguments = "{}"
        if arguments is None and self._role == "arguments" and self._first == "{":
            begun = self.raw if self._bare else self.raw[self._json.value_start :]
            if len(begun) > HELD_ARGUMENTS:
                arguments, self.unfinished = begun, True
        if arguments is None:
            return []
        self.given, self.raw = True, ""
        return [Call(self._index, self._name), Arguments(self._index, arguments)]


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:  # a constant that JSON does not have
        return None


def _encodable(text: str) -> bool:
    """Whether it is text: an escape can spell half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
