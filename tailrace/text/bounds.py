"""How few tokens a text can have, told without tokenizing it.

A prompt of ten megabytes takes many seconds to tokenize only to be refused as too long; these bounds are proven for the
tokenizer at hand, cost milliseconds, and refuse most such prompts at once.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tailrace.text.splits import SPLITS
from tailrace.text.tokens import TokenBytes, byte_alphabet

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NFC_SHRINKS = 3  # canonical composition makes UTF-8 at most this many times shorter (Unicode FAQ, normalization)
_KNOWN_WORDS = {step["pattern"]["Regex"] for splits in SPLITS.values() for step in splits.steps if "pattern" in step}


def _state(component: Any) -> Any:
    """A part of a tokenizer as it is in tokenizer.json."""
    return None if component is None else json.loads(component.__getstate__())


def _steps(state: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if state is None:
        return []
    return [inner for step in state[key] for inner in _steps(step, key)] if state["type"] == "Sequence" else [state]


class TokenBounds:
    """Lower bounds on the number of tokens of a text, for one tokenizer.

    *Bytes*: every token spells at most as many bytes as the longest one; bytes that the vocabulary lacks are not
    counted, and normalization is allowed for. *Words*: where the pre-tokenizer is one whose words hold letters in one
    run only, every letter after a space begins another word, and no token goes on past the end of its word.
    """

    def __init__(self, tokenizer: Tokenizer, table: TokenBytes) -> None:
        normalizers = _steps(_state(tokenizer.normalizer), "normalizers")
        splits = _steps(_state(tokenizer.pre_tokenizer), "pretokenizers")
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
        swallowing = any(token.lstrip or token.rstrip for token in added)
        self._longest = max(table.longest, 1)
        self._dropped: bytes | None = None if swallowing else _dropped(tokenizer, splits)
        self._shrinks = _shrinks(normalizers)
        spaced = any(" " in token.content.strip() for token in added)
        self._words = self._shrinks is not None and not spaced and any(map(_one_run_of_letters, splits))

    def min_tokens(self, text: str) -> int:
        """No encoding of the text has fewer tokens than this."""
        data = text.encode("utf-8", "replace")
        bound = 0
        if self._dropped is not None and self._shrinks is not None:
            kept = len(data.translate(None, self._dropped)) if self._dropped else len(data)
            bound = -(-kept // (self._longest * self._shrinks))
        return max(bound, _words(data)) if self._words else bound


_LETTERS = bytes(ord("a") if chr(byte).isalpha() and byte < 128 else byte if byte == 0x20 else 0 for byte in range(256))


def _words(data: bytes) -> int:
    """Letters of ASCII that follow a space."""
    return data.translate(_LETTERS).count(b" a")


def _one_run_of_letters(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"])
    regex = step.get("pattern", {}).get("Regex", "")
    return step["type"] == "Split" and step["behavior"] == "Isolated" and r"\p{L}" in regex and regex in _KNOWN_WORDS


def _shrinks(normalizers: list[dict[str, Any]]) -> int | None:
    """How many times shorter normalization can make a text; None where it is not known."""
    factor = 1
    for step in normalizers:
        if step["type"] == "NFC":
            factor *= _NFC_SHRINKS
        elif step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": " "}, "▁"):
            continue  # spelled as a space again
        elif step["type"] != "Prepend":
            return None
    return factor


def _dropped(tokenizer: Tokenizer, splits: list[dict[str, Any]]) -> bytes | None:
    """The bytes that the tokenizer may drop or gather under one unknown token; None where that is not known."""
    model = tokenizer.model
    if type(model).__name__ != "BPE":
        return None
    if any(step["type"] == "ByteLevel" for step in splits):
        kept = all(step.get("behavior", "Isolated") in ("Isolated", "Contiguous") for step in splits)
        missing = [byte for char, byte in byte_alphabet().items() if tokenizer.token_to_id(char) is None]
        return bytes(missing) if kept else None
    if splits and any(step["type"] != "Metaspace" for step in splits):
        return None
    fallback = model.byte_fallback and all(tokenizer.token_to_id(f"<0x{b:02X}>") is not None for b in range(256))
    return b"" if fallback else None
