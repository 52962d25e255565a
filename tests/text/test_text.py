"""`Text`: BOS, bounds, configurations."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.terms import InvalidInput, ModelError
from tailrace.text import TokenBytes, load_text
from tests.text import samples
from tests.text.support import assets, golden, ids_of, text_of

NAMES = ["llama3", "qwen", "tekken", "spm"]
BOS = {"llama3": "<|begin_of_text|>", "tekken": "<s>", "spm": "<s>"}


@pytest.mark.parametrize("name", list(BOS))
def test_there_is_exactly_one_bos(name: str) -> None:
    text = text_of(name)
    bos = ids_of(golden(name)["tokenizer"])[BOS[name]]
    for prompt in ("hello", BOS[name] + "hello", BOS[name] + "hello " + BOS[name], "", BOS[name]):
        ids = text.encode(prompt)
        assert ids[0] == bos
        assert ids.count(bos) == 1
        assert bos not in text.encode("x" + prompt, add_bos=False)
    assert text.encode(BOS[name] + "hello") == text.encode("hello")
    chat = [{"role": "user", "content": "hello " + BOS[name]}]
    assert text.encode_chat(chat).count(bos) == 1


def test_a_tokenizer_that_adds_no_bos_gets_none() -> None:
    assert text_of("qwen").encode("hello") == text_of("qwen").encode("hello", add_bos=False)


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_models_word_about_bos_counts_more_than_the_tokenizers(add_bos: bool) -> None:
    for name, token in (("llama3", "<|begin_of_text|>"), ("qwen", "<|endoftext|>")):
        tokenizer = golden(name)["tokenizer"]
        bos = ids_of(tokenizer)[token]
        text = load_text(assets(tokenizer, add_bos=add_bos, bos_id=bos), vocab=800)
        assert text.encode("hello").count(bos) == int(add_bos)


@pytest.mark.parametrize("name", NAMES)
def test_the_lower_bound_holds_and_is_of_use(name: str) -> None:
    text = text_of(name)
    for sample in [
        *samples.texts(500),
        "word " * 500,
        "x" * 1000,
        " " * 1000,
        "\u0300" * 400,
        "각" * 300,
        "e\u0301" * 300,
    ]:
        assert text.min_tokens(sample) <= len(text.encode(sample, add_bos=False)), sample
    began = time.monotonic()
    assert text.min_tokens("some words " * 1_000_000) > 100_000
    assert time.monotonic() - began < 5


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.sampled_from(NAMES))
def test_the_lower_bound_holds_for_any_text(sample: str, name: str) -> None:
    assert text_of(name).min_tokens(sample) <= len(text_of(name).encode(sample, add_bos=False))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives_a_round_trip(sample: str) -> None:
    assert text_of("llama3").decode(text_of("llama3").encode(sample)) == sample
    assert text_of("spm").decode(text_of("spm").encode(sample)) == sample


def test_rows_past_the_vocabulary_are_not_tokens_and_spell_nothing() -> None:
    tokenizer = golden("qwen")["tokenizer"]
    size = max(ids_of(tokenizer).values()) + 1
    text = load_text(assets(tokenizer), vocab=size + 100)
    assert text.vocab_size == size
    assert text.decode([size, size + 50, 10**9]) == ""
    with pytest.raises(InvalidInput, match="no row"):
        load_text(assets(tokenizer), vocab=300).encode("hello world, hello world")


def test_tokens_that_only_the_configuration_names_are_added() -> None:
    tokenizer = json.loads(json.dumps(golden("qwen")["tokenizer"]))
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != "</think>"]
    size = len(ids_of(tokenizer))
    entry = {"content": "</think>", "special": False, "normalized": False}
    text = load_text(assets(tokenizer, config={"added_tokens_decoder": {str(size): entry}}), vocab=800)
    assert text.encode("</think>", parse_special=True) == [size]
    with pytest.raises(ModelError, match="cannot have the id"):
        load_text(assets(tokenizer, config={"added_tokens_decoder": {str(size + 9): entry}}), vocab=800)


def test_special_tokens_by_role_may_be_objects() -> None:
    config = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "eos_token": None}
    text = load_text(
        assets(golden("qwen")["tokenizer"], config=config, template="{{ bos_token }}|{{ eos_token }}"), vocab=800
    )
    assert text.render_chat([]).text == "<|im_start|>|"


def test_truncation_and_padding_of_the_file_are_off() -> None:
    tokenizer = json.loads(json.dumps(golden("llama3")["tokenizer"]))
    tokenizer["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    assert load_text(assets(tokenizer), vocab=800).encode("hello world " * 9) == text_of("llama3").encode(
        "hello world " * 9
    )


def test_words_and_spaces_that_were_added_stay_tokens() -> None:
    tokenizer = json.loads(json.dumps(golden("llama3")["tokenizer"]))
    size = len(ids_of(tokenizer))
    for index, content in enumerate(("        ", "Tailrace", "<think>")):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        tokenizer["added_tokens"].append({"id": size + index, "content": content, **flags})
    text = load_text(assets(tokenizer), vocab=800)
    ids = text.encode("a        Tailrace<think>", add_bos=False)
    assert ids[1:3] == [size, size + 1]
    assert size + 2 not in ids


def test_a_template_tokens_white_space_is_swallowed_as_its_flags_say() -> None:
    tokenizer = json.loads(json.dumps(golden("qwen")["tokenizer"]))
    for token in tokenizer["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_start|>"
        token["lstrip"] = token["content"] == "<|im_end|>"
    text = load_text(assets(tokenizer, template="<|im_start|> \n{{ messages[0].content }} \n<|im_end|>x"), vocab=800)
    ids = ids_of(tokenizer)
    for content in ("hi", "hi <|im_end|> there"):
        expected = [ids["<|im_start|>"], *text.encode(content), ids["<|im_end|>"], *text.encode("x")]
        assert text.encode_chat([{"role": "user", "content": content}]) == expected


def test_metaspace_puts_a_space_at_the_beginning_only() -> None:
    pieces = {"▁": 0, "a": 1, "▁a": 2, "<s>": 3, "<": 4, "s": 5, ">": 6, "<unk>": 7}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": 3, "content": "<s>", **flags}],
        "normalizer": None,
        "pre_tokenizer": metaspace,
        "post_processor": None,
        "decoder": metaspace,
        "model": {"type": "BPE", "vocab": pieces, "merges": [["▁", "a"]], "unk_token": "<unk>"},
    }
    text = load_text(assets(tokenizer, template="<s>{{ messages[0].content }}<s>a"), vocab=8)
    assert text.encode("a") == [2]
    assert text.encode_chat([{"role": "user", "content": "a"}]) == [3, 1, 3, 1]
    assert text.encode_chat([{"role": "user", "content": "a<s>"}]) == [3, 1, 4, 5, 6, 3, 1]


def test_a_saved_table_serves_instead_of_a_new_one() -> None:
    table = text_of("qwen").token_bytes()
    again = TokenBytes.from_bytes(table.to_bytes())
    text = load_text(assets(golden("qwen")["tokenizer"]), vocab=800, token_bytes=again)
    assert text.token_bytes() is again
    assert text.decode(text.encode("Zürich 😀")) == "Zürich 😀"


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        load_text(assets(None), vocab=1)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_text(assets({"model": {}}), vocab=1)
