"""Keeps the caller's text from becoming control tokens.

A chat template writes control tokens as text, around text that callers wrote. To tell the two apart afterwards, the
caller's strings are rendered with a marker: a private-use character that occurs nowhere in the inputs, put where it
breaks every control token that their text could spell, alone or together with what the template writes beside it.
What is still a control token after rendering was written by the template. Inputs are marked in one of two ways:

- *strict*: after every character that begins a control token, and before the first character of every string, so that
  a control token can neither begin in the caller's text nor go on in it, whatever the template joins or cuts away;
- *light*: only where the string, in upper or lower case, holds a control token, ends like the beginning of one or
  begins like the end of one. Templates that look at joined text see light marks far less often.

To a template a marked string still compares, measures, searches, cuts and splits as the caller's text does; operations
that know nothing of this (joining, formatting, JSON) keep the marks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

from tailrace.terms import InvalidInput

MAX_DEPTH = 100
"""Levels of nesting in messages, tools and template arguments."""

_TAG = re.compile("\\s*[<\\[{\uff1c\uff5f\u3010].*[>\\]}\uff1e\uff60\u3011]\\s*", re.DOTALL)
_SAID = ("content", "reasoning_content", "thinking", "reasoning")
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Control:
    """One control token. `special`: it produces no text; others are markup such as `<think>`. lstrip and rstrip: it
    swallows white space before or after itself."""

    id: int
    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


def looks_like_markup(text: str) -> bool:
    """Whether an added token that is not special should still not be spelled by callers: tags such as `<tool_call>`
    are, runs of spaces and plain words are not."""
    return _TAG.fullmatch(text) is not None


def literal_trie(texts: Iterable[str]) -> str:
    """A regular expression that matches the longest of these strings, in time that does not grow with their number."""
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        branches = [re.escape(char) + pattern(child) for char, child in node.items() if char]
        if not branches:
            return ""
        joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
        return joined + ("?" if "" in node else "")

    return pattern(root) or "(?!)"


class Controls:
    """A tokenizer's control tokens and how to find them in text."""

    def __init__(self, controls: Iterable[Control]) -> None:
        self.by_text = {control.text: control for control in controls if control.text}
        self.by_id = {control.id: control for control in self.by_text.values()}
        self._found = re.compile(literal_trie(self.by_text))

    def find(self, text: str) -> Iterator[tuple[int, int, Control]]:
        """Each control token in the text: start, end and which; leftmost, longest, not overlapping."""
        for match in self._found.finditer(text):
            yield match.start(), match.end(), self.by_text[match[0]]


@dataclass(frozen=True)
class Marks:
    """How strings are marked, and the marker."""

    marker: str
    strict: bool
    _begin: re.Pattern[str]
    _spelled: str  # all control texts in lower case, each between NULs

    @staticmethod
    def of(marker: str, texts: Iterable[str], *, strict: bool, allowed: Iterable[str] = ()) -> Marks:
        """`texts` are the control tokens that must not be spelled, `allowed` those that may be."""
        known = sorted({text for text in texts if text})
        spelled = "\0" + "\0\0".join(text.lower() for text in known) + "\0"
        # A token that begins with a letter or digit is marked where it is spelled: marking every such letter would
        # mark nearly everything.
        worded = literal_trie(text for text in known if text[0].isalnum() or not strict)
        signs = "".join(sorted({re.escape(text[0]) for text in known if not text[0].isalnum()})) if strict else ""
        whole = literal_trie(text for text in allowed if not any(other.startswith(text) for other in known))
        begin = rf"(?P<allowed>(?-i:{whole}))|" + (f"[{signs}]|" if signs else "") + rf"(?={worded})[\s\S]"
        return Marks(marker, strict, re.compile(begin, re.IGNORECASE), spelled)

    def mark(self, text: str) -> str:
        """The text with marks; white space at its ends stays there, so that trimming still works."""
        marked = self._begin.sub(lambda match: match[0] + ("" if match.lastgroup else self.marker), text)
        lead = len(text) - len(text.lstrip())
        if lead == len(text):
            return marked
        if self.strict:
            return marked[:lead] + self.marker + marked[lead:]
        core = text.strip().lower()
        if self._ends_like_a_beginning(core):
            # The beginning's own first character is not followed by a mark yet; one at its end serves as well.
            end = len(marked.rstrip())
            marked = marked[:end] + self.marker + marked[end:]
        if self._begins_like_an_end(core):
            marked = marked[:lead] + self.marker + marked[lead:]
        return marked

    def _sizes(self, core: str) -> range:
        return range(1, min(len(core), max(map(len, self._spelled.split("\0")))) + 1)

    def _ends_like_a_beginning(self, core: str) -> bool:
        return any("\0" + core[-size:] in self._spelled for size in self._sizes(core))

    def _begins_like_an_end(self, core: str) -> bool:
        sizes = self._sizes(core)
        return core in self._spelled or any(core[:size] + "\0" in self._spelled for size in sizes)

    @property
    def escaped(self) -> str:
        """What JSON makes of the marker where a template asks for ASCII."""
        return json.dumps(self.marker)[1:-1]


class Guarded(str):
    """A caller's string inside a template: holds its marked text, behaves as its own."""

    _own: str
    _marks: Marks

    def __new__(cls, text: str, marks: Marks) -> Guarded:
        self = super().__new__(cls, marks.mark(text))
        self._own = text
        self._marks = marks
        return self

    def __str__(self) -> str:
        return self  # str() of it keeps the behaviour

    def __eq__(self, other: object) -> bool:
        return bool(self._own == _own(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._own != _own(other))

    def __hash__(self) -> int:
        return hash(self._own)

    def __lt__(self, other: str) -> bool:
        return bool(self._own < _own(other))

    def __le__(self, other: str) -> bool:
        return bool(self._own <= _own(other))

    def __gt__(self, other: str) -> bool:
        return bool(self._own > _own(other))

    def __ge__(self, other: str) -> bool:
        return bool(self._own >= _own(other))

    def __len__(self) -> int:
        return len(self._own)

    def __contains__(self, part: object) -> bool:
        return bool(_own(part) in self._own)

    def __getitem__(self, index: SupportsIndex | slice) -> Guarded:
        return Guarded(self._own[index], self._marks)

    def __iter__(self) -> Iterator[str]:
        return (Guarded(char, self._marks) for char in self._own)


def _own(value: Any) -> Any:
    return value._own if isinstance(value, Guarded) else value


def _again(value: Any, marks: Marks) -> Any:
    """Results of a string's methods are the caller's text again, cut or changed: mark them anew."""
    if isinstance(value, str):
        return Guarded(value, marks)
    if isinstance(value, list | tuple):
        return type(value)(_again(item, marks) for item in value)
    return value


def _forward(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def forward(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        own = [tuple(map(_own, arg)) if isinstance(arg, tuple) else _own(arg) for arg in args]
        return _again(method(self._own, *own, **kwargs), self._marks)

    forward.__name__ = name
    return forward


_FORWARDED = (
    *("capitalize", "casefold", "count", "endswith", "expandtabs", "find", "index", "isalnum", "isalpha", "isascii"),
    *("isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"),
    *("lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition"),
    *("rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
)
for _name in _FORWARDED:
    setattr(Guarded, _name, _forward(_name))


def strings_in(value: Any, depth: int = 0) -> Iterator[str]:
    """Every string in nested dicts (keys too) and lists; raises `InvalidInput` for what is nested too deeply."""
    if depth > MAX_DEPTH:
        raise InvalidInput(f"nested more than {MAX_DEPTH} levels deep", param="messages")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key, depth + 1)
            yield from strings_in(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item, depth + 1)


def pick_marker(texts: list[str]) -> str:
    """A private-use character that is in none of the texts, nor is its JSON escape. Drawn at random: callers cannot
    use them all up without sending all 137,000."""
    for _ in range(64):
        marker = chr(0xE000 + int.from_bytes(os.urandom(8), "big") % 0x1900)
        escape = json.dumps(marker)[1:-1]
        if not any(marker in text or escape in text.lower() for text in texts):
            return marker
    raise InvalidInput("the text holds too many private-use characters", param="messages")


def guard_value(value: Any, marks: Marks) -> Any:
    """The value with every string in it marked, dict keys too."""
    if isinstance(value, str):
        return Guarded(value, marks) if value else value
    if isinstance(value, Mapping):
        return {guard_value(key, marks): guard_value(item, marks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [guard_value(item, marks) for item in value]
    return value


def guard_message(message: Mapping[str, Any], every: Marks, special: Marks) -> dict[str, Any]:
    """A message marked by its role: what an assistant said may hold markup of its own (`<think>`), which stays markup;
    its special tokens do not, nor does anything in its tool calls."""
    role = message.get("role")
    said = _SAID if role == "assistant" else ()
    guarded: dict[str, Any] = {}
    for key, value in message.items():
        guarded[guard_value(key, every)] = guard_value(value, special if key in said else every)
    if isinstance(role, str) and _ROLE.fullmatch(role):
        guarded["role"] = role  # templates build control tokens of roles: '<|' + role + '|>'
    return guarded
