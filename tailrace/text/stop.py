"""Finds stop strings in text that arrives in pieces.

The automaton is Aho and Corasick's ("Efficient string matching", CACM 18(6), 1975): one pass, whatever the number of
stop strings and however they overlap.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete.

    The match is the stop string that *ends* first in the stream; of several that end at the same character the longest
    (which contains the others). Both depend on the text alone, so the result is the same however the text is cut.
    Emitted text ends before the stop string, or with it where `include`. Text that could still become a stop string is
    held back. Empty stop strings are ignored. Time is linear in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._include = include
        self._matched: str | None = None
        self._held = ""
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self._depth: list[int] = [0]
        self._stop: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            if stop:
                self._insert(stop)
        self._link()
        firsts = "".join(map(re.escape, self._next[0]))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._stop.append(None)
            state = self._next[state][char]
        self._stop[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                fall = self._fail[state]
                while fall and char not in self._next[fall]:
                    fall = self._fail[fall]
                self._fail[child] = self._next[fall].get(char, 0)
                # A state's own stop string is longer than any that ends in the states it falls back to.
                if self._stop[child] is None:
                    self._stop[child] = self._stop[self._fail[child]]
                queue.append(child)

    @property
    def matched(self) -> str | None:
        """The stop string that was found, if any."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece; returns the text that is safe to emit, and the stop string once it was found.
        After that everything further is swallowed."""
        if self._matched is not None:
            return "", self._matched
        if self._first is None:
            return text, None
        end = self._scan(text)
        pending = self._held + text
        if self._matched is not None:
            end += len(self._held)
            self._held = ""
            return pending[: end if self._include else end - len(self._matched)], self._matched
        keep = self._depth[self._state]
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def _scan(self, text: str) -> int:
        """Moves the automaton over the text; returns where in it the match ended (its length if there was none)."""
        state, at, size = self._state, 0, len(text)
        assert self._first is not None
        while at < size:
            if state == 0:
                found = self._first.search(text, at)
                if found is None:
                    break
                at = found.start()
            char = text[at]
            while state and char not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(char, 0)
            at += 1
            if self._stop[state] is not None:
                self._state, self._matched = state, self._stop[state]
                return at
        self._state = state
        return size

    def flush(self) -> str:
        """The text still held back; call once the stream has ended without a match."""
        held, self._held, self._state = self._held, "", 0
        return held
