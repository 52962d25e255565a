"""Drafts of the next tokens, copied from where the request's own tokens went on the last time they were alike.

Text repeats itself: quotations of a prompt, code that is written out again, lists, loops. Where the last tokens have
occurred before, what followed then is a guess at what follows now. A guess costs nothing until it is computed, so each
is first held against the token that was drawn anyway; only after some of them in a row came true does the next step
compute a few more along with the drawn token (`Scheduler`). A step that computes several tokens of a sequence gives the
same bits as steps that compute one each, so the drawn tokens are the same with and without.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

GRAM = 3
"""Tokens that must be alike for what followed them to be a guess."""
FIRST_NEED, LARGEST_NEED = 4, 64
"""Guesses in a row that must have come true before a draft; it doubles when drafts fail, and comes down again."""
AT_A_TIME = 64
"""Prompt tokens that are looked through for every token drawn, so that a long prompt delays no step."""
HISTORY = 1 << 15
"""Prompt tokens that are looked through at most, from its end; and tokens of a prediction, from its beginning."""
_BITS = 21
_MASK = (1 << GRAM * _BITS) - 1


class Drafter:
    """Follows the tokens of one request, which the caller appends to `tokens`."""

    __slots__ = (
        "_behind",
        "_first",
        "_from",
        "_key",
        "_need",
        "_next",
        "_places",
        "_predicted",
        "_predicted_places",
        "_tokens",
        "accepted",
        "rejected",
        "streak",
    )

    def __init__(self, tokens: array[int], predicted: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._predicted = array("i", predicted[:HISTORY])  # what the caller expects to follow the prompt
        self._predicted_places = _places_of(self._predicted)
        self.accepted = self.rejected = 0  # tokens of drafts of what the caller expects that came true, or did not
        self._from = self._predicted if predicted else tokens  # where the guess at the next token is from
        self._places: dict[int, int] = {}  # what follows the last occurrence of so many tokens
        self._next = 0 if predicted else -1  # where the guess is, there
        self.streak = FIRST_NEED if predicted else 0  # guesses in a row that came true; the caller's word counts
        self._need = FIRST_NEED
        self._behind = len(tokens) - 1  # prompt tokens up to this one are yet to be looked through
        self._first = max(GRAM - 1, len(tokens) - HISTORY)
        self._key = 0
        for token in tokens[-GRAM:]:
            self._key = self._key << _BITS | token

    @property
    def expecting(self) -> bool:
        """Whether the next guess is of what the caller expects."""
        return self._from is self._predicted

    @property
    def ready(self) -> bool:
        """Whether a draft is likely to come true."""
        return self.streak >= self._need

    def follow(self) -> None:
        """A token has been appended."""
        tokens, places = self._tokens, self._places
        at = len(tokens) - 1
        token = tokens[at]
        guess = self._next
        if guess >= 0:
            if self._from[guess] == token:
                self.streak += 1
                self._next = guess + 1
                if self._from is self._predicted and guess + 1 == len(self._predicted):
                    self.streak, guess = 0, -1  # it has come to its end
            else:
                self.streak = 0
                guess = -1
        self._key = key = (self._key << _BITS | token) & _MASK
        if self._behind >= self._first:
            self._look_back()
        if guess < 0:
            self._next = self._predicted_places.get(key, -1)
            self._from = self._predicted
            if self._next < 0:
                self._next = places.get(key, -1)
                self._from = tokens
        places[key] = at + 1

    def draft(self, count: int) -> list[int]:
        """At most `count` tokens that are likely to follow, and no more than guesses in a row came true; none where
        nothing is likely."""
        source, begin = self._from, self._next
        known, count = len(source), min(count, self.streak)
        drafted: list[int] = []
        if begin >= 0:
            if source is self._predicted:
                return source[begin : begin + count].tolist()
            for at in range(begin, begin + count):
                drafted.append(source[at] if at < known else drafted[at - known])
        return drafted

    def judge(self, drafted: int, accepted: int, *, predicted: bool = False) -> None:
        """So many tokens of a draft came true. `predicted`: it was what the caller expects."""
        if predicted:
            self.accepted += accepted
            self.rejected += drafted - accepted
        elif 2 * accepted < drafted:
            self._need = min(LARGEST_NEED, 2 * self._need)
        elif accepted == drafted:
            self._need = max(FIRST_NEED, self._need - 1)

    def _look_back(self) -> None:
        """Takes in some more of the prompt, the latest first; what came later stays."""
        tokens, places = self._tokens, self._places
        last = self._behind
        first = max(self._first, last - AT_A_TIME + 1)
        for at in range(last, first - 1, -1):
            key = (tokens[at - 2] << _BITS | tokens[at - 1]) << _BITS | tokens[at]
            places.setdefault(key, at + 1)
        self._behind = first - 1


def _places_of(tokens: array[int]) -> dict[int, int]:
    """What follows the first occurrence of so many tokens in a row."""
    places: dict[int, int] = {}
    key = 0
    for at, token in enumerate(tokens[:-1]):
        key = (key << _BITS | token) & _MASK
        if at >= GRAM - 1:
            places.setdefault(key, at + 1)
    return places
