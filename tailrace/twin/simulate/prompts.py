"""Token ids of prompts and answers that are alike exactly where a workload says so.

All tokens of a piece are one number, which stands for its source: what two prompts share is then found as in the real
engine, by the ids of whole pages, at the price of a copy of memory.
"""

from __future__ import annotations

from array import array

from tailrace.workload.session import Piece, Session

IDS = 1 << 31
"""Token ids lie below."""

Source = tuple[str | int, int]


class Prompts:
    """Numbers sources in the order in which they are first met."""

    def __init__(self) -> None:
        self._numbers: dict[Source, int] = {}

    def answer(self, session: Session, turn: int) -> int:
        """What the tokens of this turn's answer are."""
        return self._number((session.number, turn))

    def prompt(self, session: Session, turn: int) -> array[int]:
        """The tokens of this turn's prompt; where it has an earlier turn's answer in it, those of that answer."""
        tokens = array("i")
        before: Source | None = None
        for piece in session.turns[turn].pieces:
            source = _source(session, piece)
            if before is not None and source[0] == before[0] and piece.answer_of is None:
                source = (source[0], before[1] - 1)  # the same text once more does not go on where that ended
            tokens.extend(array("i", (self._number(source),)) * piece.tokens)
            before = source
        return tokens

    def _number(self, source: Source) -> int:
        return self._numbers.setdefault(source, len(self._numbers))


def _source(session: Session, piece: Piece) -> Source:
    return (piece.source, -1) if piece.answer_of is None else (session.number, piece.answer_of)
