"""What each token id spells: a compact table that loads in milliseconds and needs no tokenizer library."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import sub
from pathlib import Path
from typing import Any

from tailrace.terms import ModelError

STRIP_FIRST_TOKEN = -1
"""Value of `TokenBytes.leading`: the first token of a text loses all its spaces (Hugging Face's Metaspace decoder)."""

_MAGIC = b"TRTOKEN1"
_HEADER = struct.Struct("<8sIiIQ")  # magic, ids, leading, CRC-32 of the body, begun with leading, bytes of the blob


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies (Radford et al. 2019, GPT-2): bytes that print
    stand for themselves, the others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(hidden))
    return alphabet


@dataclass(frozen=True)
class Spelling:
    """How a tokenizer's decoder turns its tokens' strings into bytes; `leading` as in `TokenBytes`."""

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    leading: int = 0
    inner: str = ""
    """What WordPiece tokens that go on with a word begin with; before every other token is a space. The decoder's
    clean-up (no space before a full stop, say) is left out: it is of no token alone."""

    @staticmethod
    def of(decoder: dict[str, Any] | None) -> Spelling:
        """Reads the `decoder` of a tokenizer.json; raises `ModelError` for a kind that is not supported."""
        if decoder is None:
            raise ModelError("tokenizer.json has no decoder: cannot tell how its tokens are spelled")
        steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        level = fallback = fused = False
        replace: list[tuple[str, str]] = []
        leading = 0
        for step in steps:
            kind = step.get("type")
            text = step.get("pattern", {}).get("String") if kind == "Replace" else None
            if kind == "ByteLevel":
                level = True
            elif kind == "ByteFallback":
                fallback = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Replace" and text and not fused:
                replace.append((text, step["content"]))
            elif kind == "Strip" and fused and step["content"] == " " and step["stop"] == 0:
                leading = step["start"]
            elif kind == "Metaspace":
                replace.append((step["replacement"], " "))
                leading = 0 if step.get("prepend_scheme", "always") == "never" else STRIP_FIRST_TOKEN
            elif kind == "WordPiece" and len(steps) == 1 and step.get("prefix"):
                return Spelling(leading=1, inner=step["prefix"])
            else:
                raise ModelError(f"tokenizer.json: the decoder {kind!r} (here: {step}) is not supported")
        return Spelling(level, fallback, tuple(replace), leading)

    def spell(self, tokens: Iterable[str]) -> list[bytes]:
        """The bytes of each token."""
        alphabet = {ord(char): byte for char, byte in byte_alphabet().items()} if self.byte_level else {}
        known = frozenset(map(chr, alphabet))
        spelled = []
        for token in tokens:
            if self.inner:
                inside = token.startswith(self.inner)
                spelled.append((token.removeprefix(self.inner) if inside else f" {token}").encode())
                continue
            if self.byte_level:
                # As Hugging Face decodes: a token with any character outside of the alphabet stands for itself.
                inside = known.issuperset(token)
                spelled.append(token.translate(alphabet).encode("latin-1") if inside else token.encode())
                continue
            for old, new in self.replace:
                token = token.replace(old, new)
            is_byte = self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
            try:
                spelled.append(bytes([int(token[3:5], 16)]) if is_byte else token.encode())
            except ValueError:
                spelled.append(token.encode())
        return spelled


class TokenBytes:
    """Id to bytes: id i spells blob[offsets[i] : offsets[i + 1]].

    `offsets` are 32-bit, one more than ids; `special` has a byte for each id, 1 for control tokens, which produce no
    text unless asked for. `leading`: n > 0 strips up to n spaces from the start of a text, 0 none, `STRIP_FIRST_TOKEN`
    see there. Ids past the table (rows that pad the model's vocabulary) spell nothing. Plain memory, no numpy: a token
    costs two look-ups, and a process that only decodes text need not import it.
    """

    def __init__(self, blob: bytes, offsets: array[int], special: bytes, leading: int = 0) -> None:
        self._blob = blob
        self._offsets = offsets
        self._special = special
        self._size = len(special)
        self.leading = leading

    @staticmethod
    def build(spelled: Sequence[bytes], special: Iterable[int], leading: int = 0) -> TokenBytes:
        """From the bytes of each id, in order, and the ids of the control tokens."""
        offsets = array("i", accumulate(map(len, spelled), initial=0))
        flags = bytearray(len(spelled))
        for token in special:
            flags[token] = 1
        return TokenBytes(b"".join(spelled), offsets, bytes(flags), leading)

    @staticmethod
    def from_tokenizer(data: dict[str, Any]) -> TokenBytes:
        """From a parsed tokenizer.json; raises `ModelError` for a decoder that is not supported."""
        vocab = data["model"]["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {piece[0]: index for index, piece in enumerate(vocab)}
        special = []
        for token in data.get("added_tokens", []):
            ids[token["content"]] = token["id"]
            if token.get("special"):
                special.append(token["id"])
        tokens = [""] * (max(ids.values(), default=-1) + 1)
        for token, index in ids.items():
            tokens[index] = token
        spelling = Spelling.of(data.get("decoder"))
        return TokenBytes.build(spelling.spell(tokens), special, spelling.leading)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, token: int) -> bytes:
        """What an id spells; nothing for ids outside of the table."""
        if not 0 <= token < self._size:
            return b""
        return self._blob[self._offsets[token] : self._offsets[token + 1]]

    def is_special(self, token: int) -> bool:
        """Whether an id is a control token."""
        return 0 <= token < self._size and self._special[token] == 1

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(sub, self._offsets[1:], self._offsets), default=0)

    def to_bytes(self) -> bytes:
        """The table as one string of bytes, little-endian."""
        body = _little(self._offsets).tobytes() + self._special + self._blob
        return (
            _HEADER.pack(_MAGIC, len(self), self.leading, zlib.crc32(body, self.leading & 0xFFFFFFFF), len(self._blob))
            + body
        )

    @staticmethod
    def from_bytes(data: bytes) -> TokenBytes:
        """The inverse of `to_bytes`; raises `ModelError` for anything else."""
        if len(data) < _HEADER.size:
            raise ModelError("the token table is cut short")
        magic, ids, leading, crc, size = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        split = 4 * (ids + 1)
        if magic != _MAGIC or len(body) != split + ids + size or zlib.crc32(body, leading & 0xFFFFFFFF) != crc:
            raise ModelError("the token table is damaged")
        offsets = array("i", body[:split])
        return TokenBytes(body[split + ids :], _little(offsets), body[split : split + ids], leading)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table to a file."""
        Path(path).write_bytes(self.to_bytes())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> TokenBytes:
        """Reads what `save` wrote; raises `ModelError` naming the file if it is damaged, OSError if it is missing."""
        try:
            return TokenBytes.from_bytes(Path(path).read_bytes())
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None


def _little(values: array[int]) -> array[int]:
    """The same numbers to or from little-endian bytes."""
    if sys.byteorder == "little":
        return values
    swapped = values[:]
    swapped.byteswap()
    return swapped
