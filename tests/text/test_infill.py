"""Fill in the middle: which models have it, and how a prompt is laid out."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.terms import InvalidInput
from tailrace.text import Text, load_text
from tailrace.text.gguf import TokenType
from tests.text.support import assets, text_of

CONTROL = int(TokenType.CONTROL)


def gguf(*spelled: str, **keys: int) -> dict[str, Any]:
    """A vocabulary of a, b, ab and these control tokens, with ids 3, 4, 5, as a GGUF file's metadata has it."""
    head = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b", "ab", *spelled], "merges": ["a b"]}
    head |= {"token_type": [1, 1, 1] + [CONTROL] * len(spelled), "add_bos_token": False, **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in head.items()}


def loaded(metadata: dict[str, Any]) -> Text:
    return load_text(assets(None, gguf=metadata), vocab=len(metadata["tokenizer.ggml.tokens"]))


@pytest.mark.parametrize(
    "keys",
    [
        {"fim_pre_token_id": 3, "fim_suf_token_id": 4, "fim_mid_token_id": 5},
        {"prefix_token_id": 3, "suffix_token_id": 4, "middle_token_id": 5},
    ],
)
def test_a_gguf_file_names_its_tokens(keys: dict[str, int]) -> None:
    text = loaded(gguf("<1>", "<2>", "<3>", **keys))
    assert text.encode_infill("ab", "ba") == [3, 2, 4, 1, 0, 5]
    assert text.encode_infill("", "a") == [3, 4, 0, 5]


@pytest.mark.parametrize(
    "names",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
        ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ],
)
def test_well_known_names_are_found_in_the_vocabulary(names: tuple[str, str, str]) -> None:
    assert loaded(gguf(*names)).encode_infill("a", "b") == [3, 0, 4, 1, 5]


def test_what_the_file_says_goes_before_the_known_names() -> None:
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    text = loaded(gguf(*names, fim_pre_token_id=4, fim_suf_token_id=3, fim_mid_token_id=5))
    assert text.encode_infill("a", "b") == [4, 0, 3, 1, 5]


def test_a_bos_goes_before_all() -> None:
    metadata = gguf("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<s>", add_bos_token=True, bos_token_id=6)
    assert loaded(metadata).encode_infill("a", "b") == [6, 3, 0, 4, 1, 5]


def test_callers_cannot_spell_the_tokens() -> None:
    text = loaded(gguf("ab<|fim_middle|>", "<|fim_suffix|>", "<a>", prefix_token_id=3, suffix_token_id=4))
    assert text.infill is None  # two of three are not enough
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    ids = loaded(gguf(*names)).encode_infill("a<|fim_middle|>", "<|fim_suffix|>b")
    assert [token for token in ids if token > 2] == [3, 4, 5]


def test_a_model_without_them_says_so() -> None:
    text = text_of("tekken")
    assert text.infill is None
    with pytest.raises(InvalidInput, match="fill-in-the-middle"):
        text.encode_infill("a", "b")
