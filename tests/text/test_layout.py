"""A tokenizer in the layout that loads fast is the same tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from tailrace.text.layout import laid_out
from tests.text.support import golden
from tests.text.test_golden import NAMES


def as_pairs(tokenizer: dict[str, Any]) -> dict[str, Any]:
    model = tokenizer["model"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return {**tokenizer, "model": {**model, "merges": merges}}


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_is_the_same(name: str) -> None:
    data = json.dumps(as_pairs(golden(name)["tokenizer"])).encode()
    made = laid_out(data)
    assert made != data
    want = tokenizers.Tokenizer.from_buffer(data)
    assert tokenizers.Tokenizer.from_buffer(made).to_str() == want.to_str()
    assert all(isinstance(merge, str) for merge in json.loads(made)["model"]["merges"])
    assert laid_out(made) == made


@pytest.mark.parametrize("pair", [("a b", "c"), ("a", "b c"), ("#version", "x"), ("", "a b")])
def test_merges_that_a_line_cannot_tell_apart_stay_pairs(pair: tuple[str, str]) -> None:
    merges = [("a", "b"), pair]
    tokens = dict.fromkeys([*merges[0], "ab", *pair, "".join(pair)])
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
    made = laid_out(json.dumps({"version": "1.0", "model": model}).encode())
    assert json.loads(made)["model"]["merges"] == [list(merge) for merge in merges]
    tokenizers.Tokenizer.from_buffer(made)


def test_other_models_stay_as_they_are() -> None:
    data = b'{"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}}'
    assert laid_out(data) == data
