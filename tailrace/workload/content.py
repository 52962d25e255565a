"""What a piece of a prompt says: token ids, or words. Both follow from its source alone, so what is shared is alike."""

from __future__ import annotations

import random

from tailrace.workload.session import Piece

FIRST_ID = 200
"""Ids below are often bytes and control tokens."""

TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense nation plan college "
    "interest death experience effect use class control field development role effort rate heart drug show leader "
    "light voice wife police mind price report decision son view relationship town road arm difference value building "
    "action season society tax director position player record paper space ground form event official matter center"
)
WORDS = TEXT.split()
"""Words that are one token each, with the space before them, in the vocabularies of most models."""


def ids(piece: Piece, below: int) -> list[int]:
    """`piece.tokens` token ids from `FIRST_ID` to `below`. A longer piece of the same source begins with the same."""
    lowest = min(FIRST_ID, below // 2)
    return [lowest + int((below - lowest) * x) for x in _noise(piece.source, piece.tokens)]


def words(piece: Piece, count: int) -> str:
    """So many words; more of the same source begin with the same."""
    return " ".join([WORDS[int(len(WORDS) * x)] for x in _noise(piece.source, count)])


def _noise(source: str, count: int) -> list[float]:
    draw = random.Random(source).random
    return [draw() for _ in range(count)]
