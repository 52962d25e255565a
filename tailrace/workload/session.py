"""What a workload is made of: sessions of turns, whose prompts are pieces that say what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt. Pieces with the same `source` have the same tokens, as far as the shorter one goes: that is
    all that requests share. `text` is what it says, where that is not made up. `answer_of` names the turn of the same
    session whose answer stands here, as it really came where that is known; `tokens` is then what is expected of it."""

    source: str
    tokens: int
    role: Role = "user"
    text: str | None = None
    answer_of: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the whole prompt, and how many tokens are asked for. It is due `pause` seconds after the last of the
    turns `after` (numbers in the session) has ended."""

    pieces: tuple[Piece, ...]
    output: int
    after: tuple[int, ...] = ()
    pause: float = 0.0

    @property
    def input(self) -> int:
        """Tokens of the prompt, as planned."""
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that belong together: most often one. `at`: seconds from the start, where a trace says when it came."""

    number: int
    turns: tuple[Turn, ...]
    at: float | None = None
