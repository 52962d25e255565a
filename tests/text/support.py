"""Tokenizers for tests: from the golden files, and made by hand."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tailrace.models.checkpoint import TextAssets
from tailrace.text import Text, load_text
from tests.text import samples

GOLDEN = Path(__file__).parent / "golden"


@functools.cache
def golden(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return value


def assets(
    tokenizer: dict[str, Any] | None,
    *,
    config: dict[str, Any] | None = None,
    gguf: dict[str, Any] | None = None,
    template: str | None = None,
    add_bos: bool | None = None,
    bos_id: int | None = None,
    eos_ids: tuple[int, ...] = (),
) -> TextAssets:
    data = None if tokenizer is None else json.dumps(tokenizer).encode()
    return TextAssets(data, config or {}, gguf, template, bos_id, eos_ids, add_bos)


def ids_of(tokenizer: dict[str, Any]) -> dict[str, int]:
    return {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}


@functools.cache
def text_of(name: str, template: str | None = None) -> Text:
    """The golden tokenizer of this name with its chat template, or with another."""
    value = golden(name)
    ids = ids_of(value["tokenizer"])
    config = {"bos_token": value["bos"], "eos_token": value["eos"]}
    made = assets(
        value["tokenizer"],
        config=config,
        template=template or samples.TEMPLATES[name],
        bos_id=ids.get(value["bos"]),
        eos_ids=(ids[value["eos"]],),
    )
    return load_text(made, vocab=max(ids.values()) + 1)


def controls_of(name: str) -> set[int]:
    return {token["id"] for token in golden(name)["tokenizer"]["added_tokens"]}


def gguf_of(tokenizer: dict[str, Any], pre: str) -> dict[str, Any]:
    """The GGUF metadata that a byte-level tokenizer.json would be converted to."""
    ids = ids_of(tokenizer)
    tokens = [""] * (max(ids.values()) + 1)
    for token, index in ids.items():
        tokens[index] = token
    types = [1] * len(tokens)
    for token in tokenizer["added_tokens"]:
        types[token["id"]] = 3 if token["special"] else 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
    }
