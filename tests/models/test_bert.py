"""Encoder checkpoints: what is wrong is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.models.bert import EncoderModel
from tailrace.models.checkpoint import open_checkpoint
from tailrace.models.load import is_encoder, load_encoder, load_model
from tailrace.terms import ModelError
from tests.models import random_bert


def load(folder: Path, *, asked: str | None = None, **options: Any) -> EncoderModel:
    return load_encoder(open_checkpoint(random_bert.write(folder / "model", **options)), asked)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drop": "encoder.layer.1.output.dense.bias"}, "encoder.layer.1.output.dense.bias is missing"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": ["BertForQuestionAnswering"]}, "architectures"),
        ({"type_vocab_size": 3}, "token_type_embeddings"),
        ({"kind": "roberta", "pad_token_id": 99}, "pad_token_id"),
        ({"matryoshka_dimensions": "all"}, "matryoshka_dimensions"),
    ],
)
def test_a_wrong_checkpoint_is_refused_by_name(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    if said == "token_type_embeddings":
        folder = random_bert.write(tmp_path / "model")
        made = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**made, **options}))
        with pytest.raises(ModelError, match=said):
            load_encoder(open_checkpoint(folder))
        return
    with pytest.raises(ModelError, match=said):
        load(tmp_path, **options)


def test_roberta_counts_positions_from_after_its_padding(tmp_path: Path) -> None:
    config = load(tmp_path, kind="roberta").config
    assert (config.first, config.longest) == (2, random_bert.POSITIONS - 2)
    assert load(tmp_path / "bert").config.longest == random_bert.POSITIONS


def test_what_sentence_transformers_files_say_is_followed(tmp_path: Path) -> None:
    folder = random_bert.write(tmp_path / "model", pooling="cls_token", unit=False, matryoshka_dimensions=[64, 16])
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    config = load_encoder(open_checkpoint(folder)).config
    assert (config.output.pooling, config.output.unit, config.longest) == ("cls", False, 20)
    assert config.output.dimensions == (16, 64)
    assert load_encoder(open_checkpoint(folder), "mean").config.output.pooling == "mean"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("modules.json", '[{"type": "x.Transformer", "path": ""}, {"type": "x.Dense", "path": "2"}]', "Dense"),
        ("modules.json", "{}", "modules"),
        ("modules.json", '[{"type": "x.Transformer", "path": "../up"}]', "leaves the folder"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "max_tokens"),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}', "cls_token"),
        ("sentence_bert_config.json", '{"max_seq_length": "many"}', "max_seq_length"),
    ],
)
def test_modules_that_are_not_understood_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    folder = random_bert.write(tmp_path / "model", pooling="mean_tokens")
    (folder / name).write_text(text)
    with pytest.raises(ModelError, match=said):
        load_encoder(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("fields", "sigmoid"),
    [
        ({}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
    ],
)
def test_scores_are_bent_as_the_configuration_says(tmp_path: Path, fields: dict[str, Any], sigmoid: bool) -> None:
    assert load(tmp_path, labels=1, **fields).config.sigmoid is sigmoid


def test_an_unknown_activation_of_scores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Softplus"):
        load(tmp_path, labels=1, sbert_ce_default_activation_function="torch.nn.Softplus")


def test_an_encoder_is_no_model_that_generates(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(random_bert.write(tmp_path / "model"))
    assert is_encoder(checkpoint)
    with pytest.raises(ModelError, match="encoders"):
        load_model(checkpoint)
