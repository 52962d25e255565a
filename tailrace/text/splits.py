"""The pre-tokenizer behind each name that GGUF files give one (`tokenizer.ggml.pre`).

Only those are listed whose original tokenizer.json is known in all that shapes ids: normalizer, splits, and whether
whole words skip the merges. Two names with the same split are still two entries where the rest differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Splits:
    """What precedes the merges of a byte-level BPE, as pieces of a tokenizer.json.

    `ignore_merges`: a word that is a token is taken whole. `bos`: whether prompts begin with BOS where the file does
    not say.
    """

    steps: tuple[dict[str, Any], ...]
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False

    @property
    def pre_tokenizer(self) -> dict[str, Any]:
        if len(self.steps) == 1:
            return self.steps[0]
        return {"type": "Sequence", "pretokenizers": list(self.steps)}

    @property
    def normalizer(self) -> dict[str, Any] | None:
        return {"type": "NFC"} if self.nfc else None


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _bytes(*, words: bool) -> dict[str, Any]:
    """Bytes to their printable stand-ins, after GPT-2's split into words or none."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}


def _digits(*, individual: bool) -> dict[str, Any]:
    return {"type": "Digits", "individual_digits": individual}


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(numbers: str) -> str:
    """The cl100k family: contractions, words with one leading non-letter, numbers, punctuation, white space."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_TAIL}"


def _cased_words(numbers: str) -> str:
    """The tekken family: words also end where upper case follows lower case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return rf"{lead}{upper}*{lower}+|{lead}{upper}+{lower}*|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}"


_GPT2 = Splits((_bytes(words=True),))
_SINGLE_DIGITS = Splits((_digits(individual=True), _bytes(words=True)))
_LLAMA3 = (_split(_words(r"\p{N}{1,3}")), _bytes(words=False))
_QWEN2 = Splits((_split(_words(r"\p{N}")), _bytes(words=False)), nfc=True)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

SPLITS: dict[str, Splits] = {
    "gpt-2": _GPT2,
    "olmo": Splits(_GPT2.steps, nfc=True),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": Splits(_SINGLE_DIGITS.steps, nfc=True, bos=True),
    "llama-bpe": Splits(_LLAMA3, ignore_merges=True, bos=True),
    "llama3": Splits(_LLAMA3, ignore_merges=True, bos=True),
    "llama-v3": Splits(_LLAMA3, ignore_merges=True, bos=True),
    "smaug-bpe": Splits(_LLAMA3),
    "dbrx": Splits(_LLAMA3),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Splits((_split(_cased_words(r"\p{N}")), _bytes(words=False)), ignore_merges=True, bos=True),
    "deepseek-coder": Splits(
        (
            _split(r"[\r\n]"),
            _split(r"\s?\p{L}+"),
            _split(r"\s?\p{P}+"),
            _split(_CJK),
            _digits(individual=True),
            _bytes(words=False),
        ),
    ),
    "deepseek-v3": Splits(
        (
            _split(r"\p{N}{1,3}"),
            _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
            _split(
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_TAIL}"
            ),
            _bytes(words=False),
        ),
    ),
}
"""By the name in `tokenizer.ggml.pre`."""
