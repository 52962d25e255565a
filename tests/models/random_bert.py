"""Small encoders with random weights in float32, as folders that can be served."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

WORDS = ["the", "water", "mill", "wheel", "turns", "stone", "old", "river", "runs", "##s", "##ing", "a", "b", "c", "!"]
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *(chr(code) for code in range(ord("d"), ord("z") + 1))]
HIDDEN, INNER, LAYERS, HEADS, POSITIONS = 64, 96, 2, 4, 48


def config(kind: str = "bert", labels: int = 0, **fields: Any) -> dict[str, Any]:
    """A configuration as Hugging Face writes it."""
    name = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}[kind]
    made: dict[str, Any] = {
        "architectures": [name + ("ForSequenceClassification" if labels else "Model")],
        "model_type": kind,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2 if kind == "bert" else 1,
        "vocab_size": len(VOCAB),
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12 if kind == "bert" else 1e-5,
        "pad_token_id": 0 if kind == "bert" else 1,
    }
    if labels:
        made["id2label"] = {str(label): f"LABEL_{label}" for label in range(labels)}
    return {**made, **fields}


def shapes(made: dict[str, Any], labels: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model."""
    kind, hidden, inner = made["model_type"], made["hidden_size"], made["intermediate_size"]
    prefix = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta."}[kind] if labels else ""
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}embeddings.word_embeddings.weight": (made["vocab_size"], hidden),
        f"{prefix}embeddings.position_embeddings.weight": (made["max_position_embeddings"], hidden),
        f"{prefix}embeddings.token_type_embeddings.weight": (made["type_vocab_size"], hidden),
    }

    def norm(name: str) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (hidden,)

    def linear(name: str, out: int, size: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (out, size), (out,)

    norm(f"{prefix}embeddings.LayerNorm")
    for layer in range(made["num_hidden_layers"]):
        at = f"{prefix}encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            linear(f"{at}.attention.self.{name}", hidden, hidden)
        linear(f"{at}.attention.output.dense", hidden, hidden)
        norm(f"{at}.attention.output.LayerNorm")
        linear(f"{at}.intermediate.dense", inner, hidden)
        linear(f"{at}.output.dense", hidden, inner)
        norm(f"{at}.output.LayerNorm")
    if labels:
        linear("bert.pooler.dense" if kind == "bert" else "classifier.dense", hidden, hidden)
        linear("classifier" if kind == "bert" else "classifier.out_proj", labels, hidden)
    return found


def write(
    folder: Path,
    kind: str = "bert",
    *,
    labels: int = 0,
    pooling: str | None = None,
    unit: bool = True,
    drop: str = "",
    **fields: Any,
) -> Path:
    """Makes the folder. `pooling` writes sentence-transformers' files too; `drop` leaves a tensor out."""
    folder.mkdir(parents=True)
    made = config(kind, labels, **fields)
    (folder / "config.json").write_text(json.dumps(made))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(pairs=kind == "bert")))
    rng = np.random.default_rng(7)
    header: dict[str, Any] = {}
    data = b""
    for name, shape in shapes(made, labels).items():
        scale = 0.5 if "embeddings" in name and len(shape) == 2 else 1.5 / shape[-1] ** 0.5
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale if len(shape) == 2 else 0.1)
        if name.endswith("LayerNorm.weight"):
            values = 1 + values
        if name == drop:
            continue
        raw = values.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    positions = np.arange(POSITIONS, dtype="<i8").tobytes()  # as old versions of transformers store
    span = [len(data), len(data) + len(positions)]
    header["embeddings.position_ids"] = {"dtype": "I64", "shape": [1, POSITIONS], "data_offsets": span}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data + positions)
    if pooling is not None:
        modules = ["Transformer", "Pooling"] + (["Normalize"] if unit else [])
        rows = [
            {"idx": at, "name": str(at), "path": f"{at}_{name}" if at else "", "type": f"sentence_transformers.{name}"}
            for at, name in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(rows))
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{name}": name == pooling for name in ("mean_tokens", "cls_token", "lasttoken")}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": HIDDEN, **modes}))
    return folder


def tokenizer(*, pairs: bool) -> dict[str, Any]:
    """WordPiece over `VOCAB`. Without `pairs`, the second text of a pair is of segment 0, as RoBERTa has it."""

    def special(name: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    def sequence(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    second = int(pairs)
    single = [special("[CLS]", 0), sequence("A", 0), special("[SEP]", 0)]
    both = [*single, *([] if pairs else [special("[SEP]", 0)]), sequence("B", second), special("[SEP]", second)]
    ids = {name: {"id": name, "ids": [VOCAB.index(name)], "tokens": [name]} for name in ("[CLS]", "[SEP]")}
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": at, "content": VOCAB[at], **flags} for at in range(5)],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": both, "special_tokens": ids},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": {word: at for at, word in enumerate(VOCAB)}},
    }  # fmt: skip
