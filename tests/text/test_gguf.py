"""Tokenizers from GGUF metadata: exact, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers, trainers

from tailrace.terms import ModelError
from tailrace.text import load_text, tokenizer_config_from_gguf, tokenizer_json_from_gguf
from tailrace.text.splits import SPLITS
from tests.text import samples
from tests.text.support import assets, gguf_of, golden

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK_CODER = "[一-龥ࠀ-一가-\ud7ff]+"
V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WRITTEN_OUT = {  # each split as a chain of regular expressions, independent of how `splits` builds it
    "gpt-2": [GPT2],
    "olmo": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "refact": [r"\p{N}", GPT2],
    "command-r": [r"\p{N}", GPT2],
    "llama-bpe": [CL100K],
    "llama3": [CL100K],
    "llama-v3": [CL100K],
    "smaug-bpe": [CL100K],
    "dbrx": [CL100K],
    "qwen2": [CL100K.replace("{1,3}", "")],
    "deepseek-r1-qwen": [CL100K.replace("{1,3}", "")],
    "tekken": [CASED],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_CODER, r"\p{N}"],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", V3],  # noqa: RUF001
}


def loaded(gguf: dict[str, Any]):
    return load_text(assets(None, gguf=gguf), vocab=len(gguf["tokenizer.ggml.tokens"]))


@pytest.mark.parametrize("pre", list(SPLITS))
def test_every_known_pre_tokenizer_splits_as_written_out(pre: str) -> None:
    stub = {"type": "BPE", "vocab": {}, "merges": []}
    known = tokenizers.Tokenizer.from_str(
        json.dumps({"version": "1.0", "pre_tokenizer": SPLITS[pre].pre_tokenizer, "model": stub})
    ).pre_tokenizer
    steps = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in WRITTEN_OUT[pre]]
    written = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    for sample in samples.texts(600):
        assert known.pre_tokenize_str(sample) == written.pre_tokenize_str(sample), sample


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "deepseek-coder", "olmo"])
def test_a_trained_tokenizer_comes_back_from_its_metadata(pre: str) -> None:
    splits = SPLITS[pre]
    stub = {"type": "BPE", "vocab": {}, "merges": []}
    parts = {"version": "1.0", "normalizer": splits.normalizer, "pre_tokenizer": splits.pre_tokenizer, "model": stub}
    original = tokenizers.Tokenizer.from_str(json.dumps(parts))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    original.train_from_iterator(
        samples.texts(500), trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    original.add_special_tokens(["<|end|>"])
    text = loaded(gguf_of(json.loads(original.to_str()), pre))
    for sample in samples.texts(500, ("<|end|>",)):
        ids = text.encode(sample, parse_special=True)
        assert ids == original.encode(sample).ids, sample
        if splits.normalizer is None:
            assert text.decode(text.encode(sample)) == sample


def base(**changes: Any) -> dict[str, Any]:
    gguf = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<|x|>", "<think>", "[PAD5]"],
        "token_type": [1, 1, 1, 3, 4, 5],
        "merges": ["a b"],
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in gguf.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": None}, "merges is missing"),
        ({"merges": []}, "merges is missing"),
        ({"merges": ["a c"]}, "a c"),
        ({"pre": None}, "pre is missing"),
        ({"pre": "default"}, "default"),
        ({"pre": "chatglm-bpe"}, "chatglm-bpe"),
        ({"pre": "viking"}, "viking"),
        ({"pre": "falcon"}, "falcon"),
        ({"model": "t5"}, "t5"),
        ({"model": "bert"}, "bert"),
        ({"model": None}, "None"),
        ({"tokens": None}, "tokens is missing"),
        ({"token_type": [1]}, "token_type"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": [0.0]}, "scores is missing"),
    ],
)
def test_what_cannot_be_had_exactly_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_json_from_gguf(base(**changes))


def test_token_types_are_kept() -> None:
    text = loaded(base())
    assert text.encode("ab<|x|><think>", parse_special=True) == [2, 3, 4]
    assert not {3, 4} & set(text.encode("ab<|x|><think>"))
    assert text.decode([2, 3, 4, 5, 6, 99]) == "ab<think>"
    assert text.decode([2, 3], skip_special=False) == "ab<|x|>"
    assert text.vocab_size == 5  # rows that pad the vocabulary are not tokens


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [2]),
        ({"add_bos_token": True, "bos_token_id": 3}, [3, 2]),
        ({"add_bos_token": False, "bos_token_id": 3}, [2]),
        ({"add_bos_token": True, "bos_token_id": 3, "add_eos_token": True, "eos_token_id": 4}, [3, 2, 4]),
        ({"pre": "llama-bpe", "bos_token_id": 3}, [3, 2]),
        ({"pre": "llama-bpe", "bos_token_id": 3, "add_bos_token": False}, [2]),
        ({"pre": "llama-bpe"}, [2]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(changes: dict[str, Any], expected: list[int]) -> None:
    assert loaded(base(**changes)).encode("ab") == expected


def test_a_sentencepiece_vocabulary_without_a_space_prefix_has_none() -> None:
    gguf = golden("spm")["gguf"] | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    text = loaded(gguf)
    for sample in ("hello", " hello", "日本語 ok"):
        assert text.decode(text.encode(sample)) == sample
    assert text.encode(" hello") == loaded(golden("spm")["gguf"]).encode("hello")[1:]


def test_the_special_tokens_have_their_names() -> None:
    gguf = base(bos_token_id=3, eos_token_id=2, unknown_token_id=99, padding_token_id=4)
    config = tokenizer_config_from_gguf(gguf | {"tokenizer.chat_template": "x"})
    assert config == {"bos_token": "<|x|>", "eos_token": "ab", "pad_token": "<think>", "chat_template": "x"}
