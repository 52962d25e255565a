"""Ids and texts equal Hugging Face's, from tokenizer.json and from GGUF metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.models.checkpoint import open_checkpoint
from tailrace.terms import InvalidInput
from tailrace.text import Text, decode, load_text
from tests.text import samples
from tests.text.support import assets, gguf_of, golden, text_of

NAMES = ["llama3", "qwen", "tekken", "spm"]
PRE = {"llama3": "llama-bpe", "qwen": "qwen2", "tekken": "tekken"}


def golden_texts(name: str) -> list[str]:
    special = tuple(
        token["content"] for token in sorted(golden(name)["tokenizer"]["added_tokens"], key=lambda t: t["id"])
    )
    return samples.texts(500, special)


def rebuilt(name: str) -> Text:
    """The tokenizer as its GGUF metadata gives it."""
    value = golden(name)
    gguf = dict(value["gguf"]) if "gguf" in value else gguf_of(value["tokenizer"], PRE[name])
    ids = {token["content"]: token["id"] for token in value["tokenizer"]["added_tokens"]}
    if value["bos"] is not None:
        gguf |= {"tokenizer.ggml.bos_token_id": ids[value["bos"]], "tokenizer.ggml.add_bos_token": True}
    made = assets(
        None, gguf=gguf, template=samples.TEMPLATES[name], bos_id=ids.get(value["bos"]), eos_ids=(ids[value["eos"]],)
    )
    return load_text(made, vocab=len(gguf["tokenizer.ggml.tokens"]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", [text_of, rebuilt])
def test_ids_equal_hugging_faces(name: str, source) -> None:
    text = source(name)
    bos = text._prefix
    for sample, expected in zip(golden_texts(name), golden(name)["ids"], strict=True):
        got = [*bos, *text.encode(sample, add_bos=False, parse_special=True)]
        assert got == expected, sample


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", [text_of, rebuilt])
def test_ordinary_ids_are_the_same_whether_or_not_control_tokens_would_be_parsed(name: str, source) -> None:
    text = source(name)
    for sample in samples.texts(300):
        assert text.encode(sample) == text.encode(sample, parse_special=True), sample


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", [text_of, rebuilt])
def test_decoded_text_equals_hugging_faces(name: str, source) -> None:
    text = source(name)
    for ids, expected in zip(golden(name)["ids"], golden(name)["decoded"], strict=True):
        assert text.decode(ids) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", [text_of, rebuilt])
@pytest.mark.parametrize("chat", list(samples.CHATS))
def test_chats_equal_hugging_faces(name: str, source, chat: str) -> None:
    text, expected = source(name), golden(name)["chats"][chat]
    arguments = {"add_generation_prompt": True, **samples.CHATS[chat]}
    messages = arguments.pop("messages")
    if isinstance(expected, str):
        with pytest.raises(InvalidInput, match=expected[:20]):
            text.encode_chat(messages, **arguments)
    else:
        assert text.encode_chat(messages, **arguments) == expected


def test_sentencepiece_ids_equal_sentencepieces_own() -> None:
    text = rebuilt("spm")
    for sample, expected in zip(samples.texts(500), golden("spm")["sentencepiece"], strict=True):
        assert text.encode(sample, add_bos=False) == expected, sample


@pytest.fixture(scope="module")
def smollm2_text(smollm2: Path) -> Text:
    checkpoint = open_checkpoint(smollm2)
    return load_text(checkpoint.text, vocab=49152)


def test_smollm2_ids_equal_the_originals(smollm2_text: Text) -> None:
    texts = samples.texts(1100, samples.SMOLLM_SPECIAL)
    expected = golden("smollm2")["ids"]
    assert len(texts) == len(expected) >= 1000
    for sample, ids in zip(texts, expected, strict=True):
        assert smollm2_text.encode(sample, parse_special=True) == ids, sample


def test_smollm2_text_survives_a_round_trip(smollm2_text: Text) -> None:
    lacking = {"\x0b", "\x0c", "\x00", "\x01", "\x7f", "\x1b"}  # bytes that are not in the vocabulary
    for sample in samples.texts(400):
        if lacking.isdisjoint(sample):
            assert smollm2_text.decode(smollm2_text.encode(sample)) == sample


@pytest.mark.parametrize("chat", samples.SMOLLM_CHATS)
def test_smollm2_chats_equal_hugging_faces(smollm2_text: Text, chat: str) -> None:
    arguments = {"add_generation_prompt": True, **samples.CHATS[chat]}
    messages = arguments.pop("messages")
    assert smollm2_text.encode_chat(messages, **arguments) == golden("smollm2")["chats"][chat]


def test_smollm2_tables_decode_alike_when_saved(smollm2_text: Text, tmp_path: Path) -> None:
    table = smollm2_text.token_bytes()
    table.save(tmp_path / "table")
    loaded = type(table).load(tmp_path / "table")
    for ids in golden("smollm2")["ids"][:300]:
        assert decode(loaded, ids) == smollm2_text.decode(ids)
