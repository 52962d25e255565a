"""A Hugging Face tokenizer.json rebuilt from the metadata of a GGUF file.

Ids must equal the original tokenizer's, or the file is refused by name: a byte-level BPE needs its merges and a known
pre-tokenizer, a SentencePiece-style one its scores.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.terms import ModelError
from tailrace.text.splits import SPLITS, Splits

_SPACE = "▁"  # SentencePiece's stand-in for a space


class TokenType(enum.IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Metadata:
    """The keys below `tokenizer.ggml.`, checked."""

    keys: Mapping[str, Any]
    tokens: list[str]
    types: list[int]

    @staticmethod
    def of(gguf: Mapping[str, Any]) -> _Metadata:
        prefix = "tokenizer.ggml."
        keys = {key.removeprefix(prefix): value for key, value in gguf.items() if key.startswith(prefix)}
        tokens = [str(token) for token in keys.get("tokens", ())]
        if not tokens:
            raise ModelError("GGUF: tokenizer.ggml.tokens is missing: the file has no vocabulary")
        types = [int(kind) for kind in keys.get("token_type", ())]
        if len(types) not in (0, len(tokens)):
            raise ModelError(f"GGUF: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        return _Metadata(keys, tokens, types or [TokenType.NORMAL] * len(tokens))

    def id(self, name: str) -> int | None:
        """A special token's id, such as `bos_token_id`; None where the file names none."""
        value = self.keys.get(name)
        return int(value) if value is not None and 0 <= int(value) < len(self.tokens) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self.keys.get(name)
        return default if value is None else bool(value)

    def vocabulary(self) -> dict[str, int]:
        """Token to id, without the rows that only pad; the first of two equal tokens has it."""
        vocab: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != TokenType.UNUSED:
                vocab.setdefault(token, index)
        return vocab

    def added(self, vocab: Mapping[str, int]) -> list[dict[str, Any]]:
        """The tokens that are found in text before anything else: control tokens and user-defined ones."""
        special = {TokenType.CONTROL, TokenType.UNKNOWN}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": index, "content": token, **flags, "special": kind in special}
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in {*special, TokenType.USER_DEFINED} and vocab[token] == index
        ]

    def post_processor(self, bos: bool) -> dict[str, Any] | None:
        """Adds BOS before and EOS after a prompt, as the file says (`bos`: where it does not)."""
        first = self.id("bos_token_id") if self.flag("add_bos_token", bos) else None
        last = self.id("eos_token_id") if self.flag("add_eos_token", False) else None
        if first is None and last is None:
            return None
        used = {self.tokens[index]: index for index in (first, last) if index is not None}

        def piece(index: int | None, type_id: int) -> list[dict[str, Any]]:
            return [] if index is None else [{"SpecialToken": {"id": self.tokens[index], "type_id": type_id}}]

        def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
            return [*piece(first, type_id), {"Sequence": {"id": name, "type_id": type_id}}, *piece(last, type_id)]

        return {
            "type": "TemplateProcessing",
            "single": sequence("A", 0),
            "pair": [*sequence("A", 0), *sequence("B", 1)],
            "special_tokens": {
                token: {"id": token, "ids": [index], "tokens": [token]} for token, index in used.items()
            },
        }


def tokenizer_json_from_gguf(gguf: Mapping[str, Any]) -> bytes:
    """The tokenizer.json of a GGUF file's `tokenizer.*` metadata; raises `ModelError` for what is not supported."""
    metadata = _Metadata.of(gguf)
    model = metadata.keys.get("model")
    if model == "gpt2":
        parts = _byte_level(metadata)
    elif model == "llama":
        parts = _sentencepiece(metadata)
    else:
        raise ModelError(
            f"GGUF: the tokenizer {model!r} is not supported (gpt2 and llama are); use the model's own files"
        )
    head = {"version": "1.0", "truncation": None, "padding": None}
    return json.dumps({**head, **parts}, ensure_ascii=False).encode()


def tokenizer_config_from_gguf(gguf: Mapping[str, Any]) -> dict[str, Any]:
    """What a tokenizer_config.json would say of the file: the special tokens by name, and the chat template."""
    metadata = _Metadata.of(gguf)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config: dict[str, Any] = {}
    for name, key in names.items():
        index = metadata.id(f"{key}_token_id")
        if index is not None:
            config[f"{name}_token"] = metadata.tokens[index]
    for part, key in (("prefix", "pre"), ("suffix", "suf"), ("middle", "mid")):
        index = metadata.id(f"fim_{key}_token_id")
        index = metadata.id(f"{part}_token_id") if index is None else index  # the older name
        if index is not None:
            config[f"{part}_token"] = metadata.tokens[index]
    template = gguf.get("tokenizer.chat_template")
    return {**config, "chat_template": template} if template else config


def _byte_level(metadata: _Metadata) -> dict[str, Any]:
    splits = _splits(metadata.keys.get("pre"))
    vocab = metadata.vocabulary()
    merges = metadata.keys.get("merges")
    if merges is None or len(merges) == 0:
        raise ModelError(
            "GGUF: tokenizer.ggml.merges is missing: the tokenizer cannot be rebuilt; convert the model again"
        )
    pairs = _byte_level_merges(merges, vocab)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "added_tokens": metadata.added(vocab),
        "normalizer": splits.normalizer,
        "pre_tokenizer": splits.pre_tokenizer,
        "post_processor": metadata.post_processor(splits.bos),
        "decoder": level,
        "model": {**_BPE, "ignore_merges": splits.ignore_merges, "vocab": vocab, "merges": pairs},
    }


_BPE: dict[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def _splits(pre: object) -> Splits:
    if pre is None:
        raise ModelError("GGUF: tokenizer.ggml.pre is missing: the pre-tokenizer is unknown; convert the model again")
    if pre == "default":
        raise ModelError(
            "GGUF: the pre-tokenizer 'default' says that its converter did not know it; convert the model again"
        )
    if pre not in SPLITS:
        raise ModelError(f"GGUF: the pre-tokenizer {pre!r} is not supported; known are {', '.join(sorted(SPLITS))}")
    return SPLITS[str(pre)]


def _byte_level_merges(merges: Sequence[Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = str(merge).partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"GGUF: the merge {merge!r} names a token that the vocabulary lacks")
        pairs.append((left, right))
    return pairs


def _sentencepiece(metadata: _Metadata) -> dict[str, Any]:
    scores = metadata.keys.get("scores")
    if scores is None or len(scores) != len(metadata.tokens):
        raise ModelError("GGUF: tokenizer.ggml.scores is missing or has another length than the vocabulary")
    vocab = metadata.vocabulary()
    unknown = metadata.id("unknown_token_id")
    if unknown is None and TokenType.UNKNOWN in metadata.types:
        unknown = metadata.types.index(TokenType.UNKNOWN)
    prefix = metadata.flag("add_space_prefix", True)
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, *spaces] if prefix else spaces
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {
        **_BPE,
        "unk_token": None if unknown is None else metadata.tokens[unknown],
        "fuse_unk": True,
        "byte_fallback": all(f"<0x{byte:02X}>" in vocab for byte in range(256)),
        "vocab": vocab,
        "merges": _merges_from_scores(metadata, vocab, [float(score) for score in scores]),
    }
    return {
        "added_tokens": metadata.added(vocab),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": metadata.post_processor(True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges_from_scores(metadata: _Metadata, vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece's BPE joins whichever neighbours form the piece with the highest score; as a list of merges that
    is every way to cut every piece in two pieces, best score first. Control tokens are never the result of a merge."""
    candidates: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        if metadata.types[index] != TokenType.NORMAL:
            continue
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        cuts = [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
        cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        candidates += [(-scores[index], -len(left), -len(right), left, right) for left, right in cuts]
    candidates.sort(key=lambda candidate: candidate[:3])
    return [(left, right) for *_, left, right in candidates]
