"""Ids to text, all at once or as they come."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from tailrace.text.tokens import STRIP_FIRST_TOKEN, TokenBytes

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns a stream of ids into text, one id at a time; never emits half a character.

    The pieces joined are exactly the bytes of all the ids decoded at once with invalid UTF-8 replaced by U+FFFD, as
    `decode` does. Control tokens produce no text unless `skip_special` is False or they are among `shown`. `start` says
    that the text begins here, so that the space with which SentencePiece-style vocabularies begin a text is dropped;
    pass False for text that continues other text. Spaces before punctuation are not cleaned up
    (`clean_up_tokenization_spaces` in Hugging Face's configurations is not applied: it would make the text depend on
    how it is cut).
    """

    def __init__(
        self, table: TokenBytes, *, skip_special: bool = True, start: bool = True, shown: Collection[int] = ()
    ) -> None:
        self._table = table
        self._shown = shown
        self._skip_special = skip_special
        self._leading = table.leading if start else 0
        self._utf8 = _Utf8("replace")

    def push(self, token: int) -> str:
        """Takes the next id; returns the text that is complete."""
        if self._skip_special and self._table.is_special(token) and token not in self._shown:
            return ""
        data = self._table[token]
        if self._leading:
            data = self._strip(data)
        return self._utf8.decode(data)

    def _strip(self, data: bytes) -> bytes:
        if self._leading == STRIP_FIRST_TOKEN:
            self._leading = 0
            return data.replace(b" ", b"")
        stripped = data.lstrip(b" ")
        spaces = min(len(data) - len(stripped), self._leading)
        self._leading = self._leading - spaces if not stripped else 0
        return data[spaces:]

    def finish(self) -> str:
        """The end of the stream: an incomplete character, if there is one, becomes one U+FFFD."""
        return self._utf8.decode(b"", True)


def decode(table: TokenBytes, ids: Sequence[int], *, skip_special: bool = True, start: bool = True) -> str:
    """All the ids at once."""
    stream = Detokenizer(table, skip_special=skip_special, start=start)
    return "".join([*map(stream.push, ids), stream.finish()])
